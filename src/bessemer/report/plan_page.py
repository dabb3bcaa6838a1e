"""A plan as a page of its own, and the scaling laws' section of a run's report, from the series of plan/pictures.py.

Its tables and bars are there without JavaScript; only its figures need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.plan import here, pictures
from bessemer.plan.outcome import Outcome
from bessemer.plan.tables import assumptions, layout_line, plan_rows, what_if_columns
from bessemer.report import parts, plan_figures
from bessemer.report.data import RunData, as_number, as_object, as_objects, as_text
from bessemer.report.parts import Block, capitalised, short_time, tile
from bessemer.terminal import amount, duration, rate, size

Json = dict[str, Any]

MEMORY_INKS = {
    "weights": "source-1", "gradients": "source-2", "optimizer": "source-3", "activations": "source-4", "logits": "source-5",
    "buffers": "source-6", "average": "rule", "slack": "raw", "base": "reference",
}  # fmt: skip
# Of each part of a step: its colour, its name, what it is.
STEP_PARTS = {
    "forward": ("raw", "forward", "forward passes of the slowest stage"),
    "backward": ("reference", "backward", "backward passes of the slowest stage"),
    "products": ("source-1", "matmuls", "matrix multiplications, with what is recomputed"),
    "attention": ("source-5", "attention", "scores and weighted values"),
    "elementwise": ("source-3", "element-wise", "norms, sums, activations: as long as the memory takes"),
    "host": ("rule", "waiting for launches", "the device waits for the host to launch kernels"),
    "tensor": ("source-2", "tensor, exposed", "activations between tensor ranks that nothing hides"),
    "context": ("source-6", "context, exposed", "keys and values between context ranks"),
    "shard": ("source-4", "sharded weights, exposed", "weights gathered, gradients scattered, beyond what passes hide"),
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


def writable(path: Path) -> Path:
    """The path, if a page can be written there. Raises InputError."""
    if path.is_dir():
        raise InputError(f"--html: {path} is a folder; give a file, for example {path / 'plan.html'}")
    if not path.parent.is_dir():
        raise InputError(f"--html: {path.parent}: no such folder to write the page in; make it first")
    return path


def write(path: Path, of: Outcome, **options: Any) -> Path:
    """Write the page of a planned job, atomically; options as in `render`."""
    return parts.write_page(writable(path), render(of, **options))


def render(of: Outcome, *, name: str, beside: Sequence[Outcome] = (), titles: Sequence[str] = ()) -> str:
    """The page as HTML. beside: what-ifs, with their titles."""
    columns = what_if_columns([of, *beside], ["as asked", *titles]) if beside else []
    notes = [] if of.verdict.fits else ["This layout does not fit: " + "; ".join(of.verdict.reasons) + "."]
    return compose(
        name, pictures.pictures(of), headline=_headline(of), notes=notes, tiles=_tiles(of), rows=plan_rows(of),
        origin=f"{layout_line(of.job)}; framework profile {of.job.framework.name}", verdict=of.standing.sentence,
        assumed=assumptions(of), columns=columns,
    )  # fmt: skip


def write_here(path: Path, plan: Json, rows: dict[str, str], *, name: str) -> Path:
    """Write the page of a plan of this machine, atomically: what its plan.json has. rows: as a person reads it."""
    held = {part: value for part, value in as_object(plan.get("memory_bytes_per_device")).items() if part != "total"}
    bar = {"name": "peak", "parts": held, "total": sum(held.values()), "fits": bool(plan.get("fits")), "own": True}
    drawn = {"memory": {"groups": [{"kind": "part", "bars": [bar]}]}, **as_object(here.drawn(plan).get("pictures"))}
    html = compose(
        name, drawn, origin=f"step time: {plan['step_seconds_from']}", rows=rows,
        headline=f"{amount(plan['parameters'])} parameters on {amount(plan['tokens'])} tokens take "
        f"{duration(plan['seconds'])} on {plan['device']}.",
        notes=[] if plan.get("fits") else ["This device has less free memory than a step takes."],
        verdict=as_text(as_object(plan.get("chinchilla")).get("sentence")),
    )  # fmt: skip
    return parts.write_page(writable(path), html)


def compose(
    name: str, drawn: Json, *, headline: str = "", origin: str = "", notes: Sequence[str] = (), tiles: Sequence[Block] = (),
    rows: dict[str, str] | None = None, verdict: str = "", assumed: Sequence[Sequence[str]] = (), columns: Sequence[Json] = (),
) -> str:  # fmt: skip
    """The page from plain values; what is missing or empty leaves its section out. drawn: the series of plan/pictures.py."""
    series = {key: as_object(drawn.get(key)) for key in
              ("memory", "timeline", "pipeline", "layouts", "surface", "checkpoints")}  # fmt: skip
    plain = parts.table(["", ""], (rows or {}).items(), css="plain")
    names = [name for name in (columns[0] if columns else ()) if name]
    cells = [[name, *(column[name] for column in columns)] for name in names]
    what_if = parts.table(["", *(f"n|{column['']}" for column in columns)], cells)
    said = "What was not counted from the model and the layout, and where it is from."
    listed = parts.table(["What", "Value", "soft|Source"], assumed,
                         css="named")  # fmt: skip
    sections = [
        parts.section("facts", "The plan", plain), parts.section("what-if", "What if", what_if), _memory(series["memory"]),
        _step(series["timeline"]), _pipeline(series["pipeline"]), _layouts(series["layouts"]),
        _laws("scaling", series["surface"], drawn.get("laws"), verdict),
        _checkpoints(series["checkpoints"]),
        parts.section("assumptions", "Assumptions", parts.finding(said), listed) if listed else {},
    ]  # fmt: skip
    return parts.render_page(name, "plan", headline, sections, origin=origin, notes=notes, tiles=tiles)


def run_section(data: RunData) -> Block:
    """What a run's plan.json says of the scaling laws, for the run's report: the verdict and the loss surface."""
    sentence = as_text(as_object(data.plan.get("chinchilla")).get("sentence"))
    drawn = as_object(data.plan.get("pictures"))
    return _laws("standing", as_object(drawn.get("surface")), drawn.get("laws"), sentence, beside_laws=False)


def beyond(surface: Json) -> str:
    """What to make of a plan outside of what the laws were fitted on (Hoffmann et al. 2022, abstract); within it, nothing."""
    place = surface.get("here")
    if not isinstance(place, list) or len(place) != 2:
        return ""
    if all(low <= value <= high for value, (low, high) in zip(place, FITTED, strict=True)):
        return ""
    small = any(value < low for value, (low, _) in zip(place, FITTED, strict=True))
    means = "; so far below them its loss means little, and the ratio not much" if small else ""
    return f"The laws were fitted on 70M to 16B parameters and 5B to 500B tokens: this plan extrapolates them{means}."


def _laws(name: str, surface: Json, laws: Any, verdict: str, beside_laws: bool = True) -> Block:
    """The verdict, the loss surface, and what each scaling law makes of this size and of these FLOPs."""
    figure = plan_figures.loss_surface(surface)
    numbers = {
        "optimal_tokens": "n|Best tokens for this size", "best_parameters": "n|Best size for these FLOPs",
        "best_tokens": "n|and its tokens",
    }  # fmt: skip
    rows = [[law["law"], *(amount(law[key]) for key in numbers), law["source"]] for law in as_objects(laws)]
    columns = ["Law", *numbers.values(), "wide-only what soft|Source"]
    if beside_laws and not (figure or rows):
        return {}
    return parts.section(
        name, "Scaling laws", parts.finding(f"{capitalised(verdict)}.", beyond(surface)) if verdict else {},
        parts.plots(figure, css="single tall", wide=True), parts.table(columns, rows, css="named"),
    )  # fmt: skip


def _headline(of: Outcome) -> str:
    job, bill = of.job, of.bill
    money = f"${amount(bill.cost)}" if bill.cost is not None else f"{amount(bill.device_hours)} device-hours"
    return (
        f"{amount(job.model.parameters)} parameters on {amount(of.goal.tokens)} tokens take {duration(of.running.seconds)} and "
        f"{money} on {job.cluster.devices:,} {job.cluster.device.name}, at {of.step.mfu:.0%} of their peak."
    )


def _tiles(of: Outcome) -> list[Block]:
    job, bill, step = of.job, of.bill, of.step
    count, flops = job.cluster.devices, rate(step.model_flops / step.seconds / job.cluster.devices)
    priced = bill.cost is not None
    return [
        tile("Time with failures", duration(of.running.seconds), f"{duration(of.seconds)} without"),
        tile("Cost", f"${amount(bill.cost or 0.0)}", f"${bill.price:.2f} a device-hour") if priced
        else tile("Device-hours", amount(bill.device_hours), "no price known"),
        tile("One step", short_time(step.seconds), f"{amount(job.tokens)} tokens"),
        tile("Tokens/s a device", amount(step.tokens_per_second / count), f"MFU {step.mfu:.1%}, {flops}"),
        tile("Memory", size(of.memory.total),
             f"of {size(job.cluster.device.memory)}" + ("" if of.verdict.fits else ": too much")),
        tile("Tokens a parameter", f"{of.standing.tokens_per_parameter:,.3g}", of.standing.sentence.partition(":")[0]),
    ]  # fmt: skip


def _memory(of: Json) -> Block:
    """The bars of each group with their parts as shares of the width, and where the device's memory ends, if that is known."""
    capacity, groups = as_number(of.get("capacity")), as_objects(of.get("groups"))
    if not groups:
        return {}
    totals = [bar["total"] for group in groups for bar in group["bars"]]
    width = 1.02 * (max(min(max(totals), LONGEST_BAR * capacity), capacity) if capacity else max(totals))
    present = {name for group in groups for bar in group["bars"] for name, value in bar["parts"].items() if value > 0}
    names = [name for name in MEMORY_INKS if name in present]
    blocks: list[Any] = []
    for group in groups:
        rows, cells = [], []
        for bar in group["bars"]:
            at, pieces = 0.0, []
            for name, value in bar["parts"].items():
                start, at = at, at + max(value, 0)
                if value > 0 and start < width:
                    stretch = 100 * start / width, 100 * (min(at, width) - start) / width
                    pieces.append((MEMORY_INKS.get(name, "reference"), *stretch, f"{name} {size(value)}"))
            rows.append({"name": bar["name"], "pieces": pieces, "end": size(bar["total"]), "far": not bar["fits"],
                         "own": bar["own"], "cut": bar["total"] > width})  # fmt: skip
            shown = (size(bar["parts"][name]) if bar["parts"].get(name) else "–" for name in names)
            cells.append([bar["name"], *shown, size(bar["total"])])
        numbers = parts.table(["", *(f"n|{name}" for name in names), "n|total"], cells)
        edge = 100 * capacity / width if capacity else None
        blocks.append(parts.titled(f"By {group['kind']}", parts.lanes(rows, edge), parts.folded("In numbers", numbers)))
    said = (
        f"Of the fullest device, by part. The line is the memory of one {as_text(of.get('device'))}, {size(capacity)}; the "
        "plan's own layout is in bold." if capacity else ""
    )  # fmt: skip
    return parts.section(
        "memory", "Memory", parts.finding(said), parts.key((MEMORY_INKS[one], one, "") for one in names), blocks
    )


