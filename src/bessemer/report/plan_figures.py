"""The figures and bars of a plan, from the series of plan/pictures.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bessemer.report import parts
from bessemer.report.data import Json, as_number, as_object, as_objects
from bessemer.report.parts import Block, Figure, short_time, words
from bessemer.terminal import amount, size

LAWS = {
    "rule": "20 tokens a parameter", "approach_1": "Chinchilla 1", "approach_2": "Chinchilla 2", "approach_3": "Chinchilla 3",
    "replication": "Replication 2024",
}  # fmt: skip
SPANS = (
    1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 18_000, 36_000, 86_400, 172_800, 432_000, 864_000,
)  # seconds  # fmt: skip
MAX_NATS = 12.0  # more than a guess among all words loses (ln 128,256 = 11.8): the law far below where it was fitted
MEMORY_INKS = {
    "weights": "source-1", "gradients": "source-2", "optimizer": "source-3", "activations": "source-4", "logits": "source-5",
    "buffers": "source-6", "ema": "rule", "fragmentation": "raw", "before_model": "reference",
}  # fmt: skip
# Of each part of a step: its colour, its name, what it is.
STEP_PARTS = {
    "forward": ("raw", "forward", "forward passes of the slowest stage"),
    "backward": ("reference", "backward", "backward passes of the slowest stage"),
    "matmuls": ("source-1", "matmuls", "matrix multiplications, with what is recomputed"),
    "attention": ("source-5", "attention", "scores and weighted values"),
    "elementwise": ("source-3", "element-wise", "norms, sums, activations: as long as the memory takes"),
    "host": ("rule", "waiting for launches", "the device waits for the host to launch kernels"),
    "tensor": ("source-2", "tensor, exposed", "activations between tensor ranks that nothing hides"),
    "context": ("source-6", "context, exposed", "keys and values between context ranks"),
    "shard": ("source-4", "sharded weights, exposed", "weights gathered, gradients scattered, beyond what passes hide"),
    "expert": ("part-4", "experts, exposed", "tokens to a mixture's experts and back, beyond what passes hide"),
    "pipeline": ("lost", "sends, exposed", "results sent between stages"),
    "bubble": ("line", "bubble", "waiting for other stages of the pipeline"),
    "stragglers": ("soft", "stragglers", "waiting for the slowest device"),
    "data": ("accent", "gradients, exposed", "gradients and new weights between data ranks, once a step"),
    "optimizer": ("train", "optimizer", "AdamW's passes over the state, and what a step does once"),
}
# Colours of plan/pipeline.py, for a file of its own, as those of the page's theme.
THEME = {"#15191d": "ink", "#56616b": "soft", "#dde2e6": "line", "#f0f2f3": "panel", "#b8c0c7": "rule"}
FITTED = ((70e6, 16e9), (5e9, 500e9))  # parameters and tokens of the models of Hoffmann et al. 2022
LONGEST_BAR = 2.2  # devices' memories that a bar shows; longer ones are cut, and say so
PASSES = [(STEP_PARTS[name][0], f"{name}, in order", "") for name in ("forward", "backward")]


def memory_bars(of: Json) -> Json:
    """The bars of each group with their parts as shares of the width, and where the device's memory ends, if that is known.

    legend: (ink, part, nothing); columns: of the tables of numbers; groups: kind, lanes, rows of numbers; edge: in percent.
    """
    capacity, groups = as_number(of.get("capacity")), as_objects(of.get("groups"))
    totals = [bar["total"] for group in groups for bar in group["bars"]]
    width = 1.02 * (max(min(max(totals), LONGEST_BAR * capacity), capacity) if capacity else max(totals))
    present = {name for group in groups for bar in group["bars"] for name, value in bar["parts"].items() if value > 0}
    names = [name for name in MEMORY_INKS if name in present]
    found = []
    for group in groups:
        lanes, rows = [], []
        for bar in group["bars"]:
            at, pieces = 0.0, []
            for name, value in bar["parts"].items():
                start, at = at, at + max(value, 0)
                if value > 0 and start < width:
                    stretch = 100 * start / width, 100 * (min(at, width) - start) / width
                    pieces.append((MEMORY_INKS.get(name, "reference"), *stretch, f"{words(name)} {size(value)}"))
            lanes.append({"name": bar["name"], "pieces": pieces, "end": size(bar["total"]), "far": not bar["fits"],
                          "own": bar["own"], "cut": bar["total"] > width})  # fmt: skip
            shown = (size(bar["parts"][name]) if bar["parts"].get(name) else "–" for name in names)
            rows.append([bar["name"], *shown, size(bar["total"])])
        found.append((group["kind"], lanes, rows))
    return {
        "legend": [(MEMORY_INKS[name], words(name), "") for name in names], "groups": found,
        "columns": ["", *(f"n|{words(name)}" for name in names), "n|total"],
        "edge": 100 * capacity / width if capacity else None,
    }  # fmt: skip


def step_lanes(of: Json) -> list[Json]:
    """The two lanes of a step, as shares of its time: its passes in order, and what their time goes into."""
    whole, names = of["seconds"], {"passes": "in order", "parts": "by part"}
    return [
        {"name": names[lane], "pieces": [
            (STEP_PARTS[name][0], 100 * start / whole, 100 * (end - start) / whole,
             f"{STEP_PARTS[name][1]} {short_time(end - start)}") for name, start, end in bars]}
        for lane, bars in of["lanes"].items()
    ]  # fmt: skip


def step_parts(of: Json) -> list[tuple[tuple[str, str, str], float, str]]:
    """The parts of a step that take time: (ink, name, nothing), seconds, what it is."""
    shown = ((*STEP_PARTS[name], value) for name, value in of["parts"].items() if value)
    return [((ink, title, ""), value, meaning) for ink, title, meaning, value in shown]


def quarters(seconds: float) -> list[tuple[float, str]]:
    return [(25.0 * at, short_time(seconds * at / 4)) for at in range(5)]


def themed(svg: str) -> str:
    """The diagram of a pipeline in the colours of the page, without its ground, which comes first."""
    for colour, ink in THEME.items():
        svg = svg.replace(f'"{colour}"', f'"var(--{ink})"')
    return svg.replace('fill="#ffffff"', 'fill="none"', 1)


def beyond(surface: Json) -> str:
    """What to make of a plan outside of what the laws were fitted on (Hoffmann et al. 2022, abstract); within it, nothing."""
    place = _list(surface, "here")
    if len(place) != 2 or all(low <= value <= high for value, (low, high) in zip(place, FITTED, strict=True)):
        return ""
    small = any(value < low for value, (low, _) in zip(place, FITTED, strict=True))
    means = "; so far below them its loss means little, and the ratio not much" if small else ""
    return f"The laws were fitted on 70M to 16B parameters and 5B to 500B tokens: this plan extrapolates them{means}."


def _list(of: Json, key: str) -> list[Any]:
    return value if isinstance(value := of.get(key), list) else []


def loss_surface(of: Json) -> Figure | None:
    """Lines of equal loss over parameters and tokens, lines of equal compute, the laws' optimal lines, and the plan."""
    across, up, own, loss = (_list(of, key) for key in ("parameters", "tokens", "here", "loss"))
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
            hover = f"{row['name']}<extra></extra>"
            traces.append(parts.trace(LAWS.get(name, row["name"]), sizes, tokens, parts.series_ink(index), hover=hover))
    near = as_objects(of.get("known"))
    if near:
        hover = "%{text}<br>%{x:.3s} parameters, %{y:.3s} tokens<extra></extra>"
        traces.append(parts.trace("known models", [one["parameters"] for one in near], [one["tokens"] for one in near], "soft",
                                  lines=False, marks=5, hover=hover, text=[one["name"] for one in near]))  # fmt: skip
    traces.append(_mark("this run", *own))
    x, y = log_axis("parameters", across[0], across[-1], amount), log_axis("training tokens", up[0], up[-1], amount)
    note = f"Nats a token, by {of.get('law')}; dotted: equal compute, 6 N D."
    return parts.point_figure("surface", "Predicted loss", traces, x, y, note=note, annotations=labels)


