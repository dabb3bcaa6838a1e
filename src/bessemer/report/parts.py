"""The parts that every page is made of, as plain JSON-able values. page.html turns them into HTML, script.js draws the figures.

A page has sections, a section has blocks; the `kind` of a block names its markup in page.html. Builders return nothing ({} or
[]) for empty content, so that callers need no conditions. A column of a table is "CSS CLASSES|TITLE": n (number), wide-only
(hidden on a phone), bar, dots, what. A cell is text or a value of `cell`. Colours are names of style.css, as `ink`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cache
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError
from bessemer.report.data import Json, RunData, as_number, as_text
from bessemer.run import write_atomic
from bessemer.terminal import duration

Block = dict[str, Any]
Figure = dict[str, Any]


# --- The page ---------------------------------------------------------------------------------------------------------


def write_page(path: Path, html: str) -> Path:
    """Write a page atomically. A lone surrogate, as a damaged excerpt may hold, cannot be written as UTF-8."""
    write_atomic(path, html.encode("utf-8", errors="replace"))
    return path


def render_page(
    name: str,
    kind: str,
    headline: str,
    sections: Iterable[Block],
    *,
    origin: str = "",
    notes: Sequence[str] = (),
    tiles: Iterable[Block | None] = (),
) -> str:
    """A page as HTML that loads nothing: style, script, plotly.js and data stand in it.

    Everything is escaped, and a content security policy lets only the scripts written here run, by their hashes.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise BessemerError(f"the report needs {error.name}; install it with: pip install 'bessemer[report]'") from None

    shown = [one for one in sections if one]
    figures = {one["id"]: one for one in chain.from_iterable(map(_figures_in, shown))}
    script = _file("script.js")
    plotly = str(get_plotlyjs()).replace("\r\n", "\n") if figures else ""
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in (script, plotly) if code]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    # Compact, and in the order in which the figures were built.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return environment.from_string(_file("page.html")).render(
        name=name, kind=kind, headline=headline, origin=origin, notes=notes, tiles=[tile for tile in tiles if tile],
        sections=shown, figures=figures, style=Markup(_file("style.css")), script=Markup(script), plotly=Markup(plotly),
        policy=f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:",
        markup=Markup,
    ).lstrip()  # fmt: skip


@cache
def _file(name: str) -> str:
    return (resources.files("bessemer.report") / name).read_text(encoding="utf-8")


def _figures_in(block: Block) -> Iterable[Figure]:
    yield from block.get("figures", ())
    for inner in block.get("blocks", ()):
        yield from _figures_in(inner)


def section(name: str, title: str, *blocks: Any) -> Block:
    """A section with a place in the navigation; nothing where all its blocks are empty. Blocks may be lists of blocks."""
    shown = flat(blocks)
    return {"id": name, "title": title, "blocks": shown} if shown else {}


def flat(blocks: Iterable[Any]) -> list[Block]:
    """Blocks and lists of blocks as one list, without the empty ones."""
    found: list[Block] = []
    for block in blocks:
        found += flat(block) if isinstance(block, list | tuple) else [block] if block else []
    return found


def tile(label: str, value: str, note: str = "") -> Block:
    """A key figure at the top: its label, its value, what to compare it with."""
    return {"label": label, "value": value, "note": note}


# --- Blocks -----------------------------------------------------------------------------------------------------------


def _block(kind: str, name: str, items: Iterable[Any], **more: Any) -> Block:
    """A block of several items under `name`; nothing without items."""
    shown = list(items)
    return {"kind": kind, name: shown, **more} if shown else {}


def finding(*sentences: str) -> Block:
    """The first paragraph of a section: what its numbers come to."""
    said = " ".join(filter(None, sentences))
    return {"kind": "finding", "text": said} if said else {}


def note(text: str) -> Block:
    """A paragraph that stands out: a warning, what is left out."""
    return {"kind": "note", "text": text} if text else {}


def titled(title: str, *blocks: Any) -> list[Block]:
    """Blocks under a heading; nothing where all of them are empty."""
    shown = flat(blocks)
    return [{"kind": "heading", "text": title}, *shown] if shown else []


