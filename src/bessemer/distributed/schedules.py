"""Pipeline schedules as lists: the actions of each rank, in order.

Notation: p ranks, v stages on each, m micro-batches. F is a stage's forward of a micro-batch and B its backward. A schedule
that splits the backward has I (gradient of the input, which the previous stage waits for) and W (gradient of the weights,
which nothing waits for). `0F3` is stage 0's forward of micro-batch 3, as in torch.distributed.pipelining.

The planner and its figures use these lists. `distributed/pipeline.py` runs torch's classes instead; a test compares their
`pipeline_order` (and the behaviour of ScheduleGPipe and Schedule1F1B) with these lists. V-shaped schedules take their lists
from torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from types import SimpleNamespace
from typing import Any, Literal

from bessemer.common.errors import InputError
from bessemer.recipe.parallel import SCHEDULES, interleaved_rounds, stages_complaint, stages_per_rank

Kind = Literal["F", "B", "I", "W"]
NAMES: tuple[str, ...] = tuple(SCHEDULES)
MAX_ACTIONS = 2_000_000
"""Larger schedules raise an error: lists are built and simulated in Python, which takes seconds per million actions."""


def nearest_that_fit(number: int, fits: Callable[[int], bool]) -> list[str]:
    """Return the nearest number below (if any) and above `number` for which `fits` is true, as strings."""
    below = next((n for n in range(number - 1, 0, -1) if fits(n)), None)
    above = next(n for n in count(number + 1) if fits(n))
    return [str(n) for n in (below, above) if n is not None]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch.

    Attributes:
        stage: Number of the stage, from 0.
        kind: F (forward), B (backward), or in place of B, I (gradients of inputs) and W (gradients of weights).
        micro_batch: Number of the micro-batch, from 0.
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class OverlappedPair:
    """A forward and a backward of two micro-batches that a rank starts together, so that one hides the other's sends.

    Both start when the inputs of both have arrived, and their results are available when both are done. Torch's runtime
    computes them one after the other unless a function for OVERLAP_F_B is registered.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ScheduleEntry = Action | OverlappedPair


def actions(steps: Iterable[ScheduleEntry]) -> Iterator[Action]:
    """Yield the actions of a list in the order in which they are computed, with overlapped pairs separated."""
    for step in steps:
        if isinstance(step, OverlappedPair):
            yield step.forward
            yield step.backward
        else:
            yield step


@dataclass(frozen=True)
class ScheduleActions:
    """The actions of each rank of a pipeline.

    Attributes:
        name: Name of the schedule.
        ranks: Processes of the pipeline (p).
        virtual: Stages on each rank (v).
        micro_batches: Micro-batches per step (m).
        steps: The actions of each rank, in the order in which it computes them.
    """

    name: str
    ranks: int
    virtual: int
    micro_batches: int
    steps: tuple[tuple[ScheduleEntry, ...], ...]

    @property
    def stages(self) -> int:
        """The number of stages in the pipeline."""
        return self.ranks * self.virtual


def checked_stages_per_rank(name: str, virtual: int | None = None) -> int:
    """Return the stages on each rank, by default the schedule's standard number.

    Args:
        name: Name of the schedule.
        virtual: Stages on each rank; None takes the standard number.

    Raises:
        InputError: The schedule is unknown or cannot have this number of stages.
    """
    if name not in NAMES:
        raise InputError(f"schedule {name}: unknown schedule; use one of {', '.join(NAMES)}")
    if complaint := stages_complaint(name, virtual):
        raise InputError(f"schedule {name}: {complaint}")
    return stages_per_rank(name, 2, virtual)


