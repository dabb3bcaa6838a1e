"""How a run of several processes was split, and what they sent each other."""

from __future__ import annotations

from typing import Any

from bessemer.report.data import RunData, number, table, text
from bessemer.terminal import size

WAYS = {
    "replicate": "copies of the model",
    "shard": "processes that share one copy's state",
    "tensor": "processes that share every matrix",
    "pipeline": "stages of blocks",
    "context": "processes that share every sequence",
}


def section(data: RunData) -> dict[str, Any]:
    """Rows of the section; empty for a run of one process."""
    layout = table(data.recipe.get("parallel"))
    ways = {way: max(int(number(layout.get(way)) or 1), 1) for way in WAYS}
    world = 1
    for count in ways.values():
        world *= count
    if world == 1:
        return {}
    split = [{"way": way, "count": count, "meaning": WAYS[way]} for way, count in ways.items() if count > 1]
    if ways["shard"] * ways["context"] > 1:
        split.append({"way": "zero", "count": int(number(layout.get("zero")) or 3), "meaning": "what shard divides"})
    if ways["pipeline"] > 1:
        split.append(
            {"way": "schedule", "count": text(layout.get("schedule")) or "1f1b", "meaning": "of the micro-batches"}
        )
    planned = table(data.plan.get("communicated_bytes"))
    kinds = [kind for kind in dict.fromkeys([*planned, *data.sent]) if planned.get(kind) or data.sent.get(kind)]
    rows = [_row(kind.replace("_", "-"), number(planned.get(kind)), data.sent.get(kind)) for kind in kinds]
    total = sum(data.sent.values())
    named = " x ".join(f"{way} {count}" for way, count in ways.items() if count > 1)
    finding = f"{world:,} processes: {named}."
    if total:
        finding += f" In a step they sent each other {size(total)}, {size(total / world)} each."
    return {"finding": finding, "split": split, "sent": rows}


def _row(kind: str, planned: float | None, sent: float | None) -> dict[str, Any]:
    return {
        "kind": kind,
        "planned": "–" if planned is None else size(planned),
        "measured": "–" if sent is None else size(sent),
        "ratio": None if not planned or sent is None else sent / planned,
    }
