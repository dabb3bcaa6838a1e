"""The processes that the last start of a group lost: found in what they left behind, and recorded at the next start."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from bessemer.guard import heartbeat
from bessemer.guard.heartbeat import BEAT_SECONDS, Reading
from bessemer.guard.incidents import HANG, LOST, IncidentKind, record
from bessemer.launch import reports
from bessemer.run import RunFolder
from bessemer.terminal import warn

ACTION = "the group starts again from the newest checkpoint"
SAME_MOMENT = 3 * BEAT_SECONDS  # heartbeats whose last beats are nearer ended together


@dataclass(frozen=True)
class LostRank:
    """A process or node that was lost, or that hung. step: the last that it completed."""

    kind: IncidentKind
    cause: str
    rank: int
    host: str
    step: int


def begin(run: RunFolder) -> None:
    """Record what the last start of the group lost, and make the folder for the reports of this one."""
    place = reports.folder(run)
    if reports.reported(run) is None:
        found, stacks = lost_ranks(run), ""
        if any(loss.kind is HANG for loss in found):
            stacks = str(_collect_stacks(run))
        for loss in found:
            warn(f"{loss.cause}; {ACTION}")
            more = {"stacks": stacks} if stacks else {}
            record(
                run.incidents, loss.kind, step=loss.step, cause=loss.cause, action=ACTION, rank=loss.rank, host=loss.host, **more
            )  # fmt: skip
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)


def lost_ranks(run: RunFolder) -> list[LostRank]:
    """Return what the last start of the group lost: processes that hung, else those that were killed, else the first crash."""
    place = reports.folder(run)
    readings = [one for path in sorted(place.glob("rank-*.json")) if (one := heartbeat.read(path)) is not None]
    dumped = {int(path.stem.removeprefix("rank-")) for path in place.glob("rank-*.stacks") if path.stat().st_size}
    if readings and dumped:
        return [_hang(one, readings, one.rank in dumped) for one in culprits(readings)]
    crashes, root = reports.crashes(run), reports.root_crash(run)
    silent = [one for one in readings if one.rank not in crashes]
    if not silent or (root is not None and not reports.is_from_neighbour(root)):
        if root is None:
            return []
        return [LostRank(LOST, f"rank {root['rank']} failed: {root['error']}", root["rank"], "", _last_step(readings))]
    first = min(one.beat for one in silent)
    return _killed([one for one in silent if one.beat - first < SAME_MOMENT], readings)


def culprits(readings: list[Reading]) -> list[Reading]:
    """Return the processes that kept the others waiting: those whose beats ended long before the others'; else those that
    were behind the others, or all."""
    last, limit = max(one.beat for one in readings), min(one.limit for one in readings)
    if silent := [one for one in readings if last - one.beat > max(SAME_MOMENT, limit / 2)]:
        return silent
    places = {one.rank: (one.step, heartbeat.PHASES.index(one.phase)) for one in readings}
    return [one for one in readings if places[one.rank] == min(places.values())]


def _hang(one: Reading, readings: list[Reading], has_stacks: bool) -> LostRank:
    last = max(other.beat for other in readings)
    if last - one.beat > SAME_MOMENT:
        why = "it held the interpreter" if has_stacks else "it was stopped by a signal, or its machine hangs"
        cause = f"rank {one.rank} on {one.host} had not answered for {last - one.beat:.0f} s in {one.activity}: {why}"
    else:
        cause = f"rank {one.rank} on {one.host} had made no progress for {last - one.since:.0f} s in {one.activity}"
    return LostRank(HANG, cause, one.rank, one.host, one.step + 1)


def _killed(lost: list[Reading], readings: list[Reading]) -> list[LostRank]:
    """Return the losses of processes that ended without a report; those of a whole node are one."""
    losses, step = [], _last_step(readings)
    for node in sorted({one.node for one in lost}):
        here = [one for one in lost if one.node == node]
        rank, host = here[0].rank, here[0].host
        if len(here) == sum(one.node == node for one in readings) < len(readings):
            losses.append(LostRank(LOST, f"node {node} ({host}) was lost after step {step}", rank, host, step))
        else:
            losses += [
                LostRank(LOST, f"rank {one.rank} on {host} was killed after step {step}", one.rank, host, step)
                for one in here
            ]
    return losses


def _last_step(readings: list[Reading]) -> int:
    return max((one.step for one in readings), default=0)


def _collect_stacks(run: RunFolder) -> Path:
    """Append the stacks of all processes to stacks.txt in the run folder."""
    kept = run.path / "stacks.txt"
    with open(kept, "a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        for path in sorted(reports.folder(run).glob("rank-*.stacks")):
            text = path.read_text(errors="replace") or "no stacks: another process ended first, or it did not answer\n"
            file.write(f"--- {path.stem}\n{text}\n")
    return kept
