"""80% intervals and expected figures: what they are made of, and that what is printed is what the JSON has."""

from dataclasses import replace
from math import exp

import pytest

from bessemer.model.config import ModelConfig
from bessemer.plan import failures
from bessemer.plan.estimate.job import Job, Layout
from bessemer.plan.intervals import (
    NORMAL_80,
    UNMEASURED_DEVICE,
    evidence,
    expected_run,
    extrapolation,
    interval,
    residuals,
)
from bessemer.plan.tables import evidence_line
from tests.plan.plans import job_of

MODEL = ModelConfig(
    vocabulary=32_000, layers=8, width=1024, heads=8, kv_heads=8, head_dim=128, mlp_width=4096, sequence_length=2048
)  # fmt: skip


def job(device: str = "H100", framework: str = "bessemer", count: int = 64, precision: str = "bf16") -> Job:
    return job_of(MODEL, Layout(shard=count), count, framework, device, precision)


def test_evidence_tells_programs_and_devices_apart() -> None:
    assert evidence(job()).state == "unmeasured" and evidence(job()).device and not evidence(job()).elsewhere
    assert evidence(job(framework="megatron-core")).program
    assert evidence(job("A100", "megatron-core")).elsewhere and evidence(job("H200", "megatron-core")).program
    assert not evidence(job("MI300X")).device and evidence(job("MI300X")).cases == 0
    assert evidence(job(precision="fp8")).device and not evidence(job("MI300X", precision="fp8")).device


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
def test_a_precision_that_was_not_measured_widens(precision: str) -> None:
    """What was measured on the H100 is in bf16 and fp8."""
    other, known = job(precision=precision), job()
    assert not evidence(other).device and f"in {precision};" in evidence_line(other)
    assert _width(interval("step", other, 1.0)) > _width(interval("step", known, 1.0))
    of_program = job(precision=precision, framework="megatron-core")
    assert evidence(of_program).elsewhere and extrapolation(of_program) == pytest.approx(UNMEASURED_DEVICE)


def test_every_interval_holds_the_expected_and_widens_with_what_no_case_covers() -> None:
    known, unmeasured = job(framework="megatron-core"), job()
    for question in ("step", "chosen", "run", "memory"):
        found = interval(question, known, 10.0)  # type: ignore[arg-type]
        assert found.low < found.expected < found.high
    assert _width(interval("step", known, 1.0)) < _width(interval("step", unmeasured, 1.0))
    assert _width(interval("step", unmeasured, 1.0)) < _width(interval("step", job("MI300X"), 1.0))
    assert _width(interval("run", unmeasured, 1.0)) < _width(interval("run", job(count=65_536), 1.0))
    assert extrapolation(known) == 0 and extrapolation(job("MI300X")) == pytest.approx(UNMEASURED_DEVICE)


def test_memory_of_a_program_that_no_peak_is_of_is_less_certain() -> None:
    known = [
        _width(interval("memory", job(framework=name), 1.0))
        for name in ("bessemer", "megatron-core", "torchtitan-eager")
    ]
    assert len({round(width, 9) for width in known}) == 1
    for name in ("fsdp", "maxtext"):
        found = interval("memory", job(framework=name), 1.0)
        assert _width(found) > known[0] and found.expected == interval("memory", job(), 1.0).expected
    assert _width(interval("memory", job("MI300X"), 1.0)) == pytest.approx(known[0]), "it follows from the program"


def _width(found: object) -> float:
    return found.high / found.low  # type: ignore[attr-defined, no-any-return]


def test_an_interval_is_the_residuals_and_the_extra_spread_in_squares() -> None:
    row, extra = residuals()["step"]["unmeasured"], NORMAL_80 * UNMEASURED_DEVICE
    found = interval("step", job("MI300X"), 2.0)
    assert found.expected == pytest.approx(2 * exp(row["middle"]))
    assert found.high == pytest.approx(found.expected * exp(((row["high"] - row["middle"]) ** 2 + extra**2) ** 0.5))
    assert found.low == pytest.approx(found.expected * exp(-(((row["middle"] - row["low"]) ** 2 + extra**2) ** 0.5)))


def test_the_parts_of_the_expected_run_make_it_up_and_each_has_a_source() -> None:
    ideal, save = 30 * 86_400.0, failures.CheckpointCost(2.0, 60.0, 1e12)
    running = failures.outlook(ideal, 5.0, failures.mtbf(1024), save)
    found = expected_run(job(), running, ideal, chosen=True)
    assert found.parts["steps"] == ideal
    assert sum(found.parts.values()) == pytest.approx(found.seconds.expected) and min(found.parts.values()) >= 0
    given = expected_run(job(), running, ideal, chosen=False)
    assert given.parts == found.parts, "a layout has one price, whoever chose it"
    assert found.seconds.high >= interval("chosen", job(), ideal).high, "a run may be as long as its steps may"
    named = expected_run(job(framework="megatron-core"), running, ideal, chosen=True)
    assert named.seconds.expected < found.seconds.expected
    quiet = replace(running, lost=0.0, saves=0.0)
    factors = residuals()
    share = factors["step"]["unmeasured"]["middle"] + factors["run"]["rest"]["unmeasured"]
    assert expected_run(job(), quiet, ideal, chosen=True).seconds.expected == pytest.approx(ideal * exp(share))
