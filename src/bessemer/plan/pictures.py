"""A plan as plain series, for pictures: what each shows stands here, how it looks in report/plan_figures.py.

Bytes, seconds, FLOPs, dollars. Nothing is drawn, except that a pipeline's diagram is the one of plan/diagram.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

from bessemer.errors import InputError
from bessemer.plan import failures, outcome
from bessemer.plan.estimate.job import Job, Layout
from bessemer.plan.estimate.memory import ROOM, Memory, fits, memory, stages
from bessemer.plan.estimate.step import Step
from bessemer.plan.laws import chinchilla
from bessemer.plan.laws.known import known
from bessemer.plan.laws.surface import surface
from bessemer.plan.pipeline_picture import pipeline, rank_of_slowest
from bessemer.plan.roofline import roofline
from bessemer.plan.search import RECOMPUTE, Candidate, Found
from bessemer.plan.tables import layout_line
from bessemer.plan.what_if import Point

DRAWN_PASSES = 12  # micro-batches whose passes a timeline shows one by one
DRAWN_LAYOUTS = 300  # of a search, the fastest; those of the Pareto list always
# Fields of Step that are no seconds of a part.
NO_PARTS = ("seconds", "model_flops", "hardware_flops", "mfu", "hfu", "tokens_per_second", "micro_batches", "stages")
ONCE = ("bubble", "stragglers", "data", "optimizer")  # parts of a step that are not of a pass


def pictures(of: outcome.Outcome, curve: Sequence[Point] = ()) -> dict[str, Any]:
    """Everything of an outcome; what it does not have is left out or empty."""
    return {
        "memory": memory_bars(of.job),
        "roofline": roofline(of.job, of.step),
        "timeline": timeline(of.step, of.job.layout),
        "pipeline": pipeline(of.job, of.step),
        "devices": by_devices(of, curve),
        "surface": loss_surface(of.job.model.parameters, of.goal.tokens),
        "laws": laws(of.job.model.parameters, of.goal.tokens),
        "checkpoints": checkpoints(of.running, of.save),
        "layouts": layouts(of.found, of.job) if of.found is not None else None,
    }


def memory_bars(job: Job) -> dict[str, Any]:
    """Memory of the fullest device by part: for each ZeRO stage, each recompute mode, and each place of the pipeline.

    groups: bars of one kind, the plan's own marked; capacity: of the device, room: what a plan may take of it.
    """
    groups = [
        _group("ZeRO stage", {f"ZeRO {zero}": _with_zero(job, zero) for zero in range(4)}, f"ZeRO {job.layout.zero}"),
        _group("recompute", {mode: job.with_layout(recompute=mode) for mode in RECOMPUTE}, job.layout.recompute),
    ]
    if job.layout.data * job.layout.context == 1:  # nothing that could be divided
        groups = groups[1:]
    found = stages(job)
    if len(found) > 1:
        fullest = max(found, key=lambda one: one.total)
        bars = [_bar(f"stage {one.place + 1}", job, one, one is fullest) for one in found]
        groups.append({"kind": "pipeline stage", "bars": bars})
    device = job.cluster.device
    return {"capacity": device.memory, "room": device.memory * ROOM, "device": device.name, "groups": groups}


def _with_zero(job: Job, zero: int) -> Job:
    """The same job with another ZeRO stage; copies that divide nothing become the ranks that do."""
    layout = job.layout
    if zero and layout.shard * layout.context == 1:
        return job.with_layout(zero=zero, replicate=1, shard=layout.data)
    return job.with_layout(zero=zero)


def _group(kind: str, jobs: dict[str, Job], own: str) -> dict[str, Any]:
    return {"kind": kind, "bars": [_bar(name, job, memory(job), name == own) for name, job in jobs.items()]}


def _bar(name: str, job: Job, held: Memory, own: bool) -> dict[str, Any]:
    parts = {part: value for part, value in held.to_dict().items() if part != "total"}
    return {"name": name, "parts": parts, "total": held.total, "fits": fits(job, held).fits, "own": own}


def parts_of(step: Step) -> dict[str, float]:
    """Seconds of a step by part, those of a pass first; they add up to its seconds."""
    names = [each.name for each in fields(step) if each.name not in NO_PARTS]
    names.sort(key=lambda name: ONCE.index(name) + 1 if name in ONCE else 0)
    return {name: getattr(step, name) for name in names}


def timeline(step: Step, layout: Layout) -> dict[str, Any]:
    """A step of the device whose stage is the slowest, as two lanes that end together: its passes one after the other, and what
    their time goes into. Each bar is (what, start, end) in seconds; what is waited for in the pipeline is drawn in one piece.
    """
    parts = parts_of(step)
    mine = rank_of_slowest(step, layout)
    forward, backward = (sum(getattr(step.stages[one], way) for one in mine) for way in ("forward", "backward"))
    m = step.micro_batches
    passes = (
        [("forward", forward), ("backward", backward)] * m
        if m <= DRAWN_PASSES
        else [("forward", m * forward), ("backward", m * backward)]
    )
    once = [(name, parts[name]) for name in ONCE if parts.get(name)]
    return {
        "seconds": step.seconds,
        "micro_batches": m,
        "each": m <= DRAWN_PASSES,
        "stages": [one + 1 for one in mine],
        "forward": forward,
        "backward": backward,
        "parts": parts,
        "lanes": {
            "passes": list(_laid([*passes, *once])),
            "parts": list(_laid([item for item in parts.items() if item[1]])),
        },
    }


def _laid(lengths: Sequence[tuple[str, float]]) -> Iterator[tuple[str, float, float]]:
    """One behind the other."""
    at = 0.0
    for name, length in lengths:
        yield name, at, (at := at + length)


def by_devices(of: outcome.Outcome, curve: Sequence[Point]) -> dict[str, Any]:
    """Time and money on other numbers of devices, each with the fastest layout there; here: the plan itself."""
    rows = [_on_devices(of, point.best) if point.best else {"devices": point.devices, "days": None} for point in curve]
    return {"here": _on_devices(of, Candidate(of.job, of.memory, of.step)), "rows": rows}


def _on_devices(of: outcome.Outcome, best: Candidate) -> dict[str, Any]:
    _, running, bill = outcome.run_of(of.goal, best)
    return {
        "devices": best.job.cluster.devices,
        "days": of.goal.tokens / best.tokens_per_second / 86_400,
        "days_with_failures": bill.days,
        "device_hours": bill.device_hours,
        "cost": bill.cost,
        "tokens_per_second": best.tokens_per_second,
        "mfu": best.step.mfu,
        "effective": running.effective,
        "memory": best.memory.total,
        "layout": layout_line(best.job),
    }


def loss_surface(parameters: float, tokens: float, points: int = 41, decades: float = 1.5) -> dict[str, Any]:
    """The loss around a plan, with lines of equal compute, the laws' optimal lines, and known models nearby."""
    found = surface(parameters, tokens, points=points, decades=decades)
    low, high = (found.parameters[0], found.tokens[0]), (found.parameters[-1], found.tokens[-1])
    near = [
        {"name": one.name, "parameters": one.active, "tokens": one.tokens}
        for one in known()
        if low[0] <= one.active <= high[0] and low[1] <= one.tokens <= high[1]
    ]
    return {
        "parameters": _short(found.parameters),
        "tokens": _short(found.tokens),
        "loss": [_short(row) for row in found.loss],
        "budgets": [
            {"flops": flops, "parameters": _short(line.parameters), "tokens": _short(line.tokens)}
            for flops, line in found.budgets.items()
        ],
        "optima": {
            name: {"name": line.name, "parameters": _short(line.parameters), "tokens": _short(line.tokens)}
            for name, line in found.optima.items()
        },
        "here": list(found.here),
        "law": found.law,
        "known": near,
    }


