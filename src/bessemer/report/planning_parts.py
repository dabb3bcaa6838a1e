"""The parts of a plan's page: the series of plan/pictures.py as rows, bars and sentences for the templates."""

from __future__ import annotations

from typing import Any

from bessemer.plan.tables import PART_NAMES
from bessemer.report import planning_figures as figures
from bessemer.report.data import RunData, number, table, tables, text
from bessemer.terminal import amount, duration, size

MEMORY_INKS = {
    "weights": "source-1", "gradients": "source-2", "optimizer": "source-3", "activations": "source-4", "logits": "source-5",
    "buffers": "source-6", "average": "rule", "slack": "raw", "base": "reference",
}  # fmt: skip
STEP_INKS = {
    "forward": "raw", "backward": "reference", "products": "source-1", "attention": "source-5", "elementwise": "source-3",
    "host": "rule", "tensor": "source-2", "context": "source-6", "shard": "source-4", "pipeline": "lost", "bubble": "line",
    "stragglers": "soft", "data": "accent", "optimizer": "train",
}  # fmt: skip
STEP_NAMES = PART_NAMES | {
    "elementwise": "element-wise", "tensor": "tensor, exposed", "context": "context, exposed",
    "shard": "sharded weights, exposed", "data": "gradients, exposed", "pipeline": "sends, exposed", "bubble": "bubble",
}  # fmt: skip
MEANINGS = {
    "forward": "forward passes of the slowest stage", "backward": "backward passes of the slowest stage",
    "products": "matrix products, with what is recomputed", "attention": "scores and weighted values",
    "elementwise": "norms, sums, activations: as long as the memory takes",
    "host": "the device waits for the host to launch kernels",
    "tensor": "activations between tensor ranks that nothing hides", "context": "keys and values between context ranks",
    "shard": "weights gathered, gradients scattered, beyond what hides behind the passes",
    "pipeline": "results sent between stages", "bubble": "waiting for other stages of the pipeline",
    "stragglers": "waiting for the slowest device", "data": "gradients and new weights between data ranks, once a step",
    "optimizer": "AdamW's passes over the state, and what a step does once",
}  # fmt: skip
# Colours of plan/diagram.py, for a file of its own, as those of the page's theme.
THEME = {"#15191d": "ink", "#56616b": "soft", "#dde2e6": "line", "#f0f2f3": "panel", "#b8c0c7": "rule"}
FITTED = ((70e6, 16e9), (5e9, 500e9))  # parameters and tokens of the models of Hoffmann et al. 2022
MOST_SHOWN = 2.2  # devices' memories that a bar shows; longer ones are cut, and say so


def section(data: RunData) -> dict[str, Any] | None:
    """What a run's plan.json says of the scaling laws, for the run's report: the verdict and the loss surface."""
    standing = table(data.plan.get("chinchilla"))
    drawn = table(data.plan.get("pictures"))
    figure = figures.loss_surface(table(drawn.get("surface")))
    laws = law_rows(drawn.get("laws"))
    sentence = capitalised(text(standing.get("sentence")))
    if not (figure or sentence or laws):
        return None
    return {"verdict": sentence, "figure": figure, "laws": laws, "beyond": beyond(table(drawn.get("surface")))}


def beyond(surface: dict[str, Any]) -> str:
    """What to make of a plan outside of what the laws were fitted on (Hoffmann et al. 2022, abstract); within it, nothing."""
    here = surface.get("here")
    if not isinstance(here, list) or len(here) != 2:
        return ""
    if all(low <= value <= high for value, (low, high) in zip(here, FITTED, strict=True)):
        return ""
    small = any(value < low for value, (low, _) in zip(here, FITTED, strict=True))
    means = "; so far below them its loss means little, and the ratio not much" if small else ""
    return f"The laws were fitted on 70M to 16B parameters and 5B to 500B tokens: this plan extrapolates them{means}."


def capitalised(sentence: str) -> str:
    """With a large first letter; the rest as it is."""
    return sentence[:1].upper() + sentence[1:]


