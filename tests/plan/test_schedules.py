"""Our lists beside those that torch's own schedule objects run, and the timetable beside the published formulas."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from bessemer.distributed.schedules import NAMES, Action, generate, to_csv_rows
from bessemer.plan.timetable import Durations, simulate
from tests.plan.schedule_formulas import bubble, check

TEXTBOOK, WORK = Durations(1, 1), Durations(1, 2)
LOOPS = {"gpipe": "GPipe", "1f1b": "1F1B"}
GRID = [
    (name, p, m, v)
    for name in NAMES
    for p in (1, 2, 3, 4, 5, 8, 12)
    for m in (1, 2, 3, 4, 6, 8, 9, 10, 16, 24, 30)
    for v in ((2, 3, 4) if name == "interleaved" else (None,))
    if not (name == "dualpipev" and m < 2 * p) and not (name == "interleaved" and m % max(1, m // p))
]


class StageOfTorch:
    """What a schedule asks a stage before it runs; there is nothing to send, and `done` notes what it is told to compute."""

    submod = None
    has_backward = True

    def __init__(self, stage: int, ranks: int, virtual: int) -> None:
        self.stage_index, self.group_rank, self.group_size = stage, stage % ranks, ranks
        self.num_stages, self.is_first, self.is_last = ranks * virtual, stage == 0, stage == ranks * virtual - 1
        self.done: list[str] = []

    def nothing(self, number: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = nothing

    def forward_one_chunk(self, number: int, *args: Any, **keywords: Any) -> None:
        self.done.append(f"{self.stage_index}F{number}")

    def backward_one_chunk(self, number: int, *args: Any, **keywords: Any) -> None:
        self.done.append(f"{self.stage_index}B{number}")

    def perform_reduce_grad(self, factor: int) -> None:
        pass


def loop_of_torch(name: str, ranks: int, micro_batches: int) -> list[list[str]]:
    """What ScheduleGPipe and Schedule1F1B do on each rank, from the calls that their loops make."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    rows = []
    for rank in range(ranks):
        stage = StageOfTorch(rank, ranks, 1)
        schedule: Any = get_schedule_class(LOOPS[name])(stage, micro_batches)  # type: ignore[arg-type]
        schedule._initialize_stage = lambda *args: None
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        rows.append(stage.done)
    return rows


@pytest.mark.parametrize("name", LOOPS)
def test_the_lists_are_what_torchs_loops_do(name: str) -> None:
    for p, m in ((1, 3), (2, 2), (2, 5), (3, 3), (4, 4), (4, 8), (4, 11), (8, 16)):
        assert to_csv_rows(generate(name, p, m)) == loop_of_torch(name, p, m), (p, m)


def test_the_lists_are_those_of_torchs_classes() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    rows = [row[1:] for row in GRID if row[0] == "interleaved" and row[1] * row[2] <= 64]
    assert len(rows) >= 15
    for p, m, v in rows:
        ours = generate("interleaved", p, m, v)
        stages = [StageOfTorch(stage, p, ours.virtual) for stage in range(ours.virtual)]
        theirs: Any = get_schedule_class("Interleaved1F1B")(stages, m)
        order = [[str(action) for action in row if action is not None] for row in theirs.pipeline_order.values()]
        assert to_csv_rows(ours) == order, (p, m, v)
        assert [ours.rank_of_stage(stage) for stage in range(ours.stages)] == [
            theirs.stage_index_to_group_rank[stage] for stage in range(ours.stages)
        ]


@pytest.mark.parametrize("name", NAMES)
def test_lists_are_complete_and_nobody_waits_for_ever(name: str) -> None:
    rows = [row[1:] for row in GRID if row[0] == name]
    assert len(rows) > 30
    for p, m, v in rows:
        schedule = generate(name, p, m, v)
        check(schedule)
        table = simulate(schedule, Durations(1, 2))
        ended = {slot.action: (slot.start, slot.end) for row in table.slots for slot in row}
        for action, (start, _) in ended.items():  # by another way than the simulation's
            kinds = ("F",) if action.kind == "F" else ("B", "I")
            beside = action.stage + (-1 if action.kind == "F" else 1)
            if action.kind == "W":
                assert start >= ended[Action(action.stage, "I", action.micro_batch)][1]
            elif 0 <= beside < schedule.stages:
                there = next(a for kind in kinds if (a := Action(beside, kind, action.micro_batch)) in ended)  # type: ignore[arg-type]
                assert start >= ended[there][1]
        for row in table.slots:
            assert all(one.end <= two.start for one, two in itertools.pairwise(row))
        assert table.active == pytest.approx(3 * m * schedule.stages)