def generate(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> ScheduleActions:
    """Return the actions of a schedule: gpipe, 1f1b, interleaved, zbv or dualpipev.

    Accepts fewer micro-batches than ranks, which training rejects (`Parallel.fits_micro_batches`).

    Args:
        name: Name of the schedule.
        ranks: Processes of the pipeline (p).
        micro_batches: Micro-batches per step (m).
        virtual: Stages on each process (v); None takes the schedule's standard number.

    Raises:
        InputError: The schedule is unknown, or it cannot have these numbers.
    """
    for what, number in (("stages", ranks), ("micro-batches", micro_batches), ("virtual", virtual)):
        if number is not None and number < 1:
            raise InputError(f"schedule {name}: {what} = {number} is too small; use 1 or more")
    each = checked_stages_per_rank(name, virtual)
    if 3 * ranks * each * micro_batches > MAX_ACTIONS:
        raise InputError(
            f"schedule {name}: {ranks} x {each} stages and {micro_batches:,} micro-batches exceed "
            f"{MAX_ACTIONS:,} actions; use fewer micro-batches, since the pattern repeats"
        )
    if name == "interleaved":
        _group(ranks, micro_batches)
    facts = SCHEDULES[name]
    if facts.micro_batches_per_rank > 1 and micro_batches < (least := facts.min_micro_batches(ranks)):
        raise InputError(
            f"schedule {name}: {ranks} processes need {least} micro-batches or more, one per stage, not "
            f"{micro_batches}; increase them, or use zbv with {ranks} or more"
        )
    lists: dict[str, Callable[[int], list[ScheduleEntry]]] = {
        "gpipe": lambda rank: _gpipe(rank, micro_batches),
        "1f1b": lambda rank: _one_forward_one_backward(rank, ranks, micro_batches),
        "interleaved": lambda rank: _interleaved(rank, ranks, each, micro_batches),
    }
    steps = (
        [lists[name](rank) for rank in range(ranks)] if name in lists else _lists_of_torch(name, ranks, micro_batches)
    )
    return ScheduleActions(name, ranks, each, micro_batches, tuple(tuple(actions_of_rank) for actions_of_rank in steps))


def _gpipe(rank: int, m: int) -> list[ScheduleEntry]:
    """Return all forwards, then all backwards in the same order (Huang et al. 2019, figure 2c)."""
    return [Action(rank, kind, number) for kind in ("F", "B") for number in range(m)]


def _one_forward_one_backward(rank: int, p: int, m: int) -> list[ScheduleEntry]:
    """Return the 1F1B actions of a rank (PipeDream-Flush: Narayanan et al. 2021, section 2.2.1).

    First come as many forwards as there are later ranks, then forwards and backwards alternate, then the remaining
    backwards follow.
    """
    ahead = min(p - 1 - rank, m)
    return [*_in_turns([Action(rank, "F", n) for n in range(m)], [Action(rank, "B", n) for n in range(m)], ahead)]


def _interleaved(rank: int, p: int, v: int, m: int) -> list[ScheduleEntry]:
    """Return the actions of 1F1B over v stages on a rank, by groups of micro-batches (Narayanan et al. 2021, section 2.2.2)."""
    group = _group(p, m)

    def order(kind: Kind, nth: Iterable[int]) -> list[Action]:
        turns = range(0, m, group)
        return [Action(c * p + rank, kind, first + n) for first in turns for c in nth for n in range(group)]

    ahead = min((v - 1) * group + 2 * (p - 1 - rank), m * v)
    return [*_in_turns(order("F", range(v)), order("B", range(v - 1, -1, -1)), ahead)]


def _group(p: int, m: int) -> int:
    """Return the number of micro-batches that pass one stage of a rank before its next stage starts.

    The paper uses p and requires m to be a multiple of it. Torch uses m / (m // p), so that 10 micro-batches on 4 ranks
    form two groups of 5. Raises InputError if that is not an integer.
    """
    groups = interleaved_rounds(p, m)
    if m % groups:
        fits = nearest_that_fit(m, lambda n: n % interleaved_rounds(p, n) == 0)
        raise InputError(
            f"schedule interleaved: {m} micro-batches on {p} processes do not form {groups} equal groups; "
            f"use {' or '.join(fits)}"
        )
    return m // groups


def _in_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """Yield `ahead` forwards, then a forward and a backward in alternation, then the remaining backwards."""
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _lists_of_torch(name: str, ranks: int, micro_batches: int) -> list[list[ScheduleEntry]]:
    """Return torch's lists of a V-shaped schedule.

    These are ZB-V (Qi et al. 2023, section 6), and DualPipe with its two directions folded (Liu et al. 2024, section
    3.2.1).
    """
    from torch.distributed.pipelining import schedules

    def entry(text: str) -> ScheduleEntry:
        parts = [Action(int(s), kind, int(m)) for s, kind, m in re.findall(r"(\d+)([FBIW])(\d+)", text)]  # type: ignore[arg-type]
        return OverlappedPair(*parts) if len(parts) == 2 else parts[0]

    of_rank = {"group_rank": 0, "group_size": ranks, "num_stages": 2 * ranks, "has_backward": True, "submod": None}
    stages: Any = [
        SimpleNamespace(stage_index=stage, is_first=stage == 0, is_last=stage > 0, **of_rank)
        for stage in (0, 2 * ranks - 1)
    ]
    kinds: Any = {"zbv": schedules.ScheduleZBVZeroBubble, "dualpipev": schedules.ScheduleDualPipeV}
    order = kinds[name](stages, micro_batches).pipeline_order
    return [[entry(str(action)) for action in order[rank] if action is not None] for rank in range(ranks)]


@lru_cache(maxsize=4096)
def micro_batches_in_flight(schedule: str, ranks: int, virtual: int, rank: int, micro_batches: int) -> float:
    """Return the peak number of micro-batches whose activations a rank holds, by a formula.

    One unit is the activations of one micro-batch on all of the rank's stages. A test compares the result with a count over
    the actions of `generate`; for zbv the result is 1/2 larger.

    - GPipe: m (Huang et al. 2019).
    - 1F1B: p - rank (Narayanan et al. 2021, section 2.2.1).
    - Interleaved: (2 (p - rank - 1) + (v - 1) r + 1) / v, in rounds of r micro-batches (section 2.2.2 there).
    - DualPipeV: p + 1/2 (Qi et al. 2024).
    - ZBV: at most p + 1/2. Rank i starts up to 2p - i - 1 micro-batches on its first stage before any is done, and then
      i + 1 on its second.

    Args:
        schedule: Name of the schedule.
        ranks: Processes of the pipeline (p).
        virtual: Stages on each rank (v).
        rank: The rank of the pipeline, from 0.
        micro_batches: Micro-batches per step (m).
    """
    if ranks == 1:
        return 1.0
    if schedule == "gpipe":
        return float(micro_batches)
    if schedule == "1f1b":
        peak = float(ranks - rank)
    elif schedule == "interleaved":
        round_size = micro_batches // interleaved_rounds(ranks, micro_batches)
        peak = (2 * (ranks - rank - 1) + (virtual - 1) * round_size + 1) / virtual
    elif schedule == "zbv":
        peak = (min(micro_batches, 2 * ranks - rank - 1) + min(micro_batches, rank + 1) + 1) / 2
    else:
        assert schedule == "dualpipev", schedule
        peak = ranks + 0.5
    return min(peak, float(micro_batches))
