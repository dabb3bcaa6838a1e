"""Simulated timetables of pipeline schedules: start and end of each action, idle time and step time.

Times are in time-steps. A time-step is a stage's forward pass of a micro-batch unless `Durations` says otherwise. With
v stages on a rank, a stage has 1/v of the depth, so divide time-steps by v to compare schedules with different v.
Utilisation compares directly.

`pipeline_seconds` gives the time of a step's micro-batches through a pipeline, in seconds. It uses a closed form where
that is exact for the schedule, and simulates the action list otherwise. Its inputs are the seconds of each of the p x v
stages for a micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from bessemer.distributed.schedules import Action, ScheduleActions, actions, generate
from bessemer.distributed.stages import stage_ids_of_rank


@dataclass(frozen=True)
class Durations:
    """The durations of a stage's forward and backward pass of a micro-batch, in time-steps.

    Attributes:
        forward: Duration of the forward pass.
        backward: Duration of the backward pass. A schedule that splits it takes half for the gradients of inputs and
            half for those of weights. Each half multiplies two matrices, as the forward pass does, hence 2. Textbooks
            that draw each action as one time-step have 1.
        stages: Relative duration of each stage; None: all equal.
    """

    forward: float = 1.0
    backward: float = 2.0
    stages: tuple[float, ...] | None = None

    def of(self, action: Action) -> float:
        """Return the time-steps of an action."""
        base = {"F": self.forward, "B": self.backward, "I": self.backward / 2, "W": self.backward / 2}[action.kind]
        return base * (1.0 if self.stages is None else self.stages[action.stage])


@dataclass(frozen=True, slots=True)
class Slot:
    """An action with its start and end. The two actions of an overlapped pair have consecutive slots."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timetable:
    """A simulated schedule.

    Attributes:
        schedule: The actions of each rank.
        durations: The durations of the actions.
        slots: Slots of each rank, in order of time.
    """

    schedule: ScheduleActions
    durations: Durations
    slots: tuple[tuple[Slot, ...], ...]

    @cached_property
    def timesteps(self) -> float:
        """Time-steps from the first start to the last end."""
        return max(row[-1].end for row in self.slots)

    @property
    def active(self) -> float:
        """Time-steps in which ranks compute, summed over all ranks."""
        return sum(sum(slot.end - slot.start for slot in row) for row in self.slots)

    @property
    def idle(self) -> float:
        """Time-steps in which ranks wait, summed over all ranks."""
        return self.timesteps * len(self.slots) - self.active

    @property
    def utilisation(self) -> float:
        """Share of the ranks' time in which they compute."""
        return self.active / (self.timesteps * len(self.slots))


def simulate(schedule: ScheduleActions, durations: Durations | None = None) -> Timetable:
    """Simulate a schedule: each rank executes its list in order, each action as soon as its inputs are available.

    The actions of a stage for a micro-batch are F (forward), B (backward), or in place of B, I (gradients of inputs)
    and W (gradients of weights). F needs F of the previous stage. B and I need B or I of the next stage, and F of their
    own stage. W needs its own I. Raises ValueError if the ranks deadlock.
    """
    asked = durations or Durations()
    done: dict[tuple[int, str, int], float] = {}  # end of the F, B (or I) and W of a stage and micro-batch

    def ready(action: Action) -> float | None:
        """Return when the inputs of an action are available, or None if that is not known yet."""
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
                for action in actions([step]):  # both results of a pair are available at its end
                    done[action.stage, "B" if action.kind == "I" else action.kind, action.micro_batch] = start
                steps.pop()
                moved = True
        if not moved:
            heads = ", ".join(f"rank {rank} at {steps[-1]}" for rank, steps in enumerate(todo) if steps)
            raise ValueError(f"schedule {schedule.name}: deadlock, the ranks wait for each other: {heads}")
    return Timetable(schedule, asked, tuple(tuple(row) for row in slots))


def _needs(action: Action, stages: int) -> Iterator[tuple[int, str]]:
    """Yield (stage, kind) of each action that must precede `action`, for the same micro-batch.

    Kind "B" stands for B or I, see `simulate`. `stages` is the number of stages of the pipeline.
    """
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
    """Return the seconds of a schedule from the first forward pass to the last backward pass.

    `forward` and `backward` are the seconds of a micro-batch in each of the ranks x `virtual` stages, where `virtual`
    (v) is the number of stages on each rank. They include the sends, which occupy the stages.

    GPipe runs all forward and then all backward passes, each a flow through the stages in order. 1F1B is
    `_seconds_1f1b`. Interleaved takes the time of the slowest rank's stages, with a fill and drain 1/v as long
    (Narayanan et al. 2021, section 2.2). ZB-V and DualPipeV take the work of the slowest rank plus the idle time of the
    simulated schedule with equal stages.
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
    """Return, for each rank, the seconds of a micro-batch in its stages; `forward` and `backward` are those of each stage."""
    of_rank = [stage_ids_of_rank(name, rank, ranks, virtual) for rank in range(ranks)]
    return [sum(forward[stage] + backward[stage] for stage in stages) for stages in of_rank]


def _seconds_1f1b(micro_batches: int, forward: tuple[float, ...], backward: tuple[float, ...]) -> float:
    """Return the seconds of 1F1B: those of the stage which takes longest, including its waits.

    `forward` and `backward` are the seconds of each stage for a micro-batch.

    Stage k first waits for the first forward pass of the stages before it, and its last backward pass must go through
    them. It sends w = p - 1 - k micro-batches ahead. It waits if these take less time than a micro-batch takes through
    the later stages and back: once for its first backward pass, after w forward passes, and once for its last, after w
    backward passes. With equal stages, the waits are (p - 1)(F + B) in total. With at most w micro-batches, the time is
    one pass through all stages and the stage's other micro-batches.
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
    """Return the idle time of a rank in a schedule with equal stages, in units of one stage's forward pass.

    `ratio` is the duration of a backward pass over that of a forward pass. At most 4 micro-batches per rank are
    simulated, because further ones add no idle time.
    """
    enough = min(micro_batches, 4 * ranks)
    return simulate(generate(name, ranks, enough), Durations(1.0, ratio)).timesteps - enough * 2 * (1.0 + ratio)