def memory_rows(of: dict[str, Any]) -> dict[str, Any]:
    """The bars of each group with their parts as shares of the width, and where the device's memory ends, if that is known."""
    capacity, groups = number(of.get("capacity")), tables(of.get("groups"))
    if not groups:
        return {}
    totals = [bar["total"] for group in groups for bar in group["bars"]]
    width = 1.02 * (max(min(max(totals), MOST_SHOWN * capacity), capacity) if capacity else max(totals))
    shown = []
    names: dict[str, None] = {}
    for group in groups:
        bars = []
        for bar in group["bars"]:
            at, pieces = 0.0, []
            for name, value in bar["parts"].items():
                if value <= 0:
                    continue
                names[name] = None
                start, at = at, at + value
                if start < width:
                    pieces.append(
                        _piece(name, start / width, min(at, width) / width, MEMORY_INKS, f"{name} {size(value)}")
                    )
            bars.append({**bar, "pieces": pieces, "size": size(bar["total"]), "cut": bar["total"] > width})
        shown.append({"kind": group["kind"], "bars": bars})
    columns = [name for name in MEMORY_INKS if name in names]
    for group in shown:
        for bar in group["bars"]:
            bar["cells"] = [size(bar["parts"].get(name, 0)) if bar["parts"].get(name) else "–" for name in columns]
    return {
        "groups": shown,
        "capacity": size(capacity) if capacity else "",
        "device": text(of.get("device")),
        "edge": 100 * capacity / width if capacity else None,
        "columns": columns,
        "key": [{"name": name, "ink": MEMORY_INKS[name]} for name in columns],
    }


def step_lanes(of: dict[str, Any]) -> dict[str, Any]:
    """The two lanes of a step, as shares of its time, and its parts in a table."""
    seconds, lanes, parts = number(of.get("seconds")), table(of.get("lanes")), table(of.get("parts"))
    if not seconds or not lanes:
        return {}
    shown = [
        {
            "name": {"passes": "in order", "parts": "by part"}.get(lane, lane),
            "pieces": [
                _piece(name, start / seconds, end / seconds, STEP_INKS, f"{STEP_NAMES.get(name, name)} {short_time(end - start)}")
                for name, start, end in bars
            ],
        }
        for lane, bars in lanes.items()
    ]  # fmt: skip
    rows = [
        {
            "name": STEP_NAMES.get(name, name), "ink": STEP_INKS.get(name, "reference"), "seconds": short_time(value),
            "share": f"{value / seconds:.1%}", "meaning": MEANINGS.get(name, ""),
        }
        for name, value in parts.items()
        if value
    ]  # fmt: skip
    m = of["micro_batches"]
    each = f"{m} micro-batch{'es' if m > 1 else ''}" + ("" if of["each"] or m == 1 else ", their passes drawn together")
    passes = f"{short_time(of['forward'])} forward and {short_time(of['backward'])} backward for each"
    return {
        "lanes": shown,
        "rows": rows,
        "total": short_time(seconds),
        "finding": f"{short_time(seconds)} for {each}: {passes}.",
        "ticks": [{"place": 25.0 * at, "text": short_time(seconds * at / 4)} for at in range(5)],
        "passes": [{"name": name, "ink": STEP_INKS[name]} for name in ("forward", "backward")],
    }


def pipeline_part(of: dict[str, Any]) -> dict[str, Any]:
    """The diagram in the colours of the page, and what of it is not drawn."""
    drawing = text(of.get("svg"))
    if not drawing:
        return {}
    from markupsafe import Markup

    for colour, ink in THEME.items():
        drawing = drawing.replace(f'"{colour}"', f'"var(--{ink})"')
    start = drawing.index('fill="#ffffff"')  # the ground, which comes first
    drawing = drawing[:start] + 'fill="none"' + drawing[start + len('fill="#ffffff"') :]
    left_out = []
    if of["shown_micro_batches"] < of["micro_batches"]:
        left_out.append(
            f"{of['shown_micro_batches']} of the {of['micro_batches']:,} micro-batches, so the bubble looks larger than it is"
        )
    if len(of["shown_ranks"]) < of["ranks"]:
        left_out.append(f"{len(of['shown_ranks'])} of the {of['ranks']} ranks")
    each = f", {of['virtual']} stages on each" if of["virtual"] > 1 else ""
    said = (
        f"{of['schedule'].capitalize()} over {of['ranks']} ranks{each}. A time-step is {short_time(of['time_step'])}, "
    )
    said += "the mean stage's forward pass."
    said += f" Drawn: {'; '.join(left_out)}." if left_out else ""
    cut = sorted({one["layers"] for one in of["stages"]})
    blocks = f"{cut[0]}" if len(cut) == 1 else f"{cut[0]} to {cut[-1]}"
    said += f" A stage holds {blocks} block{'s' if cut[-1] > 1 else ''}."
    return {"finding": said, "svg": Markup(drawing)}  # numbers and words of our own


