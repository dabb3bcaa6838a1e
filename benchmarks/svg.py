"""Figures of the report as SVG for the pictures of the documentation: curves, points, bands, axes and a legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import numpy as np

from bessemer.common.console import amount
from bessemer.report.curves import thin
from bessemer.report.parts import Block, Figure

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 34, 42
DASHES = {"dash": "6 4", "dot": "2 3", "dashdot": "6 3 2 3"}
SYMBOL_SIZE = 3.0
MAX_POINTS = 400  # per curve
# The colours of the light theme (style.css).
INKS = {
    "paper": "#fdfdfc", "panel": "#f4f5f5", "ink": "#15191d", "soft": "#56616b", "line": "#e4e7ea", "rule": "#b8c0c7",
    "accent": "#b3430a", "good": "#00734f", "lost": "#c98a63", "raw": "#bcc4cb", "train": "#2b333a", "reference": "#7a858f",
    "source-1": "#0072b2", "source-2": "#d98200", "source-3": "#009e73", "source-4": "#b8578f", "source-5": "#45a3dc",
    "source-6": "#8a7a1f",
}  # fmt: skip

Points = tuple[Sequence[float], Sequence[float]]


def svg(figure: Figure, *, smoothing: int = 0) -> str:
    """Return the figure as SVG, or "" if it has no curves. `smoothing` is the level of a smoothed curve."""
    traces = [one for one in figure["traces"] if one["type"] == "scatter"]
    drawn = [(one, _points(one, smoothing)) for one in traces]
    drawn = [(one, points) for one, points in drawn if len(points[0]) and not isinstance(points[0][0], str)]
    is_log = figure["layout"]["yaxis"].get("type") == "log"
    ys = [y for _, points in drawn for y in points[1] if y > 0 or not is_log]
    if not ys:
        return ""
    xs = [x for _, points in drawn for x in points[0]]
    from_zero = figure["layout"]["yaxis"].get("rangemode") == "tozero"
    bottom, top = (0.0 if from_zero else min(ys)), max(ys)
    is_wide = figure["layout"]["xaxis"].get("type") == "log" and min(xs) > 0
    left, across = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, is_log=is_wide)
    up_ticks, up = _scale(bottom, top, HEIGHT - BOTTOM, TOP, is_log=is_log)

    def ink(name: str) -> str:
        return INKS.get(name, INKS["train"])

    x_title, y_title = (figure["layout"][axis]["title"]["text"] for axis in ("xaxis", "yaxis"))
    parts = [_open_svg(f"{figure['title']}, {y_title} over {x_title}", HEIGHT)]
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{ink("paper")}"/>')
    suffix = figure["layout"]["yaxis"].get("ticksuffix", "")
    for value in up_ticks:
        y = up(value)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{ink("line")}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{_number(value)}{suffix}", ink("soft"), "end"))
    for value in left:
        x, is_last = across(value), across(value) > WIDTH - RIGHT - 20
        parts.append(_text(x, HEIGHT - BOTTOM + 18, _number(value), ink("soft"), "end" if is_last else "middle"))
    parts.append(f'<path d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}" stroke="{ink("rule")}"/>')
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_title, ink("soft"), "middle"))
    parts.append(_text(14, (TOP + HEIGHT - BOTTOM) / 2, y_title, ink("soft"), "middle", turned=True))
    for shape in figure["shapes"]:
        if shape["x0"] == shape["x1"] and min(xs) <= shape["x0"] <= max(xs):
            x = across(shape["x0"])
            style = f'stroke="{ink(shape["ink"])}" stroke-dasharray="{DASHES["dot"]}"'
            parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" {style}/>')
    below: Points | None = None
    for trace, points in drawn:
        kept = [(x, y) for x, y in zip(*points, strict=True) if y > 0 or not is_log]
        places = [f"{across(x):.1f} {up(y):.1f}" for x, y in kept]
        if trace.get("fill") == "tonexty" and below is not None:
            edge = [f"{across(x):.1f} {up(y):.1f}" for x, y in zip(*below, strict=True)]
            outline = "L".join([*edge, *reversed(places)])
            parts.append(f'<path d="M{outline}Z" fill="{ink(trace.get("fillink", "line"))}"/>')
        below = points
        if "lines" in trace["mode"] and len(places) > 1:
            parts.append(
                f'<path d="M{"L".join(places)}" fill="none" stroke="{ink(trace["ink"])}" '
                f'stroke-width="{trace["line"]["width"]}" stroke-linejoin="round"{_dashed(trace)}/>'
            )
        if "markers" in trace["mode"] or len(places) == 1:
            marks = "".join(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="{SYMBOL_SIZE}"/>' for x, y in kept)
            parts.append(f'<g fill="{ink(trace["ink"])}">{marks}</g>')
    parts += _legend([trace for trace, _ in drawn if trace.get("showlegend", True)], ink)
    return "".join([*parts, "</svg>"])


def _open_svg(label: str, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" font-size="12" '
        f'font-family="system-ui, sans-serif" aria-label="{escape(label)}">'
    )


def _points(trace: Block, smoothing: int) -> Points:
    levels = trace.get("levels")
    shown = levels[min(smoothing, len(levels) - 1)] if levels else trace
    if len(shown["x"]) <= MAX_POINTS:
        return shown["x"], shown["y"]
    x, y = thin(np.array(shown["x"]), np.array(shown["y"]), MAX_POINTS)
    return x.tolist(), y.tolist()


def _dashed(trace: Block) -> str:
    dash = DASHES.get(trace["line"].get("dash", ""), "")
    return f' stroke-dasharray="{dash}"' if dash else ""


def _scale(
    low: float, high: float, start: float, end: float, *, is_log: bool = False
) -> tuple[list[float], Callable[[float], float]]:
    """Return round numbers between two values, and a function from a value to its position."""
    form: Callable[[float], float] = math.log10 if is_log else float
    if high <= low:
        low, high = (low / 2, high * 2) if is_log else (low - 0.5, high + 0.5)
    first, last = form(low), form(high)
    slack = 0.0 if start < end else 0.04 * (last - first)  # room above the highest point of a curve
    last += slack

    def place(value: float) -> float:
        return start + (form(value) - first) / (last - first) * (end - start)

    if is_log and last - first >= 1.5:
        return [10.0**power for power in range(math.ceil(first), math.floor(last) + 1)], place
    span = 10.0**last - low if is_log else last - first
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if span / (unit * factor) <= 6)
    begin = math.ceil((low if is_log else first) / step)
    end_value = 10.0**last if is_log else last
    return [step * number for number in range(begin, begin + 12) if step * number <= end_value], place


def _number(value: float) -> str:
    return amount(value) if abs(value) >= 10_000 else f"{value:.4g}"


def _text(x: float, y: float, text: Any, fill: str, anchor: str, *, turned: bool = False) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" text-anchor="{anchor}"{turn}>{escape(str(text))}</text>'


def _legend(traces: Sequence[Block], ink: Callable[[str], str]) -> list[str]:
    """Return the names of the curves in a row, as many as fit."""
    parts: list[str] = []
    x = float(LEFT)
    if len(traces) < 2:
        return parts
    for trace in traces:
        width = 30 + 6.6 * len(trace["name"])
        if x + width > WIDTH - RIGHT:
            break
        parts.append(f'<path d="M{x:.0f} 16h18" stroke="{ink(trace["ink"])}" stroke-width="2"{_dashed(trace)}/>')
        parts.append(_text(x + 23, 20, trace["name"], ink("ink"), "start"))
        x += width
    return parts
