"""The exit code of a training on several processes.

torchrun restarts a process that exits with any code but 0, and itself exits with 1 whatever happened. So a process whose end
a restart would meet again (bad input, a stop on request) reports it in a file and exits with 0. Afterwards

    python -m bessemer.launch.outcome RUN [CODE [SECONDS]] [--set KEY=VALUE]

prints the message and exits with 0, 1, 2 or 75. RUN is the run directory or its recipe, with the options `--set` of the worker.
CODE is the exit code of torchrun, which began less than SECONDS ago: reports that are older are of an earlier start.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from bessemer.common import interrupt
from bessemer.common.console import printable
from bessemer.common.errors import BessemerError, Stopped
from bessemer.launch import status_files
from bessemer.launch.lost_ranks import lost_ranks
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory


def read_outcome(run: RunDirectory, code: int, since: float = 0.0) -> dict[str, Any]:
    """Return the report of a completed training. Raises the error with which another one ended.

    Args:
        code: exit code of torchrun; 128 + N, or -N, where signal N ended it.
        since: time (seconds since the epoch) before which a report is of an earlier start.
    """
    found = status_files.read_report(run)
    if found is not None and found["time"] >= since:
        if found["code"]:
            raise status_files.ERRORS[found["code"]](found["message"])
        return found
    number = -code if code < 0 else code - 128
    crash = status_files.root_crash(run)
    # After a crash srun ends the other nodes by a signal.
    is_cause = crash is not None and not status_files.is_from_neighbour(crash)
    if number in interrupt.SIGNALS and not is_cause:
        raise Stopped(f"stopped by {interrupt.plain_name(number)}; {status_files.describe_resume(run)}")
    losses = [loss["cause"] for loss in lost_ranks(run)]
    cause = "; ".join(losses or [f"torchrun ended with {code}, for a reason that is shown above"])
    if crash is not None:
        kept = run.path / "training-error.txt"
        kept.write_text(crash["traceback"])
        cause += f"; see {kept}"
    raise BessemerError(f"train: {cause}; {status_files.describe_resume(run)}")


def main() -> int:
    """Print how the training of a run ended. Returns its exit code."""
    parser = ArgumentParser("python -m bessemer.launch.outcome", description="Print how the training of a run ended.")
    parser.add_argument("run", type=Path, help="its folder or its recipe")
    parser.add_argument("code", type=int, nargs="?", default=0, help="exit code of torchrun")
    parser.add_argument(
        "seconds", type=int, nargs="?", default=0, help="since torchrun began; older reports do not count"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as given to the worker")
    args = parser.parse_args()
    try:
        run = RunDirectory(args.run if args.run.is_dir() else load(args.run, args.set).run.folder)
        read_outcome(run, args.code, time.time() - args.seconds if args.seconds else 0.0)
    except BessemerError as error:
        print(f"bessemer: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
