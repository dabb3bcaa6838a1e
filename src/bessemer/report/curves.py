"""Figures of a run's curves, smoothed and thinned for the screen."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from bessemer.common.console import amount
from bessemer.report import metrics, parts
from bessemer.report.data import Column, RunData, as_number, as_text
from bessemer.report.metrics import LAYER_METRICS, LOG, LOSS, METRICS, PERCENT, USUAL_UPDATE, Metric, baselines
from bessemer.report.parts import Block, Figure

WINDOWS = (0.0, 0.02, 0.1)  # smoothing windows as shares of the curve; 0.0 is no smoothing
DEFAULT_WINDOW = 1  # index in WINDOWS
POINTS = 2000  # maximum number of points in a curve
SMOOTH_SHARE = 0.3  # share of POINTS for a smoothed curve, which has no spikes to keep
LISTED_INCIDENTS = 200
HEAT_COLUMNS = 240  # maximum number of columns of a heat map over the steps


def curves(data: RunData, points: int = POINTS) -> list[Figure]:
    """Return the figures of a run in page order, with at most `points` points per curve."""
    figures = [
        _loss(data), _bits_per_byte(data), _accuracy(data), _loss_by_source(data),
        *(_tasks(data, score) for score in task_scores(data)),
        *(metric_figure(metric, {metric.name: data}) for metric in (*METRICS, metrics.auxiliary_loss([data]))),
        _largest_loads(data), _last_loads(data), _unbalanced_experts(data),
        *(_layers(data, key) for key in dict.fromkeys((*LAYER_METRICS, *data.inside.groups))),
    ]  # fmt: skip
    return [thin_figure(figure, points) for figure in figures if figure is not None]


def thin_figure(figure: Figure, points: int) -> Figure:
    """Return a figure whose curves have at most `points` points each. Heat maps stay as they are.

    A trace with the key `smoothed` is replaced by one trace per position of the page's smoothing control.
    """
    traces = []
    for trace in figure["traces"]:
        if "z" in trace:
            traces.append(trace)
            continue
        x, y = trace["x"], trace["y"]
        shown = [thin(x, y, points)]
        if trace.pop("smoothed", False):
            shown += [thin(x, smooth(y, _window(share, len(x))), int(SMOOTH_SHARE * points)) for share in WINDOWS[1:]]
        levels = [{"x": parts.short(x), "y": parts.short(y)} for x, y in shown]
        traces.append({**trace, **levels[0]} if len(levels) == 1 else {**trace, "x": [], "y": [], "levels": levels})
    return {**figure, "traces": traces}


def smoothing_labels(points: int) -> list[str]:
    """Return the label of each position of the page's smoothing control for curves with `points` points."""
    return ["off", *(f"mean of {_window(share, points):,} points" for share in WINDOWS[1:])]


def metric_figure(metric: Metric, runs: Mapping[str, RunData]) -> Figure | None:
    """Return the figure of a metric for one or several runs.

    The figure of a single run also shows the metric's reference level.
    """
    traces, positive = [], np.empty(0)
    for index, (name, data) in enumerate(runs.items()):
        values, lines = metric.values(data), getattr(data, metric.lines)
        if values is None:
            continue
        style = parts.series_style(index) if len(runs) > 1 else {"ink": "train"}
        is_train = metric.lines == "train"
        trace = curve(name, lines.step, values, hover=metric.hover, width=1.5, marked=not is_train, **style)
        traces.append(trace | {"smoothed": is_train and metric.key == LOSS.key})
        level = as_number(vars(data), *metric.level_at)
        if level is not None and len(runs) == 1:
            traces.append(_level(metric.level, lines.step, level * metric.factor, metric.hover))
        positive = np.append(positive, values[np.isfinite(values) & (values > 0)])
    is_wide = metric.id == "grad" and len(positive) and positive.max() / positive.min() > 50
    return step_figure(metric.id, metric.title, metric.unit, traces, LOG if is_wide else metric.axis)


def _loss(data: RunData) -> Figure | None:
    loss, traces = data.train.column("loss"), []
    if loss is not None:
        traces.append(curve("train, each step", data.train.step, loss, "raw", width=1))
    for number, fork in enumerate(data.forks, 1):
        if (undone := fork.column("loss")) is not None:
            traces.append(curve(f"rolled back ({number})", fork.step, undone, "lost", dash="dot", width=1.5))
    traces += [*_train_and_held_out(data, "loss"), *_predicted(data)]
    if loss is not None and data.incidents:
        traces.append(_incident_points(data, loss))
    notes = [
        "Diamonds: incidents; a click opens the row." if loss is not None and data.incidents else "",
        "Dotted curves: steps that rollbacks undid; training continued from where each begins." if data.forks else "",
        _scored_text(data),
    ]
    return step_figure("loss", "Loss", data.loss_unit, traces, note=" ".join(filter(None, notes)))


