"""Pipeline schedules compared with those of torch's schedule classes, and the timetable compared with published formulas."""

import dataclasses
import itertools
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from bessemer.distributed.schedules import NAMES, Action, ScheduleActions, actions, generate
from bessemer.distributed.stages import Costs, blocks_per_stage, rank_of_stage, split_blocks
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.plan import local_plan
from bessemer.plan.timetable import Durations, pipeline_seconds, simulate
from bessemer.recipe import Parallel, Recipe, load

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


def stage_costs(costs: Costs, cut: Sequence[range]) -> tuple[float, ...]:
    """Return the cost of each stage of a cut, in the unit of `costs`."""
    totals = [sum(costs.blocks[block] for block in blocks) for blocks in cut]
    totals[0] += costs.embedding
    totals[-1] += costs.head
    return tuple(totals)


class StageOfTorch:
    """Stand-in for a pipeline stage of torch: sends nothing, and records in `done` the computations it is asked for."""

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
    """Return the actions of ScheduleGPipe and Schedule1F1B on each rank, from the calls of their loops."""
    from torch.distributed.pipelining.schedules import get_schedule_class

    rows = []
    for rank in range(ranks):
        stage = StageOfTorch(rank, ranks, 1)
        schedule: Any = get_schedule_class(LOOPS[name])(stage, micro_batches)  # type: ignore[arg-type]
        schedule._initialize_stage = lambda *args: None
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        rows.append(stage.done)
    return rows


def rows_of(schedule: ScheduleActions) -> list[list[str]]:
    return [[str(step) for step in steps] for steps in schedule.steps]


@pytest.mark.parametrize("name", LOOPS)
def test_schedules_equal_those_of_torchs_loops(name: str) -> None:
    for p, m in ((1, 3), (2, 2), (2, 5), (3, 3), (4, 4), (4, 8), (4, 11), (8, 16)):
        assert rows_of(generate(name, p, m)) == loop_of_torch(name, p, m), (p, m)


def test_schedules_equal_those_of_torchs_classes() -> None:
    from torch.distributed.pipelining.schedules import get_schedule_class

    rows = [row[1:] for row in GRID if row[0] == "interleaved" and row[1] * row[2] <= 64]
    assert len(rows) >= 15
    for p, m, v in rows:
        ours = generate("interleaved", p, m, v)
        stages = [StageOfTorch(stage, p, ours.virtual) for stage in range(ours.virtual)]
        theirs: Any = get_schedule_class("Interleaved1F1B")(stages, m)
        order = [[str(action) for action in row if action is not None] for row in theirs.pipeline_order.values()]
        assert rows_of(ours) == order, (p, m, v)
        assert [rank_of_stage(ours.name, stage, ours.ranks) for stage in range(ours.stages)] == [
            theirs.stage_index_to_group_rank[stage] for stage in range(ours.stages)
        ]


@pytest.mark.parametrize("name", NAMES)
def test_schedules_are_complete_and_free_of_deadlocks(name: str) -> None:
    rows = [row[1:] for row in GRID if row[0] == name]
    assert len(rows) > 30
    for p, m, v in rows:
        schedule = generate(name, p, m, v)
        check(schedule)
        table = simulate(schedule, Durations(1, 2))
        ended = {slot.action: (slot.start, slot.end) for row in table.slots for slot in row}
        for action, (start, _) in ended.items():  # by another method than the simulation
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


def test_a_deadlock_is_detected() -> None:
    whole = generate("1f1b", 2, 3)
    first, second = whole.steps
    knot = (first[0], Action(0, "B", 0), *(step for step in first[1:] if str(step) != "0B0"))
    late = (*second[2:4], *second[:2], *second[4:])
    with pytest.raises(ValueError, match=r"rank 0 at 0B0, rank 1 at 1F1"):
        simulate(dataclasses.replace(whole, steps=(knot, late)))


@pytest.mark.parametrize("name", NAMES)
def test_the_timetable_has_the_published_bubble(name: str) -> None:
    compared = 0
    for p, m, v in [row[1:] for row in GRID if row[0] == name]:
        for durations in (TEXTBOOK, WORK):
            schedule = generate(name, p, m, v)
            if (wanted := bubble(schedule, durations)) is not None:
                work = m * schedule.virtual * (durations.forward + durations.backward)
                assert simulate(schedule, durations).timesteps - work == pytest.approx(wanted), (p, m, v)
                compared += 1
    assert compared > 20


