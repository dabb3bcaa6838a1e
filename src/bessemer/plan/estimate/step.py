"""What a training step of a job takes, in seconds, part by part.

A block's computation is bound by the device or by the host, whichever is slower; what is sent beside it hides behind it as
far as the stack lets it; the pipeline's schedule puts micro-batches together; gradients, the optimizer and what a step does
once come last. Sources stand where the formulas are: compute.py, collectives.py, bubble.py, physics.py, stacks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log, sqrt

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan.cost import flops_per_token
from bessemer.plan.estimate import collectives, compute
from bessemer.plan.estimate.bubble import passage
from bessemer.plan.estimate.compute import Work
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.physics import PHYSICS, Physics
from bessemer.plan.stage_cut import balanced


@dataclass(frozen=True)
class Stage:
    """Seconds of a pipeline stage for one micro-batch. layers: blocks that it holds."""

    layers: int
    forward: float
    backward: float


@dataclass(frozen=True)
class Step:
    """Seconds of a step, their parts, and its FLOPs.

    The parts are of the device whose pipeline stage is the slowest, and add up to seconds: products, attention, elementwise
    on the device; host: what the device waits for launches; tensor, context, shard (weights gathered and gradients scattered
    for each micro-batch), data (gradients and weights once a step), pipeline: communication that nothing hides; bubble: what
    the slowest rank waits for others in the pipeline; stragglers: what the mean device waits for the slowest; optimizer: its passes and what a step does once. model_flops, hardware_flops: of all
    devices; hardware: with what is recomputed. stages: for a picture of the step.
    """

    seconds: float
    products: float
    attention: float
    elementwise: float
    host: float
    tensor: float
    context: float
    shard: float
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
    stages: tuple[Stage, ...]

    @property
    def utilisation(self) -> float:
        """Share of the micro-batches' time in which the slowest stage works: 1 less the bubble."""
        busy = self.seconds - self.data - self.optimizer
        return (busy - self.bubble) / busy if busy > 0 else 1.0


def step(job: Job, physics: Physics | None = None) -> Step:
    """The step of a job. Raises InputError where it cannot be split so (see `refuse`) or the device lacks the precision."""
    refusal = refuse(job)
    if refusal is not None:
        raise InputError(refusal)
    how = physics or PHYSICS
    layout, model, m = job.layout, job.model, job.micro_batches
    pieces = _pieces(job.model, job.layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel, layout.recompute,
                     layout.zero, layout.shard, job.precision, job.cluster, job.stack, how)  # fmt: skip
    cut = _cut(model.layers, layout.pipeline * layout.virtual, pieces.head_in_blocks if job.stack.balanced else 0.0)
    head_forward, head_backward = pieces.head_forward, pieces.head_backward
    forward = [layers * pieces.forward for layers in cut]
    backward = [layers * pieces.backward for layers in cut]
    forward[-1] += head_forward
    backward[-1] += head_backward
    send = _send(job, how)
    exposed = send * (1.0 - job.stack.pipeline_overlap)
    ranks, virtual = layout.pipeline, layout.virtual
    if ranks > 1:  # a stage that is not overlapped waits for what it receives: once forward, once backward
        forward = [each + exposed for each in forward]
        backward = [each + exposed for each in backward]
    # The slowest of n alike lies sqrt(2 ln n) standard deviations behind (the maximum of n normal numbers).
    slower = 1.0 + how.spread * sqrt(2 * log(job.cluster.devices)) if job.cluster.devices > 1 else 1.0
    through = slower * passage(layout.schedule, ranks, virtual, m, tuple(forward), tuple(backward), 0.0)
    by_rank = [sum(forward[s] + backward[s] for s in _stages_of(layout.schedule, rank, ranks, virtual)) for rank in range(ranks)]
    slow = max(range(ranks), key=by_rank.__getitem__)
    mine = _stages_of(layout.schedule, slow, ranks, virtual)
    layers, has_head = sum(cut[s] for s in mine), len(cut) - 1 in mine
    data = _data(job, pieces, cut, by_rank, backward, how)
    optimizer = _optimizer(job, cut, how)
    seconds = through + data + optimizer
    parts = pieces.parts(layers, has_head, m)
    pipeline = 2 * exposed * len(mine) * m if ranks > 1 else 0.0
    waiting = through - through / slower
    bubble = through - waiting - m * by_rank[slow]
    flops = flops_per_token(model) * job.tokens
    hardware = flops + _recomputed(job)
    peak = job.cluster.device.peak(job.precision) * job.cluster.devices
    return Step(
        seconds=seconds, **parts, data=data, pipeline=pipeline, bubble=bubble, stragglers=waiting, optimizer=optimizer, model_flops=flops,
        hardware_flops=hardware, mfu=flops / seconds / peak, hfu=hardware / seconds / peak, tokens_per_second=job.tokens / seconds,
        micro_batches=m, stages=tuple(Stage(*each) for each in zip(cut, forward, backward, strict=True)),
    )  # fmt: skip