def _step(of: Json) -> Block:
    """The two lanes of a step, as shares of its time, and its parts in a table."""
    seconds, lanes, held = as_number(of.get("seconds")), as_object(of.get("lanes")), as_object(of.get("parts"))
    if not seconds or not lanes:
        return {}
    whole, other = seconds, ("reference", "", "")
    rows = [
        {"name": {"passes": "in order", "parts": "by part"}.get(lane, lane), "own": False, "cut": False, "pieces": [
            (STEP_PARTS.get(name, other)[0], 100 * start / whole, 100 * (end - start) / whole,
             f"{STEP_PARTS.get(name, other)[1] or name} {short_time(end - start)}") for name, start, end in bars]}
        for lane, bars in lanes.items()
    ]  # fmt: skip
    shown = [(name, value, *STEP_PARTS.get(name, ("reference", name, ""))) for name, value in held.items() if value]
    cells = [[parts.cell(title, ink=ink), short_time(value), f"{value / seconds:.1%}", meaning]
             for _, value, ink, title, meaning in shown]  # fmt: skip
    m = of["micro_batches"]
    each = f"{m} micro-batch{'es' if m > 1 else ''}" + ("" if of["each"] or m == 1 else ", their passes drawn together")
    said = f"{short_time(seconds)} for {each}: {short_time(of['forward'])} forward and "
    said += f"{short_time(of['backward'])} backward for each."
    passes = [(STEP_PARTS[name][0], f"{name}, in order", "") for name in ("forward", "backward")]
    return parts.section(
        "step", "One step", parts.finding(said, "The device is the one whose stage is the slowest."),
        parts.lanes(rows, ticks=[(25.0 * at, short_time(seconds * at / 4)) for at in range(5)]),
        parts.key([*passes, *((ink, title, "") for _, _, ink, title, _ in shown)]),
        parts.table(["Part", "n|Time", "n|Share", "wide-only what soft|What it is"], cells,
                    total=["all", short_time(seconds), "100%", ""]),
    )  # fmt: skip


