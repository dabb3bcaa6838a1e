"""Fast start of Python programs in tests, by forking a process that has loaded torch and the package.

`interpreter()` returns the path of a small program that replaces the Python interpreter. It passes its arguments, environment,
folder and open files to a server, which forks; the fork runs what a new interpreter would run. Signals, exit codes and ends by a
signal are passed in both directions. Killing the small program kills the fork shortly after; `fork_of` finds the fork to kill
both at once. The real interpreter runs everything that a fork cannot do, such as other flags, and variables that libraries read
at import.

    python -m tests.warm SOCKET bessemer     the server, which a test session starts and ends; forks inherit the last word, so
    that
                                             the launcher recognises its processes
"""

import atexit
import builtins
import contextlib
import faulthandler
import gc
import importlib
import marshal
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import weakref
from pathlib import Path
from typing import Any

LOADED = (
    "torch", "torch.distributed", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.nn.parallel", "torch.distributed.checkpoint", "torch.distributed.run", "torch.profiler._cupti_monitor",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch.utils.tensorboard", "numpy", "pandas", "pyarrow",
    "pyarrow.parquet", "tokenizers", "gigatoken", "numba", "numba.np.arraymath", "scipy.linalg", "transformers",
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "transformers.models.qwen3.modeling_qwen3",
    "tensorboard.compat.tensorflow_stub", "tensorboard.compat.proto.config_pb2", "rich.console", "rich.progress", "rich._emoji_codes",
    "plotly.offline", "hypothesis", "xdist.remote", "dateutil.parser", "email.policy", "pyppmd", "tabulate", "xml.dom.minidom",
)  # fmt: skip
"""Modules that are loaded before forking, besides those of the package. torch imports tabulate when a process ends."""
READ_AT_START = ("HF_", "NUMBA_", "MKL_", "TORCH", "PYTHON", "LD_", "GOMP_", "KINETO_", "NO_COLOR", "TRANSFORMERS_")
"""Prefixes of variables that are read at import: if they differ, a new interpreter is started."""
FREE = (  # also those set by ray, lm_eval, corpus workers and an export
    "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE", "PYTHONBREAKPOINT",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_CPP_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR",
    "KINETO_LOG_LEVEL", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_XET_HIGH_PERFORMANCE", "NUMBA_NUM_THREADS",
    "TRANSFORMERS_VERBOSITY", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE",
)  # fmt: skip
"""Exceptions, which a fork can follow."""
PASSED_SIGNALS = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGXCPU,
)  # fmt: skip
MAX_FILES = 250

CLIENT = """#!{python} -IS
import os, sys
GIVEN, REAL = sys.argv[1:], {python!r}
ARGUMENTS = GIVEN[GIVEN[:1] == ["-u"] :]  # what pytest-xdist starts its workers with
def cold():
    os.execv(REAL, [REAL, *GIVEN])
if os.environ.get("COLD_PYTHON") or not ARGUMENTS or (ARGUMENTS[0][:1] == "-" and ARGUMENTS[0] not in ("-m", "-c")) or "/ray/" in ARGUMENTS[0]:
    cold()  # also ray's own programs
import _signal, _socket, marshal  # of the modules around them each takes as long as this whole program
if ARGUMENTS[0] == "-m" and ARGUMENTS[1].startswith("bessemer.launch."):  # which ask the kernel for this when their parent dies
    import ctypes
    ctypes.CDLL(None).prctl(1, _signal.SIGKILL)
files = []
for name in os.listdir("/proc/self/fd"):
    try:
        os.fstat(int(name))
        files.append(int(name))
    except OSError:
        pass
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
try:
    server.connect({server!r})
except OSError:
    cold()
files = [file for file in files if file != server.fileno()][:{max_files}]
files = [file for file in files if not os.readlink(f"/proc/self/fd/{{file}}").startswith("/proc/")]
ignored = [number for number in _signal.valid_signals() if _signal.getsignal(number) == _signal.SIG_IGN]
mask = os.umask(0)
os.umask(mask)
header = {{
    "arguments": ARGUMENTS, "folder": os.getcwd(), "environment": dict(os.environ), "files": files, "umask": mask,
    "leads": os.getsid(0) == os.getpid(), "ignored": ignored,
}}
raw = marshal.dumps(header)
numbers = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
server.sendmsg([len(raw).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
server.sendall(raw)
received = b""
def line():
    global received
    while bytes([10]) not in received and (more := server.recv(64)):
        received += more
    found, _, received = received.partition(bytes([10]))
    return found
try:
    pid = int(line() or 0)
except OSError:
    pid = 0
if not pid:
    cold()
def passed(number, frame):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
for number in {signals!r}:
    if number not in ignored:
        _signal.signal(number, passed)
for file in files:
    os.close(file)
status = line()
if not status:
    os._exit(70)
status = int(status)
if os.WIFSIGNALED(status):
    number = os.WTERMSIG(status)
    if number not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(number, _signal.SIG_DFL)
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), number)
os._exit(os.WEXITSTATUS(status))
"""


