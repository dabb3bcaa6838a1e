"""HTML for notebooks: a title over a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def facts(title: str, rows: Mapping[str, str]) -> str:
    """Return a table with a row for each name."""
    return table(title, (), rows.items())


def table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a header. Everything is escaped."""
    head = "".join(f'<th style="text-align:left">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div><p><b>{escape(title)}</b></p><table><tr>{head}</tr>{body}</table></div>"


def _cell(text: str) -> str:
    return f'<td style="text-align:left;white-space:pre-line">{escape(text)}</td>'
