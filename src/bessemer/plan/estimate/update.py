"""What a step does once: gradients and weights among data ranks, and the optimizer."""

from __future__ import annotations

from functools import lru_cache

from bessemer.layout.stages import stages_of
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate import collectives
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.physics import Physics


def fullest(job: Job, cut: tuple[int, ...]) -> float:
    """Parameters on the device that holds most, before ZeRO divides them. cut: blocks of each stage."""
    layout = job.layout
    return _fullest(job.model, layout.tensor, layout.schedule, layout.pipeline, layout.virtual, cut)


@lru_cache(maxsize=16_384)
def _fullest(model: ModelConfig, tensor: int, schedule: str, ranks: int, virtual: int, cut: tuple[int, ...]) -> float:
    most, table = 0.0, model.vocabulary * model.width
    for rank in range(ranks):
        mine = stages_of(schedule, rank, ranks, virtual)
        first, last = 0 in mine, len(cut) - 1 in mine
        ends = int(first) + int(last and not (model.tie_embeddings and first))
        most = max(most, sum(cut[stage] for stage in mine) * model.block_matrix_parameters + ends * table)
    return most / tensor


def data(job: Job, cut: tuple[int, ...], last: float, how: Physics) -> float:
    """Seconds that gradients on their way to other data ranks, and new weights on theirs, add to a step.

    last: seconds of one micro-batch's backward pass on a rank, beside which they travel. Where sharded gradients go for each
    micro-batch (`pieces`) only the replicas' all-reduce of a part is left. Else one all-reduce, or a scatter (or, by the
    stack's habit, an all-reduce) and a gather (ZeRO-1, 2), of all gradients.
    """
    layout, stack = job.layout, job.stack
    parameters = fullest(job, cut)
    calls = max(parameters / stack.bucket, 1.0) if stack.bucket else 1.0
    inside, sharded = layout.tensor * layout.context, layout.zero >= 1 and layout.shard > 1
    # Context ranks hold the same weights: their gradients are summed with those of the data ranks.
    group = layout.shard if sharded else layout.data
    ranks = collectives.of(job.cluster, group * layout.context, layout.tensor, how)
    gradients, weights = parameters * stack.reduce_bytes, parameters * stack.gather_bytes
    total = 0.0
    if not sharded:
        total = collectives.reduce(ranks, gradients, calls)
    else:
        if layout.zero == 1 or stack.scatter == "step":
            total += collectives.summed(ranks, gradients, calls, stack.sums)
        if layout.zero < 3:
            total += collectives.gather(ranks, weights, calls)
        copies = collectives.of(job.cluster, layout.replicate, inside * layout.shard, how)
        total += collectives.reduce(copies, gradients / layout.shard, calls)
    # Beside the last backward pass, and the next forward for the weights: half as much again. With interleaving a rank's last
    # stage is done while its other stages still have a group of p micro-batches before them.
    beside = 1.5 * last * (layout.pipeline * (1 - 1 / layout.virtual) if layout.virtual > 1 else 1.0)
    overlap = stack.data_overlap
    if sharded and layout.zero == 1 and stack.sharded_overlap is not None:
        overlap = stack.sharded_overlap
    return total - overlap * min(total, beside)


def optimizer(job: Job, cut: tuple[int, ...], how: Physics) -> float:
    """Seconds of AdamW's passes over what a device holds of the state, and of what a step does once (the norm, the host).

    Read: gradient, master weight, two moments; written: the last three and the weight. Gradients besides: read for the norm,
    both ways for the clip, and set to nothing.
    """
    layout, stack = job.layout, job.stack
    share = layout.shard if layout.zero >= 1 else 1
    held = fullest(job, cut)
    wide = stack.master_bytes or stack.weight_bytes
    state = 2 * (stack.moment_bytes + wide) + stack.gradient_bytes + (stack.weight_bytes if stack.master_bytes else 0.0)
    gradients = held / (share if layout.zero >= 2 else 1) * stack.gradient_bytes * 4
    return (held / share * state + gradients) / (job.cluster.device.bandwidth * how.bandwidth) + how.step
