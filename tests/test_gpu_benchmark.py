"""`make gpu` in a tiny form, on the CPU: its parts run, keep to the time and say how they ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def run(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), "--out", str(out), "--tiny", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_parts_run_and_leave_what_they_found(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts", "losses", "waits", "step_8b")
    assert done.returncode == 0, done.stdout + done.stderr
    ended = {row["part"]: row["ended"] for row in json.loads((tmp_path / "summary.json").read_text())["parts"]}
    assert ended == {"losses": "passed", "waits": "passed", "step_8b": "passed"}
    rows = json.loads((tmp_path / "losses.json").read_text())
    assert len(rows) == 10 and all(row["ok"] and row["loss"] == 0.0 for row in rows)
    assert {case["case"] for case in json.loads((tmp_path / "step_8b.json").read_text())["cases"]} == {
        "Bessemer tiny",
        "tiny plain",
    }


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "--minutes", "0.09", "--parts", "losses", "memory")
    rows = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert done.returncode == 0 and [row["part"] for row in rows] == ["losses", "memory"], done.stdout + done.stderr
    assert all(row["ended"].startswith(("not begun", "cut short")) for row in rows)
