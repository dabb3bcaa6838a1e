"""Pipeline schedules in time: start and end of each action, idle time, and the seconds of a step's micro-batches.

Times are in time-steps: one is a stage's forward of a micro-batch unless `Durations` says otherwise. With v stages on a
rank, stages are 1/v as deep, so time-steps of schedules with different v compare after division by v; utilisation as it is.

`pipeline_seconds` gives the time of a step's micro-batches through a pipeline: closed forms where they are the schedule's own
time, and its action list simulated elsewhere; times in seconds, of each of the p x v stages for a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from bessemer.distributed.schedules import Action, ScheduleActions, actions, generate, to_csv_rows
from bessemer.distributed.stages import stage_ids_of_rank


@dataclass(frozen=True)
class Durations:
    """How long a stage takes for a micro-batch.

    backward: the whole one, half of it for the inputs' gradient and half for the weights' where a schedule splits it
    (each multiplies two matrices, as the forward does: hence 2). A textbook that draws each action as one time-step has
    backward = 1. stages: how much longer than 1 each stage takes, by stage; None: all the same.
    """

    forward: float = 1.0
    backward: float = 2.0
    stages: tuple[float, ...] | None = None

    def of(self, action: Action) -> float:
        """Time-steps of one action."""
        base = {"F": self.forward, "B": self.backward, "I": self.backward / 2, "W": self.backward / 2}[action.kind]
        return base * (1.0 if self.stages is None else self.stages[action.stage])


@dataclass(frozen=True, slots=True)
class Slot:
    """An action in time. Of an overlapped pair each has its own slot, one behind the other."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """slots: by rank, in the order of time."""

    schedule: ScheduleActions
    durations: Durations
    slots: tuple[tuple[Slot, ...], ...]

    @cached_property
    def timesteps(self) -> float:
        """From the first start to the last end."""
        return max(row[-1].end for row in self.slots)

    @cached_property
    def active_of(self) -> tuple[float, ...]:
        """Time-steps in which each rank computes."""
        return tuple(sum(slot.end - slot.start for slot in row) for row in self.slots)

    @property
    def active(self) -> float:
        """Time-steps of all ranks in which they compute."""
        return sum(self.active_of)

    @property
    def idle(self) -> float:
        """Time-steps of all ranks in which they wait."""
        return self.timesteps * len(self.slots) - self.active

    @property
    def utilisation(self) -> float:
        """Share of the ranks' time in which they compute."""
        return self.active / (self.timesteps * len(self.slots))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values. `rows` are the lists that run; `slots` are (action, start, end)."""
        of = self.schedule
        return {
            "schedule": of.name,
            "ranks": of.ranks,
            "virtual": of.virtual,
            "stages": of.stages,
            "micro_batches": of.micro_batches,
            "timesteps": self.timesteps,
            "active": self.active,
            "idle": self.idle,
            "utilisation": self.utilisation,
            "rows": to_csv_rows(of),
            "slots": [[(str(slot.action), slot.start, slot.end) for slot in row] for row in self.slots],
        }  # fmt: skip


def simulate(schedule: ScheduleActions, durations: Durations | None = None) -> Timetable:
    """Let each rank do its list in order, each action as soon as what it needs is there.

    F needs the stage before, B and I the stage behind and their own F, W its I.
    Raises ValueError when the ranks wait for each other for ever.
    """
    asked = durations or Durations()
    done: dict[tuple[int, str, int], float] = {}  # when the F, B (or I) and W of a stage and micro-batch ended

    def ready(action: Action) -> float | None:
        """When what an action needs is there; None: that is not known yet."""
        latest = 0.0
        for stage, kind in _needs(action, schedule.stages):
            ended = done.get((stage, kind, action.micro_batch))
            if ended is None:
                return None
            latest = max(latest, ended)
        return latest

    slots: list[list[Slot]] = [[] for _ in range(schedule.ranks)]
    todo = [list(reversed(steps)) for steps in schedule.steps]
    while any(todo):
        moved = False
        for row, steps in zip(slots, todo, strict=True):
            while steps:
                step = steps[-1]
                times = [ready(action) for action in actions([step])]
                if None in times:
                    break
                start = max([row[-1].end if row else 0.0, *(time for time in times if time is not None)])
                for action in actions([step]):
                    row.append(Slot(action, start, start := start + asked.of(action)))
                for action in actions([step]):  # a pair's results are both there when the pair is done
                    done[action.stage, "B" if action.kind == "I" else action.kind, action.micro_batch] = start
                steps.pop()
                moved = True
        if not moved:
            heads = ", ".join(f"rank {rank} at {steps[-1]}" for rank, steps in enumerate(todo) if steps)
            raise ValueError(f"schedule {schedule.name}: the ranks wait for each other for ever: {heads}")
    return Timetable(schedule, asked, tuple(tuple(row) for row in slots))


def _needs(action: Action, stages: int) -> Iterator[tuple[int, str]]:
    """(stage, kind) of what has to be done for the same micro-batch."""
    if action.kind == "F":
        if action.stage > 0:
            yield action.stage - 1, "F"
    elif action.kind == "W":
        yield action.stage, "B"
    else:
        yield action.stage, "F"
        if action.stage < stages - 1:
            yield action.stage + 1, "B"


def pipeline_seconds(
    name: str, ranks: int, virtual: int, micro_batches: int, forward: tuple[float, ...], backward: tuple[float, ...]
) -> float:
    """Seconds from the first forward to the last backward; sends keep the stages busy, and count with them.

    GPipe: the forwards and then the backwards, each a flow through stages in order. 1F1B: see `_seconds_1f1b`. Interleaved: the
    slowest rank's stages together, with the way down and up 1/v as long (Narayanan et al. 2021, section 2.2). ZB-V, DualPipeV:
    what the simulated list idles, stages alike, against the work of the slowest rank.
    """
    if ranks == 1:
        return micro_batches * (sum(forward) + sum(backward))
    if name == "gpipe":
        return sum(forward) + sum(backward) + (micro_batches - 1) * (max(forward) + max(backward))
    if name == "1f1b":
        return _seconds_1f1b(micro_batches, forward, backward)
    if name == "interleaved":
        by_rank = rank_seconds(name, ranks, virtual, forward, backward)
        return micro_batches * max(by_rank) + (sum(by_rank) - max(by_rank)) / virtual
    one = sum(forward) / len(forward)
    ratio = round(sum(backward) / sum(forward), 1)
    idle = _idle(name, ranks, micro_batches, ratio)
    return micro_batches * max(rank_seconds(name, ranks, virtual, forward, backward)) + idle * one


def rank_seconds(
    name: str, ranks: int, virtual: int, forward: Sequence[float], backward: Sequence[float]
) -> list[float]:
    """Return the seconds of each rank's stages for a micro-batch."""
    of_rank = [stage_ids_of_rank(name, rank, ranks, virtual) for rank in range(ranks)]
    return [sum(forward[stage] + backward[stage] for stage in stages) for stages in of_rank]


