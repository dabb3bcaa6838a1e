"""Failures and checkpoint intervals against Aupy et al.'s table, the clusters' own counts, a search and a simulation."""

import random

import pytest

from bessemer.layout import devices
from bessemer.plan import failures

HOUR = 3600.0

# Aupy et al. 2013, table 2: mu, Young, Daly, optimum, seconds; C = R = 600, D = 60. The first two optima are their search's.
TABLE = [
    (3849609, 68567, 68573, 68240), (1924805, 48660, 48668, 48320), (962402, 34584, 34595, 34189),
    (481201, 24630, 24646, 24231), (240601, 17592, 17615, 17194), (120300, 12615, 12648, 12218),
    (60150, 9096, 9142, 8701), (30075, 6608, 6673, 6214), (15038, 4848, 4940, 4458),
    (7519, 3604, 3733, 3218),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE)
def test_intervals_are_those_of_the_table(row: tuple[int, ...]) -> None:
    mu, young, _, best = row
    assert failures.young(mu, 600) == pytest.approx(young, rel=2e-4)
    assert failures.optimal(mu, 600) == pytest.approx(best, rel=2e-3)


@pytest.mark.parametrize("mu", [1e3, 1e5, 1e7])
@pytest.mark.parametrize("cost", [0.01, 10.0, 900.0])
def test_optimum_is_the_lowest_of_a_search(mu: float, cost: float) -> None:
    best = failures.optimal(mu, cost)
    least = failures.exact_time(best, mu, cost, 60, 600)
    for step in range(-200, 201):
        interval = cost + (best - cost) * 1.02**step
        assert failures.exact_time(interval, mu, cost, 60, 600) >= least * (1 - 1e-12)


def test_expected_time_is_what_a_simulation_takes() -> None:
    mu, cost, down, recovery, interval = 1000.0, 40.0, 30.0, 50.0, 300.0
    source, spent, rounds = random.Random(0), 0.0, 40_000
    for _ in range(rounds):
        while (fails := source.expovariate(1 / mu)) < interval:
            spent += fails + down
            while (again := source.expovariate(1 / mu)) < recovery:  # a recovery may fail too
                spent += again + down
            spent += recovery
        spent += interval
    expected = failures.exact_time(interval, mu, cost, down, recovery)
    assert spent / (rounds * (interval - cost)) == pytest.approx(expected, rel=0.01)


def test_the_rate_is_its_sources() -> None:
    # Kokolis et al. 2024: 1.8 h projected for 16,384 GPUs, 0.23 h for 131,072; a node alone lasts 3,692 h.
    assert failures.mtbf(16_384) / HOUR == pytest.approx(1.8, abs=0.01)
    assert failures.mtbf(131_072) / HOUR == pytest.approx(0.23, abs=0.006)


def test_a_device_has_the_rate_of_its_generation() -> None:
    """Llama 3's 419 interruptions in 54 days on 16,384 H100; other generations have RSC-1's."""
    rate, source = failures.published_rate(devices.find("H200").generation)
    assert failures.mtbf(16_384, rate) == pytest.approx(54 * 24 * HOUR / 419, rel=0.01) and "Llama 3" in source
    for name in ("A100", "B200", "MI300X"):
        assert failures.published_rate(devices.find(name).generation)[0] == failures.FAILURES_PER_NODE_DAY


def test_large_clusters_reach_what_is_reported() -> None:
    """Llama 3 reports more than 90% effective time at 16,384 GPUs; Kokolis et al. that 12,000 need saves of some 10 s for it."""
    save = failures.checkpoint(405e9 * 14, 16_384, 2e12)
    llama = failures.outlook(54 * 24 * HOUR, 5.0, 54 * 24 * HOUR / 419, save)
    assert 0.88 < llama.effective < 0.95
    between = failures.mtbf(12_000)
    best = {cost: failures.optimal(between, cost) for cost in (10.0, 300.0)}
    ratio = {cost: 1 / failures.exact_time(interval, between, cost, 0, 300) for cost, interval in best.items()}
    assert ratio[10.0] > 0.9 > ratio[300.0]


def test_only_the_copy_stalls_a_save() -> None:
    save = failures.checkpoint(70e9 * 14, 512, storage_bandwidth=50e9)
    assert save.stall == pytest.approx(70e9 * 14 / 512 / 10e9) and save.write == pytest.approx(19.6)


def test_outlook_adds_up() -> None:
    save = failures.checkpoint(1e12, 1024, 20e9)
    run = failures.outlook(20 * 86_400, 12.0, failures.mtbf(1024), save)
    assert run.seconds == pytest.approx(20 * 86_400 + run.lost + run.saves)
    assert run.effective == pytest.approx(1 - run.waste) == pytest.approx(20 * 86_400 / run.seconds)
    assert run.interval == pytest.approx(run.every * 12 + save.stall)
    assert run.failures == pytest.approx(run.seconds / failures.mtbf(1024))
    down, between = failures.downtime_seconds(save), failures.mtbf(1024)
    assert run.every * 12 == failures.MIN_INTERVAL_SECONDS, "the copy alone would ask for two minutes"
    assert lost(run.interval * 3, between, save, down) > run.waste
    slow = failures.CheckpointCost(stall=60.0, write=100.0, bytes=1e12)
    run, down = failures.outlook(20 * 86_400, 12.0, between, slow), failures.downtime_seconds(slow)
    for interval in (run.interval / 3, run.interval * 3):
        assert lost(interval, between, slow, down) > run.waste


def lost(interval: float, between: float, save: failures.CheckpointCost, down: float) -> float:
    """Return the share of the time that failures and checkpoints take."""
    return 1 - 1 / failures.exact_time(interval, between, save.stall, down, failures.RESTART_SECONDS)
