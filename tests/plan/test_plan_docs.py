"""docs/plan.md and docs/plan-accuracy.md show what the commands print and what was measured."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.plan import intervals

ROOT = Path(__file__).parent.parent.parent


def test_the_tables_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("planner_docs", ROOT / "benchmarks" / "planner_docs.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    found = json.loads((ROOT / "benchmarks" / "results" / "planner_accuracy.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "plan-accuracy.md").read_text(encoding="utf-8")
    assert made.filled(page, found) == page


def test_the_intervals_are_those_of_the_results_and_hold_on_cases_that_took_no_part() -> None:
    """The program's own table is the benchmark's, and between 75% and 90% of what was left out of it lies inside."""
    found = json.loads((ROOT / "benchmarks" / "results" / "planner_accuracy.json").read_text(encoding="utf-8"))[
        "intervals"
    ]
    kept = intervals.residuals()
    for name, row in found["kinds"].items():
        question, _, state = name.partition(", ")
        own = kept[question][state] if state else kept[question]
        assert {key: row[key] for key in ("low", "middle", "high")} == pytest.approx(
            {key: own[key] for key in ("low", "middle", "high")}, abs=1e-4
        )
        assert 0.75 <= row["coverage_of_sources"] <= 0.905, name


def test_the_expected_hours_of_runs_that_nothing_was_fitted_to() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "planner_accuracy.json").read_text(encoding="utf-8"))[
        "intervals"
    ]
    halves = {half: {row["run"] for row in found["runs"] if row["half"] == half} for half in ("fitted", "scored")}
    assert not halves["fitted"] & halves["scored"] and abs(len(halves["fitted"]) - len(halves["scored"])) <= 1
    score = found["scores"]["default, scored"]
    assert score["n"] == len(halves["scored"]) >= 11
    assert score["median_absolute"] < 0.15 and score["mean_absolute"] < 0.2 and abs(score["bias"]) < 0.1
    assert score["ideal_bias"] < -0.3, "what the expected figures mend"


def examples() -> list[tuple[str, str]]:
    """Commands of docs/plan.md whose output is shown under them."""
    page = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    return re.findall(r"```bash\nbessemer (plan [^\n]*)\n```\n\n```\n(.*?)```\n", page, flags=re.DOTALL)


def test_there_are_examples() -> None:
    assert len(examples()) >= 2


@pytest.mark.parametrize(("command", "shown"), examples(), ids=lambda value: value[:40])
def test_the_output_is_what_is_printed(command: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(shlex.split(command)) == 0
    assert capsys.readouterr().out.rstrip("\n") == shown.rstrip("\n")
