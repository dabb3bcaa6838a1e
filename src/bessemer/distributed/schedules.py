"""Pipeline schedules as lists: what each rank computes, in which order.

Legend: p ranks, v stages on each, m micro-batches. A stage's forward of a micro-batch is F, its backward B, or, where a
schedule splits it, I (gradient of the input, which the stage before waits for) and W (gradient of the weights, which nobody
waits for). `0F3` is stage 0's forward of micro-batch 3, as in torch.distributed.pipelining.

For the planner and its pictures. `distributed/pipeline.py` runs torch's own classes, whose `pipeline_order` (and what
ScheduleGPipe and Schedule1F1B do) a test holds equal to these lists; those in a V are torch's, which they need. torch's
_PipelineScheduleRuntime runs such a list for any schedule and puts the sends and receives in by itself: `to_csv_rows` gives the
rows that its `_load_csv(file, format="compute_only")` and `_Action.from_str` read.
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
from bessemer.distributed.stages import rank_of_stage
from bessemer.recipe.parallel import SCHEDULES, interleaved_rounds, stages_complaint, stages_per_rank

Kind = Literal["F", "B", "I", "W"]
NAMES: tuple[str, ...] = tuple(SCHEDULES)
MAX_ACTIONS = 2_000_000
"""Larger schedules are refused: a list is made and simulated in Python, a million actions in some seconds."""


def nearest_that_fit(number: int, fits: Callable[[int], bool]) -> list[str]:
    """Return the next numbers below, if any, and above that fit."""
    below = next((n for n in range(number - 1, 0, -1) if fits(n)), None)
    above = next(n for n in count(number + 1) if fits(n))
    return [str(n) for n in (below, above) if n is not None]


@dataclass(frozen=True, slots=True)
class Action:
    """One stage's work on one micro-batch."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class OverlappedPair:
    """A forward and a backward of two micro-batches that a rank starts together, so that one hides the other's sends.

    Both start once the inputs of both are there; their results are available once both are done. torch's runtime computes
    them one after the other unless a function for OVERLAP_F_B is registered.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


ScheduleEntry = Action | OverlappedPair


def actions(steps: Iterable[ScheduleEntry]) -> Iterator[Action]:
    """The actions of a list in the order in which they are computed, overlapped ones apart."""
    for step in steps:
        if isinstance(step, OverlappedPair):
            yield step.forward
            yield step.backward
        else:
            yield step


@dataclass(frozen=True)
class ScheduleActions:
    """Which rank does what. virtual: stages on each rank (v); steps: by rank, in the order in which they are done."""

    name: str
    ranks: int
    virtual: int
    micro_batches: int
    steps: tuple[tuple[ScheduleEntry, ...], ...]

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.ranks * self.virtual

    def rank_of_stage(self, stage: int) -> int:
        """The rank that holds a stage."""
        return rank_of_stage(self.name, stage, self.ranks)

    def peak_in_flight(self, rank: int) -> float:
        """Micro-batches whose activations a rank holds at its fullest, in units of all its stages' for one micro-batch.

        Counted from a stage's forward to the end of its backward; a split one's end is W, although a part of the
        memory is free after I (Qi et al. 2023, section 2). Does not depend on how long anything takes.
        """
        now = most = 0
        for action in actions(self.steps[rank]):
            now += {"F": 1, "B": -1, "W": -1, "I": 0}[action.kind]
            most = max(most, now)
        return most / self.virtual


def checked_stages_per_rank(name: str, virtual: int | None = None) -> int:
    """Stages on a rank, the schedule's own number when left out. Raises InputError where the schedule has another number."""
    if name not in NAMES:
        raise InputError(f"schedule {name}: there is none of that name; possible: {', '.join(NAMES)}")
    if complaint := stages_complaint(name, virtual):
        raise InputError(f"schedule {name}: {complaint}")
    return stages_per_rank(name, 2, virtual)


