"""The figures that circulate, with what they assume."""

from __future__ import annotations

import math

import pytest

from bessemer.errors import InputError
from bessemer.plan import textbook
from bessemer.plan.laws.chinchilla import RULE, training_flops


def test_the_state_of_seventy_billion() -> None:
    found = [(state.bytes / 1e9, state.devices) for state in textbook.states(70e9, 80e9)]
    assert found == [(840, 11), (980, 13), (1120, 14)]


def test_gpt3_in_flops_and_petaflop_days() -> None:
    flops = training_flops(175e9, 300e9)
    assert flops == pytest.approx(3.15e23) and textbook.petaflop_days(flops) == pytest.approx(3640, rel=0.002)


def test_a_budget_of_6e23_is_71_billion_and_not_10() -> None:
    best = RULE.optimum(6e23)
    assert best.parameters == pytest.approx(math.sqrt(6e23 / 120)) == pytest.approx(70.7e9, rel=0.001)
    assert best.tokens == pytest.approx(1.41e12, rel=0.005)


def test_seventy_billion_on_two_trillion() -> None:
    assert textbook.device_hours(70e9, 2e12, 1e15, 0.5) == pytest.approx(466_667, rel=1e-5)


@pytest.mark.parametrize("wrong", [(0, 80e9), (70e9, 0), (-1, 80e9), (math.nan, 80e9)])
def test_what_cannot_be(wrong: tuple[float, float]) -> None:
    with pytest.raises(InputError, match="above zero"):
        textbook.states(*wrong)
