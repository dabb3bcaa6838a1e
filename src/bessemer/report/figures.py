"""The curves of a run as plain JSON figures.

A figure here holds what is shown: traces, axes, units. How it looks (colours of the theme, fonts, grid) is
added by script.js, which redraws when the theme changes; a trace names its colour by an `ink` that style.css
defines.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.report.data import Column, Curves, RunData, number, table, tables, text
from bessemer.report.thinning import smooth, thin
from bessemer.terminal import amount

SMOOTH_POINTS = 600  # a smoothed curve has no spikes to keep
WINDOWS = (
    0.0,
    0.005,
    0.02,
    0.05,
    0.15,
)  # of the smoothing, as shares of the curve; the first is no smoothing
MARKED_INCIDENTS = 50

Figure = dict[str, Any]

NOTHING = Curves(np.empty(0))


def curves(data: RunData) -> list[Figure]:
    """The curves of training for which the run has data, in the order of the page."""
    figures = [
        _loss(data),
        _bits_per_byte(data),
        _accuracy(data),
        _loss_by_source(data),
        _learning_rate(data),
        _grad_norm(data),
        _throughput(data),
        _data_wait(data),
        _memory(data),
        _utilisation(data),
        _activations(data),
        _logits(data),
        _updates(data),
    ]
    return [figure for figure in figures if figure is not None]


def lengths(data: RunData) -> Figure | None:
    """How long the kept documents are, by source."""
    names = data.source_names
    counts = {
        text(source.get("source")): {
            int(low): found
            for row in tables(source.get("length_histogram"))
            if (low := number(row.get("from_characters"))) is not None
            and (found := number(row.get("documents"))) is not None
        }
        for source in tables(data.statistics.get("sources"))
    }
    steps = sorted({low for row in counts.values() for low in row})
    if not steps:
        return None
    steps = [steps[0] << power for power in range((steps[-1] // max(steps[0], 1)).bit_length())]
    labels = [f"{low >> 10}k" if low >= 1024 else f"{low}" for low in steps]
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": labels,
            "y": [row.get(low, 0) for low in steps],
            "ink": _ink(name, names),
            "hovertemplate": "%{y:,}",
        }
        for name, row in counts.items()
        if name in names
    ]
    figure = _figure("lengths", "Length of the kept documents", "documents", traces)
    if figure is not None:
        figure["group"] = "lengths"
        figure["layout"]["xaxis"] = {"title": {"text": "characters, from"}, "type": "category"}
        figure["layout"] |= {"barmode": "stack", "bargap": 0.12}
    return figure


def smoothing_labels(points: int) -> list[str]:
    """What each position of the smoothing control means."""
    return ["off", *(f"mean of {_window(share, points):,} points" for share in WINDOWS[1:])]


def _window(share: float, points: int) -> int:
    """4n + 1 points: two means over 2n + 1 points each."""
    return 4 * max(round(share * points / 4), 1) + 1


def _loss(data: RunData) -> Figure | None:
    train, validation = data.train, data.validation
    loss, held_out = train.column("loss"), validation.column("loss")
    traces = []
    if loss is not None:
        traces.append(_trace("train, each step", train.step, loss, "raw", ".4f", width=1))
        traces.append({**_smoothed("train, smoothed", train.step, loss, "train"), "line": {"width": 2}})
    if held_out is not None:
        traces.append(_trace("held out", validation.step, held_out, "accent", ".4f", markers=True))
    shapes = [
        {
            "type": "line",
            "x0": step,
            "x1": step,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "ink": "accent",
            "dash": "dot",
        }
        for incident in data.incidents[:MARKED_INCIDENTS]
        if (step := number(incident.get("step"))) is not None
    ]
    note = " ".join(filter(None, ["Dotted lines: incidents." if shapes else "", _scored_text(data)]))
    return _figure("loss", "Loss", data.loss_unit, traces, shapes=shapes, note=note)


def _bits_per_byte(data: RunData) -> Figure | None:
    validation = data.validation
    bits, tokens = validation.column("bits_per_byte"), validation.column("tokens")
    if bits is None:
        return None
    x = validation.step if tokens is None else tokens
    several = len(validation.by_source) > 1
    traces = [_trace("all sources" if several else "held out", x, bits, "accent", ".4f", markers=True)]
    names = data.source_names
    if several:
        for name, values in validation.by_source.items():
            trace = _trace(name, x, values, _ink(name, names), ".4f")
            traces.append({**trace, "line": {"width": 1.25, **_dash(name, names)}})
    ngram = number(table(data.evaluation.get("ngram")).get("bits_per_byte"))
    if ngram is not None:
        order = number(table(data.evaluation.get("ngram")).get("order")) or 5
        label = f"byte {order:.0f}-gram"
        traces.append(_level(label, x, ngram, ".4f"))
    figure = _figure("bits", "Bits per byte, held-out text", "bits per byte", traces, note=_scored_text(data))
    if figure and tokens is not None:
        figure["group"] = "tokens"
        figure["layout"]["xaxis"] |= {
            "title": {"text": "training tokens"},
            "tickformat": "~s",
            "hoverformat": ".4s",
        }
    return figure


def _scored_text(data: RunData) -> str:
    """Why the curve ends elsewhere than the headline, where validations read a part of the held-out text."""
    whole = number(data.evaluation.get("tokens"))
    most = number(table(data.recipe.get("evaluate")).get("max_tokens"))
    if whole is None or most is None or whole <= most:
        return ""
    return (
        f"Validations read {amount(most)} of the {amount(whole)} held-out tokens (evaluate.max_tokens), an even part of each "
        "source; the score at the top is of all of them."
    )


def _accuracy(data: RunData) -> Figure | None:
    train, validation = data.train, data.validation
    trained, held_out = train.column("accuracy"), validation.column("accuracy")
    traces = []
    if trained is not None:
        traces.append(_smoothed("train, smoothed", train.step, 100.0 * trained, "train"))
    if held_out is not None:
        traces.append(_trace("held out", validation.step, 100.0 * held_out, "accent", ".2f", markers=True))
    what = "texts in the right class" if data.objective == "classify" else "hidden tokens guessed right"
    return _figure("accuracy", "Accuracy", what, traces, yaxis={"rangemode": "tozero", "ticksuffix": "%"})


def _loss_by_source(data: RunData) -> Figure | None:
    train, names = data.train, data.source_names
    if len(train.by_source) < 2:
        return None
    traces = []
    for name, values in train.by_source.items():
        trace = _smoothed(name, train.step, values, _ink(name, names))
        traces.append({**trace, "line": {"width": 1.5, **_dash(name, names)}})
    return _figure("sources", "Training loss by source", data.loss_unit, traces)


def _learning_rate(data: RunData) -> Figure | None:
    rate = data.train.column("learning_rate")
    traces = [_trace("learning rate", data.train.step, rate, "train", ".3e")] if rate is not None else []
    return _figure("rate", "Learning rate", "learning rate", traces, yaxis={"rangemode": "tozero"})


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
        "grad",
        "Gradient norm",
        "global L2 norm",
        traces,
        yaxis={"type": "log"} if wide else {"rangemode": "tozero"},
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


def _activations(data: RunData) -> Figure | None:
    """Of the first, the last and evenly spread blocks between them, as many as there are colours."""
    curves = data.inside.get("activation_rms", NOTHING)
    blocks = sorted(curves.by_source, key=int)
    shown = [blocks[round(place)] for place in np.linspace(0, len(blocks) - 1, min(len(blocks), 6))]
    traces = [
        _trace(f"block {int(block) + 1}", curves.step, curves.by_source[block], _ink(block, shown), ".3g")
        for block in shown
    ]
    note = f"{len(shown)} of {len(blocks)} blocks." if len(shown) < len(blocks) else ""
    return _figure("activations", "Activations after each block", "RMS", traces, yaxis={"type": "log"}, note=note)


def _logits(data: RunData) -> Figure | None:
    curves = data.inside.get("attention_logit_max", NOTHING)
    traces = []
    if curves.by_source:
        values = np.stack(list(curves.by_source.values()))
        largest = np.where(np.isfinite(values), values, -np.inf).max(axis=0)
        traces.append(_trace("in any block", curves.step, largest, "train", ".3g"))
    return _figure("logits", "Largest attention logit", "q·k / √width of a head", traces)


def _updates(data: RunData) -> Figure | None:
    """By kind of weights; of attention and MLP the mean over the blocks."""
    curves = data.inside.get("update_ratio", NOTHING)
    kinds: dict[str, list[Column]] = {}
    for group, values in curves.by_source.items():
        kinds.setdefault(group.rpartition(".")[2], []).append(np.where(values > 0, values, np.nan))
    names = list(kinds)
    traces = [
        _trace(name, curves.step, np.mean(columns, axis=0), _ink(name, names), ".2e") for name, columns in kinds.items()
    ]
    if traces:
        traces.append(_level("usual with Adam", curves.step, 1e-3, "g"))
    title = "Size of an update against its weights"
    return _figure("updates", title, "ratio of the norms", traces, yaxis={"type": "log"})


def _figure(
    name: str,
    title: str,
    unit: str,
    traces: list[dict[str, Any]],
    yaxis: dict[str, Any] | None = None,
    shapes: list[dict[str, Any]] | None = None,
    note: str = "",
) -> Figure | None:
    """A figure over the steps; None when it has nothing to show."""
    if not any(trace["x"] or trace.get("levels") for trace in traces):
        return None
    # Markers at the ends would widen the axis, and the curves below one another would not line up.
    ends = [x for trace in traces for x in trace["x"] or trace["levels"][0]["x"]]
    clip = {} if isinstance(ends[0], str) else {"autorangeoptions": {"clipmin": min(ends), "clipmax": max(ends)}}
    return {
        "id": name,
        "title": title,
        "group": "steps",
        "traces": traces,
        "shapes": shapes or [],
        "note": note,
        "layout": {
            "xaxis": {"title": {"text": "step"}, "hoverformat": ",.0f", **clip},
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
        "cliponaxis": not markers,
        "hovertemplate": f"%{{y:{hover}}}",
    }


def _smoothed(name: str, x: Column, y: Column, ink: str) -> dict[str, Any]:
    """A trace with one curve for each position of the smoothing control."""
    levels = []
    for share in WINDOWS:
        kept_x, kept_y = thin(x, smooth(y, _window(share, len(x))), SMOOTH_POINTS) if share else thin(x, y)
        levels.append({"x": _plain(kept_x), "y": _plain(kept_y)})
    empty = x[:0]
    return {**_trace(name, empty, empty, ink, ".4f"), "levels": levels}


def _ink(name: str, names: list[str]) -> str:
    return f"source-{names.index(name) % 6 + 1}"


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
