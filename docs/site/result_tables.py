"""Tables of measurements, from the results of benchmarks/ and the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import plan_tables

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CASES = {
    "plain": "Each sequence is one document. Embedding and head are two matrices. One micro-batch for each process.",
    "hard": "Packed documents of 1 to 40 tokens with a document mask, sequences with padding, tied embeddings, and gradients "
    "accumulated over two micro-batches.",
    "mixture": "The hard case with 8 experts in every layer but the first, of which a token uses 2 and a shared one, balanced by "
    "a bias and a loss. In steps before a token near a tie goes to another expert, all fp32 losses are within 1e-5.",
    "dropout": "The hard case with a dropout of 0.1 on embeddings, attention weights and residuals.",
}
"""Description of the certificate's cases."""


def read(name: str) -> Any:
    """Return the results of benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown."""
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def layout_certificate() -> str:
    """Return the largest differences from one process, a table for each case."""
    found = read("layouts")
    precisions = dict.fromkeys(row["precision"] for row in found["rows"])
    columns = [f"{precision}: {what}" for precision in precisions for what in ("loss", "weights")]
    parts = []
    for case, meaning in CASES.items():
        rows = {}
        for row in (row for row in found["rows"] if row["case"] == case):
            cells = rows.setdefault(row["layout"], [row["layout"], row["processes"]])
            cells += [f"{row['loss']:.1e}", f"{row['weight']:.1e}"]
        parts += [f"### {case.capitalize()}", meaning, table(["layout", "processes", *columns], rows.values())]
    return "\n\n".join(parts)


def parity() -> str:
    """Return the largest differences from transformers, by model, direction and precision."""
    rows = read("parity")["rows"]
    titles = list(rows[0])
    return table(titles, ([cell if isinstance(cell, str) else f"{cell:.0e}" for cell in row.values()] for row in rows))


def deduplication() -> str:
    """Return speed, recall and precision of the search for duplicates, by program and settings."""
    titles = ("program", "MB per CPU second", "pairs found", "precision", "a similar document stays")
    rows = []
    for row in read("dedup")["rows"]:
        shares = (row["all"]["recall"], row["precision"], row["precision_to_kept"])
        rows.append([row["side"], f"{row['mb_per_cpu_second']:.3g}", *(f"{share:.1%}" for share in shares)])
    return table(titles, rows)


def faults() -> str:
    """Return the fault matrix."""
    rows = read("faults")["rows"]
    titles = ("fault", "injection", "required", "result", "")
    keys = ("fault", "injection", "demanded", "obtained", "verdict")
    return table(["#", *titles], ([row["number"], *(row[key] for key in keys)] for row in rows))


def ladder_coverage() -> str:
    """Return how often the intervals of the ladder contain the measured loss."""
    titles = ("runs", "predictions", "distance", "inside", "width", "error", "mean error")
    rows = (
        [
            name,
            row["predictions"],
            f"{row['median_beyond']:.1f}",
            f"{row['inside']} ({row['coverage']:.0%})",
            f"{row['median_width']:.1%}",
            f"{row['median_error']:.1%}",
            f"{row['mean_error']:+.1%}",
        ]
        for name, row in read("ladder_coverage")["summary"].items()
    )
    return table(titles, rows)


def plan_table(name: str) -> str:
    """Return a table of the planner's accuracy."""
    return plan_tables.TABLES[name](read("planner_accuracy"))


TABLES: dict[str, Callable[[], str]] = {
    "layout_certificate": layout_certificate,
    "parity": parity,
    "faults": faults,
    "deduplication": deduplication,
    "ladder_coverage": ladder_coverage,
    **{f"plan_{name}": partial(plan_table, name) for name in plan_tables.TABLES},
}
"""Tables by the name in the marker of the page."""
