"""`make gpu` in its tiny form on the CPU: its parts run, stay within the time limit and report their outcome."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "benchmarks" / "gpu.py"


def run(out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run from the folder that contains `out`, with a relative path to it."""
    command = [sys.executable, str(PROGRAM), "--out", out.name, "--tiny", *more]
    return subprocess.run(command, cwd=out.parent, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_parts_run_and_write_their_results(tmp_path: Path) -> None:
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


def test_parts_without_time_are_reported(tmp_path: Path) -> None:
    done = run(tmp_path, "--minutes", "0.09", "--parts", "losses", "memory")
    rows = json.loads((tmp_path / "summary.json").read_text())["parts"]
    assert done.returncode == 0 and [row["part"] for row in rows] == ["losses", "memory"], done.stdout + done.stderr
    assert all(row["ended"].startswith(("not started", "timed out")) for row in rows)
    refused = run(tmp_path, "--minutes", "0")
    assert refused.returncode == 2 and "--minutes" in refused.stderr


def test_the_packed_wheels_are_all_that_a_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    from gpu_wheels import EXTRAS, required

    names = required("bessemer", EXTRAS, "3.12", without="torch")
    assert {"pydantic", "pyarrow", "numba", "llvmlite", "scipy", "transformers", "pyyaml", "plotly"} <= set(names)
    assert not {"torch", "sympy", "filelock", "bessemer", "mlflow", "pytest"} & set(names), "torch brings its own along"


def test_missing_packages_come_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Test a machine that has torch and no network."""
    monkeypatch.syspath_prepend(str(PROGRAM.parent))
    from gpu_wheels import provide

    monkeypatch.setattr(sys, "path", [*sys.path])
    wheels, site, facts = tmp_path / "wheels", tmp_path / "site", "absent_thing-1.0.dist-info"
    assert provide(["pytest", "absent-thing"], wheels, site) == ["absent-thing"]
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "absent_thing-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("absent_thing.py", "")
        wheel.writestr(f"{facts}/METADATA", "Metadata-Version: 2.1\nName: absent-thing\nVersion: 1.0\n")
        wheel.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{facts}/RECORD", "")
    assert provide(["pytest", "absent-thing"], wheels, site) == []
    assert (site / "absent_thing.py").exists()
