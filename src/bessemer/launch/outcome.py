"""The outcome of a training on several processes: its exit code, and the processes that it lost.

torchrun restarts a process that exits with any code but 0, and itself exits with 1 for every failure. If a restart would fail
in the same way (bad input, a requested stop), the process reports the error in a file and exits with 0. Afterwards

    python -m bessemer.launch.outcome RUN [CODE [SECONDS]] [--set KEY=VALUE]

prints the message and exits with 0, 1, 2 or 75. RUN is the run directory or its recipe, with the worker's `--set` options. CODE
is the exit code of torchrun, which started less than SECONDS ago: older reports belong to an earlier start.
"""

from __future__ import annotations

import shutil
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from bessemer.common import interrupt
from bessemer.common.console import printable, warn
from bessemer.common.errors import BessemerError, InputError, Stopped
from bessemer.guard import heartbeat
from bessemer.guard.incidents import HANG, LOST, IncidentKind, record
from bessemer.launch import status_files
from bessemer.recipe import load
from bessemer.run.directory import RunDirectory, checkpoint_steps

ERRORS = {error.exit_code: error for error in (BessemerError, InputError, Stopped)}
ACTION = "the group starts again from the newest checkpoint"
SAME_MOMENT = 3 * heartbeat.BEAT_SECONDS  # processes whose last beats are closer than this ended together


def read_outcome(run: RunDirectory, code: int, since: float = 0.0) -> dict[str, Any]:
    """Return the summary of a completed training, or raise the error that ended it.

    Args:
        run: The run directory.
        code: The exit code of torchrun; 128 + N or -N if signal N ended it.
        since: The time (seconds since the epoch) of the start; older reports belong to an earlier start.
    """
    report = status_files.read_report(run)
    if report is not None and report["time"] >= since:
        if report["code"]:
            raise ERRORS[report["code"]](report["message"])
        return dict(report["summary"])
    then = "run the same command again to continue from the last checkpoint"
    if not checkpoint_steps(run.checkpoints):
        then = "no checkpoint is saved yet; run the same command again to train from the start"
    number = -code if code < 0 else code - 128
    crashes = status_files.read_crashes(run)
    # After a crash, srun ends the other nodes with a signal, which is then not the cause.
    if number in interrupt.SIGNALS and (not crashes or crashes[0]["is_consequence"]):
        raise Stopped(f"stopped by {interrupt.plain_name(number)}; {then}")
    cause = "; ".join(loss["cause"] for loss in lost_ranks(run)) or f"torchrun exited with {code}, see the output above"
    if crashes:
        path = run.path / "training-error.txt"
        path.write_text(crashes[0]["traceback"])
        cause += f"; see {path}"
    raise BessemerError(f"train: {cause}; {then}")


def record_lost_ranks(run: RunDirectory) -> None:
    """Record an incident for each process that ended the last start, and create an empty folder for this start's reports."""
    if status_files.read_report(run) is None:
        incidents = lost_ranks(run)
        more: dict[str, Any] = {"stacks": _collect_stacks(run)} if any(one["kind"] is HANG for one in incidents) else {}
        for incident in incidents:
            warn(f"{incident['cause']}; {ACTION}")
            record(run.incidents, action=ACTION, **incident, **more)
    shutil.rmtree(run.status, ignore_errors=True)
    run.status.mkdir(parents=True)


def lost_ranks(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the ranks that ended the last start of the training, as dicts of arguments of `incidents.record`.

    They are the processes that hung, else those that were killed, else the first that crashed. `step` in a dict is the last
    completed step, or the step that hung.
    """
    readings = list(filter(None, map(heartbeat.read, sorted(run.status.glob("rank-*.json")))))
    if readings and any(path.stat().st_size for path in run.status.glob("rank-*.stacks")):
        return [_hang(one, readings) for one in stalled_ranks(readings)]
    crashes = status_files.read_crashes(run)
    silent = [one for one in readings if one.rank not in {crash["rank"] for crash in crashes}]
    step = max((one.step for one in readings), default=0)
    if crashes and not (silent and crashes[0]["is_consequence"]):
        rank, error = crashes[0]["rank"], crashes[0]["error"]
        return [{"kind": LOST, "cause": f"rank {rank} failed: {error}", "rank": rank, "host": "", "step": step}]
    first = min((one.beat for one in silent), default=0.0)
    killed = [one for one in silent if one.beat - first < SAME_MOMENT]
    nodes = {one.node: [each for each in killed if each.node == one.node] for one in killed}
    return [_incident(LOST, lost, f"was lost after step {step}", step) for lost in nodes.values()]


def stalled_ranks(readings: list[heartbeat.Reading]) -> list[heartbeat.Reading]:
    """Return the last heartbeats of the processes that kept the others waiting, from those of all processes.

    They are the processes whose heartbeats ended long before the others', else those that were behind the others, or all.
    """
    last, limit = max(one.beat for one in readings), min(one.limit for one in readings)
    if silent := [one for one in readings if last - one.beat > max(SAME_MOMENT, limit / 2)]:
        return silent
    progress = {one.rank: (one.step, heartbeat.PHASES.index(one.phase)) for one in readings}
    return [one for one in readings if progress[one.rank] == min(progress.values())]


def _hang(stalled: heartbeat.Reading, readings: list[heartbeat.Reading]) -> dict[str, Any]:
    """Return the incident of the process whose last heartbeat is `stalled`, as arguments of `incidents.record`.

    `readings` are the last heartbeats of all processes, which tell how long it had been stalled.
    """
    last = max(reading.beat for reading in readings)
    what, since = "made no progress", stalled.since
    if last - stalled.beat > SAME_MOMENT:
        what, since = "not responded (blocked interpreter, stopped by a signal, or its machine hangs)", stalled.beat
    return _incident(HANG, [stalled], f"had {what} for {last - since:.0f} s in {stalled.activity}", stalled.step + 1)


def _incident(kind: IncidentKind, lost: list[heartbeat.Reading], what: str, step: int) -> dict[str, Any]:
    """Return the incident of the lost processes of one node, as arguments of `incidents.record`.

    `what` is the end of a sentence about them, such as "was lost after step 7". The incident's rank is that of the first
    one.
    """
    cause = f"rank {', '.join(str(one.rank) for one in lost)} on {lost[0].host} {what}"
    return {"kind": kind, "cause": cause, "rank": lost[0].rank, "host": lost[0].host, "step": step}


def _collect_stacks(run: RunDirectory) -> str:
    """Append the stacks of all processes to stacks.txt in the run directory, and return its path."""
    output = run.path / "stacks.txt"
    with open(output, "a") as file:
        for path in sorted(run.status.glob("rank-*.stacks")):
            file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {path.stem}\n{path.read_text(errors='replace')}\n")
    return str(output)


def main() -> int:
    """Print how the training of a run ended, and return its exit code."""
    parser = ArgumentParser("python -m bessemer.launch.outcome", description="Print how the training of a run ended.")
    parser.add_argument("run", type=Path, help="run directory or recipe")
    parser.add_argument("code", type=int, nargs="?", default=0, help="exit code of torchrun")
    parser.add_argument("seconds", type=int, nargs="?", default=0, help="age of torchrun, to ignore older reports")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="the worker's --set options")
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
