"""Keeps a group of processes on this machine: torch's elastic agent, without its own words.

`python -m bessemer.launch.agent RUN PROCESSES RESTARTS [profile]` starts `bessemer.launch.member` so many times as one
group, and starts all of them again after one was lost, up to RESTARTS times. A process of its own, so that a Ctrl-C in a
terminal reaches the command alone, which asks the members to stop.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import uuid


def main() -> int:
    """Exit code 0 when all members ended well, 1 when they could not be brought back."""
    run, processes, restarts, *more = sys.argv[1:]
    _end_with_the_parent()
    os.environ["LOGLEVEL"] = "CRITICAL"  # what has to be said, the command says
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # with it shared, restarts fail (torch 2.11 to 2.13)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(processes),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=int(restarts),
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "bessemer.launch.member", run, *more)
    except ChildFailedError:
        return 1
    return 0


def _end_with_the_parent() -> None:
    """Ask the kernel for a SIGTERM when the command dies, which the agent hands on to the members."""
    if sys.platform.startswith("linux"):
        parent_death_signal = 1  # PR_SET_PDEATHSIG of sys/prctl.h
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
