"""Pipeline schedules as lists: what each rank computes, in which order.

Legend: p ranks, v stages on each, m micro-batches. A stage's forward of a micro-batch is F, its backward B, or, where a
schedule splits it, I (gradient of the input, which the stage before waits for) and W (gradient of the weights, which nobody
waits for). `0F3` is stage 0's forward of micro-batch 3, as in torch.distributed.pipelining.

For the planner and its pictures. `parallel/pipeline.py` runs torch's own classes, whose `pipeline_order` (and what ScheduleGPipe
and Schedule1F1B do) a test holds equal to these lists. torch's _PipelineScheduleRuntime
runs such a list for any schedule and puts the sends and receives in by itself: `to_csv_rows` gives the rows that its
`_load_csv(file, format="compute_only")` and `_Action.from_str` read. Its lists of torch 2.11 and 2.13 are the same.
"""

from __future__ import annotations

import difflib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from bessemer.errors import InputError
from bessemer.layout.pipeline_stages import rank_of_stage, stage_ids_of_rank
from bessemer.recipe.parallel import (
    SCHEDULES,
    interleaved_rounds,
    nearest_that_fit,
    stages_complaint,
    stages_per_rank,
)

Kind = Literal["F", "B", "I", "W"]
NAMES: tuple[str, ...] = tuple(SCHEDULES)
MAX_ACTIONS = 2_000_000
"""Larger schedules are refused: a list is made and simulated in Python, a million actions in some seconds."""


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

    def stage_ids_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, from the first."""
        return stage_ids_of_rank(self.name, rank, self.ranks, self.virtual)

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
        near = difflib.get_close_matches(name.lower(), [*NAMES, *_ALIASES], n=1, cutoff=0.5)
        meant = f"; did you mean {_ALIASES.get(near[0], near[0])}?" if near else "."
        raise InputError(f"schedule {name}: there is none of that name{meant} There are {', '.join(NAMES)}")
    if complaint := stages_complaint(name, virtual):
        raise InputError(f"schedule {name}: {complaint}")
    return stages_per_rank(name, 2, virtual)


_ALIASES = {
    "1f1b": "1f1b", "pipedream": "1f1b", "interleaved1f1b": "interleaved", "zb-v": "zbv", "zbvzerobubble": "zbv",
    "zerobubble": "zbv", "dualpipe": "dualpipev",
}  # fmt: skip


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
        "zbv": lambda rank: _zbv(rank, ranks, micro_batches),
        "dualpipev": lambda rank: _dualpipev(rank, ranks, micro_batches),
    }
    steps = [lists[name](rank) for rank in range(ranks)]
    return ScheduleActions(name, ranks, each, micro_batches, tuple(tuple(of) for of in steps))


def to_csv_rows(schedule: ScheduleActions) -> list[list[str]]:
    """The lists in torch's notation, a row a rank: what `_Action.from_str` and `_load_csv(format="compute_only")` read."""
    return [[str(step) for step in steps] for steps in schedule.steps]


class _Writer:
    """A rank's list while it is written: each kind of each stage takes the micro-batches in their order."""

    def __init__(self) -> None:
        self.steps: list[ScheduleEntry] = []
        self.weights: deque[Action] = deque()  # of I whose W is still to come
        self._next: Counter[tuple[int, str]] = Counter()

    def make(self, kind: Kind, stage: int) -> Action:
        """The next action of a kind; a backward counts the same whole or split."""
        counted = (stage, "F" if kind == "F" else "B")
        action = Action(stage, kind, self._next[counted])
        self._next[counted] += 1
        if kind == "I":
            self.weights.append(Action(stage, "W", action.micro_batch))
        return action

    def add(self, kind: Kind, stage: int) -> None:
        self.steps.append(self.make(kind, stage))

    def overlap(self, forward: int, backward: int) -> None:
        self.steps.append(OverlappedPair(self.make("F", forward), self.make("B", backward)))

    def weight(self, stage: int | None = None) -> bool:
        """The oldest W that waits, of a stage if one is named. False: none waits."""
        found = next((action for action in self.weights if stage in (None, action.stage)), None)
        if found is not None:
            self.weights.remove(found)
            self.steps.append(found)
        return found is not None

    def count(self, kind: Kind, stage: int) -> int:
        return self._next[stage, "F" if kind == "F" else "B"]


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


def _zbv(rank: int, p: int, m: int) -> list[ScheduleEntry]:
    """ZB-V (Qi et al. 2023, section 6): where forward, I and W take the same time, no rank waits between its first and its
    last action, once m >= 2p - 1; with fewer, those that are not there are left out of the list of 2p - 1.

    near, far: the rank's stage in the first half of the V and in the second.
    """
    near, far, writer = rank, 2 * p - 1 - rank, _Writer()
    add, full = writer.add, max(2 * p - 1, m)

    def backward(stage: int) -> None:
        add("I", stage)
        writer.weight(stage)

    for _ in range(2 * (p - rank) - 1):
        add("F", near)
    for _ in range(rank):
        add("F", far)
        add("F", near)
    for _ in range(p - rank):
        add("F", far)
        backward(far)
    while writer.count("F", far) < full:
        if writer.count("F", near) < full:
            add("F", near)
        backward(near)
        add("F", far)
        backward(far)
    for _ in range(rank):  # the way down: first what others wait for, the weights' gradients fill what would be idle
        add("I", near)
        add("I", far)
    for _ in range(p - rank):
        add("I", near)
        writer.weight(near)
    while writer.weight(far) or writer.weight(near):
        pass
    return [action for action in actions(writer.steps) if action.micro_batch < m]


def _dualpipev(rank: int, p: int, m: int) -> list[ScheduleEntry]:
    """DualPipe with its two directions folded into a V (Liu et al. 2024, section 3.2.1, and the authors' DualPipe
    repository, whose eight steps these are). near, far: as in `_zbv`."""
    near, far, writer = rank, 2 * p - 1 - rank, _Writer()
    add, behind = writer.add, p - 1 - rank
    for _ in range(2 * behind):  # 1
        add("F", near)
    for _ in range(rank + 1):  # 2
        add("F", near)
        add("F", far)
    for _ in range(behind):  # 3
        add("I", far)
        writer.weight()
        add("F", far)
    for turn in range(m - 2 * p + rank + 1):  # 4
        if turn == 0 and rank == p - 1:  # apart, so that the last rank's first backward does not wait for its forward
            add("F", near)
            add("B", far)
        else:
            writer.overlap(near, far)
        writer.overlap(far, near)
    for _ in range(behind):  # 5
        add("B", far)
        writer.overlap(far, near)
    for turn in range(2 * (rank + 1)):  # 6: the second half is split
        add("I" if turn > rank else "B", near if turn % 2 else far)
    for _ in range(behind):  # 7
        writer.weight()
        add("I", near)
    while writer.weight():  # 8
        pass
    return writer.steps


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
