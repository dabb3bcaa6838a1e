"""A plan as plain series, for pictures: what each shows stands here, how it looks in report/plan_figures.py.

Bytes, seconds, FLOPs, dollars. Nothing is drawn, except that a pipeline's diagram is the one of plan/pipeline.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Any

from bessemer.errors import InputError
from bessemer.layout.pipeline_schedules import generate
from bessemer.layout.pipeline_stages import stage_ids_of_rank
from bessemer.plan import failures, laws, outcome, pipeline
from bessemer.plan.estimate.job import Job, Layout
from bessemer.plan.estimate.memory import DeviceMemory, fits, memory, stages
from bessemer.plan.estimate.step import Step
from bessemer.plan.search import RECOMPUTE, LayoutSearchResult
from bessemer.plan.standing import known
from bessemer.plan.tables import layout_line
from bessemer.plan.timetable import Durations, simulate
from bessemer.recipe.parallel import SCHEDULES

CELLS = 1500  # about as many as can be drawn; more micro-batches repeat what these show
ROWS = 16


def stages_of_slowest_rank(step: Step, layout: Layout) -> tuple[int, ...]:
    """The stages of the rank whose passes take longest."""
    ranks, virtual = layout.pipeline, len(step.stages) // layout.pipeline
    each = (stage_ids_of_rank(layout.schedule, rank, ranks, virtual) for rank in range(ranks))
    return max(each, key=lambda mine: sum(step.stages[one].forward + step.stages[one].backward for one in mine))


def pipeline_picture(job: Job, step: Step) -> dict[str, Any] | None:
    """The diagram as SVG with what it leaves out: ranks beyond ROWS but the last, micro-batches beyond what CELLS hold.

    A time-step is the forward pass of the mean stage, time_step its seconds. None: there is no pipeline.
    """
    layout = job.layout
    ranks, virtual = layout.pipeline, len(step.stages) // layout.pipeline
    if ranks == 1:
        return None
    rows = list(range(ranks)) if ranks <= ROWS else [*range(ROWS - 1), ranks - 1]
    kinds = 3 if SCHEDULES[layout.schedule].splits_backward else 2
    # Interleaving wants a multiple of the ranks.
    most = max(CELLS // (len(rows) * virtual * kinds) // ranks * ranks, ranks)
    shown = min(job.micro_batches, max(most, SCHEDULES[layout.schedule].min_micro_batches(ranks)))
    forward, backward = (sum(getattr(one, way) for one in step.stages) for way in ("forward", "backward"))
    mean = (forward + backward) / len(step.stages)
    relative = tuple((one.forward + one.backward) / mean for one in step.stages)
    schedule = generate(layout.schedule, ranks, shown, virtual if virtual > 1 else None)
    table = simulate(schedule, Durations(1.0, backward / forward, 0.0, relative))
    return {
        "schedule": layout.schedule,
        "ranks": ranks,
        "virtual": virtual,
        "micro_batches": job.micro_batches,
        "shown_micro_batches": shown,
        "shown_ranks": rows,
        "time_step": forward / len(step.stages),
        "utilisation": table.utilisation,
        "stages": [{"stage": number, **asdict(one)} for number, one in enumerate(step.stages)],
        "svg": pipeline.svg(table, rows),
    }


DRAWN_PASSES = 12  # micro-batches whose passes a timeline shows one by one
DRAWN_LAYOUTS = 300  # of a search, the fastest; those of the Pareto list always
ONCE = ("bubble", "stragglers", "data", "optimizer")  # parts of a step that are not of a pass
PARTS = (*(part for part in outcome.STEP_PARTS if part not in ONCE), *ONCE)


def pictures(of: outcome.PlanResult) -> dict[str, Any]:
    """Everything of an outcome; what it does not have is left out or empty."""
    return {
        "memory": memory_bars(of.job),
        "timeline": timeline(of.step, of.job.layout),
        "pipeline": pipeline_picture(of.job, of.step),
        "surface": of.standing and loss_surface(of.job.model.active_parameters, of.goal.tokens),
        "laws": of.standing and law_opinions(of.job.model.active_parameters, of.goal.tokens),
        "checkpoints": checkpoints(of.running, of.save),
        "layouts": layouts(of.found, of.job) if of.found is not None else None,
    }


def memory_bars(job: Job) -> dict[str, Any]:
    """Memory of the fullest device by part: for each ZeRO stage, each recompute mode, and each place of the pipeline.

    groups: bars of one kind, the plan's own marked; capacity: of the device.
    """
    groups = [
        _group("ZeRO stage", {f"ZeRO {zero}": _with_zero(job, zero) for zero in range(4)}, f"ZeRO {job.layout.zero}"),
        _group("recompute", {mode: job.with_layout(recompute=mode) for mode in RECOMPUTE}, job.layout.recompute),
    ]
    if job.layout.replicate * job.layout.state_shards == 1:  # nothing that could be divided
        groups = groups[1:]
    found = stages(job)
    if len(found) > 1:
        fullest = max(found, key=lambda one: one.total)
        bars = [_bar(f"stage {one.place + 1}", job, one, one is fullest) for one in found]
        groups.append({"kind": "pipeline stage", "bars": bars})
    device = job.cluster.device
    return {"capacity": device.memory, "device": device.name, "groups": groups}


def _with_zero(job: Job, zero: int) -> Job:
    """The same job with another ZeRO stage; copies that divide nothing become the ranks that do."""
    layout = job.layout
    if zero and layout.state_shards == 1:
        return job.with_layout(zero=zero, replicate=1, shard=layout.data)
    return job.with_layout(zero=zero)


def _group(kind: str, jobs: dict[str, Job], own: str) -> dict[str, Any]:
    return {"kind": kind, "bars": [_bar(name, job, memory(job), name == own) for name, job in jobs.items()]}


def _bar(name: str, job: Job, held: DeviceMemory, own: bool) -> dict[str, Any]:
    parts = {part: value for part, value in held.to_dict().items() if part != "total"}
    return {"name": name, "parts": parts, "total": held.total, "fits": fits(job, held).fits, "own": own}


def timeline(step: Step, layout: Layout) -> dict[str, Any]:
    """A step of the device whose stage is the slowest, as two lanes that end together: its passes one after the other, and what
    their time goes into. Each bar is (what, start, end) in seconds; what is waited for in the pipeline is drawn in one piece.
    """
    parts = {name: getattr(step, name) for name in PARTS}  # of a pass first; they add up to the step's seconds
    mine = stages_of_slowest_rank(step, layout)
    forward, backward = (sum(getattr(step.stages[one], way) for one in mine) for way in ("forward", "backward"))
    m = step.micro_batches
    drawn = m if m <= DRAWN_PASSES else 1  # else all of a kind in one piece
    passes = [("forward", m // drawn * forward), ("backward", m // drawn * backward)] * drawn
    once = [(name, parts[name]) for name in ONCE if parts.get(name)]
    return {
        "seconds": step.seconds,
        "micro_batches": m,
        "each": m <= DRAWN_PASSES,
        "stages": [one + 1 for one in mine],
        "forward": forward,
        "backward": backward,
        "parts": parts,
        "lanes": {"passes": _laid([*passes, *once]), "parts": _laid([item for item in parts.items() if item[1]])},
    }


def _laid(lengths: Sequence[tuple[str, float]]) -> list[tuple[str, float, float]]:
    """One behind the other."""
    ends = list(accumulate((length for _, length in lengths), initial=0.0))
    return [(name, start, end) for (name, _), (start, end) in zip(lengths, pairwise(ends), strict=True)]


DECADES = 1.5


def loss_surface(parameters: float, tokens: float, points: int = 41) -> dict[str, Any]:
    """The loss DECADES powers of ten around a plan on both axes, loss[i][j] at tokens[i] and parameters[j]; lines of equal
    compute, one of them through the plan; the laws' optimal lines; known models nearby."""
    across, up = (
        [10.0 ** (math.log10(centre) - DECADES + 2 * DECADES * i / (points - 1)) for i in range(points)]
        for centre in (parameters, tokens)
    )
    flops = laws.FLOPS_PER_PARAMETER_TOKEN * parameters * tokens
    budgets = []
    for budget in (flops * 10.0**power for power in range(-3, 4)):
        line = [(size, budget / (laws.FLOPS_PER_PARAMETER_TOKEN * size)) for size in across]
        if inside := [(size, count) for size, count in line if up[0] * 0.999 <= count <= up[-1] * 1.001]:
            sizes, counts = zip(*inside, strict=True)
            budgets.append({"flops": budget, "parameters": _short(sizes), "tokens": _short(counts)})
    return {
        "parameters": _short(across),
        "tokens": _short(up),
        "loss": [_short([laws.REPLICATION.loss(size, count) for size in across]) for count in up],
        "budgets": budgets,
        "optima": {
            key: {
                "name": law.name, "parameters": _short(across),
                "tokens": _short([law.optimal_tokens(size) for size in across]),
            }
            for key, law in laws.FRONTIERS.items()
        },
        "here": [parameters, tokens],
        "law": laws.REPLICATION.name,
        "known": [
            {"name": one.name, "parameters": one.active, "tokens": one.tokens}
            for one in known()
            if across[0] <= one.active <= across[-1] and up[0] <= one.tokens <= up[-1]
        ],
    }  # fmt: skip


