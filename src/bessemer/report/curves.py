"""The curves of a run. To add one of a single number: a line of METRICS, and the trainer that writes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from bessemer.guard.incidents import RECIPE_CHANGED, RECORDED
from bessemer.report import parts
from bessemer.report.data import Column, RunData, as_number, as_object, as_objects, as_text
from bessemer.report.parts import Block, Figure
from bessemer.terminal import amount

POINTS = 2000  # of a curve, at most
SMOOTH_POINTS = 600  # a smoothed curve has no spikes to keep
WINDOWS = (0.0, 0.005, 0.02, 0.05, 0.15)  # of the smoothing, as shares of the curve; the first is no smoothing
MARKED_INCIDENTS = 50
FROM_ZERO = {"rangemode": "tozero"}


@dataclass(frozen=True)
class Metric:
    """A curve of one number of the training lines. factor: from the number to its unit; level: the name of a horizontal
    line to compare with; level_at: where RunData holds its value, its field and then keys."""

    id: str
    title: str
    unit: str
    column: str
    name: str
    hover: str
    axis: dict[str, Any]
    factor: float = 1.0
    level: str = ""
    level_at: tuple[str, ...] = ()


METRICS = (
    Metric("rate", "Learning rate", "learning rate", "learning_rate", "learning rate", ".3e", FROM_ZERO),
    Metric("grad", "Gradient norm", "global L2 norm", "grad_norm", "gradient norm", ".3f", FROM_ZERO,
           level="clipped above", level_at=("recipe", "train", "optimizer", "clip_norm")),
    Metric("rates", "Throughput", "tokens per second", "tokens_per_second", "measured", ".4s",
           {**FROM_ZERO, "tickformat": "~s"}, level="planned", level_at=("plan", "tokens_per_second")),
    Metric("wait", "Waiting for data", "share of the step time", "data_wait_share", "waiting for data", ".2f",
           {**FROM_ZERO, "ticksuffix": "%"}, factor=100.0),
    Metric("memory", "Memory", "GB", "memory_bytes", "measured", ".3f", FROM_ZERO, factor=1e-9,
           level="planned", level_at=("plan", "memory_bytes", "total")),
    Metric("mfu", "Model FLOPs utilisation", "share of the peak rate", "mfu", "MFU", ".1f",
           {**FROM_ZERO, "ticksuffix": "%"}, factor=100.0),
)  # fmt: skip


def curves(data: RunData) -> list[Figure]:
    """The curves of training for which the run has data, in the order of the page."""
    wait, seconds = data.train.column("data_wait"), data.train.column("step_seconds")
    if wait is not None and seconds is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            columns = {**data.train.columns, "data_wait_share": wait / seconds}
        data = replace(data, train=replace(data.train, columns=columns))
    figures = [
        _loss(data), _bits_per_byte(data), _accuracy(data), _loss_by_source(data),
        *(_metric(data, metric) for metric in METRICS), _activations(data), _logits(data), _updates(data),
    ]  # fmt: skip
    return [figure for figure in figures if figure is not None]


def smoothing_labels(points: int) -> list[str]:
    """What each position of the smoothing control means."""
    return ["off", *(f"mean of {_window(share, points):,} points" for share in WINDOWS[1:])]


def _metric(data: RunData, metric: Metric) -> Figure | None:
    values = data.train.column(metric.column)
    if values is None:
        return None
    values, axis = values * metric.factor, metric.axis
    traces = [_curve(metric.name, data.train.step, values, "train", metric.hover, width=1.5)]
    level = as_number(vars(data), *metric.level_at)
    if level is not None:
        traces.append(_level(metric.level, data.train.step, level * metric.factor, metric.hover))
    positive = values[np.isfinite(values) & (values > 0)]
    if metric.id == "grad" and len(positive) and positive.max() / positive.min() > 50:
        axis = {"type": "log"}
    changed, note = _other_steps(data) if metric.id == "rate" else ([], "")
    return _figure(
        metric.id, metric.title, metric.unit, traces, axis, shapes=[parts.vertical(step) for step in changed], note=note
    )


def _other_steps(data: RunData) -> tuple[list[float], str]:
    """Where the number of steps changed, which the decay follows, and why."""
    revised = [as_number(one, "at") for one in as_objects(data.recipe, "train", "revised")]
    longer = [as_number(one, "step") for one in data.incidents if one.get("what") == RECIPE_CHANGED.name]
    steps = [step for step in [*revised, *longer] if step is not None]
    if not steps:
        return [], ""
    said = [
        "the number of steps was decided again by the measured time of a step" if revised else "",
        "training went on under another number of steps" if longer else "",
    ]
    return steps, f"Dotted lines: {', or '.join(filter(None, said))}; the decay follows it."


def _loss(data: RunData) -> Figure | None:
    loss, held_out = data.train.column("loss"), data.validation.column("loss")
    traces = []
    if loss is not None:
        traces.append(_curve("train, each step", data.train.step, loss, "raw", ".4f", width=1))
        traces.append(_smoothed("train, smoothed", data.train.step, loss, "train", width=2))
    for number, fork in enumerate(data.forks, 1):
        undone = fork.column("loss")
        if undone is not None:
            traces.append(_curve(f"rolled back ({number})", fork.step, undone, "lost", ".4f", dash="dot", width=1.5))
    if held_out is not None:
        traces.append(_curve("held out", data.validation.step, held_out, "accent", ".4f", marked=True))
    shapes = [parts.vertical(step) for step in _marked(data)]
    said = [
        "Vertical dotted lines: incidents." if shapes else "",
        "Dotted curves: what rollbacks undid; training went on from where each begins." if data.forks else "",
        _scored_text(data),
    ]
    note = " ".join(filter(None, said))
    return _figure("loss", "Loss", data.loss_unit, traces, shapes=shapes, note=note)


def _marked(data: RunData) -> list[float]:
    """Steps of incidents, one of those that would be one line on the page, those that were acted on first."""
    apart = (data.train.step[-1] if data.train.step.size else 0) / MARKED_INCIDENTS
    ordered = sorted(data.incidents, key=lambda one: as_text(one, "action") == RECORDED)
    marked: list[float] = []
    for step in (as_number(one, "step") for one in ordered):
        if step is not None and all(abs(step - other) > apart for other in marked):
            marked.append(step)
    return marked


def _bits_per_byte(data: RunData) -> Figure | None:
    validation, names = data.validation, data.source_names
    bits, tokens = validation.column("bits_per_byte"), validation.column("tokens")
    if bits is None:
        return None
    x = validation.step if tokens is None else tokens
    by_source = validation.groups.get("bits_per_byte_by_source", {})
    several = len(by_source) > 1
    traces = [_curve("all sources" if several else "held out", x, bits, "accent", ".4f", marked=True)]
    if several:
        traces += [_curve(name, x, values, *_style(name, names), width=1.25) for name, values in by_source.items()]
    ngram = as_object(data.evaluation, "ngram")
    if (level := as_number(ngram, "bits_per_byte")) is not None:
        traces.append(_level(f"byte {as_number(ngram, 'order') or 5:.0f}-gram", x, level, ".4f"))
    figure = _figure("bits", "Bits per byte, held-out text", "bits per byte", traces, note=_scored_text(data))
    if figure and tokens is not None:
        figure["group"] = "tokens"
        figure["layout"]["xaxis"] |= parts.axis("training tokens", tickformat="~s", hoverformat=".4s")
    return figure


def _scored_text(data: RunData) -> str:
    """Why the curve ends elsewhere than the headline, where validations read a part of the held-out text."""
    whole = as_number(data.evaluation, "tokens")
    limit = as_number(data.recipe, "evaluate", "max_tokens")
    if whole is None or limit is None or whole <= limit:
        return ""
    return (
        f"Validations read {amount(limit)} of the {amount(whole)} held-out tokens (evaluate.max_tokens), an even part of each "
        "source; the score at the top is of all of them."
    )


def _accuracy(data: RunData) -> Figure | None:
    trained, held_out = data.train.column("accuracy"), data.validation.column("accuracy")
    traces = []
    if trained is not None:
        traces.append(_smoothed("train, smoothed", data.train.step, 100.0 * trained, "train"))
    if held_out is not None:
        traces.append(_curve("held out", data.validation.step, 100.0 * held_out, "accent", ".2f", marked=True))
    what = "texts in the right class" if data.objective == "classify" else "hidden tokens guessed right"
    return _figure("accuracy", "Accuracy", what, traces, {**FROM_ZERO, "ticksuffix": "%"})


def _loss_by_source(data: RunData) -> Figure | None:
    by_source, names = data.train.groups.get("loss_by_source", {}), data.source_names
    if len(by_source) < 2:
        return None
    traces = []
    for name, values in by_source.items():
        ink, _, dash = _style(name, names)
        traces.append(_smoothed(name, data.train.step, values, ink, width=1.5, dash=dash))
    return _figure("sources", "Training loss by source", data.loss_unit, traces)


def _activations(data: RunData) -> Figure | None:
    """Of the first, the last and evenly spread blocks between them, one for each colour."""
    by_block = data.inside.groups.get("activation_rms", {})
    blocks = sorted(by_block, key=int)
    shown = [blocks[round(place)] for place in np.linspace(0, len(blocks) - 1, min(len(blocks), 6))]
    traces = [
        _curve(f"block {int(block) + 1}", data.inside.step, by_block[block], parts.series_ink(place), ".3g")
        for place, block in enumerate(shown)
    ]
    note = f"{len(shown)} of {len(blocks)} blocks." if len(shown) < len(blocks) else ""
    return _figure("activations", "Activations after each block", "RMS", traces, {"type": "log"}, note=note)


def _logits(data: RunData) -> Figure | None:
    by_block = data.inside.groups.get("attention_logit_max", {})
    traces = []
    if by_block:
        values = np.stack(list(by_block.values()))
        largest = np.where(np.isfinite(values), values, -np.inf).max(axis=0)
        traces.append(_curve("in any block", data.inside.step, largest, "train", ".3g"))
    return _figure("logits", "Largest attention logit", "q·k / √width of a head", traces)


def _updates(data: RunData) -> Figure | None:
    """By kind of weights; of attention and MLP the mean over the blocks."""
    kinds: dict[str, list[Column]] = {}
    for group, values in data.inside.groups.get("update_ratio", {}).items():
        kinds.setdefault(group.rpartition(".")[2], []).append(np.where(values > 0, values, np.nan))
    traces = [
        _curve(name, data.inside.step, np.mean(columns, axis=0), parts.series_ink(place), ".2e")
        for place, (name, columns) in enumerate(kinds.items())
    ]
    if traces:
        traces.append(_level("usual with Adam", data.inside.step, 1e-3, "g"))
    return _figure("updates", "Size of an update against its weights", "ratio of the norms", traces, {"type": "log"})


def _figure(
    name: str, title: str, unit: str, traces: list[Block], yaxis: dict[str, Any] | None = None, *,
    shapes: Sequence[Block] = (), note: str = "",
) -> Figure | None:  # fmt: skip
    """A figure over the steps; None when it has nothing to show."""
    ends = [x for trace in traces for x in trace["x"] or trace.get("levels", [{"x": []}])[0]["x"]]
    if not ends:
        return None
    # Markers at the ends would widen the axis, and the curves below one another would not line up.
    x = parts.axis("step", hoverformat=",.0f", autorangeoptions={"clipmin": min(ends), "clipmax": max(ends)})
    return parts.figure(
        name, title, traces, x, parts.axis(unit, **(yaxis or {})), group="steps", shapes=shapes, note=note
    )


def _curve(
    name: str,
    x: Column,
    y: Column,
    ink: str,
    hover: str,
    dash: str = "solid",
    width: float = 1.75,
    marked: bool = False,
) -> Block:
    x, y = thin(x, y)
    made = parts.trace(name, x, y, ink, hover=f"%{{y:{hover}}}", width=width, dash=dash, cliponaxis=not marked)
    made["marker"] = {"size": 6}
    return {**made, "mode": "lines+markers"} if marked and len(x) <= 60 else made


def _smoothed(name: str, x: Column, y: Column, ink: str, **style: Any) -> Block:
    """A trace with one curve for each position of the smoothing control."""
    levels = []
    for share in WINDOWS:
        kept_x, kept_y = thin(x, smooth(y, _window(share, len(x))), SMOOTH_POINTS) if share else thin(x, y)
        levels.append({"x": parts.short(kept_x), "y": parts.short(kept_y)})
    return {**_curve(name, x[:0], x[:0], ink, ".4f", **style), "levels": levels}


def _level(name: str, x: Column, value: float, hover: str) -> Block:
    """A horizontal line to compare with."""
    ends = np.array([x.min(), x.max()])
    return _curve(name, ends, np.array([value, value]), "reference", hover, "dash", 1.5)


def _style(name: str, names: list[str]) -> tuple[str, str, str]:
    """Colour, format and dash of a source. There are six colours; the next six sources are told apart by their dashes."""
    place = names.index(name)
    return parts.series_ink(place), ".4f", ("solid", "dash", "dot", "dashdot")[place // 6 % 4]


def _window(share: float, points: int) -> int:
    """4n + 1 points: two means over 2n + 1 points each."""
    return 4 * max(round(share * points / 4), 1) + 1


def thin(x: Column, y: Column, limit: int = POINTS) -> tuple[Column, Column]:
    """At most `limit` points of a curve: the ends, and the lowest and highest point of each stretch.

    A run of a million steps would make a page of a hundred megabytes, and averages or every n-th point would hide the one
    spike one looks for. Half of the stretches are of equal length and half grow with the step, so that the beginning is
    there on a logarithmic axis as well. Points that are not finite are left out.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= limit:
        return x, y
    stretches, last = max((limit - 2) // 4, 1), len(x) - 1
    spaced = np.concatenate([np.linspace(1, last, stretches + 1), np.geomspace(1, last, stretches)])
    keep = {0, last}
    for low, high in pairwise(np.unique(spaced.astype(int))):
        keep.add(int(low + np.argmin(y[low:high])))
        keep.add(int(low + np.argmax(y[low:high])))
    index = np.array(sorted(keep))
    return x[index], y[index]


def smooth(y: Column, window: int) -> Column:
    """Weighted mean over `window` points around each point; at the beginning over as many before as after it.

    Centred, because an average of the past alone lags behind a falling loss and seems to lie above the held-out one. The
    mean of a mean, so that a spike does not become a step. Taken before thinning, which keeps extremes and would bias it.
    """
    half = window // 4
    return _mean(_mean(y, half), half)


def _mean(y: Column, half: int) -> Column:
    finite = np.isfinite(y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, y, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(y))
    reach = np.minimum(half, index)
    low, high = index - reach, np.minimum(index + reach + 1, len(y))
    with np.errstate(invalid="ignore"):
        mean: Column = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return mean
