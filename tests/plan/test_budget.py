"""A budget in FLOPs, days or money, and what is proposed for it."""

import json
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import pytest

from bessemer.cli import run_command
from bessemer.errors import InputError
from bessemer.plan import ask, budget, laws


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
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    rows, notes = dict(lines), "; ".join(value for name, value in lines if name == "note")
    if unique < 10e9:
        assert rows["scaling"].startswith("short of new text")
        assert "the last passes over the text add almost nothing" in notes
    assert ("tokens that differ" in notes) == (unique < found["tokens"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--flops", "1e40", "--gpus", "8xH100"), "1e40: too much: the best model for it has"),
        (
            ("--money", "-5", "--gpus", "8xH100"),
            "--money: '-5' is no number of dollars above zero; write it as 500k or $2M",
        ),
        (("--days", "-5", "--gpus", "8xH100"), "a number above zero is needed"),
        (("--days", "1m", "--gpus", "8xH100"), "--days: '1m' is no number of days; write it as 30, 0.5 or 30d"),
        (("--days", "12h", "--gpus", "8xH100"), "is no number of days"),
        (("--days", "$3", "--gpus", "8xH100"), "is no number of days"),
        (("--params", "7B", "--tokens", "1T", "--days", "14"), "--gpus 64xH100 --what-if gpus=128"),
    ],
)
def test_budgets_that_cannot_be_say_why(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", *words]) == 2
    assert message in capsys.readouterr().err


def test_days_may_have_their_unit() -> None:
    texts = ("30", "30d", "30 days", "1 day", "0.5", "1e3d", "1,000")
    assert [budget.PlanBudget("days", text).amount for text in texts] == [30, 30, 30, 1, 0.5, 1000, 1000]


def test_dollars_may_have_their_sign(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--money", "$5k", "--gpus", "8xH100", "--price", "$2.5")
    assert found["price"]["dollars_per_device_hour"] == 2.5 and 4_950 <= found["expected"]["cost"] <= 5_000


@pytest.mark.parametrize(("words", "odds"), [(("--days", "14"), "90%"), (("--money", "500k"), "0.8")], ids=str)
def test_a_budget_with_odds_is_kept_by_what_so_many_runs_do_not_exceed(
    words: tuple[str, str], odds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 90% that is the upper end of the 80% interval, and money and time of the proposed run are as ever."""
    share = float(odds.rstrip("%")) / (100 if "%" in odds else 1)
    even = planned(capsys, *words, "--gpus", "64xH100")
    found = planned(capsys, *words, "--gpus", "64xH100", "--odds", odds)
    name = "days" if "--days" in words else "cost"
    expected, high, limit = found["expected"][name], found["interval_80"][name][1], ask.number(words[1], "")
    spent = expected * (high / expected) ** (NormalDist().inv_cdf(share) / NormalDist().inv_cdf(0.9))
    assert 0.99 * limit <= spent <= limit and (share < 0.9 or spent == pytest.approx(high))
    assert found["budget"] == {
        "kind": words[0][2:], "amount": limit, "odds": share, "spent": pytest.approx(spent), "is_kept": True,
    }  # fmt: skip
    assert found["total_flops"] < 0.9 * even["total_flops"] and even["budget"]["odds"] == 0.5
    assert even["budget"]["spent"] == pytest.approx(even["expected"][name])
    note = next(note for note in found["notes"] if note.startswith(" ".join(words)))
    assert f"is kept by {share:.0%} of runs (--odds), which take at most" in note and "one run in two" not in note
    sizes = {"--params": "parameters", "--tokens": "tokens", "--batch": "batch_tokens"}
    asked = [text for option, key in sizes.items() for text in (option, str(found[key]))]
    same = planned(capsys, *asked, "--gpus", "64xH100")
    assert same["interval_80"] == found["interval_80"] and same["expected"] == found["expected"]


def test_a_what_if_of_a_budget_with_odds_keeps_to_the_same_odds(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--money", "500k", "--gpus", "64xH100", "--odds", "90%", "--what-if", "price=4", "--what-if", "price=2")
    dear, cheap = planned(capsys, *asked)["what_if"]
    assert dear["expected"]["cost"] < 500e3 < dear["interval_80"]["cost"][1], "kept by what is expected alone"
    assert not dear["budget"]["is_kept"] and cheap["budget"]["is_kept"]
    share = dear["interval_80"]["cost"][1] / 500e3
    assert (
        f"--money 500k is NOT kept: the figure that 90% of runs do not exceed (--odds) is {share:.0%} of it"
        in (dear["notes"])
    )
    assert any("--money 500k is kept by" in note for note in cheap["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--flops", "6e23", "--odds", "90%"), "FLOPs are certain"),
        (("--params", "7B", "--odds", "90%"), "--odds is how many runs keep to a budget; add one"),
        (("--days", "3", "--odds", "95%"), "give 50% to 90%"),
        (("--days", "3", "--odds", "90"), r"give 50% to 90% (write 90%)"),
        (("--days", "3", "--odds", "10%"), "give 50% to 90%"),
        (("--days", "3", "--odds", "often"), "write it as 90% or 0.9"),
    ],
)
def test_odds_that_mean_nothing_are_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["plan", "--gpus", "64xH100", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "figure"),
    [
        (("--days", "14"), lambda found: found["expected"]["days"] / 14),
        (("--money", "10k", "--odds", "90%"), lambda found: found["interval_80"]["cost"][1] / 10e3),
        (("--flops", "1e21"), lambda found: found["total_flops"] / 1e21),
    ],
    ids=("days", "money", "flops"),
)
def test_a_budget_with_tokens_proposes_the_model_that_spends_it(
    words: tuple[str, ...], figure: Callable[[dict[str, Any]], float], capsys: pytest.CaptureFixture[str]
) -> None:
    """As far as the shapes by rule do, which come in steps; a much larger one does not keep to it."""
    asked = ("--gpus", "8xH100", "--tokens", "50B")
    found = planned(capsys, *words, *asked)
    assert found["tokens"] == pytest.approx(50e9, rel=1e-3) and 0.97 <= figure(found) <= 1
    assert found["budget"]["spent"] / found["budget"]["amount"] == pytest.approx(figure(found))
    larger = planned(capsys, *words, *asked, "--what-if", f"params={1.2 * found['parameters']}")["what_if"][0]
    assert not larger["budget"]["is_kept"] and figure(larger) > 1


def test_a_budget_larger_than_any_model_that_fits_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--days", "30", "--gpus", "1x4090", "--tokens", "1B")
    note = next(note for note in found["notes"] if "does not fit on these devices with the headroom" in note)
    assert note.startswith("the size that it pays for") and note.endswith("a smaller model is proposed")
    share = found["memory_bytes_per_device"]["total"] / found["device_memory_bytes"]
    assert share <= 0.85 and found["expected"]["days"] < 30


def test_a_budget_too_small_for_its_tokens_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for days in ("0.0001", "0.2"):
        assert run_command(["plan", "--days", days, "--gpus", "8xH100", "--tokens", "15T"]) == 2
        assert f"--days {days}: too little to train a model on" in capsys.readouterr().err