def _train_and_held_out(data: RunData, key: str, factor: float = 1.0) -> list[Block]:
    lines = (("train, smoothed", data.train, "train", False), ("held out", data.validation, "accent", True))
    return [
        curve(name, logged.step, factor * values, ink, marked=marked, width=2) | {"smoothed": not marked}
        for name, logged, ink, marked in lines
        if (values := logged.column(key)) is not None
    ]


def _predicted(data: RunData) -> list[Block]:
    """Return the loss that the ladder predicts for the last step, as a band over the last tenth of the run."""
    low, high, value = (as_number(data.ladder, "prediction", key) for key in ("low", "high", "value"))
    steps = data.planned_steps
    if low is None or high is None or value is None or not steps:
        return []
    ends, name = np.array([0.9 * steps, steps]), f"ladder: {value:.3f} at the end"
    lower, upper = (curve(name, ends, np.full(2, edge), "line", width=0.5) for edge in (low, high))
    return [{**lower, "hoverinfo": "skip", "showlegend": False}, {**upper, "fill": "tonexty", "fillink": "panel"}]


def _incident_points(data: RunData, loss: Column) -> Block:
    """Return a trace with a marker at the step of each incident in the report's table, at the height of the curve `loss`.

    Clicking a marker opens the incident's row in the table.
    """
    listed = [(as_number(row, "step"), number) for number, row in enumerate(data.incidents[:LISTED_INCIDENTS])]
    points = [(step, number) for step, number in listed if step is not None]
    finite = np.isfinite(loss)
    steps = np.array([step for step, _ in points])
    at = np.interp(steps, data.train.step[finite], loss[finite])
    trace = parts.trace("incidents", (), (), "accent", marks=9, lines=False, symbol="diamond", hover="%{text}")
    words = [parts.words(as_text(data.incidents[number], "what")) for _, number in points]
    return {**trace, "x": steps, "y": at, "text": words, "customdata": [number for _, number in points]}


def _bits_per_byte(data: RunData) -> Figure | None:
    validation = data.validation
    bits, tokens = validation.column("bits_per_byte"), validation.column("tokens")
    if bits is None:
        return None
    x = validation.step if tokens is None else tokens
    by_source = validation.groups.get("bits_per_byte_by_source", {})
    several = len(by_source) > 1
    traces = [curve("all sources" if several else "held out", x, bits, "accent", marked=True)]
    if several:
        traces += [
            curve(name, x, values, width=1.25, **parts.source_style(data, name)) for name, values in by_source.items()
        ]
    levels, note = baselines(data), _scored_text(data)
    traces += [_level(name, x, value, ".4f") for name, value in levels.items()]
    if len(levels) == 1:
        note += " pip install 'bessemer[ppmd]' and an evaluation add PPMd order 10, a good compressor."
    figure = step_figure("bits", f"Bits per byte, {data.scored_text}", "bits per byte", traces, note=note.strip())
    if figure and tokens is not None:
        figure["group"] = "tokens"
        figure["layout"]["xaxis"] |= parts.axis("training tokens", tickformat="~s", hoverformat=".4s")
    return figure


def _scored_text(data: RunData) -> str:
    """Return a sentence on why the validation curve differs from the final score; "" if both use the same text.

    They differ if validations read only the first `evaluate.max_tokens` held-out tokens.
    """
    whole = as_number(data.evaluation, "tokens")
    limit = as_number(data.recipe, "evaluate", "max_tokens")
    if not whole or not limit or whole <= limit:
        return ""
    part = f"Validations read {amount(limit)} of the {amount(whole)} held-out tokens (evaluate.max_tokens)"
    return f"{part}; the score at the top is of all of them."


def _accuracy(data: RunData) -> Figure | None:
    what = "texts in the right class" if data.objective == "classify" else "hidden tokens guessed right"
    return step_figure("accuracy", "Accuracy", what, _train_and_held_out(data, "accuracy", 100.0), PERCENT)


def _loss_by_source(data: RunData) -> Figure | None:
    by_source = data.train.groups.get("loss_by_source", {})
    if len(by_source) < 2:
        return None
    traces = [
        curve(name, data.train.step, values, width=1.5, **parts.source_style(data, name)) | {"smoothed": True}
        for name, values in by_source.items()
    ]
    return step_figure("sources", "Training loss by source", data.loss_unit, traces)


