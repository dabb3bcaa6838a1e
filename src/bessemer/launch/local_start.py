"""Start a training on several processes of this machine: run torchrun, forward signals and return the outcome."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bessemer.common import interrupt
from bessemer.common.console import progress, say
from bessemer.common.environment import num_cores
from bessemer.distributed.validity import describe_axes
from bessemer.launch import outcome
from bessemer.launch.worker import PREPARED, REPORTS
from bessemer.recipe import Recipe
from bessemer.run.directory import RunDirectory


def train(recipe: Recipe, run: RunDirectory, program: Sequence[str]) -> dict[str, Any]:
    """Train a resolved recipe on `parallel.world` processes of this machine with torchrun, and return the training's summary.

    A stop signal is forwarded to torchrun. Raises the error that the processes report: Stopped, InputError or
    BessemerError.

    Args:
        recipe: The resolved recipe.
        run: Its prepared run directory.
        program: Arguments of the Python interpreter that start one training process (`Worker`).
    """
    world = recipe.parallel.world
    say(f"  on {world} processes: {describe_axes(recipe.parallel)}")
    line = [
        sys.executable, "-m", "bessemer.launch.torchrun", "--standalone", f"--nproc-per-node={world}",
        f"--max-restarts={recipe.parallel.restarts}", f"--shutdown-timeout={recipe.cluster.save_seconds}", *program,
    ]  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": str(max(num_cores() // world, 1)), **os.environ, REPORTS: "1", PREPARED: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    since = time.time()
    with subprocess.Popen(line, env=environment, start_new_session=True) as torchrun:
        stop = 0
        try:
            with progress(""):  # rank 0 shows the progress
                torchrun.wait()
        except KeyboardInterrupt:
            stop = signal.Signals[(interrupt.RECEIVED or ["SIGINT"])[-1]]
            torchrun.send_signal(stop)
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C
                torchrun.wait()
        finally:
            torchrun.kill()
    return outcome.read_outcome(run, -stop or torchrun.returncode, since)