def refuse(job: Job) -> str | None:
    """Why a job cannot be split as its layout says; None: it can."""
    layout, model = job.layout, job.model
    sizes = {
        "replicate": layout.replicate, "shard": layout.shard, "tensor": layout.tensor, "pipeline": layout.pipeline,
        "virtual": layout.virtual, "context": layout.context, "micro_batch": layout.micro_batch, "batch": job.batch,
    }  # fmt: skip
    for name, size in sizes.items():
        if size < 1:
            return f"{name} = {size}: give 1 or more"
    if layout.devices != job.cluster.devices:
        return f"the layout is of {layout.devices} devices and the cluster has {job.cluster.devices}; their product must be the same"
    if job.batch % (layout.data * layout.micro_batch):
        return (
            f"batch = {job.batch} sequences: cannot be divided into micro-batches of {layout.micro_batch} on "
            f"{layout.data} data ranks; take a multiple of {layout.data * layout.micro_batch}"
        )
    stages = layout.pipeline * layout.virtual
    if stages > model.layers:
        return f"pipeline x virtual = {stages} stages, but the model has {model.layers} layers"
    if model.heads % layout.tensor:
        return f"tensor = {layout.tensor}: does not divide the {model.heads} heads"
    if model.sequence_length % layout.context:
        return f"context = {layout.context}: does not divide the sequence of {model.sequence_length}"
    return None


def _stages_of(schedule: str, rank: int, ranks: int, virtual: int) -> tuple[int, ...]:
    if schedule in ("zbv", "dualpipev") and virtual == 2:
        return (rank, 2 * ranks - 1 - rank)
    return tuple(range(rank, ranks * virtual, ranks))


