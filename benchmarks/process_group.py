"""A process group on this machine that starts once, without restarts, for measurements and checks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, NoReturn

from bessemer.common.errors import BessemerError

if TYPE_CHECKING:
    import torch

    from bessemer.distributed.mesh import ProcessMesh
    from bessemer.recipe import Parallel

ALONE = 0  # number of processes for a run without any process group


def run_group(
    arguments: Sequence[str], processes: int, logs: Path, *, seconds: float, variables: Mapping[str, str],
    good: Sequence[int] = (0,),
) -> str | None:  # fmt: skip
    """Run Python with `arguments` as a process group with torchrun's environment. If one process fails, kill the others.

    Args:
        arguments: Arguments of Python.
        processes: Number of processes; ALONE for one without a group.
        logs: Prefix of the output files, one per rank.
        seconds: Time limit of the whole run.
        variables: Additional environment variables.
        good: Exit codes that mean success.

    Returns:
        The reason of a failure in one line, or None.
    """
    environment = {
        "GOMP_SPINCOUNT": "1000", **os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables,
    }  # fmt: skip
    if processes != ALONE:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment |= {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    files = [logs.with_name(f"{logs.name}-{rank}.txt") for rank in range(max(processes, 1))]
    started, codes = list[subprocess.Popen[bytes]](), list[int | None]([None])
    deadline = monotonic() + seconds
    try:
        for rank, path in enumerate(files):
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}  # without WORLD_SIZE there is no group
            with path.open("wb") as log:
                line = [sys.executable, *arguments]
                started.append(subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT))
        while None in codes and not set(codes) - {None, *good} and monotonic() < deadline:
            sleep(0.1)
            codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    bad = set(codes) - {None, *good} or {None}
    failed = [rank for rank, code in enumerate(codes) if code in bad]
    if not failed:
        return None
    texts = [files[rank].read_text(errors="replace").strip().splitlines() for rank in failed]
    last = [lines[-1] for lines in texts if lines and "closed by peer" not in lines[-1].lower()]
    return last[0] if last else f"rank {failed[0]} ended with exit code {codes[failed[0]]} within {seconds:.0f} s"


def work_as_member(layout: Parallel, device: torch.device, work: Callable[[ProcessMesh], None]) -> NoReturn:
    """Run `work` as one process of `run_group` on the mesh of its group, then exit.

    The exit code is 0, or that of an expected error, which is printed.
    """
    from bessemer.distributed.mesh import SINGLE_PROCESS, join, leave

    code = 0
    try:
        mesh = join(layout, device) if "WORLD_SIZE" in os.environ else SINGLE_PROCESS
        work(mesh)
        mesh.barrier()
        leave()
    except BessemerError as error:
        print(f"bessemer: {error}")
        code = error.exit_code
    sys.stdout.flush()
    os._exit(code)  # Python's shutdown may wait for a thread of the group