def _short(values: Sequence[float]) -> list[float]:
    """Five digits are finer than a screen."""
    return [float(f"{value:.5g}") for value in values]


def laws(parameters: float, tokens: float) -> list[dict[str, Any]]:
    """What each law says: the best tokens for this size, and the best division of this plan's FLOPs."""
    flops = chinchilla.training_flops(parameters, tokens)
    return [
        {
            "law": one.law,
            "source": one.source,
            "optimal_tokens": chinchilla.FRONTIERS[name].optimal_tokens(parameters),
            "best_parameters": one.optimum.parameters,
            "best_tokens": one.optimum.tokens,
        }
        for name, one in chinchilla.opinions(flops).items()
    ]


def checkpoints(running: failures.Outlook, save: failures.Checkpoint) -> dict[str, Any] | None:
    """Share of the time that is lost against the interval between checkpoints, and the chosen interval; None: nothing to save."""
    down = failures.DETECTION + max(save.write - save.stall, 0.0)
    try:
        curve = failures.waste_curve(running.mtbf, save.stall, down, failures.RESTART)
    except InputError:
        return None
    while curve[-1][0] < 2 * running.interval:  # chosen longer than the best, since a write takes longer
        further = 1.3 * curve[-1][0]
        curve.append((further, failures.waste(further, running.mtbf, save.stall, down, failures.RESTART)))
    return {
        "intervals": _short([interval for interval, _ in curve]),
        "waste": _short([waste for _, waste in curve]),
        "chosen": {"interval": running.interval, "waste": running.waste, "every": running.every},
        "best": failures.optimal(running.mtbf, save.stall),
        "young": running.young,
        "daly": failures.daly(running.mtbf, save.stall, down, failures.RESTART),
        "mtbf": running.mtbf,
        "stall": save.stall,
        "write": save.write,
    }


def layouts(found: Found, job: Job) -> dict[str, Any]:
    """Speed against memory of the layouts that fit. front: no other is faster with as little memory; own: the plan's."""
    front = {id(one) for one in found.pareto}
    shown = [*found.ranked[:DRAWN_LAYOUTS], *(one for one in found.ranked[DRAWN_LAYOUTS:] if id(one) in front)]
    return {
        "capacity": job.cluster.device.memory,
        "fitting": len(found.ranked),
        "too_large": len(found.rejected),
        "impossible": found.impossible,
        "rows": [
            {
                "layout": layout_line(one.job),
                "memory": one.memory.total,
                "tokens_per_second_per_device": one.tokens_per_second / one.job.cluster.devices,
                "step_seconds": one.step.seconds,
                "mfu": one.step.mfu,
                "front": id(one) in front,
                "own": one.job == job,
            }
            for one in shown
        ],
        "misses": [
            {"layout": layout_line(replace(job, layout=miss.layout)), "reasons": list(miss.reasons)}
            for miss in found.rejected[:5]
        ],
    }