def folded(summary: str, *blocks: Any, count: str = "") -> Block:
    """Blocks that open on a click."""
    return _block("folded", "blocks", flat(blocks), summary=summary, count=count)


def facts(pairs: Iterable[tuple[str, str]]) -> Block:
    """Names with their values, in columns."""
    return _block("facts", "pairs", pairs)


def key(items: Iterable[tuple[str, str, str]], code: bool = False) -> Block:
    """A legend: (ink, name, value in bold)."""
    return _block("key", "items", items, code=code)


def stack(parts: Iterable[tuple[str, float]]) -> Block:
    """One bar over the whole width of (ink, percent)."""
    return _block("stack", "parts", parts)


def lanes(rows: Sequence[Block], edge: float | None = None, ticks: Sequence[tuple[float, str]] = ()) -> Block:
    """Horizontal bars of pieces.

    A row has name, pieces (ink, left, width, tooltip; in percent), end (text at the right), css, far and cut. edge: a line
    across all; ticks: (percent, text) of an axis below.
    """
    return _block("lanes", "rows", rows, edge=edge, ticks=list(ticks))


def checks(items: Iterable[tuple[bool, str]]) -> Block:
    """A list of what passed and what did not."""
    return _block("checks", "items", items)


def quotes(items: Iterable[Block]) -> Block:
    """Text of documents or of the model, preformatted: before, marked, after, and a caption of cells."""
    return _block("quotes", "items", items)


def example(name: str, text: str, *, more: str = "", path: str = "", detail: str = "") -> Block:
    """An excerpt of a document under its name."""
    return {"kind": "example", "name": name, "text": text, "more": more, "path": path, "detail": detail}


def plots(*figures: Figure | None, css: str = "", wide: bool = False) -> Block:
    """Figures side by side. css: single (one low and wide), even, tall; wide: the first takes the whole width."""
    return _block("plots", "figures", filter(None, figures), css=css, wide=wide)


# --- Tables -----------------------------------------------------------------------------------------------------------


def cell(text: Any = "", **more: Any) -> Block:
    """A cell with more than text.

    ink: a swatch before it; soft: words after it; css: classes; bars: [class, left, width] in percent; track: [class, left];
    shade: percent of the accent behind it; path: in the type of paths; icon: `scale` or `legend`, in a title; narrow: words
    of a title on a phone alone.
    """
    return {"text": text, **{key: value for key, value in more.items() if value not in (None, "", False)}}


def bar(width: float, css: str = "kept", left: float = 0.0) -> Block:
    """A cell with one horizontal bar, in percent of the column."""
    return cell(bars=[[css, left, width]] if width else [])


def row(cells: Sequence[Any], css: str = "", under: Any = None) -> Block:
    """A row of a table with classes, or with a block under it over all columns but the first."""
    return {"cells": list(cells), "css": css, "under": under}


def table(
    columns: Sequence[Any],
    rows: Iterable[Any],
    *,
    total: Sequence[Any] | None = None,
    groups: Sequence[tuple[str, int, str]] = (),
    groups_css: str = "",
    css: str = "",
) -> Block:
    """A table; nothing without rows. groups: (classes, columns spanned, title) above the columns; total: a last row."""
    shown = [one if isinstance(one, dict) else row(one) for one in rows]
    if shown and total is not None:
        shown.append(row(total, "total"))
    titles = [one if isinstance(one, dict) else _title(one) for one in columns]
    return _block("table", "rows", shown, columns=titles, groups=list(groups), groups_css=groups_css, css=css)


def _title(column: str) -> Block:
    css, divider, title = column.partition("|")
    return {"css": css, "text": title} if divider else {"css": "", "text": column}


def records(columns: Sequence[tuple[Any, ...]], rows: Iterable[Json], **options: Any) -> Block:
    """A table of JSON objects. A column is (title, key), a text; (title, key, format), a number, with a dash where there is
    none; or (title, function from an object to its cell)."""
    cells = [[_record_cell(one, *of) for _, *of in columns] for one in rows]
    return table([title for title, *_ in columns], cells, **options)


