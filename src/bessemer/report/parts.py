"""Figures in plotly's terms, as plain JSON-able values, and how pages write numbers. Colours are names of style.css, as `ink`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from bessemer.report.data import RunData

Block = dict[str, Any]
Figure = dict[str, Any]


Tile = tuple[str, str, str]
"""A key figure at the top of a page: its label, its value, what to compare it with."""


# --- Figures ----------------------------------------------------------------------------------------------------------


def figure(
    name: str, title: str, traces: Iterable[Block], x: Block, y: Block, *, group: str = "own", note: str = "",
    shapes: Sequence[Block] = (), **layout: Any,
) -> Figure:  # fmt: skip
    """Return a figure.

    group: `steps` and `tokens` share the page's choice of axis and zoom together; others have separate axes. layout: as in
    plotly; `hovermode="closest"` names the point nearest to the cursor, where others name all at its x.
    """
    return {
        "id": name, "title": title, "group": group, "traces": list(traces), "shapes": list(shapes), "note": note,
        "layout": {"xaxis": x, "yaxis": y, **layout},
    }  # fmt: skip


def axis(title: str, **more: Any) -> Block:
    return {"title": {"text": title}, **more}


def trace(
    name: str, x: Iterable[float], y: Iterable[float], ink: str, *, hover: str = "%{y:.4f}", width: float = 1.75,
    dash: str = "solid", marks: int = 0, lines: bool = True, symbol: str = "circle", text: Sequence[str] = (), **more: Any,
) -> Block:  # fmt: skip
    """Return a curve, or points of the size `marks` with the labels `text`, joined where `lines` is true."""
    mode = "+".join([*(["lines"] if lines else []), *(["markers"] if marks else [])])
    return {
        "type": "scatter", "mode": mode, "name": name, "x": short(x), "y": short(y), "ink": ink, "hovertemplate": hover,
        "line": {"width": width, "dash": dash}, "marker": {"size": marks, "symbol": symbol},
        **({"text": list(text)} if text else {}), **more,
    }  # fmt: skip


def bars(name: str, x: Sequence[Any], y: Iterable[float], ink: str, hover: str, **more: Any) -> Block:
    return {"type": "bar", "name": name, "x": list(x), "y": short(y), "ink": ink, "hovertemplate": hover, **more}


def vertical(x: float, dash: str = "dot") -> Block:
    """Return a line from the bottom to the top of a figure, as a shape."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "ink": "accent", "dash": dash}


def short(values: Iterable[float]) -> list[float]:
    """Round to six significant digits: more than a screen shows, and half the size of full doubles."""
    x = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    with np.errstate(divide="ignore"):
        decimals = 5.0 - np.floor(np.log10(np.abs(x), where=x != 0, out=np.zeros_like(x)))
    up, down = 10.0 ** np.maximum(decimals, 0.0), 10.0 ** np.maximum(-decimals, 0.0)
    rounded: list[float] = (np.round(x * up / down) / up * down).tolist()
    return rounded


def series_style(number: int) -> dict[str, Any]:
    """Return the style of the n-th series: six colours that colour-blind readers can tell apart, the next six dashed."""
    return {"ink": f"source-{number % 6 + 1}", "dash": ("solid", "dash", "dot", "dashdot")[number // 6 % 4]}


def source_style(data: RunData, source: str) -> dict[str, Any]:
    return series_style(data.source_names.index(source))


# --- Words ------------------------------------------------------------------------------------------------------------


def known(value: Any, shown: Callable[[Any], str]) -> str:
    """Format a value, or return a dash for None."""
    return "–" if value is None else shown(value)


def percent(share: float | None) -> str:
    """Format a share as 12.3%, or return a dash for None."""
    return known(share, lambda value: f"{100 * value:.1f}%" if value >= 0.001 or value == 0 else "<0.1%")


def capitalised(sentence: str) -> str:
    """Change the first letter to upper case."""
    return sentence[:1].upper() + sentence[1:]


def words(name: str) -> str:
    """Return a key as words."""
    return name.replace("_", " ")


def clock(value: Any) -> str:
    """Format an ISO time, in the zone it was written in."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return value if isinstance(value, str) else ""
    return f"{moment.day} {moment:%b %Y, %H:%M} {moment.tzname() or ''}".rstrip()
