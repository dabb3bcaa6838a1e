"""A budget in FLOPs, days or money, and what is proposed for it."""

import pytest

from bessemer.errors import InputError
from bessemer.plan import budget


def test_budgets_come_to_the_same_flops() -> None:
    """467k H100-hours at half of the peak, as days and as dollars."""
    hours, rate = 467e3, 0.5 * 989e12
    flops = budget.proposal_for_budget("flops", repr(hours * 3600 * rate), {"gpus": "1024xH100"}, rate)
    days = budget.proposal_for_budget("days", repr(hours / 24 / 1024), {"gpus": "1024xH100"}, rate)
    money = budget.proposal_for_budget("money", repr(2 * hours), {"gpus": "1024xH100", "price": "2"}, rate)
    assert days.tokens == pytest.approx(flops.tokens, rel=0.01) and days.parameters == flops.parameters
    assert money.tokens == pytest.approx(days.tokens) and money.parameters == days.parameters


def test_proposal_of_the_textbook_budget() -> None:
    """6e23 FLOPs: 71B and 1.4T by the rule; the proposed shape is within 2% of it and spends the whole budget."""
    found = budget.proposal_for_flops(6e23, None, 4096)
    assert found.parameters == pytest.approx(71e9, rel=0.025) and found.tokens == pytest.approx(1.4e12, rel=0.03)
    assert 6 * found.parameters * found.tokens == pytest.approx(6e23) and found.batch % 4096 == 0


@pytest.mark.parametrize("flops", [1e15, 1e17, 1e20, 1e22, 1e26])
def test_budgets_of_all_sizes(flops: float) -> None:
    assert budget.proposal_for_flops(flops, None, 512).batch <= flops


@pytest.mark.parametrize(("flops", "batch"), [(1e6, None), (1e18, 10**12)])
def test_budgets_for_nothing_are_refused(flops: float, batch: int | None) -> None:
    with pytest.raises(InputError, match="do not pay for one step"):
        budget.proposal_for_flops(flops, None, 4096, batch)
