"""Candidate layouts of a search: all ways to divide a job over its devices that keep the fields that the request fixes.

In this module, `fixed` has the names of the layout fields that the request sets, and `impossible` counts, by reason, the
divisions that cannot work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import product

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.distributed.shards import divides_state, padding
from bessemer.distributed.validity import (
    divides_evenly,
    expert_sizes,
    indivisible_by_tensor,
    require_context,
    require_tensor,
)
from bessemer.plan.estimate.job import Job, Layout
from bessemer.plan.goal import divisors
from bessemer.recipe import Parallel
from bessemer.recipe.parallel import LAYOUT_KEYS, SCHEDULES, PipelineSchedule, stages_complaint

# One device easily holds a sequence shorter than this. Context parallelism is then tried only if the batch is not a multiple of
# the devices, and over at most MAX_SHORT_CONTEXT ranks.
MIN_CONTEXT_TOKENS = 16_384
MAX_CONTEXT, MAX_SHORT_CONTEXT = 16, 4
LAYOUT_NAMES = (*LAYOUT_KEYS, "micro_batch", "recompute")  # layout fields that a request may set
STAGES_EACH = (1, 2, 4, 8)  # interleaved stages on a device


def describe_fixed(layout: Layout, fixed: frozenset[str]) -> str:
    """Describe the fixed fields of a layout, as in `tensor 8, zero 3`; empty if none is fixed."""
    return ", ".join(f"{name.replace('_', '-')} {getattr(layout, name)}" for name in LAYOUT_NAMES if name in fixed)


def splits(job: Job, fixed: frozenset[str], impossible: Counter[str]) -> Iterator[Layout]:
    """Yield divisions of a model over tensor, context and pipeline ranks, with all remaining devices for the batch.

    `fixed` names the layout fields to keep. Divisions that no micro-batch could make valid are left out early, and
    counted in `impossible` by reason. `refuse` alone decides whether the others are valid.
    """
    model, cluster, is_ours = job.model, job.cluster, job.framework.name == "bessemer"
    most_context = MAX_SHORT_CONTEXT if job.batch % cluster.devices else 1
    if model.sequence_length >= MIN_CONTEXT_TOKENS:
        most_context = MAX_CONTEXT
    copies = job.framework.copies_keys
    for tensor in _ways(job, fixed, "tensor", math.gcd(cluster.near, cluster.devices), impossible):
        if key := indivisible_by_tensor(model, tensor, copies_keys=copies):
            impossible[f"{key} does not divide over tensor{f' {tensor}' if 'tensor' in fixed else ''}"] += 1
            continue
        for context in _ways(job, fixed, "context", cluster.devices // tensor, impossible, most_context):
            try:
                require_tensor(model, Parallel(tensor=tensor, context=context), copies_keys=copies)
                require_context(model, Parallel(context=context))
            except InputError:
                impossible["the sequences do not divide over context x tensor"] += 1
                continue
            for pipeline in _ways(job, fixed, "pipeline", cluster.devices // (tensor * context), impossible):
                if pipeline > model.layers + job.framework.stages_without_blocks:
                    impossible["more pipeline stages than blocks"] += 1
                    continue
                data = cluster.devices // (tensor * context * pipeline)
                if job.batch % data:
                    impossible["the batch does not divide over shard"] += 1
                    continue
                placements = expert_ranks(job, tensor * context * data, fixed)
                if not placements:
                    impossible[f"expert {job.layout.expert} does not divide experts and ranks of a stage"] += 1
                for (schedule, virtual), shard, expert in product(
                    _schedules(job, pipeline, fixed, impossible), _shards(job, data, tensor, tensor * context, fixed, impossible),
                    placements,
                ):  # fmt: skip
                    if is_ours and not divides_evenly(model, tensor, shard * context):
                        impossible["the weights do not divide over shard x context with tensor"] += 1
                        continue
                    yield Layout(
                        replicate=data // shard, shard=shard, tensor=tensor, pipeline=pipeline, virtual=virtual, context=context,
                        schedule=schedule, sequence_parallel=job.layout.sequence_parallel, expert=expert,
                    )  # fmt: skip


def _ways(
    job: Job, fixed: frozenset[str], axis: str, devices: int, impossible: Counter[str], most: int | None = None
) -> list[int]:
    """Return the sizes of an axis to try: the layout's own if the axis is in `fixed`, else the divisors of `devices`.

    Divisors above `most` are left out. A fixed size that does not divide the devices is counted in `impossible`, by
    reason, and gives no size. A fixed tensor group may be larger than a node.
    """
    size: int = getattr(job.layout, axis)
    if axis not in fixed:
        return [each for each in divisors(devices) if most is None or each <= most]
    over = job.cluster.devices if axis == "tensor" else devices
    if over % size:
        impossible[f"{axis} {size} does not divide {counted(over, 'device')}"] += 1
        return []
    return [size]


def _shards(job: Job, data: int, tensor: int, inner: int, fixed: frozenset[str], impossible: Counter[str]) -> list[int]:
    """Return the numbers of ranks, of the `data` data ranks, over which to try to shard the state.

    They are all ranks (or the most over which the weights divide), those within a node, so that frequent collectives
    stay inside, and one. `inner` is the number of ranks of tensor x context. A fixed `shard` or `replicate` determines
    the number.
    """
    if kept := fixed & {"shard", "replicate"}:
        layout = job.layout
        shard = layout.shard if "shard" in kept else data // layout.replicate
        if shard and data % shard == 0 and ("replicate" not in kept or shard * layout.replicate == data):
            return [shard]
        ranks = describe_fixed(layout, frozenset(kept))
        impossible[f"{ranks} times the other ways is not {counted(job.cluster.devices, 'device')}"] += 1
        return []
    within = job.cluster.near // inner if job.cluster.near % inner == 0 else 1
    most = data
    if job.framework.name == "bessemer":
        even = (n for n in reversed(divisors(data)) if divides_evenly(job.model, tensor, n * inner // tensor))
        most = next(n for n in even if padding(job.model, tensor, n * inner // tensor) == 1)
    return sorted({data, most, within if data % within == 0 else data, 1}, reverse=True)


def expert_ranks(job: Job, ranks: int, fixed: frozenset[str]) -> list[int]:
    """Return the numbers of ranks of a pipeline stage over which to divide a mixture's experts, or only the fixed one."""
    sizes = expert_sizes(job.model, ranks, shards_evenly=job.framework.fully_sharded)
    return [size for size in sizes if "expert" not in fixed or size == job.layout.expert]


