"""The figures that circulate, with what they assume."""

from __future__ import annotations

import math

import pytest

from bessemer.plan import money
from bessemer.plan.laws import RULE, training_flops


def test_the_state_of_seventy_billion() -> None:
    found = [(state.bytes / 1e9, state.devices) for state in money.states(70e9, 80e9)]
    assert found == [(840, 11), (980, 13), (1120, 14)]


def test_gpt3_in_flops_and_petaflop_days() -> None:
    flops = training_flops(175e9, 300e9)
    assert flops == pytest.approx(3.15e23) and money.petaflop_days(flops) == pytest.approx(3640, rel=0.002)


def test_a_budget_of_6e23_is_71_billion_and_not_10() -> None:
    best = RULE.optimum(6e23)
    assert best.parameters == pytest.approx(math.sqrt(6e23 / 120)) == pytest.approx(70.7e9, rel=0.001)
    assert best.tokens == pytest.approx(1.41e12, rel=0.005)
