"""How long micro-batches take through a pipeline: the closed forms against the action list simulated."""

from __future__ import annotations

import random

import pytest

from bessemer.distributed.schedules import generate
from bessemer.plan import local_plan
from bessemer.plan.timetable import Durations, pipeline_seconds, simulate
from bessemer.recipe import Parallel


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 16), (8, 8), (8, 40), (3, 7), (1, 5)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_stages_alike_take_what_the_simulated_list_takes(name: str, p: int, m: int) -> None:
    simulated = simulate(generate(name, p, m), Durations(1.0, 2.0)).timesteps
    assert pipeline_seconds(name, p, 1, m, (1.0,) * p, (2.0,) * p) == pytest.approx(simulated)
    assert simulated == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 4, 32)])
def test_interleaving_takes_what_the_simulated_list_takes(p: int, v: int, m: int) -> None:
    simulated = simulate(generate("interleaved", p, m, v), Durations(1.0, 2.0)).timesteps
    assert pipeline_seconds("interleaved", p, v, m, (1.0,) * p * v, (2.0,) * p * v) == pytest.approx(simulated)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 40), (8, 64), (6, 100)])
@pytest.mark.parametrize("name", ["zbv", "dualpipev"])
def test_schedules_in_a_v_take_what_the_simulated_list_takes(name: str, p: int, m: int) -> None:
    schedule = generate(name, p, max(m, 2 * p))
    simulated = simulate(schedule, Durations(1.0, 2.0)).timesteps
    assert pipeline_seconds(name, p, 2, schedule.micro_batches, (1.0,) * 2 * p, (2.0,) * 2 * p) == pytest.approx(
        simulated
    )


@pytest.mark.parametrize("seed", range(6))
def test_gpipes_flow_is_exact_whatever_the_stages_take(seed: int) -> None:
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


def test_the_bubble_of_more_micro_batches_than_are_simulated() -> None:
    """Fewer are taken that the schedule takes: rounds of the interleaved one are of equal size."""
    for layout, count in (
        (Parallel(pipeline=3, schedule="interleaved"), 510),
        (Parallel(pipeline=9, schedule="dualpipev"), 300),
        (Parallel(pipeline=4), 1000),
    ):
        assert layout.fits_micro_batches(count)
        assert 0.0 < local_plan.bubble(layout, count) < 0.5
    assert local_plan.bubble(Parallel(shard=4), 8) == 0.0
    with pytest.raises(ValueError, match="with 1 it is 1f1b"):
        Parallel(pipeline=2, schedule="interleaved", virtual=1)