def task_scores(data: RunData) -> list[str]:
    """Return the names of the task scores logged during training."""
    return [name for name in data.tasks.groups if name != "content"]


def _tasks(data: RunData, score: str) -> Figure | None:
    """Return the figure of one score, such as accuracy, of all tasks over the training."""
    by_task, step, traces = data.tasks.groups.get(score, {}), data.tasks.step, []
    names = list(dict.fromkeys(name for one in task_scores(data) for name in data.tasks.groups[one]))
    for name, values in by_task.items():
        at = np.flatnonzero(np.isfinite(values))
        traces.append(curve(name, step[at], values[at], marked=True, **parts.series_style(names.index(name))))
    return step_figure(f"tasks-{score}", f"Tasks, {parts.words(score)}", parts.words(score), traces)


def _largest_loads(data: RunData) -> Figure | None:
    """Return the heat map of the largest load of an expert by step and block, in multiples of the mean load."""
    by_block = data.train.groups.get("max_violation", {})
    values_LS = 1.0 + np.array(list(by_block.values()))
    logged = np.flatnonzero(np.isfinite(values_LS).all(axis=0)) if by_block else ()
    if not len(logged):
        return None
    bins = np.array_split(logged, min(HEAT_COLUMNS, len(logged)))
    largest_LS = np.stack([values_LS[:, columns].max(axis=1) for columns in bins], axis=1)
    steps = np.array([data.train.step[columns[-1]] for columns in bins])
    shown = parts.heat_map(steps, list(by_block), largest_LS, "step %{x:,.0f}", low=1.0)
    title, axis, note = "Largest load of an expert", parts.whole(by_block), "In multiples of the mean."
    return step_figure("experts-largest", title, "block", [shown], axis, note, hovermode="closest")


def _last_loads(data: RunData) -> Figure | None:
    """Return the heat map of the load of each expert by block in the last logged step, in multiples of the mean load."""
    texts = {name: values[-1] for name, values in data.train.texts.items() if name.startswith("expert_load.")}
    by_block = {name.partition(".")[2]: parts.hex_values(text or "") for name, text in texts.items()}
    if len({len(load) for load in by_block.values()}) != 1:
        return None
    loads_LE = np.stack(list(by_block.values())) / 16
    experts = np.arange(loads_LE.shape[1])
    return parts.figure(
        "experts-load", "Load of each expert", [parts.heat_map(experts, list(by_block), loads_LE, "expert %{x}")],
        parts.axis("expert", **parts.whole(experts)), parts.axis("block", **parts.whole(by_block)), hovermode="closest",
        note=f"Step {data.train.step[-1]:,.0f}; the mean is 1.",
    )  # fmt: skip


def _unbalanced_experts(data: RunData) -> Figure | None:
    """Return the figure of the numbers of dead and hot experts over the training, summed over the blocks."""
    kinds = (("dead", "below a tenth of the mean load", "source-1"), ("hot", "above twice the mean load", "accent"))
    traces = [
        curve(f"{kind}: {meaning}", data.train.step, np.sum(list(by_block.values()), axis=0), ink, ".0f", width=1.5)
        for kind, meaning, ink in kinds
        if (by_block := data.train.groups.get(f"{kind}_experts"))
    ]
    return step_figure("experts-unbalanced", "Dead and hot experts", "experts, all blocks", traces, metrics.FROM_ZERO)


def _layers(data: RunData, key: str) -> Figure | None:
    """Return the figure of a statistic that is logged per block or per weight matrix; None if it was not logged.

    A statistic per block shows at most six evenly spaced blocks, and one per matrix the mean over the blocks for each kind
    of matrix. `key` is the statistic's key in metrics.jsonl.
    """
    by_name, words = data.inside.groups.get(key, {}), parts.words(key)
    metric = LAYER_METRICS.get(key) or Metric(f"layers-{key}", parts.capitalised(words), words, key, ".3g")
    shown, note = _by_kind(by_name), ""
    if key == "attention_logit_max" and by_name:
        values = np.stack(list(by_name.values()))
        shown = {"in any block": np.where(np.isfinite(values), values, -np.inf).max(axis=0)}
    elif blocks := sorted((name for name in by_name if name.isdecimal()), key=int):
        some = [blocks[round(index)] for index in np.linspace(0, len(blocks) - 1, min(len(blocks), 6))]
        shown = {f"block {block}": by_name[block] for block in some}
        note = f"{len(some)} of {len(blocks)} blocks." if len(some) < len(blocks) else ""
    traces = [
        curve(name, data.inside.step, np.where(values > 0, values, np.nan) if metric.axis else values, hover=metric.hover,
              **parts.series_style(index))
        for index, (name, values) in enumerate(shown.items())
    ]  # fmt: skip
    if metric.level and traces:
        traces.append(_level(metric.level, data.inside.step, USUAL_UPDATE, "g"))
    return step_figure(metric.id, metric.title, metric.unit, traces, metric.axis, note=note)


