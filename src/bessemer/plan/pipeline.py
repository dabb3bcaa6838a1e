"""A pipeline schedule in numbers and as a picture, for a terminal and as SVG, for stages alike or for a model's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.layout.pipeline_schedules import Action, generate
from bessemer.layout.pipeline_stages import Costs, split_blocks, stage_costs
from bessemer.model.config import ModelConfig
from bessemer.plan.timetable import Durations, Slot, Timetable, simulate
from bessemer.recipe import Parallel
from bessemer.terminal import counted, rendered

WORDS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}
MAX_PANEL_LINES = 120
"""Of a terminal drawing at most."""

# Okabe and Ito's palette (2008), told apart with every kind of colour blindness: (background, ink) of a rank's first stage,
# and of its others.
COLOURS = {
    "F": (("#0072b2", "#ffffff"), ("#9fd0ee", "#10222e")),
    "B": (("#e69f00", "#1d1400"), ("#f7d998", "#1d1400")),
    "I": (("#cc79a7", "#1f0c16"), ("#ecc9db", "#1f0c16")),
    "W": (("#009e73", "#ffffff"), ("#97dcc6", "#06251c")),
}


def label(of: Timetable, action: Action) -> str:
    """F3; with several stages on a rank with the stage before it, 4F3, as torch writes it."""
    return f"{action.kind}{action.micro_batch}" if of.schedule.virtual == 1 else str(action)


def number(value: float) -> str:
    """Time-steps as a person reads them: 33, 26.26, 15,264."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def lines(of: Timetable, width: int) -> list[str]:
    """Return the picture for a terminal of a given width, in panels one under the other where one does not hold it.

    An action is its label and dashes for as long as it lasts; a dot is idle. A picture of more than MAX_PANEL_LINES is left out.
    """
    names = [f"rank {rank}" for rank in range(of.schedule.ranks)]
    margin = max(map(len, names)) + 2
    room = max(width - margin, 12)
    slots = [slot for row in of.slots for slot in row]
    shortest = min(slot.end - slot.start for slot in slots)
    longest_label = max(len(label(of, slot.action)) for slot in slots)
    scale = min((longest_label + 1) / shortest, float(room - longest_label))  # columns a time-step
    most = max(int((room - longest_label) / scale), 1)  # time-steps of a panel; its last label may stand out
    panels = ceil(of.timesteps / most)
    if panels * (len(names) + 2) > MAX_PANEL_LINES:
        return ["too large: use --svg FILE"]
    each = ceil(of.timesteps / panels)
    found: list[str] = []
    for first in range(0, ceil(of.timesteps), each):
        last = min(first + each, of.timesteps)
        start, end = round(first * scale), round(last * scale)
        found.append(" " * margin + _axis(first, last, scale, room))
        for name, row in zip(names, of.slots, strict=True):
            cells = "".join(_cell(of, *cell, start, end) for cell in _cells(row, scale, end))
            found.append(f"{name:<{margin}}{cells}".rstrip())
        found.append("")
    return found[:-1]


def _cells(row: tuple[Slot, ...], scale: float, end: int) -> Iterator[tuple[Slot | None, int, int]]:
    """The slots of a rank and the idle time between them, in columns from the first to the end."""
    at = 0
    for slot in row:
        begin, stop = round(slot.start * scale), round(slot.end * scale)
        if begin > at:
            yield None, at, begin
        yield slot, begin, stop
        at = stop
    if at < end:
        yield None, at, end


def _cell(of: Timetable, slot: Slot | None, begin: int, stop: int, start: int, end: int) -> str:
    """The part of a cell that lies between two columns; its last column is a gap, a label stands where the cell begins."""
    if begin >= end or stop <= start:
        return ""
    size = min(stop, end) - max(begin, start)
    line = size if stop > end else max(size - 1, 1)
    if slot is None:
        text = "·" * (size - 1 if stop <= end else size)
    elif begin < start:
        text = "─" * (size if stop > end else size - 1)
    else:
        name = label(of, slot.action)
        text = (name + "─" * line)[: max(line, min(len(name), stop - begin - 1), 1)]
    return text.ljust(size)


def _axis(first: float, last: float, scale: float, room: int) -> str:
    """Numbers of time-steps, each over the column where the time-step begins."""
    step, text = tick(6 / scale), ""
    for at in range(ceil(first / step) * step, ceil(last), step):
        column = round((at - first) * scale)
        if column >= len(text) and column + len(str(at)) <= room:
            text = text.ljust(column) + f"{at} "
    return text.rstrip()


