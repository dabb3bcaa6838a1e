"""A group of processes on this machine that is started once, without restarts: for measurements and proofs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, NoReturn

from bessemer.errors import BessemerError

if TYPE_CHECKING:
    import torch

    from bessemer.parallel.mesh import ProcessMesh
    from bessemer.recipe import Parallel

ALONE = 0  # as the number of processes: one, outside of any process group


def run_group(
    arguments: Sequence[str], processes: int, logs: Path, *, seconds: float = 3600.0, good: Sequence[int] = (0,),
    variables: Mapping[str, str] | None = None,
) -> str | None:  # fmt: skip
    """Run Python with `arguments` as a process group with the environment of torchrun; processes: ALONE for one without it.

    logs: beginning of the files for their output, one a rank; seconds: limit of the whole; good: exit codes of success.
    Returns why it failed, in a line, or None. Kills those that are left when one fails.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "GOMP_SPINCOUNT": "1000", **os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(variables or {}),
    }  # fmt: skip
    files = [logs.with_name(f"{logs.name}-{rank}.txt") for rank in range(max(processes, 1))]
    started = list[subprocess.Popen[bytes]]()
    try:
        with ExitStack() as opened:
            for rank, path in enumerate(files):
                group = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
                environment = shared if processes == ALONE else shared | group
                log = opened.enter_context(path.open("wb"))
                command = [sys.executable, *arguments]
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        codes = _ended(started, seconds, good)
    finally:
        for process in started:
            process.kill()
            process.wait()
    failed = [rank for rank, code in enumerate(codes) if code not in good]
    if not failed:
        return None
    texts = [files[rank].read_text(errors="replace").strip().splitlines() for rank in failed]
    last = [lines[-1] for lines in texts if lines and "closed by peer" not in lines[-1].lower()]
    if last:
        return last[0]
    code = codes[failed[0]]
    return f"rank {failed[0]} " + (f"had not ended after {seconds:.0f} s" if code is None else f"ended with {code}")


def _ended(started: list[subprocess.Popen[bytes]], seconds: float, good: Sequence[int]) -> list[int | None]:
    """Exit codes, once all have ended, or one badly, or time is up (None: still running)."""
    deadline = monotonic() + seconds
    while monotonic() < deadline:
        codes = [process.poll() for process in started]
        if None not in codes or any(code is not None and code not in good for code in codes):
            break
        sleep(0.1)
    codes = [process.poll() for process in started]
    failed = any(code is not None and code not in good for code in codes)
    return [good[0] if code is None and failed else code for code in codes]


def work_as_member(layout: Parallel, device: torch.device, work: Callable[[ProcessMesh], None]) -> NoReturn:
    """Work as one process of `run_group`, on the mesh of its group, and exit: with the code of an expected error, which is
    printed, else with 0."""
    from bessemer.parallel.mesh import SINGLE_PROCESS, in_group, join, leave

    code = 0
    try:
        mesh = join(layout, device) if in_group() else SINGLE_PROCESS
        work(mesh)
        mesh.barrier()
        leave()
    except BessemerError as error:
        print(f"bessemer: {error}")
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)  # Python's teardown may wait for a thread of the group