def _pipeline(of: Json) -> Block:
    """The diagram in the colours of the page, and what of it is not drawn."""
    drawing = as_text(of.get("svg"))
    if not drawing:
        return {}
    for colour, ink in THEME.items():
        drawing = drawing.replace(f'"{colour}"', f'"var(--{ink})"')
    drawing = drawing.replace('fill="#ffffff"', 'fill="none"', 1)  # the ground, which comes first
    left_out = []
    if of["shown_micro_batches"] < of["micro_batches"]:
        shown = f"{of['shown_micro_batches']} of the {of['micro_batches']:,}"
        left_out.append(f"{shown} micro-batches, so the bubble looks larger than it is")
    if len(of["shown_ranks"]) < of["ranks"]:
        left_out.append(f"{len(of['shown_ranks'])} of the {of['ranks']} ranks")
    each = f", {of['virtual']} stages on each" if of["virtual"] > 1 else ""
    cut = sorted({one["layers"] for one in of["stages"]})
    blocks = f"{cut[0]}" if len(cut) == 1 else f"{cut[0]} to {cut[-1]}"
    said = parts.finding(
        f"{of['schedule'].capitalize()} over {of['ranks']} ranks{each}. A time-step is {short_time(of['time_step'])}, the mean "
        "stage's forward pass.", f"Drawn: {'; '.join(left_out)}." if left_out else "",
        f"A stage holds {blocks} block{'s' if cut[-1] > 1 else ''}.",
    )  # fmt: skip
    return parts.section("pipeline", "Pipeline", said, {"kind": "svg", "svg": drawing})  # numbers and words of our own