def _short(values: Sequence[float]) -> list[float]:
    """Five digits are finer than a screen."""
    return [float(f"{value:.5g}") for value in values]


def law_opinions(parameters: float, tokens: float) -> list[dict[str, Any]]:
    """What each law says: the best tokens for this size, and the best division of this plan's FLOPs."""
    flops = laws.training_flops(parameters, tokens)
    return [
        {
            "law": law.name,
            "source": law.source,
            "optimal_tokens": law.optimal_tokens(parameters),
            "best_parameters": law.optimum(flops).parameters,
            "best_tokens": law.optimum(flops).tokens,
        }
        for law in laws.FRONTIERS.values()
    ]


def checkpoints(running: failures.Outlook, save: failures.CheckpointCost) -> dict[str, Any] | None:
    """Share of the time that is lost against the interval between checkpoints, and the chosen interval; None: nothing to save."""
    down = failures.downtime_seconds(save)
    try:
        curve = failures.waste_curve(running.mtbf, save.stall, down, failures.RESTART_SECONDS)
    except InputError:
        return None
    while curve[-1][0] < 2 * running.interval:  # chosen longer than the best, since a write takes longer
        further = 1.3 * curve[-1][0]
        curve.append((further, failures.waste(further, running.mtbf, save.stall, down, failures.RESTART_SECONDS)))
    return {
        "intervals": _short([interval for interval, _ in curve]),
        "waste": _short([waste for _, waste in curve]),
        "chosen": {"interval": running.interval, "waste": running.waste, "every": running.every},
        "best": failures.optimal(running.mtbf, save.stall),
        "young": running.young,
        "daly": failures.daly(running.mtbf, save.stall, down, failures.RESTART_SECONDS),
        "mtbf": running.mtbf,
        "stall": save.stall,
        "write": save.write,
    }


def layouts(found: LayoutSearchResult, job: Job) -> dict[str, Any]:
    """Speed against memory of the layouts that fit. front: no other is faster with as little memory; own: the plan's."""
    front = {id(one) for one in found.pareto}
    late = (one for one in found.ranked[DRAWN_LAYOUTS:] if id(one) in front or one.job == job)
    shown = [*found.ranked[:DRAWN_LAYOUTS], *late]
    return {
        "capacity": job.cluster.device.memory,
        "fitting": len(found.ranked),
        "too_large": len(found.rejected),
        "impossible": found.impossible,
        "rows": [
            {
                "layout": layout_line(one.job),
                "memory": one.memory.total,
                "tokens_per_second_per_device": one.step.tokens_per_second / one.job.cluster.devices,
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