def _by_kind(by_name: dict[str, Column]) -> dict[str, Column]:
    """Average a statistic over the blocks for each kind of weight matrix, so `3.mlp` and `4.mlp` become `mlp`."""
    kinds: dict[str, list[Column]] = {}
    for name, values in by_name.items():
        kinds.setdefault(name.rpartition(".")[2], []).append(values)
    return {kind: np.mean(columns, axis=0) for kind, columns in kinds.items()}


def step_figure(
    name: str, title: str, unit: str, traces: list[Block], yaxis: dict[str, Any] | None = None, note: str = "", **layout: Any,
) -> Figure | None:  # fmt: skip
    """Return a figure with training steps on the horizontal axis; None if its traces have no points.

    Args:
        name: Id of the figure.
        title: Title above the figure.
        unit: Title of the vertical axis.
        traces: Curves, each with steps as `x`.
        yaxis: Plotly settings of the vertical axis.
        note: Text below the figure.
        layout: Other plotly layout keys.
    """
    ends = [float(end) for trace in traces if len(trace["x"]) for end in (trace["x"][0], trace["x"][-1])]
    if not ends:
        return None
    # Markers at the ends would widen the axis, and figures below one another would not line up.
    x = parts.axis("step", hoverformat=",.0f", autorangeoptions={"clipmin": min(ends), "clipmax": max(ends)})
    return parts.figure(name, title, traces, x, parts.axis(unit, **(yaxis or {})), group="steps", note=note, **layout)


def curve(
    name: str, x: Column, y: Column, ink: str, hover: str = ".4f", *, marked: bool = False, **style: Any
) -> Block:
    """Return a plotly trace with all finite points of a curve. `thin_figure` later reduces their number.

    Args:
        name: Name in the legend.
        x: Steps.
        y: Values.
        ink: Colour, a name of style.css.
        hover: Format of a value in the hover label, in the syntax of d3.
        marked: True to also draw a marker at each point, if there are at most 60.
        style: Other arguments of `parts.trace`.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    trace = parts.trace(name, (), (), ink, hover=f"%{{y:{hover}}}", cliponaxis=not marked, **style)
    trace |= {"x": x[finite], "y": y[finite], "marker": {"size": 6}}
    return {**trace, "mode": "lines+markers"} if (marked and finite.sum() <= 60) or finite.sum() == 1 else trace


def _level(name: str, x: Column, value: float, hover: str) -> Block:
    ends = np.array([x.min(), x.max()])
    return curve(name, ends, np.array([value, value]), "reference", hover, dash="dash", width=1.5)


def _window(share: float, points: int) -> int:
    """Return the length of a smoothing window, 4n + 1 points, nearest to the fraction `share` of a curve of `points` points.

    `smooth` applies it as a mean over 2n + 1 points, twice.
    """
    return 4 * max(round(share * points / 4), 1) + 1


def thin(x: Column, y: Column, limit: int) -> tuple[Column, Column]:
    """Return at most `limit` points of a curve: the ends, and the minimum and maximum of each interval.

    All points of a million steps would make a page of a hundred megabytes, and averages or every n-th point would hide single
    spikes. Half of the intervals have equal length and half grow with the step, so that the beginning is visible on a
    logarithmic axis too. Points that are not finite are left out.
    """
    finite = np.isfinite(x) & np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= limit:
        return x, y
    stretches, last = max((limit - 2) // 4, 1), len(x) - 1
    spaced = np.concatenate([np.linspace(1, last, stretches + 1), np.geomspace(1, last, stretches)])
    index = {0, last}
    for start, end in pairwise(np.unique(spaced.astype(int)).tolist()):
        index |= {start + int(extreme(y[start:end])) for extreme in (np.argmin, np.argmax)}
    shown = sorted(index)
    return x[shown], y[shown]


def smooth(y: Column, window: int) -> Column:
    """Return the weighted mean over `window` points around each point.

    Near the beginning, the window shrinks to as many points before as after. It is centred, because an average of past points
    lags behind a falling loss and seems to be above the held-out loss. It is a mean of means, so that a spike does not become
    a step. Smooth before thinning, which keeps extremes and would bias the mean.
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
