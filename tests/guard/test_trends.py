"""What grows or slows down is told once, and nothing healthy is."""

import math
from pathlib import Path

import pytest

from bessemer.guard.trends import Trends
from bessemer.run.files import read_json_lines


def kinds(path: Path) -> list[tuple[int, str]]:
    return [(row["step"], row["what"]) for row in read_json_lines(path)] if path.exists() else []


@pytest.mark.parametrize(
    ("statistic", "kind", "healthy"),
    [("attention_logit_max", "attention", 15.0), ("activation_rms", "activation", 1.0)],
)
def test_what_grows_inside_the_model_is_told_with_its_block(
    tmp_path: Path, statistic: str, kind: str, healthy: float, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "incidents.jsonl"
    trends = Trends(path)
    for step in range(10, 110, 10):
        trends.measured(step, {statistic: {"0": healthy, "1": healthy * (1 + step / 100)}})
    assert kinds(path) == [], "it doubles"
    for step in range(110, 150, 10):
        trends.measured(step, {statistic: {"0": healthy, "1": 10 * healthy}})
    assert kinds(path) == [(110, kind)], "once"
    assert "in block 1" in capsys.readouterr().err


def test_steps_that_become_slower_are_told_and_a_slow_validation_is_not(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    trends = Trends(path)
    for step in range(1, 257):
        trends.stepped(step, 5.0 if step % 32 == 0 else 0.1, 0.0)
    assert kinds(path) == []
    for step in range(257, 513):
        trends.stepped(step, 0.21, 0.0)
    assert kinds(path) == [(384, "slow")]


def test_waiting_for_data_is_told_as_such(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    trends = Trends(path)
    for step in range(1, 65):
        trends.stepped(step, 0.1, 0.001)
    for step in range(65, 193):
        trends.stepped(step, 0.2, 0.1)
    assert kinds(path) == [(192, "data_wait")]


def test_what_was_rolled_back_leaves_the_windows(tmp_path: Path) -> None:
    trends = Trends(tmp_path / "incidents.jsonl")
    for step in range(10, 160, 10):
        trends.measured(step, {"activation_rms": {"0": 1.0 if step < 60 else 3.9}})
    trends.rewind([{"kind": "inside", "step": step, "activation_rms": {"0": 1.0}} for step in range(10, 60, 10)])
    trends.measured(60, {"activation_rms": {"0": 5.0}})
    assert kinds(tmp_path / "incidents.jsonl") == [(60, "activation")]


def test_missing_statistics_are_no_measurements(tmp_path: Path) -> None:
    path = tmp_path / "incidents.jsonl"
    name = "attention_logit_max"
    rows = [{"kind": "inside", name: {"0": 20.0, "1": None}}] * 8 + [
        {"kind": "inside", name: {"0": None, "1": None}}
    ] * 9
    trends = Trends(path, rows)
    trends.measured(20, {name: {"0": 60.0}})
    assert kinds(path) == [], "three times the median of what was measured"
    for step in range(21, 36):
        trends.measured(step, {name: {"0": 20.0, "1": math.nan}})
    trends.measured(36, {name: {"0": 90.0}})
    assert kinds(path) == [(36, "attention")]
