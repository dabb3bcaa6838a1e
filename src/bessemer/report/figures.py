"""The curves of a run as plain JSON figures.

A figure here holds what is shown: traces, axes, units. How it looks (colours of the theme, fonts, grid) is added by
script.js, which redraws when the theme changes; a trace names its colour by an `ink` that style.css defines.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from bessemer.report.data import Column, RunData, number, table

POINTS = 2000  # a curve keeps at most so many points
SMOOTH_POINTS = 600  # a smoothed curve has no spikes to keep
HALF_LIVES = (0.0, 0.003, 0.01, 0.03, 0.1)  # of the smoothing, as shares of the curve; the first is no smoothing
MARKED_INCIDENTS = 50

Figure = dict[str, Any]


def build(data: RunData) -> list[Figure]:
    """All figures for which the run has data, in the order of the page."""
    figures = [
        _loss(data),
        _bits_per_byte(data),
        _loss_by_source(data),
        _learning_rate(data),
        _grad_norm(data),
        _throughput(data),
        _data_wait(data),
        _memory(data),
        _utilisation(data),
    ]
    return [figure for figure in figures if figure is not None]


def thin(x: Column, y: Column, limit: int = POINTS) -> tuple[Column, Column]:
    """At most `limit` points of a curve: the ends, and the lowest and highest point of each of equal stretches.

    A run of a million steps would make a page of a hundred megabytes, and a screen is some 2,000 points wide. Averages or
    every n-th point would hide the one spike one looks for; the extremes of each stretch draw the same picture as all
    points would. Points that are not finite are left out.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= limit:
        return x, y
    edges = np.linspace(1, len(x) - 1, max((limit - 2) // 2, 1) + 1).astype(int)
    keep = {0, len(x) - 1}
    for low, high in itertools.pairwise(edges):
        keep.add(int(low + np.argmin(y[low:high])))
        keep.add(int(low + np.argmax(y[low:high])))
    index = np.array(sorted(keep))
    return x[index], y[index]


def smooth(y: Column, half_life: float) -> Column:
    """Exponential moving average whose weights halve every `half_life` points, corrected for its start as in Adam.

    Taken over all points before any are left out: thinned points are extremes and would bias the average.
    """
    keep = 0.5 ** (1.0 / half_life)
    average, weight = 0.0, 0.0
    smoothed = np.empty_like(y)
    for index, value in enumerate(y):
        if np.isfinite(value):
            average = keep * average + (1.0 - keep) * value
            weight = keep * weight + (1.0 - keep)
        smoothed[index] = average / weight if weight else np.nan
    return smoothed


def smoothing_labels(points: int) -> list[str]:
    """What each position of the smoothing control means."""
    lives = [_half_life(share, points) for share in HALF_LIVES]
    return ["off" if not life else f"half-life {life:,.0f} log line{'s' if life > 1 else ''}" for life in lives]


def _half_life(share: float, points: int) -> float:
    return float(max(round(share * points), 1)) if share else 0.0


def _loss(data: RunData) -> Figure | None:
    train, validation = data.train, data.validation
    loss, held_out = train.column("loss"), validation.column("loss")
    traces = []
    if loss is not None:
        traces.append(_trace("train, each step", train.step, loss, "raw", ".4f", width=1))
        traces.append({**_smoothed("train, smoothed", train.step, loss, "train"), "line": {"width": 2}})
    if held_out is not None:
        traces.append(_trace("held out", validation.step, held_out, "text", ".4f", markers=True))
    shapes = [
        {"type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper", "ink": "accent", "dash": "dot"}
        for incident in data.incidents[:MARKED_INCIDENTS]
        if (step := number(incident.get("step"))) is not None
    ]
    note = "Dotted lines: incidents." if shapes else ""
    return _figure("loss", "Loss", "nats per token", traces, shapes=shapes, note=note)


def _bits_per_byte(data: RunData) -> Figure | None:
    validation = data.validation
    bits, tokens = validation.column("bits_per_byte"), validation.column("tokens")
    if bits is None:
        return None
    x = validation.step if tokens is None else tokens
    traces = [_trace("held out", x, bits, "text", ".4f", markers=True)]
    names = data.source_names
    if len(validation.by_source) > 1:
        for name, values in validation.by_source.items():
            traces.append({**_source(name, names, x, values), "line": {"width": 1.25, **_dash(name, names)}})
    ngram = number(table(data.evaluation.get("ngram")).get("bits_per_byte"))
    if ngram is not None:
        order = number(table(data.evaluation.get("ngram")).get("order")) or 5
        label = f"byte {order:.0f}-gram"
        traces.append(_level(label, x, ngram, ".4f"))
    figure = _figure("bits", "Bits per byte, held-out text", "bits per byte", traces)
    if figure and tokens is not None:
        figure["group"] = "tokens"
        figure["layout"]["xaxis"] = {"title": {"text": "training tokens"}, "tickformat": "~s", "hoverformat": ".4s"}
    return figure


def _loss_by_source(data: RunData) -> Figure | None:
    train, names = data.train, data.source_names
    if len(train.by_source) < 2:
        return None
    traces = []
    for name, values in train.by_source.items():
        ink = _source(name, names, train.step[:0], values[:0])
        trace = _smoothed(name, train.step, values, ink["ink"])
        traces.append({**trace, "line": {"width": 1.5, **_dash(name, names)}})
    return _figure("sources", "Training loss by source", "nats per token", traces, note="Smoothed as above.")


def _learning_rate(data: RunData) -> Figure | None:
    rate = data.train.column("learning_rate")
    traces = [_trace("learning rate", data.train.step, rate, "train", ".3e")] if rate is not None else []
    yaxis = {"tickformat": "~e", "rangemode": "tozero"}
    return _figure("rate", "Learning rate", "peak of the schedule", traces, yaxis=yaxis)


def _grad_norm(data: RunData) -> Figure | None:
    norm = data.train.column("grad_norm")
    if norm is None:
        return None
    traces = [_trace("gradient norm", data.train.step, norm, "train", ".3f", width=1.25)]
    clip = number(table(table(data.recipe.get("train")).get("optimizer")).get("clip_norm"))
    if clip is not None:
        traces.append(_level("clipped above", data.train.step, clip, "g"))
    positive = norm[np.isfinite(norm) & (norm > 0)]
    wide = len(positive) and positive.max() / positive.min() > 50
    return _figure(
        "grad", "Gradient norm", "global L2 norm", traces, yaxis={"type": "log"} if wide else {"rangemode": "tozero"}
    )


def _throughput(data: RunData) -> Figure | None:
    rate = data.train.column("tokens_per_second")
    if rate is None:
        return None
    traces = [_trace("measured", data.train.step, rate, "train", ".4s", width=1.25)]
    planned = number(data.plan.get("tokens_per_second"))
    if planned is not None:
        traces.append(_level("planned", data.train.step, planned, ".4s"))
    return _figure(
        "rates", "Throughput", "tokens per second", traces, yaxis={"tickformat": "~s", "rangemode": "tozero"}
    )


def _data_wait(data: RunData) -> Figure | None:
    wait, seconds = data.train.column("data_wait"), data.train.column("step_seconds")
    if wait is None or seconds is None:
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        share = 100.0 * wait / seconds
    traces = [_trace("waiting for data", data.train.step, share, "train", ".2f", width=1.25)]
    yaxis = {"rangemode": "tozero", "ticksuffix": "%"}
    return _figure("wait", "Waiting for data", "share of the step time", traces, yaxis=yaxis)


def _memory(data: RunData) -> Figure | None:
    used = data.train.column("memory_bytes")
    if used is None:
        return None
    traces = [_trace("measured", data.train.step, used / 1e9, "train", ".3f")]
    planned = number(table(data.plan.get("memory_bytes")).get("total"))
    if planned is not None:
        traces.append(_level("planned", data.train.step, planned / 1e9, ".3f"))
    return _figure("memory", "Memory", "GB", traces, yaxis={"rangemode": "tozero"})


def _utilisation(data: RunData) -> Figure | None:
    mfu = data.train.column("mfu")
    traces = [_trace("MFU", data.train.step, 100.0 * mfu, "train", ".1f", width=1.25)] if mfu is not None else []
    yaxis = {"rangemode": "tozero", "ticksuffix": "%"}
    return _figure("mfu", "Model FLOPs utilisation", "share of the peak rate", traces, yaxis=yaxis)


def _figure(
    name: str,
    title: str,
    unit: str,
    traces: list[dict[str, Any]],
    yaxis: dict[str, Any] | None = None,
    **more: Any,
) -> Figure | None:
    """A figure over the steps; None when it has nothing to show."""
    if not any(trace["x"] or trace.get("levels") for trace in traces):
        return None
    return {
        "id": name,
        "title": title,
        "group": "steps",
        "traces": traces,
        "shapes": more.get("shapes", []),
        "note": more.get("note", ""),
        "layout": {
            "xaxis": {"title": {"text": "step"}, "hoverformat": ",.0f"},
            "yaxis": {"title": {"text": unit}, **(yaxis or {})},
        },
    }


def _trace(
    name: str, x: Column, y: Column, ink: str, hover: str, width: float = 1.75, markers: bool = False
) -> dict[str, Any]:
    x, y = thin(x, y)
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers and len(x) <= 60 else "lines",
        "name": name,
        "x": _plain(x),
        "y": _plain(y),
        "ink": ink,
        "line": {"width": width},
        "marker": {"size": 6},
        "hovertemplate": f"%{{y:{hover}}}",
    }


def _smoothed(name: str, x: Column, y: Column, ink: str) -> dict[str, Any]:
    """A trace with one curve for each position of the smoothing control."""
    levels = []
    for share in HALF_LIVES:
        life = _half_life(share, len(x))
        kept_x, kept_y = thin(x, smooth(y, life), SMOOTH_POINTS) if life else thin(x, y)
        levels.append({"x": _plain(kept_x), "y": _plain(kept_y)})
    empty = x[:0]
    return {**_trace(name, empty, empty, ink, ".4f"), "levels": levels}


def _source(name: str, names: list[str], x: Column, y: Column) -> dict[str, Any]:
    return _trace(name, x, y, f"source-{names.index(name) % 6 + 1}", ".4f")


def _dash(name: str, names: list[str]) -> dict[str, str]:
    """There are six colours; the next six sources are told apart by their dashes."""
    return {"dash": ("solid", "dash", "dot", "dashdot")[names.index(name) // 6 % 4]}


def _level(name: str, x: Column, value: float, hover: str) -> dict[str, Any]:
    """A horizontal line to compare with."""
    ends = np.array([x.min(), x.max()])
    trace = _trace(name, ends, np.array([value, value]), "reference", hover, width=1.5)
    return {**trace, "line": {"width": 1.5, "dash": "dash"}}


def _plain(values: Column) -> list[float]:
    """Six significant digits: more than a screen shows, and half the size of full doubles."""
    return [float(f"{value:.6g}") for value in values]
