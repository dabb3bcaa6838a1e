"""The figures of a plan, from the series of plan/pictures.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bessemer.report import parts
from bessemer.report.data import as_object, as_objects
from bessemer.report.parts import Block, Figure
from bessemer.terminal import amount

LAWS = {
    "rule": "20 tokens a parameter", "approach_1": "Chinchilla 1", "approach_2": "Chinchilla 2", "approach_3": "Chinchilla 3",
    "replication": "Replication 2024",
}  # fmt: skip
SPANS = (
    1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 18_000, 36_000, 86_400, 172_800, 432_000, 864_000,
)  # seconds  # fmt: skip
MAX_NATS = 12.0  # more than a guess among all words loses (ln 128,256 = 11.8): the law far below where it was fitted


def loss_surface(of: dict[str, Any]) -> Figure | None:
    """Lines of equal loss over parameters and tokens, lines of equal compute, the laws' optimal lines, and the plan."""
    across, up, own, loss = (of.get(key) for key in ("parameters", "tokens", "here", "loss"))
    if not (isinstance(across, list) and isinstance(up, list) and isinstance(own, list) and isinstance(loss, list)):
        return None
    if len(across) < 2 or len(up) < 2 or len(own) != 2:
        return None
    every = [value for row in loss for value in row]
    low, high = min(every), min(max(every), MAX_NATS)
    step = _round_step((high - low) / 12) if high > low else 1.0
    traces: list[Block] = [{
        "type": "contour", "name": "loss", "x": across, "y": up, "z": loss, "ink": "reference", "line": {"width": 1},
        "contours": {"coloring": "none", "showlabels": True, "labelfont": {"size": 11}, "start": step * math.ceil(low / step),
                     "end": high, "size": step},
        "autocontour": False, "showscale": False,
        "hovertemplate": "%{x:.3s} parameters, %{y:.3s} tokens<br>loss %{z:.3f} nats a token<extra></extra>",
    }]  # fmt: skip
    compute, labels = _equal_compute(as_objects(of.get("budgets")), across, up)
    traces += compute
    for index, (name, row) in enumerate(as_object(of.get("optima")).items()):
        kept = [(n, d) for n, d in zip(row["parameters"], row["tokens"], strict=True) if up[0] <= d <= up[-1]]
        if len(kept) > 1:
            sizes, tokens = zip(*kept, strict=True)
            made = _line(LAWS.get(name, row["name"]), sizes, tokens, parts.series_ink(index))
            traces.append({**made, "hovertemplate": f"{row['name']}<extra></extra>"})
    near = as_objects(of.get("known"))
    if near:
        hover = "%{text}<br>%{x:.3s} parameters, %{y:.3s} tokens<extra></extra>"
        traces.append(parts.trace("known models", [one["parameters"] for one in near], [one["tokens"] for one in near], "soft",
                                  lines=False, marks=5, hover=hover, text=[one["name"] for one in near]))  # fmt: skip
    traces.append(_mark("this run", *own))
    x, y = log_axis("parameters", across[0], across[-1], amount), log_axis("training tokens", up[0], up[-1], amount)
    note = f"Nats a token, by {of.get('law')}; dotted: equal compute, 6 N D."
    return _figure("surface", "Predicted loss", traces, x, y, note=note, annotations=labels)


def _equal_compute(
    budgets: list[dict[str, Any]], across: list[float], up: list[float]
) -> tuple[list[Block], list[Block]]:
    """Lines of equal compute, and their labels near the lower ends, where other lines are far."""
    traces: list[Block] = []
    labels = []
    for row in budgets:
        made = _line("equal compute", row["parameters"], row["tokens"], "rule", dash="dot", width=1.25)
        traces.append({**made, "showlegend": not traces, "legendgroup": "compute", "hoverinfo": "skip"})
        end = 0.9 * math.log(across[-1] / across[0])
        inside = [
            (n, d) for n, d in zip(row["parameters"], row["tokens"], strict=True)
            if math.log(n / across[0]) <= end and d < up[-1] * 0.7
        ]  # fmt: skip
        if len(inside) > 3:
            n, d = inside[-1] if inside[-1][1] > up[0] * 1.3 else inside[-2]
            text = f"{row['flops']:.1e}".replace("e+", "e")
            labels.append({"x": math.log10(n), "y": math.log10(d), "text": text, "showarrow": False, "font": {"size": 10.5},
                           "xanchor": "left", "yanchor": "bottom"})  # fmt: skip
    return traces, labels


