"""The figures and bars of a plan, from the series of plan/pictures.py."""

from __future__ import annotations

from typing import Any

from bessemer.common.console import size, step_time
from bessemer.report import parts
from bessemer.report.data import Json, as_number, as_objects
from bessemer.report.parts import Block, Figure, words

MEMORY_INKS = {
    "weights": "source-1", "gradients": "source-2", "optimizer": "source-3", "activations": "source-4", "logits": "source-5",
    "buffers": "source-6", "ema": "rule", "fragmentation": "raw", "before_model": "reference",
}  # fmt: skip
# Of each part of a step: its colour, its name, what it is.
STEP_PARTS = {
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
LONGEST_BAR = 2.2  # devices' memories that a bar shows; longer ones are cut, and say so


def memory_bars(of: Json) -> Json:
    """The bars of each group with their parts as shares of the width, and where the device's memory ends, if that is known.

    legend: (ink, part, nothing); groups: kind, lanes; edge: in percent.
    """
    capacity, groups = as_number(of.get("capacity")), as_objects(of.get("groups"))
    totals = [bar["total"] for group in groups for bar in group["bars"]]
    width = 1.02 * (max(min(max(totals), LONGEST_BAR * capacity), capacity) if capacity else max(totals))
    present = {name for group in groups for bar in group["bars"] for name, value in bar["parts"].items() if value > 0}
    names = [name for name in MEMORY_INKS if name in present]
    found = []
    for group in groups:
        lanes = []
        for bar in group["bars"]:
            at, pieces = 0.0, []
            for name, value in bar["parts"].items():
                start, at = at, at + max(value, 0)
                if value > 0 and start < width:
                    stretch = 100 * start / width, 100 * (min(at, width) - start) / width
                    pieces.append((MEMORY_INKS.get(name, "reference"), *stretch, f"{words(name)} {size(value)}"))
            lanes.append({"name": bar["name"], "pieces": pieces, "end": size(bar["total"]), "far": not bar["fits"],
                          "own": bar["own"], "cut": bar["total"] > width})  # fmt: skip
        found.append((group["kind"], lanes))
    return {
        "legend": [(MEMORY_INKS[name], words(name), "") for name in names], "groups": found,
        "edge": 100 * capacity / width if capacity else None,
    }  # fmt: skip


def step_lanes(of: Json) -> list[Json]:
    """The lane of a step: what its time goes into, as shares of it."""
    whole, pieces, start = of["seconds"], [], 0.0
    for name, value in of["parts"].items():
        if value:
            ink, title, _ = STEP_PARTS[name]
            pieces.append((ink, 100 * start / whole, 100 * value / whole, f"{title} {step_time(value)}"))
            start += value
    return [{"name": "by part", "pieces": pieces}]


def step_parts(of: Json) -> list[tuple[tuple[str, str, str], float, str]]:
    """The parts of a step that take time: (ink, name, nothing), seconds, what it is."""
    shown = ((*STEP_PARTS[name], value) for name, value in of["parts"].items() if value)
    return [((ink, title, ""), value, meaning) for ink, title, meaning, value in shown]


def quarters(seconds: float) -> list[tuple[float, str]]:
    return [(25.0 * at, step_time(seconds * at / 4)) for at in range(5)]


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
