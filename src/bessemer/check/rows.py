"""Rows of a checklist, and its verdict."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bessemer.common.errors import BessemerError

Status = Literal["ok", "warn", "FAIL", "not here"]  # "not here": cannot be checked on this machine
WIDTH = 108  # columns at which the evidence is wrapped


@dataclass(frozen=True)
class CheckRow:
    """A row of the checklist: a statement about a run, its status, and the evidence."""

    topic: str
    name: str
    status: Status
    evidence: str


def judge(topic: str, name: str, holds: bool, evidence: str, *, otherwise: Status = "FAIL") -> CheckRow:
    """Return a row with the status ok if the statement `name` holds, else with the status `otherwise`."""
    return CheckRow(topic, name, "ok" if holds else otherwise, evidence)


def collect_rows(topic: str, name: str, rows: Callable[[], Iterable[CheckRow]]) -> Iterator[CheckRow]:
    """Yield the rows of a check. An error ends the check with a FAIL row under `name`."""
    try:
        yield from rows()
    except (BessemerError, OSError, MemoryError) as error:
        yield CheckRow(topic, name, "FAIL", str(error) or type(error).__name__)


def is_go(rows: Iterable[CheckRow]) -> bool:
    return all(row.status != "FAIL" for row in rows)


def verdict(rows: list[CheckRow]) -> str:
    """Return go or no-go, with the number of rows by status."""
    counts = Counter(row.status for row in rows)
    return f"{'go' if is_go(rows) else 'no-go'}: {', '.join(f'{count} {status}' for status, count in counts.items())}"


def table(rows: list[CheckRow]) -> str:
    """Format the rows by topic, with the evidence wrapped in the last column."""
    width, topics = max(len(row.name) for row in rows), [row.topic for row in rows]
    lines, topic = [], ""
    for row in sorted(rows, key=lambda row: topics.index(row.topic)):
        if row.topic != topic:
            lines.append(f"{'' if not topic else chr(10)}{row.topic}")
            topic = row.topic
        wrapped = textwrap.wrap(row.evidence, WIDTH) or [""]
        lines.append(f"  {row.status:<9} {row.name:<{width}}  {wrapped[0]}")
        lines += [f"{'':<{width + 14}}{line}" for line in wrapped[1:]]
    return "\n".join(lines)


def to_dict(rows: list[CheckRow]) -> dict[str, Any]:
    return {"go": is_go(rows), "verdict": verdict(rows), "rows": [asdict(row) for row in rows]}
