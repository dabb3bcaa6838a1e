"""The fault matrix: which tests hold which row, and the table that `make faults` prints (tests/fault_matrix.toml)."""

import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROWS: dict[int, dict[str, Any]] = {
    row["number"]: row for row in tomllib.loads((Path(__file__).parent / "fault_matrix.toml").read_text())["row"]
}
FAULT, OBTAINED = "fault", "obtained"  # what a test's report carries


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", metavar="FILE", help="run the fault matrix in full and write its table to FILE")


@pytest.fixture(scope="session")
def is_thorough(pytestconfig: pytest.Config) -> bool:
    """Whether faults are injected as often as the matrix demands, and not as often as a short test run allows."""
    return pytestconfig.getoption("--faults") is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give every test's report the rows it holds; with --faults, run only those tests, also the long ones.

    Tests in files of the name test_faults_*.py inject what takes minutes: they run with --faults alone.
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


def table(reports: list[pytest.TestReport]) -> tuple[list[str], list[int]]:
    """The matrix as lines of Markdown, and the rows that did not pass or that no test holds."""
    outcomes, obtained = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for report in reports:
        if report.when != "call" and report.outcome == "passed":
            continue
        for number in (value for key, value in report.user_properties if key == FAULT):
            outcomes[number].append(report.outcome)
            notes = [str(value) for key, value in report.user_properties if key == OBTAINED]
            obtained[number] += [note for note in notes if note not in obtained[number]]
    lines = ["| # | fault | injection | demanded | obtained | |", "|---|---|---|---|---|---|"]
    bad = []
    for number, row in ROWS.items():
        found = outcomes[number]
        if set(found) != {"passed"}:
            bad.append(number)
        verdict = "pass" if set(found) == {"passed"} else "FAIL" if "failed" in found else "not run"
        notes = "; ".join([*obtained[number], f"{found.count('passed')} of {len(found)} tests"])
        lines.append(f"| {number} | {row['fault']} | {row['injection']} | {row['demanded']} | {notes} | {verdict} |")
    return lines, bad


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    place = config.getoption("--faults")
    if not place or hasattr(config, "workerinput"):
        return
    reports = [one for kind in ("passed", "failed", "skipped", "error") for one in terminalreporter.stats.get(kind, [])]
    lines, bad = table([one for one in reports if isinstance(one, pytest.TestReport)])
    terminalreporter.section("fault matrix")
    for line in [*lines, "", f"{len(ROWS) - len(bad)} of {len(ROWS)} rows pass"]:
        terminalreporter.write_line(line)
    text = Path(place).read_text(encoding="utf-8") if Path(place).exists() else "<!-- table -->\n"
    head, _, _ = text.partition("<!-- table -->")
    Path(place).write_text(f"{head}<!-- table -->\n" + "\n".join(lines) + "\n", encoding="utf-8")
