"""docs/plan.md and docs/plan-accuracy.md show what the commands print and what was measured."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from bessemer.cli import run_command
from bessemer.plan import outcome

ROOT = Path(__file__).parent.parent.parent


def test_the_tables_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("planner_docs", ROOT / "benchmarks" / "planner_docs.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    found = json.loads((ROOT / "benchmarks" / "results" / "planner_accuracy.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "plan-accuracy.md").read_text(encoding="utf-8")
    assert made.filled(page, found) == page


def test_the_error_bars_are_those_of_the_results() -> None:
    """Mean of the sets' 90th percentiles, by their cases; without fitted sets and the sweep."""
    found = json.loads((ROOT / "benchmarks" / "results" / "planner_accuracy.json").read_text(encoding="utf-8"))
    rows = [row for row in found["time"] if not row["fitted"] and "nanotron" not in row["set"]]
    time = sum(row["n"] * row["ninetieth"] for row in rows) / sum(row["n"] for row in rows)
    sets = [found["memory"]["sets"][name] for name in ("torchtitan", "BLOOM", "B200", "Zero Bubble table 4")]
    memory = sum(row["n"] * row["percentile_90"] for row in sets) / sum(row["n"] for row in sets)
    assert time <= outcome.TIME_ERROR < time + 0.02
    assert memory <= outcome.MEMORY_ERROR < memory + 0.02


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