def generate(name: str, ranks: int, micro_batches: int, virtual: int | None = None) -> ScheduleActions:
    """The lists of a schedule: gpipe, 1f1b, interleaved, zbv or dualpipev.

    Accepts fewer micro-batches than ranks, which training rejects (`Parallel.fits_micro_batches`).

    Args:
        ranks: processes of the pipeline (p).
        virtual: stages on each process (v); None takes the schedule's own number.

    Raises:
        InputError: for an unknown schedule and for numbers that it cannot take.
    """
    for what, number in (("stages", ranks), ("micro-batches", micro_batches), ("virtual", virtual)):
        if number is not None and number < 1:
            raise InputError(f"schedule {name}: {what} = {number}; give 1 or more")
    each = checked_stages_per_rank(name, virtual)
    if 3 * ranks * each * micro_batches > MAX_ACTIONS:
        raise InputError(
            f"schedule {name}: {ranks} x {each} stages and {micro_batches:,} micro-batches are more than "
            f"{MAX_ACTIONS:,} actions; take fewer micro-batches, the picture repeats itself"
        )
    if name == "interleaved":
        _group(ranks, micro_batches)
    facts = SCHEDULES[name]
    if facts.micro_batches_per_rank > 1 and micro_batches < (least := facts.min_micro_batches(ranks)):
        raise InputError(
            f"schedule {name}: needs as many micro-batches as stages, {least} on {ranks} processes, not "
            f"{micro_batches}; zbv trains with {ranks} or more"
        )
    lists: dict[str, Callable[[int], list[ScheduleEntry]]] = {
        "gpipe": lambda rank: _gpipe(rank, micro_batches),
        "1f1b": lambda rank: _one_forward_one_backward(rank, ranks, micro_batches),
        "interleaved": lambda rank: _interleaved(rank, ranks, each, micro_batches),
    }
    steps = (
        [lists[name](rank) for rank in range(ranks)] if name in lists else _lists_of_torch(name, ranks, micro_batches)
    )
    return ScheduleActions(name, ranks, each, micro_batches, tuple(tuple(of) for of in steps))


def to_csv_rows(schedule: ScheduleActions) -> list[list[str]]:
    """The lists in torch's notation, a row a rank: what `_Action.from_str` and `_load_csv(format="compute_only")` read."""
    return [[str(step) for step in steps] for steps in schedule.steps]


def _gpipe(rank: int, m: int) -> list[ScheduleEntry]:
    """All forwards, then all backwards (Huang et al. 2019, figure 2c; the backwards in the order of the forwards)."""
    return [Action(rank, kind, number) for kind in ("F", "B") for number in range(m)]


def _one_forward_one_backward(rank: int, p: int, m: int) -> list[ScheduleEntry]:
    """As many forwards as there are ranks behind, then one forward and one backward in turns, then the backwards left
    (PipeDream-Flush: Narayanan et al. 2021, section 2.2.1)."""
    ahead = min(p - 1 - rank, m)
    return [*_in_turns([Action(rank, "F", n) for n in range(m)], [Action(rank, "B", n) for n in range(m)], ahead)]


def _interleaved(rank: int, p: int, v: int, m: int) -> list[ScheduleEntry]:
    """1F1B over v stages on a rank, by groups of micro-batches (Narayanan et al. 2021, section 2.2.2)."""
    group = _group(p, m)

    def order(kind: Kind, nth: Iterable[int]) -> list[Action]:
        turns = range(0, m, group)
        return [Action(c * p + rank, kind, first + n) for first in turns for c in nth for n in range(group)]

    ahead = min((v - 1) * group + 2 * (p - 1 - rank), m * v)
    return [*_in_turns(order("F", range(v)), order("B", range(v - 1, -1, -1)), ahead)]


def _group(p: int, m: int) -> int:
    """Micro-batches that go through one stage of a rank before the next one has its turn.

    p in the paper, which wants m to be a multiple of it. As in torch: m / (m // p), so that 10 micro-batches on 4 ranks go
    in two groups of 5. Raises InputError where that is no whole number.
    """
    groups = interleaved_rounds(p, m)
    if m % groups:
        fits = nearest_that_fit(m, lambda n: n % interleaved_rounds(p, n) == 0)
        raise InputError(
            f"schedule interleaved: {m} micro-batches on {p} processes do not make {groups} equal groups; "
            f"the nearest numbers that fit are {' and '.join(fits)}"
        )
    return m // groups


def _in_turns(forwards: list[Action], backwards: list[Action], ahead: int) -> Iterator[Action]:
    """`ahead` forwards, then forward and backward in turns, then the backwards that are left."""
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


def _lists_of_torch(name: str, ranks: int, micro_batches: int) -> list[list[ScheduleEntry]]:
    """The lists of a schedule in a V, by torch: ZB-V (Qi et al. 2023, section 6), and DualPipe with its two directions folded
    (Liu et al. 2024, section 3.2.1)."""
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
    """Peak micro-batches whose activations a rank of p with v stages each holds, in units of one micro-batch's on all of its
    stages: a fast path for what `ScheduleActions.peak_in_flight` counts of a schedule's list; for zbv 1/2 more. The two are
    compared by test_the_formula_of_micro_batches_in_flight_is_the_count_of_the_list (tests/plan/test_planned_memory.py).

    GPipe: all m (Huang et al. 2019). 1F1B: p - rank (Narayanan et al. 2021, section 2.2.1). Interleaved: (2 (p - rank - 1) +
    (v - 1) r + 1) / v, in rounds of r micro-batches (there, section 2.2.2). In a V at most p + 1/2 (Qi et al. 2024); with
    zbv rank i starts 2p - i - 1 micro-batches on its first stage, if there are so many, before any is done, and then i + 1 on
    its second.
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
