"""The fault matrix (tests/fault_matrix.toml): the tests of each row, and the table that `make faults` prints."""

import json
import tomllib
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

ROWS: dict[int, dict[str, Any]] = {
    row["number"]: row for row in tomllib.loads((Path(__file__).parent / "fault_matrix.toml").read_text())["row"]
}
FAULT, OBTAINED = "fault", "obtained"  # key of a test's report


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", metavar="FILE", help="run the fault matrix in full and write its results to FILE")


@pytest.fixture(scope="session")
def is_thorough(pytestconfig: pytest.Config) -> bool:
    """True if faults are injected as often as the matrix requires, rather than as often as a short test run allows."""
    return pytestconfig.getoption("--faults") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the rows of each test to its report; with --faults, run only those tests, including long ones.

    Tests in files named test_faults_*.py inject faults that take minutes: they run with --faults only.
    """
    for item in items:
        rows = [number for mark in item.iter_markers(FAULT) for number in mark.args]
        assert all(number in ROWS for number in rows), f"{item.nodeid}: no such row in fault_matrix.toml"
        item.user_properties += [(FAULT, number) for number in rows]
    if config.getoption("--faults"):
        kept = [item for item in items if item.get_closest_marker(FAULT) is not None]
    else:
        kept = [item for item in items if not item.path.name.startswith("test_faults_")]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def rows_of(reports: list[pytest.TestReport]) -> list[dict[str, Any]]:
    """Return the matrix with the outcome of each row's tests, and whether all of them passed."""
    outcomes, obtained = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for report in reports:
        if report.when != "call" and report.outcome == "passed":
            continue
        for number in (value for key, value in report.user_properties if key == FAULT):
            outcomes[number].append(report.outcome)
            notes = [str(value) for key, value in report.user_properties if key == OBTAINED]
            obtained[number] += [note for note in notes if note not in obtained[number]]
    rows = []
    for number, row in ROWS.items():
        found = outcomes[number]
        verdict = "pass" if set(found) == {"passed"} else "FAIL" if "failed" in found else "not run"
        notes = "; ".join([*obtained[number], f"{found.count('passed')} of {len(found)} tests"])
        facts = {key: row[key] for key in ("fault", "injection", "demanded")}
        rows.append({"number": number, **facts, "obtained": notes, "verdict": verdict})
    return rows


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    place = config.getoption("--faults")
    if not place or hasattr(config, "workerinput"):
        return
    reports = [one for kind in ("passed", "failed", "skipped", "error") for one in terminalreporter.stats.get(kind, [])]
    rows = rows_of([one for one in reports if isinstance(one, pytest.TestReport)])
    terminalreporter.section("fault matrix")
    for row in rows:
        terminalreporter.write_line(f"{row['number']:3} {row['verdict']:8} {row['fault']}: {row['obtained']}")
    passed = sum(row["verdict"] == "pass" for row in rows)
    terminalreporter.write_line(f"{passed} of {len(rows)} rows pass")
    written = {"day": str(datetime.now(UTC).date()), "rows": rows}
    Path(place).write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
