"""Start a training on several processes of this machine: run torchrun, pass signals on and return the outcome."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bessemer.common import interrupt
from bessemer.common.console import reported_elsewhere, say
from bessemer.common.environment import num_cores
from bessemer.common.errors import Stopped
from bessemer.launch import outcome, status_files
from bessemer.launch.worker import PREPARED
from bessemer.recipe import Recipe
from bessemer.recipe.parallel import describe_axes
from bessemer.run.directory import RunDirectory

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGXCPU"


def train(recipe: Recipe, run: RunDirectory, program: Sequence[str]) -> dict[str, Any]:
    """Train a resolved recipe, whose run directory is prepared, on `parallel.world` processes. Returns the summary.

    Passes a stop signal on to torchrun. Raises what the processes report: Stopped, InputError, BessemerError.

    Args:
        recipe: The resolved recipe.
        run: Its prepared run directory.
        program: Arguments of Python for a process, which is a `Worker`.
    """
    world = recipe.parallel.world
    say(f"  on {world} processes: {describe_axes(recipe.parallel)}")
    line = [
        sys.executable, "-m", "bessemer.launch.torchrun", "--standalone", f"--nproc-per-node={world}",
        f"--max-restarts={recipe.parallel.restarts}", f"--signals-to-handle={SIGNALS}",
        f"--shutdown-timeout={recipe.cluster.save_seconds}", *program,
    ]  # fmt: skip
    environment = {
        "OMP_NUM_THREADS": str(max(num_cores() // world, 1)), **os.environ, PREPARED: "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TORCH_CPP_LOG_LEVEL": "ERROR",
        "LOGLEVEL": "CRITICAL",  # of torchrun: the command shows what matters
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # with a shared store, restarts fail (torch 2.11 to 2.13)
    }  # fmt: skip
    since = time.time()
    with subprocess.Popen(line, env=environment, start_new_session=True) as torchrun:
        stopped = ""
        try:
            with reported_elsewhere():
                torchrun.wait()
        except KeyboardInterrupt:
            stopped = interrupt.last_signal()
            torchrun.send_signal(signal.Signals[stopped])
            try:
                torchrun.wait()
            except KeyboardInterrupt:  # a second Ctrl-C
                stopped = "at once"
        finally:
            torchrun.kill()
    if stopped and status_files.read_report(run) is None:
        raise Stopped(f"stopped by {stopped}; {status_files.describe_resume(run)}")
    return dict(outcome.read_outcome(run, torchrun.returncode, since)["summary"])