def checkpoints(of: dict[str, Any]) -> Figure:
    """The share of the time that is lost, against the interval between checkpoints."""
    chosen, intervals, waste = of["chosen"], of["intervals"], of["waste"]
    ticks = [one for one in SPANS if intervals[0] <= one <= intervals[-1]]
    ticks = ticks[:: max(-(-len(ticks) // 8), 1)]
    x = log_axis("interval between checkpoints", intervals[0], intervals[-1], _span, ticks or None)
    lost, own = [100 * share for share in waste], 100 * chosen["waste"]
    traces = [
        parts.trace("lost", intervals, lost, "train", hover="%{y:.2f}%<extra></extra>"),
        _mark("chosen", chosen["interval"], own, unit="% lost"),
    ]
    top = min(max(max(lost), 1.1 * own), 8 * max(own, min(lost)))
    y = parts.axis("share of the time lost", ticksuffix="%", range=[0, top])
    return _figure("checkpoints", "Lost time against the checkpoint interval", traces, x, y)


def layouts(of: dict[str, Any]) -> Figure | None:
    """Speed against memory of the layouts that fit."""
    rows = as_objects(of.get("rows"))
    if len(rows) < 2:
        return None

    def points(chosen: list[dict[str, Any]], name: str, ink: str, **style: Any) -> Block:
        x, y = [row["memory"] / 1e9 for row in chosen], [row["tokens_per_second_per_device"] for row in chosen]
        hover = "%{y:,.0f} tokens/s, %{x:.1f} GB<br>%{text}<extra></extra>"
        return parts.trace(name, x, y, ink, hover=hover, text=[row["layout"] for row in chosen], **style)

    front = sorted((row for row in rows if row["front"]), key=lambda row: row["memory"])
    others = points([row for row in rows if not row["front"]], "others that fit", "raw", lines=False, marks=5)
    best = points(front, "fastest for their memory", "source-1", marks=7)
    traces = [others, {**best, "line": {"width": 1.5, "shape": "hv"}}]
    own = [row for row in rows if row["own"]][:1]
    if own:
        traces.append(points(own, "this plan", "accent", lines=False, marks=12, symbol="diamond"))
    capacity = of["capacity"] / 1e9
    x = parts.axis("GB on the fullest device", range=[0, 1.04 * capacity])
    y = parts.axis("tokens/s a device", rangemode="tozero", tickformat=",.3~s")
    shapes = [parts.vertical(capacity, "dash")]
    return _figure("layouts", "Layouts that fit", traces, x, y, shapes=shapes, note="Dashed: the device's memory.")


def log_axis(
    title: str,
    low: float,
    high: float,
    shown: Callable[[float], str] | None = None,
    values: Sequence[float] | None = None,
) -> Block:
    """A logarithmic axis with ticks at a few round numbers. values: ticks of one's own."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = math.log10(high / low)
    steps = (1, 2, 5) if span <= 2.3 else (1, 3) if span <= 3.2 else (1,)
    ticks = values or [step * 10.0**decade for decade in decades[:: 1 if span <= 7 else 2] for step in steps]
    ticks = [one for one in ticks if low <= one <= high]
    text = shown or (lambda value: f"{value:,.10g}" if 1e-4 <= value < 1e6 else f"{value:.0e}")
    return parts.axis(title, type="log", range=[math.log10(low), math.log10(high)], tickvals=ticks,
                      ticktext=[text(one) for one in ticks])  # fmt: skip


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 by powers of ten that is not less."""
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * one for one in (1, 2, 5, 10) if size * one >= least * 0.999)


def _span(seconds: float) -> str:
    """A round time: 30 s, 5 min, 2 h, 1 d."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def _line(name: str, x: Sequence[float], y: Sequence[float], ink: str, **style: Any) -> Block:
    return parts.trace(name, x, y, ink, hover=f"{name}<br>%{{x:,.6~g}}: %{{y:,.4~g}}<extra></extra>", **style)


def _mark(name: str, x: float, y: float, unit: str = "") -> Block:
    """The plan's own place."""
    made = parts.trace(name, [x], [y], "accent", lines=False, marks=12, symbol="diamond", cliponaxis=False,
                       hover=f"{name}: %{{y:,.4~g}} {unit}<extra></extra>")  # fmt: skip
    return {**made, "x": [x], "y": [y]}


def _figure(name: str, title: str, traces: list[Block], x: Block, y: Block, **more: Any) -> Figure:
    return parts.figure(name, title, traces, x, y, hovermode="closest", **more)