def _seconds_1f1b(micro_batches: int, forward: tuple[float, ...], backward: tuple[float, ...]) -> float:
    """1F1B: the stage that takes longest with all that it waits for.

    Stage k first waits for the first forward of those before it, and its last backward has to pass them. It sends w = p - 1 - k
    micro-batches ahead, and waits where these take less time than a micro-batch takes on its way behind it and back: once for
    its first backward, after w forwards, and once for its last, after w backwards. With stages alike this is
    (p - 1)(F + B) in all. With no more than w micro-batches it is a way through all stages and the stage's other micro-batches.
    """
    whole = [one + other for one, other in zip(forward, backward, strict=True)]
    before, total, stages, longest = 0.0, sum(whole), len(whole), 0.0
    for k, (one, other) in enumerate(zip(forward, backward, strict=True)):
        ahead = stages - 1 - k
        behind = total - before - whole[k]
        through = total + (micro_batches - 1) * whole[k]
        if micro_batches > ahead:
            waits = max(behind - ahead * one, 0.0) + max(behind - ahead * other, 0.0)
            through = min(through, before + micro_batches * whole[k] + waits)
        longest = max(longest, through)
        before += whole[k]
    return longest


@lru_cache(maxsize=512)
def _idle(name: str, ranks: int, micro_batches: int, ratio: float) -> float:
    """Forwards of one stage that a schedule takes beyond a rank's work. In its steady state a further micro-batch adds none, so
    that no more than 4 p micro-batches are simulated."""
    enough = min(micro_batches, 4 * ranks)
    return simulate(generate(name, ranks, enough), Durations(1.0, ratio)).timesteps - enough * 2 * (1.0 + ratio)
