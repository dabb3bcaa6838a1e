"""What every worker does with a task, wherever it runs; and work in a thread of this process, so that signals are handled
within 0.1 s even while native code runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import bessemer
from bessemer.common import extensions, interrupt
from bessemer.common.errors import BessemerError, Stopped, first_line
from bessemer.run_tasks.task import CorpusTask

Result = TypeVar("Result")

STOP = threading.Event()  # set when the user stops the build; long work looks at it between documents
STOP_SECONDS = 2.0  # how long a stopped build waits for the work to let go of its files
ATTEMPTS = 3  # a task fails when its worker has died this often: once may be the machine's fault, not three times
SINGLE_THREAD = ("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
# Where stores are, for workers on other machines; credentials are those of their machines
STORE_VARIABLES = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION")
HANDED_ON = (*STORE_VARIABLES, extensions.TRUSTED)

OnResult = Callable[[CorpusTask], None]


def run(work: Callable[[], Result], stage: str = "corpus") -> Result:
    """Run `work` in a thread. OSError and BessemerError pass; any other failure becomes a BessemerError with the stage and its
    first line."""
    results: list[Result] = []
    failures: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    STOP.clear()
    thread = threading.Thread(target=target, name="corpus-engine", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            interrupt.check()
            thread.join(0.1)
    finally:
        if not results:
            STOP.set()
            thread.join(STOP_SECONDS)
    if not failures:
        return results[0]
    error = failures[0]
    if isinstance(error, OSError | BessemerError | KeyboardInterrupt | MemoryError):
        raise error
    raise BessemerError(f"{stage}: the work failed: {type(error).__name__}: {first_line(error)}") from error


def check_stop() -> None:
    """Raise Stopped when the user stops the build; long work calls it now and then."""
    if STOP.is_set():
        raise Stopped("stopped")


def require(holds: bool, problem: str) -> None:
    """Raise BessemerError for counts that do not add up, which is a fault of this program."""
    if not holds:
        raise BessemerError(f"corpus: {problem}; nothing was written; please report this")


# --- Tasks


def perform(task: CorpusTask) -> None:
    """Do one task."""
    import pyarrow as pa

    task.run()
    pa.default_memory_pool().release_unused()


def answer(task: CorpusTask) -> Exception | None:
    """Do one task; the exception that it raised."""
    try:
        perform(task)
    except OSError as error:
        return OSError(error.errno, error.strerror or str(error), error.filename)
    except (BessemerError, MemoryError) as error:
        return error
    except Exception as error:
        return BessemerError(f"{task.stage}: {task} failed: {type(error).__name__}: {first_line(error)}")
    return None


def gave_up(task: CorpusTask, why: str, remedy: str = "") -> BessemerError:
    """The error for a task whose worker died too often; why: how it ended the last time."""
    remedy = remedy or f"out of memory? Then lower {task.stage}.workers"
    ended = f"{task.stage}: {task}: its worker ended {ATTEMPTS} times ({why})"
    return BessemerError(f"{ended}; {remedy}; the same command resumes here")


def require_receipt(task: CorpusTask, done: dict[str, Any] | None) -> dict[str, Any]:
    """The receipt of a finished task. Raises BessemerError for one that is not there."""
    if done is None:
        raise BessemerError(f"{task.stage}: {task} is done but not in {task.work}; do all workers see this path?")
    return done


def worker_environment() -> dict[str, str]:
    """What a worker needs to find this package, stores and trusted code, and to use one core."""
    above = str(Path(bessemer.__file__).parent.parent)
    path = [above, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    handed_on = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), **dict.fromkeys(SINGLE_THREAD, "1"), **handed_on}


def use_one_core() -> None:
    """Keep the libraries of this process to one core: workers share the cores of their machine."""
    import pyarrow as pa

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)
