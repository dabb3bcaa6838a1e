"""The funnel as a person reads it when the corpus is done: from the counts of statistics.json, and from nothing else."""

from __future__ import annotations

from typing import Any

from bessemer.corpus.document import REASONS
from bessemer.corpus.statistics import where
from bessemer.terminal import counted, size

LINES = 5
"""Lines shown at the most: the rest is summed up in the last of them."""

EXAMPLE_CHARACTERS = 100
FIXABLE = ("wrong_format", "no_text_key", "no_label")
"""Reasons that are a file's and that its user mends: each file may need something else."""


def result_line(statistics: dict[str, Any], not_read: bool = False) -> str:
    """How many documents were kept of how many, of which sources; not_read: and how many files of their folders were not read."""
    totals = statistics["totals"]
    names = ", ".join(source["source"] for source in statistics["sources"])
    files = totals.get("files_not_read", 0) if not_read else 0
    ignored = f", {counted(files, 'file')} not read" if files else ""
    kept = f"{totals['documents_kept']:,} of {counted(totals['documents_in'], 'document')} kept"
    return f"{kept}, {size(totals['bytes_kept'])} ({names}){ignored}"


def funnel_lines(statistics: dict[str, Any]) -> list[str]:
    """Why documents were dropped and which files were not read, most first, in at most LINES lines; none where all of
    it was kept."""
    came = statistics["totals"]["documents_in"]
    rows = [
        (
            count,
            f"{reason:<16} {count:>9,}  {percent(count, came):>6}  {REASONS.get(reason, '')}; {_example(statistics, reason)}",
        )
        for reason, count in statistics["totals"]["rejected"].items()
        if count
    ]
    rows.sort(key=lambda row: -row[0])
    lines = [line for _, line in rows]
    ignored = _not_read(statistics)
    room = LINES - bool(ignored)
    if len(lines) > room:
        rest = rows[room - 1 :]
        number = sum(count for count, _ in rest)
        lines = lines[: room - 1]
        lines.append(
            f"{f'{len(rest)} more':<16} {number:>9,}  {percent(number, came):>6}  all in statistics.json and the report"
        )
    return lines + ignored


def percent(part: int, whole: int) -> str:
    """A share that is not rounded to nothing or to all: 0.04%, 99.97%."""
    share = 100 * part / max(whole, 1)
    digits = 1
    while digits < 6 and 0 < part < whole and float(f"{share:.{digits}f}") in (0.0, 100.0):
        digits += 1
    return f"{share:.{digits}f}%"


def _example(statistics: dict[str, Any], reason: str) -> str:
    """The first example; where what is wrong has a fix, one of each of two files, as they may need two."""
    found: dict[str, str] = {}
    for source in statistics["sources"]:
        for example in source["rejected"].get(reason, {"examples": []})["examples"]:
            detail = " ".join(example["detail"].split())
            if len(detail) > EXAMPLE_CHARACTERS:
                detail = detail[:EXAMPLE_CHARACTERS] + "..."
            found.setdefault(example["path"], where(example) + (f": {detail}" if detail else ""))
    shown = list(found.values())[: 2 if reason in FIXABLE else 1]
    return f"e.g. {'; '.join(shown)}" if shown else ""


def _not_read(statistics: dict[str, Any]) -> list[str]:
    """One line for the files that no source reads."""
    total: dict[str, list[Any]] = {}
    for source in statistics["sources"]:
        for name, entry in source["not_read"].items():
            counts = total.setdefault(name, [0, 0, entry["example"]])
            counts[0] += entry["files"]
            counts[1] += entry["bytes"]
    if not total:
        return []
    common = sorted(total.items(), key=lambda item: (-item[1][0], item[0]))
    files = sum(counts[0] for counts in total.values())
    shown = ", ".join(f"{counts[0]:,} {name}" for name, counts in common[:4]) + (", ..." if len(common) > 4 else "")
    taken = size(sum(counts[1] for counts in total.values()))
    return [f"{'files not read':<16} {files:>9,}  {'':>6}  {shown}; {taken}; e.g. {common[0][1][2]}"]