class Warm:
    """A server and the program that replaces the interpreter, in their own folder."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="warm-")
        place = Path(self.folder.name)
        self.real = sys.executable
        address = place / "socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(address))
        listener.listen(64)
        paths = [str(Path(__file__).parent.parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment.setdefault("OMP_NUM_THREADS", "1")  # libraries read it once; a fork sets torch's number itself
        self.process = subprocess.Popen(
            [self.real, "-m", "tests.warm", str(listener.fileno()), "bessemer"], env=environment, pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        listener.close()
        self.interpreter = place / "python"
        self.interpreter.write_text(
            CLIENT.format(
                python=self.real, server=str(address), max_files=MAX_FILES, signals=[int(n) for n in PASSED_SIGNALS]
            )
        )
        self.interpreter.chmod(0o755)

    def close(self) -> None:
        """End the server. Raises AssertionError if it had ended before."""
        ended = self.process.poll()
        assert ended is None, "the process to fork from had ended, and the tests started their programs slowly"
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def serve(listener: socket.socket) -> None:
    """Fork for each connection and report how the fork ended. Ends with the process that started it."""
    from bessemer.common import interrupt

    interrupt.end_with_parent(signal.SIGKILL)
    base = [path for path in sys.path if path not in os.environ["PYTHONPATH"].split(os.pathsep)]
    own = dict(os.environ)
    for name in LOADED:
        with contextlib.suppress(ModuleNotFoundError):  # torch 2.11 lacks one; others are optional
            importlib.import_module(name)
    for module in pkgutil.walk_packages(importlib.import_module("bessemer").__path__, "bessemer."):
        # The harness loads lm_eval, which few commands need.
        if not module.name.endswith(("__main__", "evaluate.harness")):
            importlib.import_module(module.name)
    quick = importlib.import_module("tests.quick")
    quick.measure_little()
    quick.compile_text_passes()
    pages = importlib.import_module("bessemer.report.template").environment()
    for name in pages.list_templates():
        pages.get_template(name)
    importlib.import_module("bessemer.text.characters").classes()
    importlib.import_module("numba.core.registry").cpu_target.target_context.refresh()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch unregisters each operator: half the time of a short program
    gc.collect()
    gc.freeze()
    set_by_imports = {name: value for name, value in os.environ.items() if own.get(name) != value}
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    clients: dict[
        int, tuple[socket.socket, int, int, Path]
    ] = {}  # under each of its two files: the connection, pid, pidfd, note
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                _accept(listener, poll, clients, own, base, set_by_imports)
            elif number in clients:
                _end(number, poll, clients)


def _accept(
    listener: socket.socket, poll: Any, clients: dict[int, Any], own: dict[str, str], base: list[str],
    set_by_imports: dict[str, str],
) -> None:  # fmt: skip
    connection, _ = listener.accept()
    files: list[int] = []
    try:
        raw, files, _, _ = socket.recv_fds(connection, 4, MAX_FILES + 1)
        length, parts = int.from_bytes(raw, "big"), b""
        while len(parts) < length:
            more = connection.recv(length - len(parts))
            if not more:
                raise EOFError
            parts += more
        header = marshal.loads(parts)
        if not _can_fork(header["environment"], own):
            connection.sendall(b"0\n")
            connection.close()
            return
        pid = os.fork()
        if pid == 0:
            for number in {listener.fileno(), connection.fileno(), *clients}:
                os.close(number)
            header["environment"] = {**set_by_imports, **header["environment"]}
            _become(header, files, base)
        handle = os.pidfd_open(pid)
        note = _note(listener, connection)
        note.write_text(str(pid))
        connection.sendall(f"{pid}\n".encode())
        for number in (connection.fileno(), handle):
            clients[number] = (connection, pid, handle, note)
            poll.register(number, select.POLLIN)
    except (OSError, EOFError, ValueError):
        connection.close()
    finally:
        for number in files:
            os.close(number)


def _note(listener: socket.socket, connection: socket.socket) -> Path:
    """Return the file with the pid of the fork for the program at the other end of a connection."""
    program, _, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return Path(listener.getsockname()).parent / str(program)


def fork_of(pid: int) -> list[int]:
    """Return the fork of a started program, or None for a separate process."""
    try:
        return [int((Path(sys.executable).parent / str(pid)).read_text())]
    except (OSError, ValueError):
        return []


def _can_fork(environment: dict[str, str], own: dict[str, str]) -> bool:
    for name in {*environment, *own}:
        if name.startswith(READ_AT_START) and not name.startswith(FREE) and environment.get(name) != own.get(name):
            return False
    return True


def _end(number: int, poll: Any, clients: dict[int, Any]) -> None:
    """Handle a fork that has ended, or whose program was killed."""
    connection, pid, handle, note = clients[number]
    if number != handle:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    note.unlink(missing_ok=True)  # no other process can have this pid yet
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    for each in (connection.fileno(), handle):
        poll.unregister(each)
        del clients[each]
    connection.close()
    os.close(handle)


def _become(header: dict[str, Any], files: list[int], base: list[str]) -> None:
    """Become the requested process in the fork; never returns."""
    code = 1
    try:
        if header["leads"]:
            os.setsid()
        _take(header, files)
        code = _run(header["arguments"], header["environment"], base)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


def _take(header: dict[str, Any], files: list[int]) -> None:
    """Take over the other process's files, folder, variables and signals."""
    import fcntl

    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 700) for number in files]
    for number in files:
        os.close(number)
    for number, target in zip(high, header["files"], strict=True):
        os.dup2(number, target, inheritable=True)
        os.close(number)
    for number in {0, 1, 2} - {*header["files"]}:
        with contextlib.suppress(OSError):
            os.close(number)
    os.umask(header["umask"])
    os.chdir(header["folder"])
    environment = header["environment"]
    os.environ.clear()
    os.environ.update(environment)
    for number in signal.valid_signals():
        if number in header["ignored"]:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
    if signal.SIGINT not in header["ignored"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    through = bool(environment.get("PYTHONUNBUFFERED"))
    sys.stdin = open(0, encoding="utf-8", closefd=False) if 0 in header["files"] else None  # type: ignore[assignment] # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        if number in header["files"]:
            stream = open(number, "w", encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
            stream.reconfigure(line_buffering=number == 2 or stream.isatty(), write_through=through)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _run(arguments: list[str], environment: dict[str, str], base: list[str]) -> int:
    """Run a module, a line of code or a file as the interpreter would, and return the exit code; -2 after Ctrl-C."""
    import torch

    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if "HF_ENDPOINT" in environment:  # read, like the variables that go with it, when this module is loaded
        importlib.reload(importlib.import_module("huggingface_hub.constants"))
    if environment.get("OMP_NUM_THREADS", "").isdigit():
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    kind, rest = (arguments[0], arguments[1:]) if arguments[0] in ("-m", "-c") else ("", arguments)
    first = {"-m": os.getcwd(), "-c": "", "": str(Path(rest[0]).resolve().parent)}[kind]
    sys.path[:] = list(dict.fromkeys([first, *paths, *base]))
    sys.argv = ["-c" if kind == "-c" else rest[0], *rest[1:]]
    sys.executable = environment.get("WARM_PYTHON", sys.executable)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    code = 0
    try:
        for file in (Path(path, "sitecustomize.py") for path in paths):
            if file.exists():  # lets a test put a fault into all processes of a training
                exec(compile(file.read_bytes(), str(file), "exec"), {"__name__": "sitecustomize"})
        if kind == "-c":
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            sys.modules.pop(rest[0], None)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            main.__file__ = rest[0]
            exec(compile(Path(rest[0]).read_bytes(), rest[0], "exec"), main.__dict__)
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(error.with_traceback(frames))
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    return code


def _exit_code(value: object) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    print(value, file=sys.stderr)
    return 1


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
