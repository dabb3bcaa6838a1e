"""Failures and checkpoint intervals against Aupy et al.'s table, the clusters' own counts, a search and a simulation."""

import random

import pytest

from bessemer.plan import devices, failures
from bessemer.plan.run_cost import PUE, bill, loading

HOUR = 3600.0

# Aupy et al. 2013, table 2: mu and optimum, seconds; C = R = 600, D = 60. The first two optima come from their search.
TABLE = [
    (3849609, 68240), (1924805, 48320), (962402, 34189), (481201, 24231), (240601, 17194), (120300, 12218), (60150, 8701),
    (30075, 6214), (15038, 4458), (7519, 3218),
]  # fmt: skip


def test_intervals_equal_those_of_the_table() -> None:
    assert [failures.optimal(mu, 600) for mu, _ in TABLE] == pytest.approx([best for _, best in TABLE], rel=2e-3)


@pytest.mark.parametrize("mu", [1e3, 1e5, 1e7])
@pytest.mark.parametrize("cost", [0.01, 10.0, 900.0])
def test_the_optimum_is_the_lowest_of_a_search(mu: float, cost: float) -> None:
    best = failures.optimal(mu, cost)
    least = failures.exact_time(best, mu, cost, 60, 600)
    for step in range(-200, 201):
        interval = cost + (best - cost) * 1.02**step
        assert failures.exact_time(interval, mu, cost, 60, 600) >= least * (1 - 1e-12)


def test_expected_time_equals_a_simulation() -> None:
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


def test_a_device_has_the_rate_of_its_generation() -> None:
    """Llama 3 had 419 interruptions in 54 days on 16,384 H100; other generations have the rate of RSC-1."""
    rate = failures.published_rate(devices.find("H200").generation)
    assert failures.mtbf(16_384, rate) == pytest.approx(54 * 24 * HOUR / 419, rel=0.01)
    for name in ("A100", "B200", "MI300X"):
        assert failures.published_rate(devices.find(name).generation) == failures.FAILURES_PER_NODE_DAY
    # Kokolis et al. 2024: 1.8 h projected for 16,384 GPUs
    assert failures.mtbf(16_384) / HOUR == pytest.approx(1.8, abs=0.01)


def test_large_clusters_reach_the_reported_effective_time() -> None:
    """Llama 3 reports more than 90% effective time at 16,384 GPUs; by Kokolis et al. 12,000 GPUs need saves of about 10 s for
    that.
    """
    save = failures.checkpoint(405e9 * 14, 16_384, 2e12)
    llama = failures.outlook(54 * 24 * HOUR, 5.0, 54 * 24 * HOUR / 419, save)
    assert 0.88 < llama.effective < 0.95
    between = failures.mtbf(12_000)
    best = {cost: failures.optimal(between, cost) for cost in (10.0, 300.0)}
    ratio = {cost: 1 / failures.exact_time(interval, between, cost, 0, 300) for cost, interval in best.items()}
    assert ratio[10.0] > 0.9 > ratio[300.0]


def test_the_parts_of_the_expected_time_add_up() -> None:
    save = failures.checkpoint(1e12, 1024, 20e9)
    run = failures.outlook(20 * 86_400, 12.0, failures.mtbf(1024), save)
    assert run.seconds == pytest.approx(20 * 86_400 + run.lost + run.saves)
    assert run.effective == pytest.approx(20 * 86_400 / run.seconds)
    assert run.interval == pytest.approx(run.every * 12 + save.stall)
    assert run.failures == pytest.approx(run.seconds / failures.mtbf(1024))
    assert run.every * 12 == failures.MIN_INTERVAL_SECONDS, "the copy alone would ask for two minutes"


@pytest.mark.parametrize(
    ("parameters", "tokens", "measured", "mfu"),
    # OLMo 2 7B and 13B on H100 (OLMo Team 2025, table 19): megawatt-hours at the GPUs. The default share of 700 W must match them
    # at an MFU typical of such runs, including all pauses.
    [(7.3e9, 4.05e12, 131, (0.20, 0.35)), (13.7e9, 5.6e12, 257, (0.25, 0.40))],
)
def test_the_energy_of_olmo2_is_reached(
    parameters: float, tokens: float, measured: float, mfu: tuple[float, float]
) -> None:
    for bound, above in zip(mfu, (True, False), strict=True):
        hours = 6 * parameters * tokens / (989e12 * bound) / 3600
        assert (bill(hours * 3600, 1, 700).megawatt_hours / PUE > measured) is above


def test_cost_equals_published_figures() -> None:
    mpt = bill(9.5 * 86_400, 440, 400, price=2.0)  # MosaicML 2023: 440 A100 for 9.5 days, about $200k
    assert (mpt.device_hours, mpt.cost) == (pytest.approx(100_320), pytest.approx(200e3, rel=0.01))
    deepseek = bill(2_664_000 * 3600 / 2048, 2048, 700, price=2.0)  # DeepSeek-V3, table 1: 2,664K hours, $5.328M
    assert deepseek.cost == pytest.approx(5.328e6) and bill(10, 1, 400).cost is None


def test_rate_bytes_and_share_of_data_loading() -> None:
    found = loading(1e6, 32_000, tokens=1e12, storage=1e7)
    assert (found.rate, found.bytes, found.share) == (2e6, 2e12, 0.2)
    narrow, wider = (loading(1.0, ids, tokens=1.0, storage=1.0).rate for ids in (65_536, 65_537))
    assert (narrow, wider) == (2.0, 4.0)