def _layouts(of: Json) -> Block:
    """The layouts worth a look, the nearest misses, and why others cannot be."""
    rows = as_objects(of.get("rows"))
    if not rows:
        return {}
    best = sorted((row for row in rows if row["front"] or row["own"]), key=lambda row: row["step_seconds"])
    cells = [
        parts.row([row["layout"], short_time(row["step_seconds"]), f"{row['tokens_per_second_per_device']:,.0f}",
                   f"{row['mfu']:.1%}", size(row["memory"])], "total" if row["own"] else "")
        for row in best
    ]  # fmt: skip
    misses = [[miss["layout"], "; ".join(miss["reasons"])] for miss in as_objects(of.get("misses"))]
    impossible = sorted(as_object(of.get("impossible")).items(), key=lambda item: -item[1])
    said = f"{of['fitting']:,} layouts fit, {of['too_large']:,} need more memory than there is."
    return parts.section(
        "layouts", "Layouts", parts.finding(said, "Listed: those that no other beats in both speed and memory."),
        parts.plots(plan_figures.layouts(of), css="single", wide=True),
        parts.table(["Layout", "n|Step", "n|Tokens/s a device", "n|MFU", "n|Memory"], cells, css="named"),
        parts.folded("Why others fall out", parts.table(["Nearest misses", "Why"], misses, css="named"),
                     parts.table(["Not possible", "n|Layouts"], [[why, f"{n:,}"] for why, n in impossible], css="named")),
    )  # fmt: skip


def _checkpoints(of: Json) -> Block:
    """The chosen interval, beside what the formulas say."""
    chosen = as_object(of.get("chosen"))
    if not chosen:
        return {}
    every = f"every {chosen['every']:,} step{'s' if chosen['every'] > 1 else ''}"
    said = (
        f"A failure is expected every {duration(of['mtbf'])}. Saving {every} loses {chosen['waste']:.1%} of the time to "
        "failures, the work that is done again, and saves."
    )
    times = [("chosen", chosen["interval"], duration), ("least lost time (Aupy et al. 2013)", of["best"], duration),
             ("Young 1974", of["young"], duration), ("Daly 2006", of["daly"], duration),
             ("training waits for a save", of["stall"], short_time),
             ("a save is durable after", of["write"], short_time)]  # fmt: skip
    return parts.section(
        "saving", "Checkpoints and failures", parts.finding(said),
        parts.plots(plan_figures.checkpoints(of), css="single", wide=True),
        parts.facts((name, shown(value)) for name, value, shown in times),
    )  # fmt: skip