def _equal_compute(budgets: list[Json], across: list[float], up: list[float]) -> tuple[list[Block], list[Block]]:
    """Lines of equal compute, and their labels near the lower ends, where other lines are far."""
    traces: list[Block] = []
    labels = []
    for row in budgets:
        hover = "equal compute<br>%{x:,.6~g}: %{y:,.4~g}<extra></extra>"
        traces.append(parts.trace("equal compute", row["parameters"], row["tokens"], "rule", hover=hover, dash="dot", width=1.25,
                                  showlegend=not traces, legendgroup="compute", hoverinfo="skip"))  # fmt: skip
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


def checkpoints(of: Json) -> Figure:
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
    return parts.point_figure("checkpoints", "Lost time against the checkpoint interval", traces, x, y)


def layouts(of: Json) -> Figure | None:
    """Speed against memory of the layouts that fit."""
    rows = as_objects(of.get("rows"))
    if len(rows) < 2:
        return None

    def points(chosen: list[Json], name: str, ink: str, **style: Any) -> Block:
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
    return parts.point_figure(
        "layouts", "Layouts that fit", traces, x, y, shapes=shapes, note="Dashed: the device's memory."
    )


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


def _mark(name: str, x: float, y: float, unit: str = "") -> Block:
    made = parts.trace(name, [x], [y], "accent", lines=False, marks=12, symbol="diamond", cliponaxis=False,
                       hover=f"{name}: %{{y:,.4~g}} {unit}<extra></extra>")  # fmt: skip
    return {**made, "x": [x], "y": [y]}
