"""Plotly figures as JSON-able values, and text formats of pages. Colours (`ink`) are names of style.css."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from bessemer.report.data import Column, RunData

Block = dict[str, Any]
Figure = dict[str, Any]


Tile = tuple[str, str, str]
"""A key figure at the top of a page: its label, its value, and a value to compare with."""


# --- Figures ----------------------------------------------------------------------------------------------------------


def figure(
    name: str, title: str, traces: Iterable[Block], x: Block, y: Block, *, group: str = "own", note: str = "",
    shapes: Sequence[Block] = (), **layout: Any,
) -> Figure:  # fmt: skip
    """Return a figure as a JSON-able value.

    Args:
        name: Id of the figure.
        title: Title above the figure.
        traces: Curves, points or bars.
        x: Horizontal axis.
        y: Vertical axis.
        group: Figures of `steps` and `tokens` share the page's choice of axis and zoom together; others have separate axes.
        note: Text below the figure.
        shapes: Lines and areas in plotly's terms.
        layout: Other plotly layout keys. `hovermode="closest"` labels the point nearest to the cursor instead of all at its
            x.
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
    """Return a curve or points as a plotly trace.

    Args:
        name: Name in the legend.
        x: Horizontal positions.
        y: Values.
        ink: Colour, a name of style.css.
        hover: Plotly template of the hover label.
        width: Line width.
        dash: Line style.
        marks: Size of the points; 0: none.
        lines: True to join the points.
        symbol: Symbol of the points.
        text: Labels of the points.
        more: Other plotly keys.
    """
    mode = "+".join([*(["lines"] if lines else []), *(["markers"] if marks else [])])
    return {
        "type": "scatter", "mode": mode, "name": name, "x": short(x), "y": short(y), "ink": ink, "hovertemplate": hover,
        "line": {"width": width, "dash": dash}, "marker": {"size": marks, "symbol": symbol},
        **({"text": list(text)} if text else {}), **more,
    }  # fmt: skip


def bars(name: str, x: Sequence[Any], y: Iterable[float], ink: str, hover: str, **more: Any) -> Block:
    return {"type": "bar", "name": name, "x": list(x), "y": short(y), "ink": ink, "hovertemplate": hover, **more}


def heat_map(x: Iterable[float], y: Sequence[str], z: Column, place: str, low: float = 0.0) -> Block:
    """Return a heat map as a plotly trace, of values of which 1 is the usual one.

    Args:
        x: Horizontal positions.
        y: Whole numbers at which the rows are.
        z: The values, (y, x).
        place: Plotly template of the horizontal position in the hover label.
        low: The smallest value with a colour. Values below 1 are blue, and values above it orange.
    """
    high = max(2.0, float(np.percentile(z, 98)))  # single larger values would make all others look equal
    inks = [(0.0, "source-1"), ((1.0 - low) / (high - low), "panel"), (1.0, "accent")][low >= 1.0 :]
    return {
        "type": "heatmap", "x": short(x), "y": [int(one) for one in y], "z": np.round(z, 2).tolist(), "zmin": low, "zmax": high,
        "inks": inks, "hovertemplate": f"{place}<br>block %{{y}}<br>%{{z:.2f}} times the mean<extra></extra>",
    }  # fmt: skip


def whole(numbers: Iterable[Any]) -> Block:
    """Return the plotly settings of an axis of whole numbers: a tick at each multiple of a power of two, at most 12."""
    return {"dtick": 1 << (-(-len(list(numbers)) // 12) - 1).bit_length()}


def hex_values(text: str) -> Column:
    """Return the numbers from 0 to 255 that a text has as two hex digits each; none if it is damaged."""
    try:
        return np.frombuffer(bytes.fromhex(text), dtype=np.uint8).astype(np.float64)
    except ValueError:
        return np.empty(0)


def vertical(x: float, dash: str = "dot") -> Block:
    """Return a vertical line over the full height of a figure, as a plotly shape."""
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "ink": "accent", "dash": dash}


def short(values: Iterable[float]) -> list[float]:
    """Round values to six significant digits, which is more than a screen shows and half the size of full doubles."""
    x = np.asarray(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    with np.errstate(divide="ignore"):
        decimals = 5.0 - np.floor(np.log10(np.abs(x), where=x != 0, out=np.zeros_like(x)))
    up, down = 10.0 ** np.maximum(decimals, 0.0), 10.0 ** np.maximum(-decimals, 0.0)
    rounded: list[float] = (np.round(x * up / down) / up * down).tolist()
    return rounded


def series_style(number: int) -> dict[str, Any]:
    """Return the style of series `number`: six colours that colour-blind readers can distinguish, then dashed ones."""
    return {"ink": f"source-{number % 6 + 1}", "dash": ("solid", "dash", "dot", "dashdot")[number // 6 % 4]}


def source_style(data: RunData, source: str) -> dict[str, Any]:
    return series_style(data.source_names.index(source))


# --- Words ------------------------------------------------------------------------------------------------------------


def known(value: Any, shown: Callable[[Any], str]) -> str:
    """Format a value; a dash for None."""
    return "–" if value is None else shown(value)


def percent(share: float | None) -> str:
    """Format a share as 12.3%; a dash for None."""
    return known(share, lambda value: f"{100 * value:.1f}%" if value >= 0.001 or value == 0 else "<0.1%")


def capitalised(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def words(name: str) -> str:
    """Return a key of metrics.jsonl or of a report as words, for example loss by source."""
    return name.replace("_", " ")


def clock(value: Any) -> str:
    """Format an ISO time in its own time zone."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError:
        return value if isinstance(value, str) else ""
    return f"{moment.day} {moment:%b %Y, %H:%M} {moment.tzname() or ''}".rstrip()
