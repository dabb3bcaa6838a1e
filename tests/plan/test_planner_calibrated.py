"""Calibration to measured steps: constants that made the steps are found again, and broken steps do not turn them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from bessemer.model.config import ModelConfig
from bessemer.plan import devices
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import PHYSICS, ClusterSpec, Job, Layout
from bessemer.plan.estimate.step import step

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
try:
    from planner_calibrated import calibrate
finally:
    sys.path.pop(0)

MODEL = ModelConfig(65_536, 24, 2048, 16, 16, 128, 5504, 4096, qk_norm="none")


def jobs() -> list[Job]:
    found = []
    for layout in (Layout(shard=16, zero=3), Layout(replicate=2, tensor=8, micro_batch=4), Layout(replicate=16, micro_batch=2),
                   Layout(replicate=4, tensor=2, pipeline=2, recompute="full")):  # fmt: skip
        found.append(
            Job(MODEL, layout, ClusterSpec.of(devices.find("A100"), 16), 128, "bf16", frameworks.find("torchtitan"))
        )
    return found


def test_a_slower_machine_is_found_from_three_steps_and_predicts_the_fourth() -> None:
    truth = replace(PHYSICS, matmuls=PHYSICS.matmuls * 0.85, intra=PHYSICS.intra * 0.8)
    measured = [(job, step(job, truth).seconds) for job in jobs()]
    found = calibrate(measured[:3])
    assert found.matmuls < PHYSICS.matmuls
    before = abs(step(jobs()[3]).seconds / measured[3][1] - 1)
    after = abs(step(jobs()[3], found).seconds / measured[3][1] - 1)
    assert before > 0.10
    assert after < 0.05


def test_steps_as_predicted_change_nothing() -> None:
    found = calibrate([(job, step(job).seconds) for job in jobs()])
    assert found == PHYSICS
    assert calibrate([]) == PHYSICS
