import math

import pytest

from bessemer.guard import GuardState, Verdict, cause, judge


@pytest.mark.parametrize("loss", [1.0, 0.0])
def test_finite_steps_are_applied_and_end_a_row(loss: float) -> None:
    assert judge(3, GuardState(2, 5), loss, 3.0) == (Verdict.APPLY, GuardState(0, 5))


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan), (1.0, math.nan)])
def test_non_finite_steps_are_skipped_and_the_third_in_a_row_stops(loss: float, norm: float) -> None:
    state, verdicts = GuardState(), []
    for _ in range(3):
        verdict, state = judge(3, state, loss, norm)
        verdicts.append(verdict)
    assert verdicts == [Verdict.SKIP, Verdict.SKIP, Verdict.STOP]
    assert state == GuardState(3, 3)


def test_the_cause_is_said_in_words() -> None:
    assert cause(math.nan, 1.0) == "the loss is nan"
    assert cause(2.0, math.inf) == "the gradient norm is inf at a loss of 2.0000"


def test_an_overflow_of_the_loss_scale_leaves_the_guard_as_it_was() -> None:
    assert judge(3, GuardState(2, 5), 1.0, math.inf, overflow=True) == (Verdict.RESCALE, GuardState(2, 5))
