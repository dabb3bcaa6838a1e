"""The fertility table of the page: tokens for the text, by source and language, for each tokenizer that was compared."""

from __future__ import annotations

from typing import Any

from bessemer.report.data import RunData, number, table, tables, text
from bessemer.terminal import size

Row = dict[str, Any]

SHOWN = 60  # rows; the others stand in tokens/manifest.json
RATES = (("bytes_per_token", "{:.2f}"), ("tokens_per_word", "{:.2f}"), ("single_byte_share", "{:.1%}"))


def fertility(data: RunData) -> Row:
    """Bytes a token, tokens a word and single-byte tokens: a row a source and language, a group of columns a tokenizer."""
    found = table(data.manifest.get("fertility"))
    every = tables(found.get("rows"))
    if not every:
        return {}
    tokenizers = tables(found.get("tokenizers"))
    largest = sorted(every, key=lambda row: -(number(row.get("bytes")) or 0.0))[:SHOWN]
    shown = [row for row in every if row in largest]
    whole = table(found.get("all"))
    rows = [_row(row, len(tokenizers)) for row in shown]
    ours, others = _rate(whole, "bytes_per_token", 0), []
    for place, tokenizer in list(enumerate(tokenizers))[1:]:
        theirs = _rate(whole, "bytes_per_token", place)
        if ours and theirs:
            others.append(
                f"{100 * (ours / theirs - 1):+.1f}% against {text(tokenizer.get('name'))}".replace("-", "−", 1)
            )
    finding = (
        f"A token stands for {ours:.2f} bytes of this text" + (f": {', '.join(others)}." if others else ".")
        if ours
        else ""
    )
    return {
        "finding": finding,
        "languages": any(row["language"] for row in rows),
        "tokenizers": [
            {"name": text(one.get("name")), "vocabulary": f"{number(one.get('vocabulary')) or 0:,.0f}"}
            for one in tokenizers
        ],
        "rows": rows,
        "total": _row(whole, len(tokenizers)),
        "left_out": len(every) - len(shown),
    }


def _row(row: Row, tokenizers: int) -> Row:
    cells = []
    for place in range(tokenizers):
        for name, shown in RATES:
            value = _rate(row, name, place)
            cells.append("–" if value is None else shown.format(value))
    return {
        "source": text(row.get("source")),
        "language": text(row.get("language")),
        "documents": f"{number(row.get('documents')) or 0:,.0f}",
        "bytes": size(number(row.get("bytes")) or 0.0),
        "cells": cells,
    }


def _rate(row: Row, name: str, place: int) -> float | None:
    values = row.get(name)
    return number(values[place]) if isinstance(values, list) and place < len(values) else None
