"""`bessemer plan --schedule`: a pipeline schedule in numbers and as a picture, for stages alike or for a model's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from bessemer.errors import InputError
from bessemer.layout.schedules import generate, stages_each
from bessemer.layout.stages import balanced, costs, stage_costs
from bessemer.model.config import ModelConfig
from bessemer.plan import diagram
from bessemer.plan.timetable import Durations, Timetable, simulate
from bessemer.recipe import Recipe


@dataclass(frozen=True)
class PipelinePlan:
    """cut: blocks of each stage of a model, in `balanced` cost, and shares: of its FLOPs; None without a model."""

    timetable: Timetable
    cut: tuple[range, ...] | None = None
    shares: tuple[float, ...] | None = None


def plan(
    name: str,
    ranks: int,
    micro_batches: int,
    virtual: int | None = None,
    *,
    backward: float = 2.0,
    send: float = 0.0,
    model: tuple[Recipe, ModelConfig] | None = None,
) -> PipelinePlan:
    """Plan a schedule. backward and send: in forwards of a stage; model: a resolved recipe, whose stages then take what
    they cost, and a time-step is the forward of their mean. Raises InputError for numbers that make no sense."""
    stages_each(name, virtual)  # a name that is none is said before a duration that is none
    if not (isfinite(backward) and backward > 0):
        raise InputError(f"--backward: {backward:g} is not a duration; give a number above 0, in forwards of a stage")
    if not (isfinite(send) and send >= 0):
        raise InputError(f"--send: {send:g} is not a duration; give 0 or more, in forwards of a stage")
    schedule = generate(name, ranks, micro_batches, virtual)
    if model is None:
        return PipelinePlan(simulate(schedule, Durations(1.0, backward, send)))
    parts = costs(*model)
    cut = balanced(parts.blocks, parts.embedding, parts.head, schedule.stages)
    each = stage_costs(parts, cut)
    relative = tuple(one * schedule.stages / parts.total for one in each)
    table = simulate(schedule, Durations(1.0, backward, send, relative))
    return PipelinePlan(table, cut, tuple(one / parts.total for one in each))


def to_dict(of: PipelinePlan) -> dict[str, Any]:
    """Plain values; `cut` has the first block of each stage and the one after its last."""
    found = of.timetable.to_dict()
    if of.cut is not None and of.shares is not None:
        found["cut"] = [
            {"stage": stage, "rank": of.timetable.schedule.rank_of(stage), "blocks": [blocks.start, blocks.stop], "share": share}
            for stage, (blocks, share) in enumerate(zip(of.cut, of.shares, strict=True))
        ]  # fmt: skip
    return found


def table(of: PipelinePlan, width: int, colour: bool = False) -> str:
    """The picture and its numbers, for a terminal of so many columns."""
    time, schedule = of.timetable, of.timetable.schedule
    whole = time.timesteps * schedule.ranks
    step = "the forward of a stage" if of.cut is None else "the forward of a mean stage"
    if schedule.virtual > 1:
        step += f", of which each rank has {schedule.virtual}"
    held = [schedule.held(rank) for rank in range(schedule.ranks)]
    per_rank = [active / time.timesteps for active in time.active_of]
    rows = {
        "schedule": f"{schedule.name}, {schedule.ranks} ranks, {schedule.stages} stages, {schedule.micro_batches} micro-batches",
        "time-step": f"{step}; backward {time.durations.backward:g}"
        + (f", send {time.durations.send:g}" if time.durations.send else ""),
        "timesteps": diagram.number(time.timesteps),
        "active": f"{diagram.number(time.active)} of {diagram.number(whole)}, all ranks together",
        "idle": diagram.number(time.idle),
        "utilisation": f"{time.utilisation:.1%}"
        + (f", by rank {_several(per_rank, '.1%')}" if max(per_rank) - min(per_rank) > 5e-4 else ""),
        "held": f"activations of {_several(held, 'g')} micro-batches at most"
        + (" on every rank" if len(set(held)) == 1 else ", by rank"),
    }
    if schedule.name in ("gpipe", "1f1b") and of.cut is None and not time.durations.send:
        p, m = schedule.ranks, schedule.micro_batches
        rows["utilisation"] += f" = m / (p + m - 1) = {m} / {p + m - 1}"
    lines = [*diagram.lines(time, width, colour), "", *(f"{name:<12} {value}" for name, value in rows.items())]
    if of.cut is not None and of.shares is not None:
        lines.append("")
        for stage, (blocks, share) in enumerate(zip(of.cut, of.shares, strict=True)):
            extra = " and the embedding" if stage == 0 else " and the head" if stage == schedule.stages - 1 else ""
            named = f"blocks {blocks.start} to {blocks.stop - 1}" if len(blocks) > 1 else f"block {blocks.start}"
            lines.append(f"stage {stage:<6} {share:6.1%} of the work on rank {schedule.rank_of(stage)}: {named}{extra}")
    return "\n".join(lines)


def _several(values: Sequence[float], format: str) -> str:
    """Values by rank; one when they are all the same, the first and last few of many."""
    shown = [f"{value:{format}}" for value in values]
    if len(set(shown)) == 1:
        return shown[0]
    return ", ".join(shown if len(shown) <= 16 else [*shown[:6], "...", *shown[-6:]])
