"""HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return an HTML table under a title, with all text escaped."""
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div><p><b>{escape(title)}</b></p><table><tr>{head}</tr>{body}</table></div>"


def _cell(text: str) -> str:
    return f'<td style="text-align:left;white-space:pre-line">{escape(text)}</td>'