def _stages_each(blocks: int, pipeline: int) -> list[int]:
    """Return the numbers of stages on each device to try, for an interleaved schedule of `pipeline` ranks.

    They are the powers of two in STAGES_EACH above 1, and the most that `blocks` blocks allow up to the largest of
    these.
    """
    return sorted({*STAGES_EACH[1:], max(min(blocks // pipeline, STAGES_EACH[-1]), STAGES_EACH[1])})


def _schedules(
    job: Job, pipeline: int, fixed: frozenset[str], impossible: Counter[str]
) -> list[tuple[PipelineSchedule, int]]:
    """Return (schedule, stages on each device) of the pipeline schedules to try for `pipeline` ranks.

    `fixed` names layout fields to keep. Without a pipeline the result is 1F1B, or empty if `fixed` has a schedule or
    several stages on a device. The reason for an empty result is counted in `impossible`.
    """
    layout, is_deep = job.layout, "virtual" in fixed and job.layout.virtual > 1
    if pipeline == 1:
        if "schedule" in fixed or is_deep:
            impossible[f"{describe_fixed(layout, fixed & {'schedule', 'virtual'})} needs a pipeline"] += 1
            return []
        return [("1f1b", 1)]
    names: tuple[PipelineSchedule, ...] = (layout.schedule,) if "schedule" in fixed else ("1f1b", "interleaved")
    schedules: list[tuple[PipelineSchedule, int]] = []
    most_stages = job.model.layers + job.framework.stages_without_blocks
    for name in names:
        own = SCHEDULES[name].stages_per_rank
        several = _stages_each(most_stages, pipeline) if name == "interleaved" else (own,)
        for virtual in (layout.virtual,) if "virtual" in fixed else several:
            if stages_complaint(name, virtual) is None and pipeline * virtual <= most_stages:
                schedules.append((name, virtual))
    if not schedules:
        impossible["more pipeline stages than blocks"] += 1
    return schedules


def zero_stages(job: Job, split: Layout, fixed: frozenset[str], impossible: Counter[str]) -> tuple[int, ...]:
    """Return the ZeRO stages to try, or only the fixed one; 0 if no two devices share state."""
    zero = job.layout.zero
    stages: tuple[int, ...] = (1, 2, 3)
    if SCHEDULES[split.schedule].splits_backward:  # gradients would be wrong (`zero_stage`)
        stages = (1,)
        if "zero" in fixed and zero > 1:
            impossible[f"schedule {split.schedule} runs with zero 1, not {zero}"] += 1
            return ()
    if divides_state(split):
        return (zero,) if "zero" in fixed else stages
    if "zero" in fixed and job.cluster.devices > 1:
        impossible[f"zero {zero} divides state over shard, and shard is 1"] += 1
        return ()
    return (0,)


def micro_batch_sizes(job: Job, split: Layout, fixed: frozenset[str], impossible: Counter[str]) -> list[int]:
    """Return the micro-batch sizes to try, in sequences: the fixed one, else all valid powers of two."""
    sizes = [job.layout.micro_batch] if "micro_batch" in fixed else [1 << n for n in range(job.batch.bit_length())]
    fits = [size for size in sizes if split.micro_batches(job.batch, size)]
    if not fits:
        impossible["the micro-batch does not divide a part of the batch"] += 1
    return fits
