"""HTML tables for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(title: str, rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return an HTML table under a title, with all text escaped."""
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in header)
    cell = '<td style="text-align:left;white-space:pre-line">{}</td>'
    body = "".join(f"<tr>{''.join(cell.format(escape(text)) for text in row)}</tr>" for row in rows)
    return f"<div><p><b>{escape(title)}</b></p><table><tr>{head}</tr>{body}</table></div>"
