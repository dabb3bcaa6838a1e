"""The rows of a checklist, and its verdict."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bessemer.common.errors import BessemerError

Status = Literal["ok", "warn", "FAIL", "not here"]  # "not here": it cannot be examined on this machine
WIDTH = 108  # of the evidence, where it is wrapped


@dataclass(frozen=True)
class CheckRow:
    """A statement about a run, whether it holds, and the figures that say so."""

    topic: str
    name: str
    status: Status
    evidence: str


def judged(topic: str, name: str, holds: bool, evidence: str, *, otherwise: Status = "FAIL") -> CheckRow:
    """A row that holds or does not."""
    return CheckRow(topic, name, "ok" if holds else otherwise, evidence)


def collected(topic: str, name: str, rows: Callable[[], Iterable[CheckRow]]) -> Iterator[CheckRow]:
    """The rows of an examination; one that ends with an error is a row that fails, by the name of the first."""
    try:
        yield from rows()
    except (BessemerError, OSError, MemoryError) as error:
        yield CheckRow(topic, name, "FAIL", str(error) or type(error).__name__)


def is_go(rows: Iterable[CheckRow]) -> bool:
    return all(row.status != "FAIL" for row in rows)


def verdict(rows: list[CheckRow]) -> str:
    """Go or no-go, with the number of rows by status."""
    counts = Counter(row.status for row in rows)
    return f"{'go' if is_go(rows) else 'no-go'}: {', '.join(f'{count} {status}' for status, count in counts.items())}"


def table(rows: list[CheckRow]) -> str:
    """The rows as text by topic, evidence wrapped beside the name."""
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
