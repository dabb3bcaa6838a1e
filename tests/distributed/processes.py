"""Run a test's function on several processes that form a gloo group, and return their results."""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ports import free_port

HERE = Path(__file__).parent


def run_on(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> list[Any]:
    """Call `function(*arguments)` on each of `world` processes of one group and return the results by rank.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as by a launcher; the function joins the group itself. It must be at the
    top level of a test module. Fails with the output of the first process that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
        started = []
        for rank in range(world):
            paths = [str(HERE), str(HERE.parent.parent), *sys.path]
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONFAULTHANDLER": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            }  # fmt: skip
            log = open(Path(folder) / f"log-{rank}", "wb")  # noqa: SIM115 (the process writes into it)
            command = [sys.executable, __file__, str(call), str(Path(folder) / f"result-{rank}")]
            started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(timeout=timeout) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        failed = [rank for rank, code in enumerate(codes) if code != 0]
        if failed:
            # If a signal ended a process, the others only report that it is gone.
            shown = [rank for rank in failed if codes[rank] < 0] or failed
            logs = "\n".join(f"--- rank {n}, exit {codes[n]}\n{end_of(Path(folder) / f'log-{n}')}" for n in shown)
            raise AssertionError(f"of {world} ranks {failed} failed\n{logs}")
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def end_of(log: Path) -> str:
    """Return the last 2,000 characters of a process's output, or the first 3,000 from where it crashed."""
    text = log.read_text(errors="replace")
    fault = text.rfind("Fatal Python error")
    return text[-2000:] if fault < 0 else text[fault : fault + 3000]


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    module, name, given = pickle.loads(Path(sys.argv[1]).read_bytes())
    result = getattr(importlib.import_module(module), name)(*given)
    Path(sys.argv[2]).write_bytes(pickle.dumps(result))
    from bessemer.distributed.mesh import leave

    leave()