def test_a_slow_stage_slows_the_step() -> None:
    """Counted manually, p = 2, m = 2, F = B = 1: the second stage takes 3 for each."""
    table = simulate(generate("gpipe", 2, 2), Durations(1, 1, stages=(1, 3)))
    assert [[(str(slot.action), slot.start, slot.end) for slot in row] for row in table.slots] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 10, 11), ("0B1", 13, 14)],
        [("1F0", 1, 4), ("1F1", 4, 7), ("1B0", 7, 10), ("1B1", 10, 13)],
    ]
    assert (table.timesteps, table.active, table.idle) == (14, 16, 12)


def test_an_overlapped_pair_returns_results_when_both_are_done() -> None:
    table = simulate(generate("dualpipev", 2, 5), WORK)
    slots = {str(slot.action): slot for row in table.slots for slot in row}
    pair = next(step for step in table.schedule.steps[0] if "OVERLAP" in str(step))
    forward, backward = slots[str(pair.forward)], slots[str(pair.backward)]  # type: ignore[union-attr]
    assert (forward.end, backward.end) == (backward.start, forward.start + 3)
    after = slots[f"{forward.action.stage + 1}F{forward.action.micro_batch}"]
    assert after.start >= backward.end


@pytest.mark.parametrize("seed", range(6))
def test_the_gpipe_formula_is_exact_for_any_stage_times(seed: int) -> None:
    chance = random.Random(seed)
    p, m = chance.choice([2, 4, 8]), chance.choice([1, 2, 8, 32])
    scale = tuple(chance.uniform(0.5, 2.0) for _ in range(p))
    simulated = simulate(generate("gpipe", p, m), Durations(1.0, 2.0, stages=scale)).timesteps
    assert pipeline_seconds("gpipe", p, 1, m, scale, tuple(2 * each for each in scale)) == pytest.approx(simulated)


@pytest.mark.parametrize("seed", range(12))
def test_one_slow_stage_sets_the_pace(seed: int) -> None:
    chance = random.Random(seed)
    p, m = chance.choice([2, 4, 8]), chance.choice([16, 32])
    scale = [1.0] * p
    scale[chance.randrange(p)] = chance.uniform(1.0, 2.0)
    simulated = simulate(generate("1f1b", p, m), Durations(1.0, 2.0, stages=tuple(scale))).timesteps
    ours = pipeline_seconds("1f1b", p, 1, m, tuple(scale), tuple(2 * each for each in scale))
    assert ours == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "count", "share"),
    [
        ({"pipeline": 3, "schedule": "interleaved"}, 510, 1 / 511), ({"pipeline": 9, "schedule": "dualpipev"}, 300, 16 / 1816),
        ({"pipeline": 4}, 1000, 3 / 1003), ({"shard": 4}, 8, 0.0),
    ],
)  # fmt: skip
def test_the_bubble_of_many_micro_batches(layout: dict[str, Any], count: int, share: float) -> None:
    assert local_plan.bubble(Parallel(**layout), count) == pytest.approx(share, abs=1e-4)


EVEN = [
    (name, 1, p, m) for name in ("gpipe", "1f1b") for p, m in ((2, 2), (4, 4), (4, 16), (8, 8), (8, 40), (3, 7), (1, 5))
]
EVEN += [("interleaved", v, p, m) for p, v, m in ((2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 4, 32))]
EVEN += [(name, 2, p, m) for name in ("zbv", "dualpipev") for p, m in ((2, 4), (4, 8), (4, 40), (8, 64), (6, 100))]


@pytest.mark.parametrize(("name", "v", "p", "m"), EVEN)
def test_equal_stages_take_the_simulated_time(name: str, v: int, p: int, m: int) -> None:
    simulated = simulate(generate(name, p, m, v), Durations(1.0, 2.0)).timesteps
    assert pipeline_seconds(name, p, v, m, (1.0,) * p * v, (2.0,) * p * v) == pytest.approx(simulated)


def check(schedule: ScheduleActions) -> None:
    """Check that each stage, on the rank of `rank_of_stage`, has each micro-batch's forward and then its backward, whole or as I
    and then W. timetable.simulate finds out whether the ranks wait for each other.
    """
    found = defaultdict[tuple[int, int], list[str]](list)
    for rank, steps in enumerate(schedule.steps):
        for action in actions(steps):
            assert rank_of_stage(schedule.name, action.stage, schedule.ranks) == rank
            found[action.stage, action.micro_batch].append(action.kind)
    assert set(found) == set(itertools.product(range(schedule.stages), range(schedule.micro_batches)))
    assert all(kinds in (["F", "B"], ["F", "I", "W"]) for kinds in found.values())


