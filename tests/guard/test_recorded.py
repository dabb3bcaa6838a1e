"""The guard on what healthy runs recorded: it leaves them alone."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from bessemer.guard.detection import GuardReference, History, observe, spike_limits
from tests.guard.recorded import curves


@pytest.mark.fault(20)
def test_healthy_runs_are_left_alone(is_thorough: bool, record_property: Callable[[str, object], None]) -> None:
    reference, kinds, steps = GuardReference(math.log(384), 1.0), Counter[str](), 0
    every = 10  # train.log_every
    for run in curves()[: None if is_thorough else 2].tolist():
        history = History()
        for step, (loss, norm) in enumerate(run, start=1):
            history, alarm = observe(history, step, loss, norm, reference)
            if step % every == 0:
                history = replace(history, limits=spike_limits(history))
            kinds[alarm.kind.name if alarm else "none"] += 1
        steps += len(run)
    assert set(kinds) <= {"none", "spike"}, "nothing that would roll back, and nothing noted"
    assert kinds["spike"] <= 2 * steps / 10_000
    record_property("obtained", f"0 rollbacks and {kinds['spike']} skipped steps in {steps:,}")
