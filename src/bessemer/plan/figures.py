"""Data of a plan's figures, in bytes and seconds; report/plan_page.py draws them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bessemer.plan import plan_result
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.memory import DeviceMemory, excess, memory, stages
from bessemer.plan.search import RECOMPUTE, LayoutSearchResult, layout_line

DRAWN_LAYOUTS = 300  # fastest layouts of a search that are drawn, in addition to the Pareto front


def figure_series(plan: plan_result.PlanResult) -> dict[str, Any]:
    """Return the data of a plan's figures: {"memory": ..., "step": ..., "layouts": ...}.

    `memory` is the result of `memory_bars`. `step` has the seconds, the number of micro-batches and the seconds by
    part. `layouts` is the result of the function of that name, or None without a search.
    """
    return {
        "memory": memory_bars(plan.job),
        "step": {
            "seconds": plan.step.seconds,
            "micro_batches": plan.step.micro_batches,
            "parts": {name: getattr(plan.step, name) for name in plan_result.STEP_PARTS},
        },
        "layouts": layouts(plan.found, plan.job) if plan.found is not None else None,
    }


def memory_bars(job: Job) -> dict[str, Any]:
    """Return the memory of the fullest device by part, as bars for each ZeRO stage, recomputation mode and pipeline rank.

    The result has `capacity` (bytes of the device), `device` (its name) and `groups`: one group of bars for ZeRO, one
    for recomputation and one for pipeline ranks, of which the first and last are absent if there is nothing to compare.
    In each group, the bar of the plan itself is marked.
    """
    groups = [
        _group("ZeRO stage", {f"ZeRO {zero}": _with_zero(job, zero) for zero in range(4)}, f"ZeRO {job.layout.zero}"),
        _group("recompute", {mode: job.with_layout(recompute=mode) for mode in RECOMPUTE}, job.layout.recompute),
    ]
    if job.layout.replicate * job.layout.state_shards == 1:  # ZeRO has nothing to divide
        groups = groups[1:]
    ranks = stages(job)
    if len(ranks) > 1:
        fullest = max(ranks, key=lambda one: one.total)
        bars = [_bar(f"stage {one.place + 1}", job, one, one is fullest) for one in ranks]
        groups.append({"kind": "pipeline stage", "bars": bars})
    device = job.cluster.device
    return {"capacity": device.memory, "device": device.name, "groups": groups}


def _with_zero(job: Job, zero: int) -> Job:
    """Return the job with another ZeRO stage; if the layout shards nothing, its replicas become the shards."""
    layout = job.layout
    if zero and layout.state_shards == 1:
        return job.with_layout(zero=zero, replicate=1, shard=layout.data)
    return job.with_layout(zero=zero)


def _group(kind: str, jobs: dict[str, Job], own: str) -> dict[str, Any]:
    return {"kind": kind, "bars": [_bar(name, job, memory(job), name == own) for name, job in jobs.items()]}


def _bar(name: str, job: Job, held: DeviceMemory, own: bool) -> dict[str, Any]:
    parts = {part: value for part, value in held.to_dict().items() if part != "total"}
    return {"name": name, "parts": parts, "total": held.total, "fits": not excess(job, held), "own": own}


def layouts(result: LayoutSearchResult, job: Job) -> dict[str, Any]:
    """Return speed and memory of the layouts that a search found.

    `rows` has one dict for each of the fastest layouts, where `front` marks the Pareto front and `own` the plan's
    layout. `misses` has the nearest layouts that do not fit, with reasons. `capacity` is the device's memory in bytes,
    and the other entries are the numbers of layouts that fit, are too large, or are impossible (by reason).
    """
    front = {id(one) for one in result.pareto}
    late = (one for one in result.ranked[DRAWN_LAYOUTS:] if id(one) in front or one.job == job)
    shown = [*result.ranked[:DRAWN_LAYOUTS], *late]
    return {
        "capacity": job.cluster.device.memory,
        "fitting": len(result.ranked),
        "too_large": len(result.rejected),
        "impossible": result.impossible,
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
            for miss in result.rejected[:5]
        ],
    }
