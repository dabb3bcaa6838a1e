"""A budget in FLOPs, days or money, and what is proposed for it."""

import pytest

from bessemer.errors import InputError
from bessemer.plan import budget
from bessemer.plan.laws.chinchilla import FRONTIERS


def test_budgets_come_to_the_same_flops() -> None:
    """467k GPU-hours at 50% of 1,000 TFLOP/s are the 8.4e23 FLOPs of 70B parameters on 2T tokens."""
    hours = 8.4e23 / 0.5e15 / 3600
    assert hours == pytest.approx(467e3, rel=1e-3)
    days = budget.from_days(hours / 24 / 1024, 1024, 1e15, 0.5, price=2.0)
    money = budget.from_money(hours * 2.0, 2.0, 1e15, 0.5, devices=1024)
    assert days.flops == pytest.approx(8.4e23) and money.flops == pytest.approx(8.4e23)
    assert days.cost == pytest.approx(money.cost) and days.days == pytest.approx(money.days)
    assert days.device_hours == pytest.approx(hours) and budget.from_flops(8.4e23).flops == 8.4e23


def test_proposal_of_the_textbook_budget() -> None:
    """6e23 FLOPs: 71B and 1.4T by the rule; the proposed shape is within 2% of it and spends the whole budget."""
    proposals = budget.propose(budget.from_flops(6e23))
    rule = proposals["rule"]
    assert rule.parameters == pytest.approx(71e9, rel=0.025) and rule.tokens == pytest.approx(1.4e12, rel=0.03)
    assert rule.tokens_per_parameter == pytest.approx(20, rel=0.05)
    assert set(proposals) == set(FRONTIERS)
    for key, proposal in proposals.items():
        assert 6 * proposal.parameters * proposal.tokens == pytest.approx(6e23)
        assert proposal.parameters == pytest.approx(FRONTIERS[key].optimum(6e23).parameters, rel=0.02)
        assert proposal.batch % 4096 == 0 and proposal.steps == int(proposal.tokens // proposal.batch)
        assert proposal.loss >= proposals["replication"].loss - 1e-4  # by whose law the losses are
        assert 1e-5 < proposal.learning_rate < 1e-2


@pytest.mark.parametrize("flops", [1e15, 1e17, 1e20, 1e22, 1e26])
def test_budgets_of_all_sizes(flops: float) -> None:
    for proposal in budget.propose(budget.from_flops(flops), sequence_length=512).values():
        assert proposal.steps >= 1 and proposal.batch <= proposal.tokens


def test_budgets_for_nothing_are_refused() -> None:
    for call in (
        lambda: budget.from_flops(0),
        lambda: budget.from_flops(-1e20),
        lambda: budget.from_days(0, 8, 1e15),
        lambda: budget.from_days(1, 0, 1e15),
        lambda: budget.from_days(1, 8, 0),
        lambda: budget.from_days(1, 8, 1e15, 1.5),
        lambda: budget.from_money(0, 2, 1e15),
        lambda: budget.from_money(10, 0, 1e15),
        lambda: budget.from_money(10, 2, 1e15, devices=0),
        lambda: budget.propose(budget.from_flops(1e20), sequence_length=0),
    ):
        with pytest.raises(InputError):
            call()
    with pytest.raises(InputError, match="do not pay for one step"):
        budget.propose(budget.from_flops(1e6))
    with pytest.raises(InputError, match="do not pay for one step"):
        budget.propose(budget.from_flops(1e18), batch=10**12)