def layout_rows(of: dict[str, Any]) -> dict[str, Any]:
    """The layouts worth a look, the nearest misses, and why others cannot be."""
    rows = tables(of.get("rows"))
    if not rows:
        return {}
    best = [row for row in rows if row["front"] or row["own"]]
    best.sort(key=lambda row: row["step_seconds"])
    return {
        "finding": f"{of['fitting']:,} layouts fit, {of['too_large']:,} need more memory than there is. Listed: those that "
        "no other beats in both speed and memory.",
        "rows": [
            {
                "layout": row["layout"], "step": short_time(row["step_seconds"]), "mfu": f"{row['mfu']:.1%}",
                "memory": size(row["memory"]), "speed": f"{row['tokens_per_second_per_device']:,.0f}", "own": row["own"],
            }
            for row in best
        ],
        "misses": [{"layout": miss["layout"], "reason": "; ".join(miss["reasons"])} for miss in tables(of.get("misses"))],
        "impossible": [
            {"count": f"{count:,}", "reason": reason}
            for reason, count in sorted(table(of.get("impossible")).items(), key=lambda item: -item[1])
        ],
    }  # fmt: skip


def device_rows(of: dict[str, Any]) -> list[dict[str, Any]]:
    """Time and money on each number of devices."""
    here = table(of.get("here"))
    found = []
    for row in tables(of.get("rows")):
        shown: dict[str, Any] = {"devices": f"{row['devices']:,}", "own": row["devices"] == here.get("devices")}
        if row.get("days") is None:
            found.append({**shown, "layout": "nothing fits or divides them", "cells": ["–"] * 6})
            continue
        days, failed = (duration(86_400 * row[key]) for key in ("days", "days_with_failures"))
        money = "–" if row["cost"] is None else f"${amount(row['cost'])}"
        speed = amount(row["tokens_per_second"])
        cells = [speed, f"{row['mfu']:.1%}", days, failed, amount(row["device_hours"]), money]
        found.append({**shown, "layout": row["layout"], "cells": cells})
    return found


def law_rows(of: Any) -> list[dict[str, str]]:
    """What each scaling law makes of this size and of these FLOPs."""
    return [
        {
            "law": row["law"], "optimal": amount(row["optimal_tokens"]), "parameters": amount(row["best_parameters"]),
            "tokens": amount(row["best_tokens"]), "source": row["source"],
        }
        for row in tables(of)
    ]  # fmt: skip


def saving(of: dict[str, Any]) -> dict[str, Any]:
    """What is chosen, beside what the formulas say."""
    chosen = table(of.get("chosen"))
    if not chosen:
        return {}
    every = f"every {chosen['every']:,} step{'s' if chosen['every'] > 1 else ''}"
    return {
        "finding": f"A failure is expected every {duration(of['mtbf'])}. Saving {every} loses {chosen['waste']:.1%} of the time "
        "to failures, the work that is done again, and saves.",
        "rows": [
            {"name": "chosen", "value": duration(chosen["interval"])},
            {"name": "least lost time (Aupy et al. 2013)", "value": duration(of["best"])},
            {"name": "Young 1974", "value": duration(of["young"])},
            {"name": "Daly 2006", "value": duration(of["daly"])},
            {"name": "training waits for a save", "value": short_time(of["stall"])},
            {"name": "a save is durable after", "value": short_time(of["write"])},
        ],
    }


def _piece(name: str, start: float, end: float, inks: dict[str, str], told: str) -> dict[str, Any]:
    return {"ink": inks.get(name, "reference"), "left": 100 * start, "width": 100 * (end - start), "told": told}


def short_time(value: float) -> str:
    """A short time: 12.3 ms, 8.74 s; from a minute on as `duration`."""
    if value >= 60:
        return duration(value)
    if value >= 1 or value == 0:
        return f"{value:.3g} s"
    return f"{1e3 * value:.3g} ms" if value >= 1e-3 else f"{1e6 * value:.3g} µs"
