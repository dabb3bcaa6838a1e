"""Output of `bessemer plan --schedule`: a pipeline schedule as numbers and as a terminal drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from bessemer.common.console import counted
from bessemer.distributed.schedules import Action, generate
from bessemer.distributed.stages import Costs, split_blocks, stage_costs
from bessemer.distributed.validity import require_micro_batches
from bessemer.model.config import ModelConfig
from bessemer.plan.timetable import Durations, Timetable, simulate
from bessemer.recipe import Parallel

MAX_PANEL_LINES = 120
"""Most lines of a terminal drawing."""


def label(of: Timetable, action: Action) -> str:
    """Return the label of an action in torch's notation: `F3`, or `4F3` with its stage if a rank has several."""
    return f"{action.kind}{action.micro_batch}" if of.schedule.virtual == 1 else str(action)


def number(value: float) -> str:
    """Format time-steps with up to two decimals: 33, 26.26, 15,264."""
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def lines(of: Timetable, width: int) -> list[str]:
    """Draw a schedule for a terminal of a given width, in several panels if one is too narrow.

    An action is drawn as its label followed by dashes for its duration, and idle time as dots. A drawing of more than
    MAX_PANEL_LINES lines is replaced by a message.
    """
    slots = [slot for row in of.slots for slot in row]
    shortest = min(slot.end - slot.start for slot in slots)
    scale = (max(len(label(of, slot.action)) for slot in slots) + 1) / shortest  # columns per time-step
    step, axis = tick(6 / scale), ""
    for at in range(0, ceil(of.timesteps), step):
        axis = axis.ljust(round(at * scale)) + str(at)
    rows = {"": axis}
    for rank, row in enumerate(of.slots):
        text = ""
        for slot in row:
            text += _filled("", round(slot.start * scale) - len(text), "·")
            text += _filled(label(of, slot.action), round(slot.end * scale) - len(text), "─")
        rows[f"rank {rank}"] = text + _filled("", round(of.timesteps * scale) - len(text), "·")
    margin = len(f"rank {of.schedule.ranks - 1}") + 2
    each = max(int((width - margin) / scale), 1)  # time-steps per panel
    if ceil(of.timesteps / each) * (len(rows) + 1) > MAX_PANEL_LINES:
        return ["too large to draw: take fewer micro-batches"]
    found: list[str] = []
    for first in range(0, ceil(of.timesteps), each):
        part = slice(round(first * scale), round((first + each) * scale))
        found += ["", *(f"{name:<{margin}}{text[part]}".rstrip() for name, text in rows.items())]
    return found[1:]


def _filled(name: str, size: int, line: str) -> str:
    """Return a label padded with a line character to `size` columns, with a gap in the last one."""
    return name.ljust(size - 1, line) + " " if size > 0 else ""


def tick(least: float) -> int:
    """Return the smallest of 1, 2, 5, 10, 20, ... that is at least `least`."""
    size = 1
    while 5 * size < least:
        size *= 10
    return next(one for one in (size, 2 * size, 5 * size) if one >= least)


@dataclass(frozen=True)
class PipelinePlan:
    """A schedule's timetable, with the stages of a model.

    Attributes:
        timetable: The simulated schedule.
        cut: Blocks of each stage with their share of the model's FLOPs, as `split_blocks` assigns them; empty without a
            model.
    """

    timetable: Timetable
    cut: tuple[tuple[range, float], ...] = ()


def plan_schedule(
    name: str, ranks: int, micro_batches: int, virtual: int | None = None, model: ModelConfig | None = None
) -> PipelinePlan:
    """Simulate a schedule in which a backward pass takes twice as long as a forward pass.

    With a model, the time of each stage follows from its FLOPs, and a time-step is the forward pass of a mean stage.
    Raises InputError for impossible numbers.
    """
    schedule = generate(name, ranks, micro_batches, virtual)
    require_micro_batches(Parallel(pipeline=ranks, schedule=name), micro_batches)  # type: ignore[arg-type]
    if model is None:
        return PipelinePlan(simulate(schedule, Durations()))
    parts = Costs.of(model)
    cut = split_blocks(parts.blocks, parts.embedding, parts.head, schedule.stages)
    each = stage_costs(parts, cut)
    table = simulate(schedule, Durations(stages=tuple(one * schedule.stages / parts.total for one in each)))
    return PipelinePlan(table, tuple((blocks, one / parts.total) for blocks, one in zip(cut, each, strict=True)))


def to_dict(of: PipelinePlan) -> dict[str, Any]:
    """Return a pipeline plan as plain values; `cut` has the first block of each stage and the one after its last."""
    found = of.timetable.to_dict()
    if of.cut:
        rank_of = of.timetable.schedule.rank_of_stage
        found["cut"] = [
            {"stage": stage, "rank": rank_of(stage), "blocks": [blocks.start, blocks.stop], "share": share}
            for stage, (blocks, share) in enumerate(of.cut)
        ]
    return found


def table(of: PipelinePlan, width: int) -> str:
    """Format a pipeline plan for a terminal of a given width, as a drawing with its numbers."""
    time, schedule = of.timetable, of.timetable.schedule
    whole = time.timesteps * schedule.ranks
    step = "the forward of a stage" if not of.cut else "the forward of a mean stage"
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
    if schedule.name in ("gpipe", "1f1b") and not of.cut:
        p, m = schedule.ranks, schedule.micro_batches
        rows["utilisation"] += f" = m / (p + m - 1) = {m} / {p + m - 1}"
    shown = [*lines(time, width), "", *(f"{name:<12} {value}" for name, value in rows.items())]
    if of.cut:
        shown.append("")
        for stage, (blocks, share) in enumerate(of.cut):
            extra = " and the embedding" if stage == 0 else " and the head" if stage == schedule.stages - 1 else ""
            named = f"blocks {blocks.start} to {blocks.stop - 1}" if len(blocks) > 1 else f"block {blocks.start}"
            shown.append(
                f"stage {stage:<6} {share:6.1%} of the work on rank {schedule.rank_of_stage(stage)}: {named}{extra}"
            )
    return "\n".join(shown)


def _several(values: Sequence[float], format: str) -> str:
    """Format the values of all ranks, or one value if they are equal."""
    shown = [f"{value:{format}}" for value in values]
    return shown[0] if len(set(shown)) == 1 else ", ".join(shown)
