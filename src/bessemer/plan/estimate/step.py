"""Step time of a job, by part.

A block's computation is bound by the device or by the host, whichever is slower. Communication overlaps with it as far
as the framework allows. The pipeline schedule combines the micro-batches. Gradient reduction, the optimizer and the
fixed costs of a step follow. Sources are next to the formulas in compute.py, micro_batch.py, collectives.py and
plan/timetable.py, and with the constants in job.py and frameworks.toml.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import log, sqrt

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.distributed.schedules import checked_stages_per_rank
from bessemer.distributed.stages import PipelineRank, rank_of_stage, stage_ids_of_rank
from bessemer.distributed.step_flops import recomputed_flops_per_token
from bessemer.distributed.validity import require_devices, require_valid
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.plan.estimate import collectives, experts
from bessemer.plan.estimate.collectives import CommunicationGroup
from bessemer.plan.estimate.frameworks import Framework, blocks_of_stages, ranks_by_cut, shard_padding
from bessemer.plan.estimate.job import PHYSICS, Job, Physics, parallel
from bessemer.plan.estimate.micro_batch import micro_batch_seconds
from bessemer.plan.timetable import pipeline_seconds, rank_seconds
from bessemer.recipe.parallel import SCHEDULES, interleaved_rounds


@dataclass(frozen=True)
class Step:
    """Seconds of a step, by part, and its FLOPs.

    The parts are those of a device on the slowest pipeline stage, and their sum is `seconds`.

    Attributes:
        seconds: Time of the step.
        matmuls: Device time of matmuls.
        attention: Device time of attention.
        elementwise: Device time of element-wise passes.
        host: Time that the device waits for kernel launches.
        tensor: Exposed communication of tensor parallelism.
        context: Exposed communication of context parallelism.
        shard: Exposed gathers of weights and scatters of gradients for each micro-batch.
        expert: Exposed dispatch of tokens to experts and their return.
        data: Exposed reduction of gradients and gathers of weights once a step.
        pipeline: Exposed transfers between stages.
        bubble: Time that the slowest rank waits for others in the pipeline.
        stragglers: Time that the mean device waits for the slowest one.
        optimizer: The optimizer's passes and the fixed costs of a step.
        model_flops: Model FLOPs of all devices.
        hardware_flops: FLOPs of all devices, including recomputation.
        mfu: Model FLOPs utilization.
        hfu: Hardware FLOPs utilization.
        tokens_per_second: Speed of all devices together.
        micro_batches: Micro-batches of a step.
    """

    seconds: float
    matmuls: float
    attention: float
    elementwise: float
    host: float
    tensor: float
    context: float
    shard: float
    expert: float
    data: float
    pipeline: float
    bubble: float
    stragglers: float
    optimizer: float
    model_flops: float
    hardware_flops: float
    mfu: float
    hfu: float
    tokens_per_second: float
    micro_batches: int


def step(job: Job, how: Physics = PHYSICS) -> Step:
    """Estimate the step time of a job.

    Raises InputError if the layout is impossible (see `refuse`) or the device lacks the precision.
    """
    if (why := refuse(job)) is not None:
        raise InputError(why)
    layout, framework, m = job.layout, job.framework, job.micro_batches
    ranks, virtual = layout.pipeline, layout.virtual
    first_piece, piece = (micro_batch_seconds(replace(job, model=kind), how) for kind in experts.kinds(job.model))
    cut = blocks_of_stages(job.model, ranks * virtual, framework.cut)
    first = _first_layers(job.model, cut)
    forward = [(n - k) * piece.forward + k * first_piece.forward for n, k in zip(cut, first, strict=True)]
    backward = [(n - k) * piece.backward + k * first_piece.backward for n, k in zip(cut, first, strict=True)]
    # A stage waits for its inputs, once forward and once backward, unless the transfer overlaps with computation. The first and
    # last stage wait for their sends.
    sends, overlap = _sends(job, how), framework.pipeline_overlap
    waits = [0.0] * len(cut)
    for stage, (into, out) in enumerate(zip((*sends[:1], *sends), (*sends, *sends[-1:]), strict=True)):
        exposed = into - overlap * min(into, forward[stage]), out - overlap * min(out, backward[stage])
        forward[stage], backward[stage] = forward[stage] + exposed[0], backward[stage] + exposed[1]
        waits[stage] = sum(exposed)
    forward[0] += piece.embedding.seconds / 3
    backward[0] += piece.embedding.seconds * 2 / 3
    forward[-1] += piece.head_forward
    backward[-1] += piece.head_backward
    # The slowest of n devices is sqrt(2 ln n) standard deviations slower: the expected maximum of n normal variables.
    devices = job.cluster.devices
    slower = 1.0 + how.spread * sqrt(2 * log(devices)) if devices > 1 else 1.0
    alone = pipeline_seconds(layout.schedule, ranks, virtual, m, tuple(forward), tuple(backward))
    by_rank = rank_seconds(layout.schedule, ranks, virtual, forward, backward)
    slow = max(range(ranks), key=by_rank.__getitem__)
    mine = stage_ids_of_rank(layout.schedule, slow, ranks, virtual)
    data, optimizer = exchange_seconds(job, sum(backward) / ranks, how), optimizer_seconds(job, how)
    seconds = alone * slower + data + optimizer
    flops, stops, layers = _flops(job.model), framework.early_stop, job.model.layers
    hardware = flops + _recomputed(layout.recompute, job.model, layers, framework.selective, stops_early=stops)
    dense_blocks = sum(first[s] for s in mine)
    parts = piece.parts(sum(cut[s] for s in mine) - dense_blocks, 0 in mine, len(cut) - 1 in mine, m)
    if dense_blocks:
        dense_parts = first_piece.parts(dense_blocks, False, False, m)
        parts = {name: parts[name] + each for name, each in dense_parts.items()}
    peak = job.cluster.device.peak(job.precision) * devices * seconds / job.tokens
    return Step(
        seconds=seconds,
        **parts,
        data=data,
        pipeline=m * sum(waits[s] for s in mine),
        bubble=alone - m * by_rank[slow],
        stragglers=alone * slower - alone,
        optimizer=optimizer,
        model_flops=flops * job.tokens,
        hardware_flops=hardware * job.tokens,
        mfu=flops / peak,
        hfu=hardware / peak,
        tokens_per_second=job.tokens / seconds,
        micro_batches=m,
    )


def _first_layers(model: ModelConfig, cut: tuple[int, ...]) -> list[int]:
    """Return how many blocks of each stage are leading dense layers of a mixture; `cut` has the blocks of each stage."""
    left, firsts = model.dense_layers, []
    for blocks in cut:
        firsts.append(min(left, blocks))
        left -= firsts[-1]
    return firsts


def refuse(job: Job) -> str | None:
    """Return the reason why a job cannot use its layout, or None."""
    layout, model = job.layout, job.model
    try:
        require_devices(layout, job.cluster.devices)
        if not job.micro_batches:
            ranks = counted(layout.data, "data rank")
            return f"batch: {counted(job.batch, 'sequence')} are no micro-batches of {layout.micro_batch} on {ranks}"
        each = checked_stages_per_rank(layout.schedule, layout.virtual if layout.virtual > 1 else None)
        if layout.pipeline > 1 and each != layout.virtual:
            return f"virtual = {layout.virtual}, but schedule {layout.schedule} has {counted(each, 'stage')} a device"
        require_valid(
            model, parallel(layout), job.micro_batches, is_ours=job.framework.name == "bessemer",
            copies_keys=job.framework.copies_keys, stages_without_blocks=job.framework.stages_without_blocks,
        )  # fmt: skip
    except InputError as error:
        return str(error)
    return None


def _sends(job: Job, how: Physics) -> tuple[float, ...]:
    """Return the seconds to send each stage's output to the next stage; 0 on the same rank.

    Each tensor rank sends its part (scatter-gather, Narayanan et al. 2021, section 4.1).
    """
    layout = job.layout
    whole = job.stream_bytes / layout.tensor
    ranks = [rank_of_stage(layout.schedule, s, layout.pipeline) for s in range(layout.pipeline * layout.virtual)]
    stride = layout.world // layout.pipeline
    return tuple(collectives.send(job.cluster, both, stride, whole, how) for both in pairwise(ranks))


_flops = lru_cache(maxsize=256)(flops_per_token)
_recomputed = lru_cache(maxsize=1024)(recomputed_flops_per_token)


@lru_cache(maxsize=16_384)
def _fullest(model: ModelConfig, ranks: tuple[PipelineRank, ...]) -> int:
    """Return the parameters on the fullest pipeline rank, without routed experts and before tensor or ZeRO sharding."""
    each, table = experts.unrouted_parameters(model), model.vocabulary * model.width
    return max(rank.blocks * each + model.tables(rank.has_embedding, rank.has_head) * table for rank in ranks)


@lru_cache(maxsize=16)  # the exchange and the optimizer ask for it
def held_parameters(job: Job) -> tuple[float, float]:
    """Return the parameters, and those of routed experts with separate shards, on the device that holds most of each.

    The first includes the padding of shards. Both are before ZeRO divides them.
    """
    model, layout = job.model, job.layout
    ranks = ranks_by_cut(model, parallel(layout), job.framework.cut)
    held = _fullest(model, ranks) / layout.tensor
    routed = max(experts.held(model, rank.blocks, rank.has_embedding, layout.expert) for rank in ranks)
    if not experts.are_apart(layout, job.framework):
        held, routed = held + routed, 0.0
    if layout.zero >= 1:
        held *= shard_padding(job.framework, model, layout.tensor, layout.state_shards)
    return held, routed


def exchange_seconds(job: Job, last: float, how: Physics) -> float:
    """Return the exposed seconds of the gradient reduction and the weight gathers that take place once a step.

    They overlap with `last`, the seconds of one micro-batch's backward pass on a rank. If the framework reduce-scatters
    sharded gradients in each micro-batch (`Framework.scatter`), only the replicas' all-reduce of a shard remains.
    Otherwise all gradients take one all-reduce, or with ZeRO 1 and 2 a reduce-scatter (an all-reduce in some
    frameworks) and an all-gather.
    """
    layout, framework = job.layout, job.framework
    parameters, placed = held_parameters(job)
    inside, sharded = layout.tensor * layout.context, layout.zero >= 1 and layout.shard > 1
    # Context ranks hold the same weights, so their gradients are summed with those of the data ranks.
    group = layout.shard if sharded else layout.data
    ranks = collectives.of(job.cluster, group * layout.context, layout.tensor, how)
    total = _exchanged(job, parameters, ranks, is_sharded=sharded)
    if sharded:
        copies = collectives.of(job.cluster, layout.replicate, inside * layout.shard, how)
        gradients = parameters * framework.reduce_bytes / layout.shard
        total += collectives.reduce(copies, gradients, _calls(framework, parameters))
    if placed:
        copies = collectives.of(job.cluster, layout.expert_shards, layout.expert, how)
        total += _exchanged(job, placed, copies, is_sharded=layout.zero >= 1)
    # Gradients overlap with the last backward pass, and weights with the next forward pass, which is half as long. With
    # interleaving, a rank's last stage finishes while its other stages still have a group of p micro-batches to process.
    overlap_window = 1.5 * last * (layout.pipeline * (1 - 1 / layout.virtual) if layout.virtual > 1 else 1.0)
    overlap = framework.data_overlap
    if sharded and layout.zero == 1 and framework.sharded_overlap is not None:
        overlap = framework.sharded_overlap
    return total - overlap * min(total, overlap_window)


def _calls(framework: Framework, parameters: float) -> float:
    """Return the number of messages in which a framework exchanges parameters or their gradients once a step."""
    return max(parameters / framework.bucket, 1.0) if framework.bucket else 1.0


def _exchanged(job: Job, parameters: float, ranks: CommunicationGroup, *, is_sharded: bool) -> float:
    """Return the seconds in which `ranks` exchange the gradients and weights of `parameters` once a step."""
    layout, framework, calls = job.layout, job.framework, _calls(job.framework, parameters)
    gradients = parameters * framework.reduce_bytes
    if not is_sharded:
        return collectives.reduce(ranks, gradients, calls)
    times = 0
    if layout.zero == 1 or framework.scatter == "step":
        times = 1
    elif framework.scatter == "round":  # each stage reduces after its backward passes of a round
        has_rounds = SCHEDULES[layout.schedule].has_equal_rounds
        times = interleaved_rounds(layout.pipeline, job.micro_batches) if has_rounds else 1
    total = times * collectives.summed(ranks, gradients, calls, framework.sums)
    if layout.zero < 3:
        total += collectives.gather(ranks, parameters * framework.gather_bytes, calls)
    return total


def optimizer_seconds(job: Job, how: Physics) -> float:
    """Return the seconds of AdamW's passes over a device's state, and of the fixed costs of a step.

    A pass reads the gradient, master weight and two moments, and writes the last three and the weight. Gradients are
    also read for the norm, read and written for the clip, and zeroed.
    """
    layout, framework = job.layout, job.framework
    shares, moved = (layout.shard, layout.expert_shards) if layout.zero >= 1 else (1, 1), 0.0
    wide = framework.master_bytes or framework.weight_bytes
    narrow = framework.weight_bytes if framework.master_bytes else 0.0
    state = 2 * (framework.moment_bytes + wide) + framework.gradient_bytes + narrow
    for held, share in zip(held_parameters(job), shares, strict=True):
        moved += held / share * state + held / (share if layout.zero >= 2 else 1) * framework.gradient_bytes * 4
    return moved / (job.cluster.device.bandwidth * how.bandwidth) + how.step