@lru_cache(maxsize=4096)
def _cut(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Blocks of each stage: alike, the last ones one fewer where they do not divide; head: what the head weighs in blocks,
    where the stack balances by cost."""
    if head > 0 and stages > 1:
        return tuple(len(each) for each in balanced([1.0] * layers, 0.0, head, stages, fewest=0))
    return tuple(layers // stages + (1 if stage < layers % stages else 0) for stage in range(stages))


@dataclass(frozen=True)
class _Pieces:
    """One block and the head for one micro-batch, with what they wait for."""

    forward: float
    backward: float
    head_forward: float
    head_backward: float
    block_work: Work
    head_work: Work
    host: float
    tensor: float
    context: float
    shard: float
    head_tensor: float
    backward_compute: float
    head_in_blocks: float

    def parts(self, layers: int, has_head: bool, m: int) -> dict[str, float]:
        """Seconds by kind of a rank's micro-batches."""
        ends = 1 if has_head else 0
        return {
            "products": m * (layers * self.block_work.products + ends * self.head_work.products),
            "attention": m * layers * self.block_work.attention,
            "elementwise": m * (layers * self.block_work.elementwise + ends * self.head_work.elementwise),
            "host": m * layers * self.host,
            "tensor": m * (layers * self.tensor + ends * self.head_tensor),
            "context": m * layers * self.context,
            "shard": m * layers * self.shard,
        }


@lru_cache(maxsize=16_384)
def _pieces(
    model: ModelConfig, tensor: int, context: int, micro_batch: int, sequence_parallel: bool, recompute: str, zero: int, shard: int,
    precision: str, cluster: collectives.Cluster, stack: compute.Stack, how: Physics,
) -> _Pieces:  # fmt: skip
    block = compute.block(model, tensor, context, micro_batch, sequence_parallel, precision, cluster.device, stack, how)
    again = Work()
    if recompute == "full":
        again = block.forward
    elif recompute == "selective":
        again = block.scores if stack.selective == "attention" else block.products_again
    added = stack.accumulate * model.block_matrix_parameters / tensor / (cluster.device.bandwidth * how.bandwidth)
    backward = block.backward + again + Work(elementwise=added)
    launch = stack.launch * how.launch
    tokens = micro_batch * model.sequence_length // context
    wide = compute.BYTES[precision] * tokens * model.width
    if precision == "fp8" and stack.fp8 == "tensor" and sequence_parallel:
        wide *= 0.75  # what is gathered travels in 8 bits, what is scattered in 16
    near = collectives.of(cluster, tensor, 1, how)
    calls = 1 if stack.parallel_block else 2
    each = calls * collectives.reduce(near, wide)
    around = collectives.of(cluster, context, tensor, how)
    if stack.context == "exchange":  # four tensors of a token's heads each way; all-to-all sends a part of each
        one_way = 2 * (model.heads + model.kv_heads) // tensor * model.head_dim * tokens * compute.BYTES[precision]
        turn = collectives.gather(around, one_way)
        back = turn
    else:  # keys and values of the others forward; backward again, and their gradients back
        keys = 2 * compute.BYTES[precision] * tokens * context * max(model.kv_heads // tensor, 1) * model.head_dim
        turn = collectives.gather(around, keys)
        back = 2 * turn
    weights = model.block_matrix_parameters / tensor
    # Context ranks hold the same weights and share them too.
    spread = collectives.of(cluster, shard * context, tensor, how) if zero >= 2 else None
    gathered = collectives.gather(spread, weights * stack.gather_bytes, stack.gathers) if spread is not None and zero == 3 else 0.0
    each_time = spread is not None and stack.scatter == "micro-batch"
    scattered = collectives.gather(spread, weights * stack.reduce_bytes, stack.gathers) if spread is not None and each_time else 0.0
    tensor_again = each if recompute == "full" else 0.0
    ways = []
    for work, tensors, turns, shards in (
        (block.forward, each, turn, gathered),
        (backward, each + tensor_again, back + (turn if recompute == "full" else 0.0), gathered + scattered),
    ):
        busy = work.seconds
        host = max(work.kernels * launch - busy - tensors, 0.0)
        tensors -= stack.tensor_overlap * min(tensors, busy)
        turns -= (CONTEXT_OVERLAP if stack.context == "ring" else 0.0) * min(turns, work.attention)
        shards -= stack.data_overlap * min(shards, busy + tensors + host)
        ways.append((busy, host, tensors, turns, shards))
    head_forward, head_backward = compute.head(model, tensor, context, micro_batch, precision, cluster.device, stack, how)
    ends = collectives.reduce(near, wide)  # the head's input gradient; the embedding's output
    one, two = ways
    whole = sum(one) + sum(two)
    head_whole = head_forward.seconds + head_backward.seconds + 2 * ends
    return _Pieces(
        forward=sum(one), backward=sum(two), head_forward=head_forward.seconds + ends, head_backward=head_backward.seconds + ends,
        block_work=block.forward + backward, head_work=head_forward + head_backward, host=one[1] + two[1], tensor=one[2] + two[2],
        context=one[3] + two[3], shard=one[4] + two[4], head_tensor=2 * ends, backward_compute=two[0],
        head_in_blocks=round(head_whole / whole, 1),
    )  # fmt: skip


CONTEXT_OVERLAP = 0.5  # ring attention sends the next keys while it computes; all-to-all and gathers do not (both are in use)


def _send(job: Job, how: Physics) -> float:
    """Seconds of a stage's result on its way to the next rank. With tensor ranks each sends its part (scatter-gather,
    Narayanan et al. 2021, section 4.1)."""
    layout = job.layout
    if layout.pipeline == 1:
        return 0.0
    tokens = layout.micro_batch * job.model.sequence_length // layout.context
    whole = compute.BYTES[job.precision] * tokens * job.model.width / layout.tensor
    return collectives.send(job.cluster, layout.tensor * layout.context * layout.data, whole, how)


def _local_parameters(job: Job, layers: int, has_embedding: bool, has_head: bool) -> float:
    """Parameters that a device holds before ZeRO divides them."""
    model = job.model
    ends = (1 if has_embedding else 0) + (1 if has_head and not (model.tie_embeddings and has_embedding) else 0)
    return (layers * model.block_matrix_parameters + ends * model.vocabulary * model.width) / job.layout.tensor


def _fullest(job: Job, cut: tuple[int, ...]) -> float:
    """Parameters on the device that holds most."""
    layout = job.layout
    most = 0.0
    for rank in range(layout.pipeline):
        mine = _stages_of(layout.schedule, rank, layout.pipeline, layout.virtual)
        most = max(most, _local_parameters(job, sum(cut[s] for s in mine), 0 in mine, len(cut) - 1 in mine))
    return most


def _data(job: Job, pieces: _Pieces, cut: tuple[int, ...], by_rank: list[float], backward: list[float], how: Physics) -> float:
    """Seconds that gradients on their way to other data ranks, and new weights on theirs, add to a step.

    ZeRO-3 and 2 scatter for each micro-batch (`_Pieces.shard`); what is left is the replicas' all-reduce of a part. Else one
    all-reduce, or a scatter and a gather, of all gradients; it runs beside the last micro-batch's backward pass.
    """
    layout, stack = job.layout, job.stack
    parameters = _fullest(job, cut)
    calls = max(parameters / stack.bucket, 1.0) if stack.bucket else 1.0
    inside = layout.tensor * layout.context
    total = 0.0
    if layout.zero >= 2 and layout.shard > 1:
        if layout.replicate > 1:
            copies = collectives.of(job.cluster, layout.replicate, inside * layout.shard, how)
            total = collectives.reduce(copies, parameters / layout.shard * stack.reduce_bytes)
        if stack.scatter == "step":
            total += collectives.gather(collectives.of(job.cluster, layout.shard, inside, how), parameters * stack.reduce_bytes)
        if layout.zero == 2:  # the new weights come back with the next forward pass
            total += collectives.gather(collectives.of(job.cluster, layout.shard, inside, how), parameters * stack.gather_bytes)
    elif layout.data * layout.context > 1:
        # Context ranks hold the same weights: their gradients are summed with those of the data ranks.
        ranks = collectives.of(job.cluster, layout.data * layout.context, layout.tensor, how)
        if layout.zero >= 1 and layout.shard > 1:
            total = collectives.gather(ranks, parameters * stack.reduce_bytes, calls)
            total += collectives.gather(ranks, parameters * stack.gather_bytes, calls)
        else:
            total = collectives.reduce(ranks, parameters * stack.reduce_bytes, calls)
    # The last micro-batch's backward pass, and the next forward for the weights. With interleaving a rank's last stage is done
    # while the other stages still have a group of p micro-batches before them.
    hidden = sum(backward) / layout.pipeline * 1.5 * (layout.pipeline * (1 - 1 / layout.virtual) if layout.virtual > 1 else 1)
    return total - stack.data_overlap * min(total, hidden)


def _optimizer(job: Job, cut: tuple[int, ...], how: Physics) -> float:
    """Seconds of AdamW's passes over what a device holds of the state, and of what a step does once (the norm, the host).

    Read: gradient, master weight, two moments; written: the last three and the weight. Read once more for the norm, and for
    the clip both ways.
    """
    layout, stack = job.layout, job.stack
    share = layout.shard if layout.zero >= 1 else 1
    held = _fullest(job, cut)
    wide = stack.master_bytes or stack.weight_bytes
    state = 2 * (stack.moment_bytes + wide) + stack.gradient_bytes + (stack.weight_bytes if stack.master_bytes else 0.0)
    gradients = held / (share if layout.zero >= 2 else 1) * stack.gradient_bytes * 4  # norm, clip, and set to nothing again
    return (held / share * state + gradients) / (job.cluster.device.bandwidth * how.bandwidth) + how.step


def _recomputed(job: Job) -> float:
    """FLOPs of a step that recompute adds."""
    model, how = job.model, job.layout.recompute
    if how == "none":
        return 0.0
    seen = sum(compute.tokens_seen(model, layer) for layer in range(model.layers))
    scores = 4.0 * model.heads * model.head_dim * seen
    matrices = 2.0 * model.layers * model.block_matrix_parameters
    if how == "full":
        return (matrices + scores) * job.tokens
    return (scores if job.stack.selective == "attention" else matrices / 2) * job.tokens
