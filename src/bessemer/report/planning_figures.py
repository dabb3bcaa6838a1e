"""The figures of a plan, from the series of plan/pictures.py, in the form that script.js draws (see figures.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bessemer.report.data import number, table, tables
from bessemer.terminal import amount

Figure = dict[str, Any]
LAWS = {
    "rule": "20 tokens a parameter",
    "approach_1": "Chinchilla 1",
    "approach_2": "Chinchilla 2",
    "approach_3": "Chinchilla 3",
    "replication": "Replication 2024",
}
SPANS = (
    1,
    2,
    5,
    10,
    30,
    60,
    120,
    300,
    600,
    1800,
    3600,
    7200,
    18_000,
    36_000,
    86_400,
    172_800,
    432_000,
    864_000,
)  # seconds
MOST_NATS = 12.0
WORK = {"products": "source-1", "attention": "source-2", "elementwise": "source-3"}


def roofline(of: dict[str, Any]) -> Figure | None:
    """The device's lines and the step's work. x: FLOPs a byte; y: TFLOP/s."""
    points = tables(of.get("points"))
    peak, best, bandwidth = (number(of.get(name)) for name in ("peak", "best", "bandwidth"))
    if not points or peak is None or best is None or bandwidth is None:
        return None
    low = min([point["intensity"] for point in points] + [peak / bandwidth]) / 4
    high = max([point["intensity"] for point in points] + [peak / bandwidth]) * 4
    total = sum(point["seconds"] for point in points)
    traces = [
        _line(
            "peak and bandwidth",
            [low, peak / bandwidth, high],
            [low * bandwidth / 1e12, peak / 1e12, peak / 1e12],
            "train",
        ),
        _line("best large product", [best / bandwidth, high], [best / 1e12, best / 1e12], "reference", dash="dash"),
    ]
    for point in points:
        share = point["seconds"] / total
        name = point["name"].replace("elementwise", "element-wise")
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": f"{name}, {share:.0%} of the computing", "x": [point["intensity"]],
                "y": [point["rate"] / 1e12], "ink": WORK.get(point["name"], "reference"),
                "marker": {"size": 8 + 18 * math.sqrt(share)},
                "hovertemplate": f"{name}<br>%{{x:,.3g}} FLOPs a byte<br>%{{y:,.3g}} TFLOP/s<extra></extra>",
            }
        )  # fmt: skip
    bottom = min(point["rate"] for point in points) / 4e12
    x, y = log_axis("FLOPs for a byte moved", low, high), log_axis("TFLOP/s", bottom, 2.5 * peak / 1e12)
    return _figure(
        "roofline", "Roofline", traces, x, y,
        note=f"{of['device']}, {of['precision']}: work under the slope waits for the memory.",
    )  # fmt: skip


def by_devices(of: dict[str, Any]) -> list[Figure]:
    """Time, and money (or device-hours where there is no price), against the number of devices."""
    here = table(of.get("here"))
    rows = [row for row in tables(of.get("rows")) if number(row.get("days")) is not None]
    if len(rows) < 2 or not here:
        return []
    counts = [row["devices"] for row in rows]
    within = {"low": min(counts) / 1.3, "high": max(counts) * 1.3}
    days = [value for row in [*rows, here] for value in (row["days"], row["days_with_failures"])]
    days += [here["days"] * here["devices"] / count for count in counts]
    layouts = [row["layout"] for row in rows]
    time = [
        _line(
            "in proportion",
            counts,
            [here["days"] * here["devices"] / count for count in counts],
            "reference",
            dash="dash",
        ),
        _line(
            "without failures", counts, [row["days"] for row in rows], "train", markers=True, text=layouts, unit="days"
        ),
        _line(
            "with failures", counts, [row["days_with_failures"] for row in rows], "source-1", markers=True, unit="days"
        ),
        _mark("this plan", here["devices"], here["days_with_failures"], unit="days"),
    ]
    axis = log_axis("devices", **within, shown=lambda value: f"{value:,.0f}", values=counts)
    priced = here.get("cost") is not None
    scale, unit, key = (1e6, "million dollars", "cost") if priced else (1e3, "thousand device-hours", "device_hours")
    if priced and here["cost"] < 1e6:
        scale, unit = (1e3, "thousand dollars") if here["cost"] >= 1e3 else (1.0, "dollars")
    if not priced and here["device_hours"] < 1e4:
        scale, unit = 1.0, "device-hours"
    money = [
        _line(
            "with failures",
            counts,
            [row[key] / scale for row in rows],
            "source-1",
            markers=True,
            text=layouts,
            unit=unit,
        ),
        _mark("this plan", here["devices"], here[key] / scale, unit=unit),
    ]
    return [
        _figure("devices-time", "Time against devices", time, axis, log_axis("days", min(days) / 1.3, max(days) * 1.3)),
        _figure(
            "devices-money", "Money against devices" if priced else "Device-hours against devices", money, axis,
            {"title": {"text": unit}, "rangemode": "tozero"},
        ),
    ]  # fmt: skip


def loss_surface(of: dict[str, Any]) -> Figure | None:
    """Lines of equal loss over parameters and tokens, lines of equal compute, the laws' optimal lines, and the plan."""
    across, up = of.get("parameters"), of.get("tokens")
    here, loss = of.get("here"), of.get("loss")
    if not (isinstance(across, list) and isinstance(up, list) and isinstance(here, list) and isinstance(loss, list)):
        return None
    if len(across) < 2 or len(up) < 2 or len(here) != 2:
        return None
    # More than a guess among all words loses (ln 128,256 = 11.8) is what the law says far below where it was fitted: not drawn.
    every = [value for row in loss for value in row]
    low, high = min(every), min(max(every), MOST_NATS)
    step = _round_step((high - low) / 12) if high > low else 1.0
    x, y = log_axis("parameters", across[0], across[-1], amount), log_axis("training tokens", up[0], up[-1], amount)
    contours: dict[str, Any] = {
        "type": "contour", "name": "loss", "x": across, "y": up, "z": loss, "ink": "reference", "line": {"width": 1},
        "contours": {
            "coloring": "none", "showlabels": True, "labelfont": {"size": 11},
            "start": step * math.ceil(low / step), "end": high, "size": step,
        },
        "autocontour": False, "showscale": False,
        "hovertemplate": "%{x:.3s} parameters, %{y:.3s} tokens<br>loss %{z:.3f} nats a token<extra></extra>",
    }  # fmt: skip
    traces, notes = [contours], []
    for row in tables(of.get("budgets")):
        line = _line("equal compute", row["parameters"], row["tokens"], "rule", dash="dot", width=1.25)
        traces.append({**line, "showlegend": len(traces) == 1, "legendgroup": "compute", "hoverinfo": "skip"})
        points = zip(row["parameters"], row["tokens"], strict=True)
        inside = [(n, d) for n, d in points if _inside(n, across, 0.9) and d < up[-1] * 0.7]
        if len(inside) > 3:  # named near its lower end, where the other lines are far
            n, d = inside[-1] if inside[-1][1] > up[0] * 1.3 else inside[-2]
            notes.append(
                {
                    "x": math.log10(n), "y": math.log10(d), "text": f"{row['flops']:.1e}".replace("e+", "e"), "showarrow": False,
                    "font": {"size": 10.5}, "xanchor": "left", "yanchor": "bottom",
                }
            )  # fmt: skip
    for index, (name, row) in enumerate(table(of.get("optima")).items()):
        kept = [(n, d) for n, d in zip(row["parameters"], row["tokens"], strict=True) if up[0] <= d <= up[-1]]
        if len(kept) > 1:
            line = _line(
                LAWS.get(name, row["name"]),
                [n for n, _ in kept],
                [d for _, d in kept],
                f"source-{index % 6 + 1}",
                width=1.75,
            )
            traces.append({**line, "hovertemplate": f"{row['name']}<extra></extra>"})
    near = tables(of.get("known"))
    if near:
        traces.append(
            {
                "type": "scatter", "mode": "markers", "name": "known models", "x": [one["parameters"] for one in near],
                "y": [one["tokens"] for one in near], "text": [one["name"] for one in near], "ink": "soft",
                "marker": {"size": 5}, "hovertemplate": "%{text}<br>%{x:.3s} parameters, %{y:.3s} tokens<extra></extra>",
            }
        )  # fmt: skip
    traces.append(_mark("this run", *here))
    figure = _figure(
        "surface", "Predicted loss", traces, x, y, note=f"Nats a token, by {of.get('law')}; dotted: 6 N D of so many FLOPs.",
    )  # fmt: skip
    figure["layout"]["annotations"] = notes
    return figure


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 by powers of ten that is not less."""
    size = 10.0 ** math.floor(math.log10(least))
    return next(size * one for one in (1, 2, 5, 10) if size * one >= least * 0.999)


def _inside(value: float, axis: Sequence[float], share: float) -> bool:
    """Within the first part of a logarithmic axis."""
    return math.log(value / axis[0]) <= share * math.log(axis[-1] / axis[0])


def checkpoints(of: dict[str, Any]) -> Figure | None:
    """The share of the time that is lost, against the interval between checkpoints."""
    chosen, intervals, waste = table(of.get("chosen")), of.get("intervals"), of.get("waste")
    if not chosen or not isinstance(intervals, list) or not isinstance(waste, list) or len(intervals) < 2:
        return None
    ticks = [one for one in SPANS if intervals[0] <= one <= intervals[-1]]
    ticks = ticks[:: max(-(-len(ticks) // 8), 1)]
    x = log_axis("interval between checkpoints", intervals[0], intervals[-1], _span, ticks or None)
    lost = [100 * share for share in waste]
    traces = [
        {**_line("lost", intervals, lost, "train"), "hovertemplate": "%{y:.2f}%<extra></extra>"},
        _mark("chosen", chosen["interval"], 100 * chosen["waste"], unit="% lost"),
    ]
    top = min(max(max(lost), 110 * chosen["waste"]), 8 * max(100 * chosen["waste"], min(lost)))
    y = {"title": {"text": "share of the time lost"}, "ticksuffix": "%", "range": [0, top]}
    return _figure("checkpoints", "Lost time against the checkpoint interval", traces, x, y)


def layouts(of: dict[str, Any]) -> Figure | None:
    """Speed against memory of the layouts that fit."""
    rows = tables(of.get("rows"))
    if len(rows) < 2:
        return None

    def points(chosen: list[dict[str, Any]], name: str, ink: str, **more: Any) -> dict[str, Any]:
        return {
            "type": "scatter", "name": name, "x": [row["memory"] / 1e9 for row in chosen],
            "y": [row["tokens_per_second_per_device"] for row in chosen], "text": [row["layout"] for row in chosen], "ink": ink,
            "hovertemplate": "%{y:,.0f} tokens/s, %{x:.1f} GB<br>%{text}<extra></extra>", **more,
        }  # fmt: skip

    front = sorted((row for row in rows if row["front"]), key=lambda row: row["memory"])
    rest = [row for row in rows if not row["front"]]
    traces = [
        points(rest, "others that fit", "raw", mode="markers", marker={"size": 5}),
        points(
            front,
            "fastest for their memory",
            "source-1",
            mode="lines+markers",
            marker={"size": 7},
            line={"width": 1.5, "shape": "hv"},
        ),
    ]
    own = [row for row in rows if row["own"]][:1]
    if own:
        traces.append(
            {**points(own, "this plan", "accent", mode="markers"), "marker": {"size": 12, "symbol": "diamond"}}
        )
    capacity = of["capacity"] / 1e9
    edge = {
        "type": "line",
        "x0": capacity,
        "x1": capacity,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "ink": "accent",
        "dash": "dash",
    }
    y = {"title": {"text": "tokens/s a device"}, "rangemode": "tozero", "tickformat": ",.3~s"}
    x = {"title": {"text": "GB on the fullest device"}, "range": [0, 1.04 * capacity]}
    return _figure("layouts", "Layouts that fit", traces, x, y, [edge], "Dashed: the device's memory.")


def log_axis(
    title: str, low: float, high: float, shown: Callable[[float], str] | None = None, values: Sequence[float] | None = None
) -> dict[str, Any]:  # fmt: skip
    """A logarithmic axis with ticks at round numbers, as many as one reads. values: ticks of one's own."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = math.log10(high / low)
    steps = (1, 2, 5) if span <= 2.3 else (1, 3) if span <= 3.2 else (1,)
    ticks = values or [step * 10.0**decade for decade in decades[:: 1 if span <= 7 else 2] for step in steps]
    ticks = [one for one in ticks if low <= one <= high]
    text = shown or (lambda value: f"{value:,.10g}" if 1e-4 <= value < 1e6 else f"{value:.0e}")
    return {
        "title": {"text": title}, "type": "log", "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks, "ticktext": [text(one) for one in ticks],
    }  # fmt: skip