def tick(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20, ... that is not less."""
    size = 1
    while 5 * size < least:
        size *= 10
    return next(one for one in (size, 2 * size, 5 * size) if one >= least)


def _chunk(of: Timetable, action: Action) -> int:
    """Which of its rank's stages an action is of, from 0."""
    return action.stage // of.schedule.ranks


def svg(of: Timetable, ranks: Sequence[int] | None = None) -> str:
    """The picture as a file of its own, at most some 1,500 points wide where the numbers still fit.

    ranks: those that are drawn; None: all. Every cell has a title with its rank, stage, micro-batch and times, which a browser
    shows under the pointer.
    """
    schedule, total = of.schedule, of.timesteps
    drawn = range(schedule.ranks) if ranks is None else ranks
    slots = [slot for row in of.slots for slot in row]
    letters = max(len(_svg_label(of, slot.action)) for slot in slots)
    shortest = min(slot.end - slot.start for slot in slots)
    unit = min(max(1150 / total, 0.5), 44.0)  # points a time-step
    if total * (needed := (7.0 * letters + 5) / shortest) < 6000:
        unit = max(unit, needed)
    left, top, row, bar = 62, 64, 32, 26
    step = tick(24 / unit)
    rows = [
        (rank, top + row * line + (row - bar) / 2, f"{of.active_of[rank] / total:.1%}",
         [_svg_cell(of, slot, left, unit) for slot in of.slots[rank]])
        for line, rank in enumerate(drawn)
    ]  # fmt: skip
    kinds = {slot.action.kind for slot in slots}
    entries = [(COLOURS[kind][0][0], words) for kind, words in WORDS.items() if kind in kinds] + [("#f0f2f3", "idle")]
    places = list(accumulate((40 + 6.4 * len(words) for _, words in entries), initial=float(left)))
    floor = top + row * len(drawn)
    return rendered(
        Path(__file__).with_name("pipeline.svg.jinja"),
        title=f"{schedule.name}: {counted(schedule.ranks, 'rank')} x {counted(schedule.virtual, 'stage')}, "
        + counted(schedule.micro_batches, "micro-batch"),
        summary=f"{number(total)} time-steps, active {number(of.active)} and idle {number(of.idle)} of "
        f"{number(total * schedule.ranks)}, utilisation {of.utilisation:.1%}",
        width=max(ceil(left + total * unit + 112), 640), height=floor + 66, left=left, right=left + total * unit, top=top,
        floor=floor, bar=bar, rows=rows,
        ticks=[(f"{at * step:g}", left + at * step * unit) for at in range(int(total // step) + 1)],
        legend=[(x, *entry) for x, entry in zip(places, entries, strict=False)], legend_end=places[-1],
        paler=None if schedule.virtual == 1 else "paler: a rank's second stage" if schedule.virtual == 2
        else "paler: later stages; 4F0 is of stage 4",
    )  # fmt: skip


def _svg_label(of: Timetable, action: Action) -> str:
    """The micro-batch; the colour says the kind, and which of a rank's stages as long as there are two at most."""
    return str(action.micro_batch) if of.schedule.virtual <= 2 else str(action)


def _svg_cell(of: Timetable, slot: Slot, left: float, unit: float) -> tuple[float, float, tuple[str, str], str, str]:
    """Place, width, (background, ink), tooltip, and the label where there is room for it."""
    action, width = slot.action, (slot.end - slot.start) * unit
    tooltip = (
        f"stage {action.stage}: {WORDS[action.kind]} of micro-batch {action.micro_batch}, time {number(slot.start)} to "
        f"{number(slot.end)}"
    )
    text = _svg_label(of, action)
    colours = COLOURS[action.kind][_chunk(of, action) > 0]
    return left + slot.start * unit, width, colours, tooltip, text if 6.6 * len(text) + 2 <= width else ""


@dataclass(frozen=True)
class PipelinePlan:
    """cut: blocks of each stage of a model, as split_blocks cuts it, and shares: of its FLOPs; None without a model."""

    timetable: Timetable
    cut: tuple[range, ...] | None = None
    shares: tuple[float, ...] | None = None


def plan(
    name: str, ranks: int, micro_batches: int, virtual: int | None = None, model: ModelConfig | None = None
) -> PipelinePlan:
    """Plan a schedule whose backward passes take two forwards. The stages of a model take time by their FLOPs, and a time-step
    is the forward of their mean. Raises InputError for numbers that make no sense."""
    schedule = generate(name, ranks, micro_batches, virtual)
    _require_trainable(name, ranks, micro_batches)
    if model is None:
        return PipelinePlan(simulate(schedule, Durations()))
    parts = Costs.of(model)
    cut = split_blocks(parts.blocks, parts.embedding, parts.head, schedule.stages)
    each = stage_costs(parts, cut)
    relative = tuple(one * schedule.stages / parts.total for one in each)
    table = simulate(schedule, Durations(stages=relative))
    return PipelinePlan(table, cut, tuple(one / parts.total for one in each))


def _require_trainable(name: str, ranks: int, micro_batches: int) -> None:
    """Raises InputError for so few micro-batches that a run with this schedule would be refused."""
    if not (layout := Parallel(pipeline=ranks, schedule=name)).fits_micro_batches(micro_batches):  # type: ignore[arg-type]
        raise InputError(
            f"schedule {name}: {counted(ranks, 'rank')} cannot run {counted(micro_batches, 'micro-batch')} a step: some would "
            f"idle all the time, and a run refuses it; give {layout.min_micro_batches} or more, or draw gpipe"
        )


def to_dict(of: PipelinePlan) -> dict[str, Any]:
    """Plain values; `cut` has the first block of each stage and the one after its last."""
    found = of.timetable.to_dict()
    if of.cut is not None and of.shares is not None:
        found["cut"] = [
            {"stage": stage, "rank": of.timetable.schedule.rank_of_stage(stage),
             "blocks": [blocks.start, blocks.stop], "share": share}
            for stage, (blocks, share) in enumerate(zip(of.cut, of.shares, strict=True))
        ]  # fmt: skip
    return found


def table(of: PipelinePlan, width: int) -> str:
    """The picture and its numbers, for a terminal of a given width."""
    time, schedule = of.timetable, of.timetable.schedule
    whole = time.timesteps * schedule.ranks
    step = "the forward of a stage" if of.cut is None else "the forward of a mean stage"
    if schedule.virtual > 1:
        step += f", of which each rank has {schedule.virtual}"
    held = [schedule.peak_in_flight(rank) for rank in range(schedule.ranks)]
    per_rank = [active / time.timesteps for active in time.active_of]
    rows = {
        "schedule": f"{schedule.name}, {counted(schedule.ranks, 'rank')}, {counted(schedule.stages, 'stage')}, "
        + counted(schedule.micro_batches, "micro-batch"),
        "time-step": f"{step}; backward {time.durations.backward:g}",
        "timesteps": number(time.timesteps),
        "active": f"{number(time.active)} of {number(whole)}, all ranks together",
        "idle": number(time.idle),
        "utilisation": f"{time.utilisation:.1%}"
        + (f", by rank {_several(per_rank, '.1%')}" if max(per_rank) - min(per_rank) > 5e-4 else ""),
        "held": f"activations of {_several(held, 'g')} micro-batches at most"
        + (" on every rank" if len(set(held)) == 1 else ", by rank"),
    }
    if schedule.name in ("gpipe", "1f1b") and of.cut is None:
        p, m = schedule.ranks, schedule.micro_batches
        rows["utilisation"] += f" = m / (p + m - 1) = {m} / {p + m - 1}"
    shown = [*lines(time, width), "", *(f"{name:<12} {value}" for name, value in rows.items())]
    if of.cut is not None and of.shares is not None:
        shown.append("")
        for stage, (blocks, share) in enumerate(zip(of.cut, of.shares, strict=True)):
            extra = " and the embedding" if stage == 0 else " and the head" if stage == schedule.stages - 1 else ""
            named = f"blocks {blocks.start} to {blocks.stop - 1}" if len(blocks) > 1 else f"block {blocks.start}"
            shown.append(
                f"stage {stage:<6} {share:6.1%} of the work on rank {schedule.rank_of_stage(stage)}: {named}{extra}"
            )
    return "\n".join(shown)


def _several(values: Sequence[float], format: str) -> str:
    """Values by rank; one when they are all the same, the first and last few of many."""
    shown = [f"{value:{format}}" for value in values]
    if len(set(shown)) == 1:
        return shown[0]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:6], "...", *shown[-6:]])
