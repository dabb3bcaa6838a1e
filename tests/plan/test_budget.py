"""A budget in FLOPs, days or money, and what is proposed for it."""

import json
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.errors import InputError
from bessemer.plan import budget, laws


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_command(["plan", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


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


@pytest.mark.parametrize("headroom", ["15%", "40%", "75%"])
def test_what_a_budget_proposes_leaves_the_headroom(headroom: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--days", "30", "--gpus", "8xH100", "--headroom", headroom)
    share = found["memory_bytes_per_device"]["total"] / found["device_memory_bytes"]
    assert share <= 1 - found["headroom"] == pytest.approx(1 - float(headroom[:-1]) / 100)
    assert found["expected"]["days"] <= 30


@pytest.mark.parametrize(("gpus", "headroom"), [("8xH100", "99%"), ("1x4090", "93.7%")])
def test_headroom_that_nothing_leaves_is_refused(gpus: str, headroom: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The libraries alone take 1.5 GB: more than 1% of an H100, and all but 12 MB of 6.3% of a 4090."""
    assert run_command(["plan", "--days", "30", "--gpus", gpus, "--headroom", headroom]) == 2
    assert f"no model leaves {float(headroom[:-1]):.0f}% of these devices' memory free" in capsys.readouterr().err


@pytest.mark.parametrize("unique", [5e9, 50e9, 400e9])
def test_a_budget_on_few_tokens_that_differ(unique: float, capsys: pytest.CaptureFixture[str]) -> None:
    """The proposed size is the one of least loss, and the screen says of the repeated tokens what they are worth."""
    words = ("--flops", "1e23", "--gpus", "64xH100", "--unique", repr(unique))
    found = planned(capsys, *words)
    best, free = laws.data_limited(1e23, unique), laws.RULE.optimum(1e23)
    assert found["parameters"] == pytest.approx(best.parameters, rel=0.03) and best.parameters <= free.parameters
    ratio = found["repeated"]["effective_tokens"] / found["chinchilla"]["optimal_tokens"]
    assert found["chinchilla"]["ratio"] == pytest.approx(ratio)
    assert run_command(["plan", *words]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    if unique < 10e9:
        assert rows["scaling"].startswith("short of new text") and "further passes" in rows["note"]
    assert ("tokens that differ" in rows["note"]) == (unique < found["tokens"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--flops", "1e40", "--gpus", "8xH100"), "1e40: too much: the best model for it has"),
        (("--money", "-5", "--gpus", "8xH100"), "a number above zero is needed"),
        (("--params", "7B", "--tokens", "1T", "--days", "14"), "--gpus 64xH100 --what-if gpus=128"),
    ],
)
def test_budgets_that_cannot_be_say_why(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_dollars_may_have_their_sign(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--money", "$5k", "--gpus", "8xH100", "--price", "$2.5")
    assert found["price"]["dollars_per_device_hour"] == 2.5 and 4_950 <= found["expected"]["cost"] <= 5_000
