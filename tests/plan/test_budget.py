"""The inverse question: what a budget of FLOPs, days or money pays for."""

from pathlib import Path
from typing import Any

import pytest

from bessemer.plan import budget
from tests.plan.plans import planned


def share(found: dict[str, Any]) -> float:
    spent: float = found["budget"]["spent"] / found["budget"]["amount"]
    return spent


@pytest.mark.parametrize(("good", "bad"), [(1.0, 2.0), (300.0, 500.0), (1e-6, 1e-5)])
def test_the_bisection_ends_at_the_last_value_that_is_kept(good: float, bad: float) -> None:
    up = budget.bisect(good, bad, lambda value: value <= 137.0)
    assert up is not None and 137 * (1 - 1.1 * budget.PRECISION) <= up <= 137
    down = budget.bisect(bad, good, lambda value: value >= 137.0)
    assert down is not None and 137 <= down <= 137 * (1 + 1.1 * budget.PRECISION)
    assert budget.bisect(good, bad, lambda value: False) is None


@pytest.mark.parametrize("words", [("--flops", "6e21"), ("--days", "14")], ids=str)
def test_a_budget_proposes_a_model_and_its_tokens(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, *words, "--gpus", "8xH100")
    assert found["tokens"] == pytest.approx(20 * found["parameters"], rel=0.06)  # shapes come in steps
    assert found["fits"] and found["budget"]["is_kept"] and 0.97 <= share(found) <= 1
    expected = {"--flops": found["total_flops"], "--days": found["expected"]["days"]}
    assert found["budget"]["spent"] == pytest.approx(expected[words[0]])


def test_a_model_that_does_not_fit_is_replaced_by_one_that_is_trained_for_longer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """400 days of one A100 pay for 6B parameters, whose state alone is 96 GB."""
    found = planned(capsys, "--days", "400", "--gpus", "1xA100")
    assert found["fits"] and 0.97 <= share(found) <= 1 and found["chinchilla"]["ratio"] > 1.5


def test_a_budget_with_tokens_proposes_the_model_that_spends_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--days", "14", "--gpus", "8xA100", "--tokens", "20B")
    assert found["tokens"] == pytest.approx(20e9, rel=1e-3) and 0.95 <= share(found) <= 1


@pytest.mark.parametrize("of", ["params", "recipe"])
def test_a_budget_of_a_model_pays_for_tokens(of: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.toml").write_text("[model]\ndepth = 12\nvocabulary = 32000\n[train]\ntokens = 1_000_000_000\n")
    model = ("--params", "7B") if of == "params" else (str(tmp_path / "mine.toml"),)
    found = planned(capsys, *model, "--money", "2k", "--gpus", "8xH100", "--what-if", "price=6")
    assert 0.98 <= share(found) <= 1 and found["tokens"] == found["steps"] * found["batch_tokens"]
    (dear,) = found["what_if"]
    assert dear["budget"]["is_kept"] is False and any("is NOT kept" in note for note in dear["notes"])


def test_days_without_a_number_of_devices_find_it(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--params", "3B", "--tokens", "60B")
    found = planned(capsys, *asked, "--gpus", "H100", "--days", "3")
    assert found["devices"] % 8 == 0 and found["expected"]["days"] <= 3
    fewer = planned(capsys, *asked, "--gpus", f"{found['devices'] - 8}xH100")
    assert fewer["expected"]["days"] > 3