def test_a_knot_is_found() -> None:
    whole = generate("1f1b", 2, 3)
    first, second = whole.steps
    knot = (first[0], Action(0, "B", 0), *(step for step in first[1:] if str(step) != "0B0"))
    late = (*second[2:4], *second[:2], *second[4:])
    with pytest.raises(ValueError, match=r"for ever: rank 0 at 0B0, rank 1 at 1F1"):
        simulate(dataclasses.replace(whole, steps=(knot, late)))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_utilisation_is_m_of_p_plus_m_minus_1(name: str) -> None:
    for p in range(1, 13):
        for m in (1, 2, 3, 4, 7, 8, 16, 33):
            for durations in (TEXTBOOK, WORK, Durations(3, 5)):
                table = simulate(generate(name, p, m), durations)
                assert table.utilisation == pytest.approx(m / (p + m - 1), rel=1e-12), (p, m)
            table = simulate(generate(name, p, m), TEXTBOOK)
            assert (table.timesteps, table.active, table.idle) == (2 * (m + p - 1), 2 * m * p, 2 * p * (p - 1))


@pytest.mark.parametrize("name", NAMES)
def test_the_published_bubble_is_that_of_the_timetable(name: str) -> None:
    compared = 0
    for p, m, v in [row[1:] for row in GRID if row[0] == name]:
        for durations in (TEXTBOOK, WORK):
            schedule = generate(name, p, m, v)
            if (wanted := bubble(schedule, durations)) is not None:
                work = m * schedule.virtual * (durations.forward + durations.backward)
                assert simulate(schedule, durations).timesteps - work == pytest.approx(wanted), (p, m, v)
                compared += 1
    assert compared > 20


def test_activations_held() -> None:
    """GPipe: all of them; 1F1B: as many as ranks from here on; the V shapes: the same on every rank."""
    for p, m in ((2, 4), (4, 8), (4, 16), (8, 16)):
        ranks = range(p)
        assert [generate("gpipe", p, m).peak_in_flight(rank) for rank in ranks] == [m] * p
        assert [generate("1f1b", p, m).peak_in_flight(rank) for rank in ranks] == [p - rank for rank in ranks]
        assert [generate("zbv", p, m).peak_in_flight(rank) for rank in ranks] == [p] * p
        assert [generate("dualpipev", p, m).peak_in_flight(rank) for rank in ranks] == [p + 0.5] * p
        for v in (2, 4):
            # Narayanan et al. 2021, section 2.2: warm-up of (v - 1) p + 2 (p - 1 - rank), and the one under way
            wanted = [((v - 1) * p + 2 * (p - 1 - rank) + 1) / v for rank in ranks]
            assert [generate("interleaved", p, m, v).peak_in_flight(rank) for rank in ranks] == wanted


def test_a_slow_stage_costs_time() -> None:
    """By hand, p = 2, m = 2, F = B = 1: the second stage takes 3 for each."""
    table = simulate(generate("gpipe", 2, 2), Durations(1, 1, stages=(1, 3)))
    assert [[(str(slot.action), slot.start, slot.end) for slot in row] for row in table.slots] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 10, 11), ("0B1", 13, 14)],
        [("1F0", 1, 4), ("1F1", 4, 7), ("1B0", 7, 10), ("1B1", 10, 13)],
    ]
    assert (table.timesteps, table.active, table.idle) == (14, 16, 12)


def test_a_pair_gives_its_results_when_both_are_done() -> None:
    table = simulate(generate("dualpipev", 2, 5), WORK)
    slots = {str(slot.action): slot for row in table.slots for slot in row}
    pair = next(step for step in table.schedule.steps[0] if "OVERLAP" in str(step))
    forward, backward = slots[str(pair.forward)], slots[str(pair.backward)]  # type: ignore[union-attr]
    assert (forward.end, backward.end) == (backward.start, forward.start + 3)
    after = slots[f"{forward.action.stage + 1}F{forward.action.micro_batch}"]
    assert after.start >= backward.end
