"""The report's section about where the wall time of the training went."""

from __future__ import annotations

from bessemer.guard.goodput import KINDS
from bessemer.report import parts
from bessemer.report.data import RunData, as_number
from bessemer.report.parts import Block
from bessemer.terminal import duration

INKS = {
    "productive": "good", "data_wait": "part-2", "validation": "part-3", "saving": "part-4", "start": "part-5",
    "recovery": "accent", "redone": "lost", "stopped": "raw", "other": "reference",
}  # fmt: skip


def section(data: RunData) -> Block:
    """One bar, and its pieces in a table."""
    seconds = {kind: as_number(data.times.get(kind)) or 0.0 for kind in KINDS}
    total, sessions = as_number(data.times.get("total")) or 0.0, int(as_number(data.times.get("sessions")) or 0)
    if not total:
        return {}
    shown = [(kind, value) for kind, value in seconds.items() if value >= 0.0005 * total]
    pieces, left = [], 0.0
    for kind, value in shown:
        width = 100.0 * value / total
        pieces.append((INKS[kind], left, width, f"{KINDS[kind]} {duration(value)}"))
        left += width
    rows = [[parts.cell(KINDS[kind], ink=INKS[kind]), duration(value), f"{value / total:.1%}"] for kind, value in shown]
    times = "" if sessions == 1 else f" in {sessions} sessions, with the time between them"
    said = f"{seconds['productive'] / total:.1%} of {duration(total)}{times} were productive steps."
    return parts.section(
        "wall-time", "Where the time went", parts.finding(said),
        parts.lanes([{"name": "", "end": "", "css": "", "far": False, "own": False, "cut": False, "pieces": pieces}]),
        parts.table(["", "n|Time", "n|Share"], rows),
    )  # fmt: skip