def _span(seconds: float) -> str:
    """A round time: 30 s, 5 min, 2 h, 1 d."""
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def _line(
    name: str, x: Sequence[float], y: Sequence[float], ink: str, *, dash: str = "solid", width: float = 1.75,
    markers: bool = False, text: Sequence[str] | None = None, unit: str = "",
) -> dict[str, Any]:  # fmt: skip
    told = f"{name}<br>%{{x:,.6~g}}: %{{y:,.4~g}} {unit}" + ("<br>%{text}" if text else "")
    return {
        "type": "scatter", "mode": "lines+markers" if markers else "lines", "name": name, "x": list(x), "y": list(y), "ink": ink,
        "line": {"width": width, "dash": dash}, "marker": {"size": 6}, "hovertemplate": f"{told}<extra></extra>",
        **({"text": list(text)} if text else {}),
    }  # fmt: skip


def _mark(name: str, x: float, y: float, unit: str = "") -> dict[str, Any]:
    """The plan's own place."""
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [x], "y": [y], "ink": "accent",
        "marker": {"size": 12, "symbol": "diamond"}, "hovertemplate": f"{name}: %{{y:,.4~g}} {unit}<extra></extra>",
        "cliponaxis": False,
    }  # fmt: skip


def _figure(
    name: str, title: str, traces: list[dict[str, Any]], x: dict[str, Any], y: dict[str, Any],
    shapes: Sequence[dict[str, Any]] = (), note: str = "",
) -> Figure:  # fmt: skip
    return {
        "id": name, "title": title, "group": "plan", "traces": traces, "shapes": list(shapes), "note": note,
        "layout": {"xaxis": x, "yaxis": y, "hovermode": "closest"},
    }  # fmt: skip
