"""The processes that the last start of a group lost: found in what they left behind, and recorded at the next start."""

from __future__ import annotations

import shutil
import time
from typing import Any

from bessemer.common.console import warn
from bessemer.guard import heartbeat
from bessemer.guard.heartbeat import BEAT_SECONDS, Reading
from bessemer.guard.incidents import HANG, LOST, record
from bessemer.launch import status_files
from bessemer.run.directory import RunDirectory

ACTION = "the group starts again from the newest checkpoint"
SAME_MOMENT = 3 * BEAT_SECONDS  # heartbeats whose last beats are nearer ended together


def record_lost_ranks(run: RunDirectory) -> None:
    """Record what the last start of the group lost, and make the folder for the reports of this one."""
    if status_files.read_report(run) is None:
        found = lost_ranks(run)
        more: dict[str, Any] = {"stacks": _collect_stacks(run)} if any(loss["kind"] is HANG for loss in found) else {}
        for loss in found:
            warn(f"{loss['cause']}; {ACTION}")
            record(run.incidents, action=ACTION, **loss, **more)
    shutil.rmtree(run.status, ignore_errors=True)
    run.status.mkdir(parents=True)


def lost_ranks(run: RunDirectory) -> list[dict[str, Any]]:
    """Return what the last start of the group lost: processes that hung, else those that were killed, else the first crash.

    Each loss is a dictionary of arguments of `record`; step: the last one that was completed, or the one that hung.
    """
    readings = list(filter(None, map(heartbeat.read, sorted(run.status.glob("rank-*.json")))))
    if readings and any(path.stat().st_size for path in run.status.glob("rank-*.stacks")):
        return [_hang(one, readings) for one in culprits(readings)]
    crashes, root = status_files.read_crashes(run), status_files.root_crash(run)
    silent = [one for one in readings if one.rank not in crashes]
    step = max((one.step for one in readings), default=0)
    if root is not None and not (silent and status_files.is_from_neighbour(root)):
        cause = f"rank {root['rank']} failed: {root['error']}"
        return [{"kind": LOST, "cause": cause, "rank": root["rank"], "host": "", "step": step}]
    first, by_node = min((one.beat for one in silent), default=0.0), dict[int, list[Reading]]()
    for one in silent:
        if one.beat - first < SAME_MOMENT:
            by_node.setdefault(one.node, []).append(one)
    return [_killed(lost, step) for lost in by_node.values()]


def culprits(readings: list[Reading]) -> list[Reading]:
    """Return the processes that kept the others waiting: those whose beats ended long before the others'; else those that
    were behind the others, or all."""
    last, limit = max(one.beat for one in readings), min(one.limit for one in readings)
    if silent := [one for one in readings if last - one.beat > max(SAME_MOMENT, limit / 2)]:
        return silent
    places = {one.rank: (one.step, heartbeat.PHASES.index(one.phase)) for one in readings}
    return [one for one in readings if places[one.rank] == min(places.values())]


def _hang(one: Reading, readings: list[Reading]) -> dict[str, Any]:
    last = max(other.beat for other in readings)
    what, since = "made no progress", one.since
    if last - one.beat > SAME_MOMENT:
        what, since = "not answered (it held the interpreter, was stopped by a signal, or its machine hangs)", one.beat
    cause = f"rank {one.rank} on {one.host} had {what} for {last - since:.0f} s in {one.activity}"
    return {"kind": HANG, "cause": cause, "rank": one.rank, "host": one.host, "step": one.step + 1}


def _killed(lost: list[Reading], step: int) -> dict[str, Any]:
    """Return the loss of processes of one node that ended without a report."""
    cause = f"rank {', '.join(str(one.rank) for one in lost)} on {lost[0].host} was lost after step {step}"
    return {"kind": LOST, "cause": cause, "rank": lost[0].rank, "host": lost[0].host, "step": step}


def _collect_stacks(run: RunDirectory) -> str:
    """Append the stacks of all processes to stacks.txt in the run directory. Returns its path."""
    kept = run.path / "stacks.txt"
    with open(kept, "a") as file:
        for path in sorted(run.status.glob("rank-*.stacks")):
            file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {path.stem}\n{path.read_text(errors='replace')}\n")
    return str(kept)