def bubble(schedule: ScheduleActions, durations: Durations | None = None) -> float | None:
    """Return the published time-steps of a step beyond its work with equal stages, or None without a formula.

    gpipe and 1f1b: (p - 1)(F + B), so that utilisation is m / (m + p - 1). interleaved, with m a multiple of p: the same for
    stages 1/v as deep, so that the idle share is (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2). zbv, if forward, I
    and W take the same time and m >= 2p - 1: nothing within a rank's span (Qi et al. 2023, section 6), and p - 1 forwards in
    total, until the last rank has its first input. dualpipev, also with equal times: (p - 1)(F&B + B - 3W), where F&B is an
    overlapped pair, here as long as both (table of the authors' DualPipe repository, whose PP is 2p).
    """
    asked, p, m = durations or Durations(), schedule.ranks, schedule.micro_batches
    if asked.stages is not None:
        return None
    forward, backward = asked.forward, asked.backward
    alike = backward == 2 * forward
    if schedule.name in ("gpipe", "1f1b") or (schedule.name == "interleaved" and m % p == 0):
        return (p - 1) * (forward + backward)
    if schedule.name == "zbv" and alike and m >= 2 * p - 1:
        return (p - 1) * forward
    if schedule.name == "dualpipev" and alike:
        return (p - 1) * (forward + backward + backward - 3 * backward / 2)
    return None


def every_cut(number: int, stages: int) -> list[tuple[range, ...]]:
    """Return all splits of the blocks into stages."""
    found = []
    for borders in itertools.combinations_with_replacement(range(number + 1), stages - 1):
        cut = tuple(itertools.starmap(range, itertools.pairwise((0, *borders, number))))
        if all(blocks for blocks in cut):
            found.append(cut)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_no_split_has_a_cheaper_largest_stage(seed: int) -> None:
    draw = random.Random(seed)
    number, stages = draw.randint(4, 9), draw.randint(1, 4)
    # whole numbers, so that sums are exact and ties occur
    of = Costs(tuple(float(draw.randint(1, 6)) for _ in range(number)), draw.randint(0, 2), draw.randint(0, 12))
    cut = split_blocks(of.blocks, of.embedding, of.head, stages)
    assert [block for blocks in cut for block in blocks] == list(range(number))
    assert len(cut) == stages and all(blocks for blocks in cut)

    def rank(cut: tuple[range, ...]) -> tuple[float, float]:
        found = stage_costs(of, cut)
        return max(found), sum(one * one for one in found)

    assert rank(cut) == min(map(rank, every_cut(number, stages)))


def resolved(name: str, vocabulary: int, *overrides: str) -> tuple[Recipe, ModelConfig]:
    recipe = recipe_defaults.resolve(load(name, list(overrides)), vocabulary)
    return recipe, model_config(recipe, vocabulary)


def test_costs_of_the_parts_add_up_to_the_plans_flops() -> None:
    _, config = resolved("gpt2-124m", 50_257)
    parts = Costs.from_config(config)
    assert parts.total - parts.embedding == pytest.approx(flops_per_token(config), rel=1e-12)
    # two products for each of forward, input and weight: vocabulary x width, padded as in the model
    assert parts.head == 6 * config.head_matrix_parameters >= 6 * 50_257 * 768


def test_gpt2s_head_is_counted() -> None:
    """It costs as much as five of the twelve blocks: the last of two stages has 4 blocks."""
    _, config = resolved("gpt2-124m", 50_257)
    parts = Costs.from_config(config)
    assert 4 < parts.head / parts.blocks[0] < 6
    cut = split_blocks(parts.blocks, parts.embedding, parts.head, 2)
    assert [len(blocks) for blocks in cut] == [8, 4]
    assert max(stage_costs(parts, cut)) / (parts.total / 2) < 1.06
    assert max(stage_costs(parts, (range(6), range(6, 12)))) / (parts.total / 2) > 1.28


def test_a_classifiers_head_takes_no_block_from_the_last_stage() -> None:
    """It reads one row per text, so no token's FLOPs include it."""
    config = ModelConfig(
        vocabulary=512, layers=8, width=64, heads=4, kv_heads=4, head_dim=16, mlp_width=64, sequence_length=128, labels=2,
        head_transform=True, norm_position="residual", causal=False,
    )  # fmt: skip
    parts = Costs.from_config(config)
    assert parts.total - parts.embedding == pytest.approx(flops_per_token(config), rel=1e-12)
    assert blocks_per_stage(config, 2) == (4, 4)