def _record_cell(one: Json, key: Any, shown: Callable[[float], Any] | None = None) -> Any:
    if callable(key):
        return key(one)
    return as_text(one, key) if shown is None else known(as_number(one, key), shown)


# --- Figures ----------------------------------------------------------------------------------------------------------


def figure(
    name: str, title: str, traces: Iterable[Block], x: Block | str, y: Block | str, *, group: str = "own", note: str = "",
    shapes: Sequence[Block] = (), **layout: Any,
) -> Figure:  # fmt: skip
    """A figure. group: `steps` and `tokens` share the page's choice of axis and zoom together; others have axes of their own."""
    axes = {
        name: {"title": {"text": axis}} if isinstance(axis, str) else axis
        for name, axis in (("xaxis", x), ("yaxis", y))
    }
    return {
        "id": name, "title": title, "group": group, "traces": list(traces), "shapes": list(shapes), "note": note,
        "layout": {**axes, **layout},
    }  # fmt: skip


def axis(title: str, **more: Any) -> Block:
    """An axis of a figure, in plotly's terms."""
    return {"title": {"text": title}, **more}


def trace(
    name: str, x: Iterable[float], y: Iterable[float], ink: str, *, hover: str = "%{y:.4f}", width: float = 1.75,
    dash: str = "solid", marks: int = 0, lines: bool = True, symbol: str = "circle", text: Sequence[str] = (), **more: Any,
) -> Block:  # fmt: skip
    """A curve, or points. marks: size of the points, 0 for none; lines: whether they are joined; text: label of each."""
    mode = "+".join([*(["lines"] if lines else []), *(["markers"] if marks else [])])
    return {
        "type": "scatter", "mode": mode, "name": name, "x": short(x), "y": short(y), "ink": ink, "hovertemplate": hover,
        "line": {"width": width, "dash": dash}, "marker": {"size": marks, "symbol": symbol},
        **({"text": list(text)} if text else {}), **more,
    }  # fmt: skip


def bars(name: str, x: Sequence[Any], y: Iterable[float], ink: str, hover: str, **more: Any) -> Block:
    """A series of bars."""
    return {"type": "bar", "name": name, "x": list(x), "y": short(y), "ink": ink, "hovertemplate": hover, **more}


def vertical(x: float, dash: str = "dot") -> Block:
    """A line from the bottom to the top of a figure, as a shape."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "ink": "accent", "dash": dash}


def short(values: Iterable[float]) -> list[float]:
    """Six significant digits: more than a screen shows, and half the size of full doubles."""
    return [float(f"{value:.6g}") for value in values]


def series_ink(number: int) -> str:
    """The colour of the n-th series: six, which colour-blind readers can tell apart."""
    return f"source-{number % 6 + 1}"


def source_ink(data: RunData, source: str) -> str:
    """The colour of a source of a run."""
    return series_ink(data.source_names.index(source))


# --- Words ------------------------------------------------------------------------------------------------------------


def known(value: Any, shown: Callable[[Any], str]) -> str:
    """A value as a person reads it, or a dash."""
    return "–" if value is None else shown(value)


def count(value: float | None) -> str:
    """With a comma between the thousands, or a dash."""
    return known(value, "{:,.0f}".format)


def percent(share: float | None) -> str:
    """A share as 12.3%, or a dash."""
    return known(share, lambda value: f"{100 * value:.1f}%" if value >= 0.001 or value == 0 else "<0.1%")


def capitalised(sentence: str) -> str:
    """With a large first letter; the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


def words(name: str) -> str:
    """A key as words."""
    return name.replace("_", " ")


def clock(value: Any) -> str:
    """An ISO time as a person reads it, in the zone it was written in."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return value if isinstance(value, str) else ""
    return f"{moment.day} {moment:%b %Y, %H:%M} {moment.tzname() or ''}".rstrip()


def short_time(value: float) -> str:
    """A short time: 12.3 ms, 8.74 s; from a minute on as `duration`."""
    if value >= 60:
        return duration(value)
    if value >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"
