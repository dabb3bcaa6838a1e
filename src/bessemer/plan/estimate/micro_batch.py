"""Time of one micro-batch in a block and at both ends of a model: computation, host and exposed communication."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from bessemer.plan.estimate import collectives, compute, experts
from bessemer.plan.estimate.compute import BlockWork, WorkSeconds
from bessemer.plan.estimate.frameworks import shard_padding
from bessemer.plan.estimate.job import ELEMENT_BYTES, TRAIN, Job, Physics

CONTEXT_OVERLAP = 0.5  # ring attention sends the next keys while it computes; gathers and exchanges do not overlap


@dataclass(frozen=True)
class MicroBatchSeconds:
    """Seconds of one micro-batch in a block, the embedding and the head.

    Attributes:
        forward: Forward pass of a block, with exposed communication.
        backward: Backward pass of a block, with exposed communication.
        embedding: Work of the embedding, both passes together.
        head_forward: Forward pass of the head.
        head_backward: Backward pass of the head.
        block_work: Work of a block, both passes together.
        head_work: Work of the head, both passes together.
        host: Time that the device waits for kernel launches of a block.
        tensor: Exposed tensor communication of a block.
        context: Exposed context communication of a block.
        shard: Exposed gathers and scatters of a block.
        expert: Exposed expert communication of a block.
        head_tensor: Tensor communication of the head.
    """

    forward: float
    backward: float
    embedding: WorkSeconds
    head_forward: float
    head_backward: float
    block_work: WorkSeconds
    head_work: WorkSeconds
    host: float
    tensor: float
    context: float
    shard: float
    expert: float
    head_tensor: float

    def parts(self, layers: int, has_embedding: bool, has_head: bool, m: int) -> dict[str, float]:
        """Return the seconds by kind over m micro-batches on a rank with `layers` blocks and perhaps the embedding or head."""
        work = self.block_work.times(layers)
        if has_embedding:
            work += self.embedding
        if has_head:
            work += self.head_work
        each_block = {name: m * layers * getattr(self, name) for name in ("host", "context", "shard", "expert")}
        return each_block | {
            "matmuls": m * work.matmuls,
            "attention": m * work.attention,
            "elementwise": m * work.elementwise,
            "tensor": m * (layers * self.tensor + (self.head_tensor if has_head else 0.0)),
        }


@dataclass(frozen=True)
class TensorSeconds:
    """Tensor communication of a block.

    Attributes:
        each: Seconds of one all-reduce of the hidden states, or of the all-gather and reduce-scatter that replace it.
        total: Seconds of the forward and of the backward pass.
        paired: Part of `total` that can overlap with a matmul.
        copied: Seconds of each pass to copy gathered or scattered data into place.
        nodes: Nodes that the group spans.
    """

    each: float
    total: tuple[float, float]
    paired: tuple[float, float]
    copied: tuple[float, float]
    nodes: int


@dataclass(frozen=True)
class PassSeconds:
    """A block's forward or backward pass, before overlap.

    Attributes:
        work: Computation on the device.
        tensor: Seconds of tensor communication.
        paired: Part of `tensor` that can overlap with a matmul.
        context: Seconds of attention's communication among context ranks.
        shard: Seconds to gather weights and scatter gradients.
        expert: Seconds to exchange tokens with experts.
    """

    work: WorkSeconds
    tensor: float
    paired: float
    context: float
    shard: float
    expert: float

    def exposed(self, job: Job, stalled: float, how: Physics) -> tuple[float, float, float, float, float, float]:
        """Return seconds of computation, and the exposed seconds of host, tensor, context, shard and expert.

        `stalled` is the host time that collectives add.
        """
        framework, busy = job.framework, self.work.seconds
        launched = (self.work.kernels * framework.launch + stalled) * how.launch
        host = max(launched - busy - self.tensor - self.expert, 0.0)
        expert = self.expert - framework.expert_overlap * min(self.expert, busy)
        tensor = self.tensor - framework.tensor_overlap * min(self.paired, busy)
        ring = CONTEXT_OVERLAP if framework.context == "ring" else 0.0
        context = self.context - ring * min(self.context, self.work.attention)
        shard = self.shard - framework.data_overlap * min(self.shard, busy + tensor + host)
        return busy, host, tensor, context, shard, expert


def micro_batch_seconds(job: Job, how: Physics) -> MicroBatchSeconds:
    """Return the times of a micro-batch of a job, apart from its pipeline; `how` has the efficiencies of the devices."""
    layout = job.layout
    queues = layout.pipeline > 1 and layout.world > job.cluster.near
    # All ranks of a stage share divided experts, replicas too.
    replicate = layout.replicate if layout.expert > 1 else 1
    alone = replace(layout, replicate=replicate, pipeline=1, virtual=1, schedule="1f1b")
    return _seconds(replace(job, layout=alone, batch=1, train=TRAIN, offload=False), queues, how)


@lru_cache(maxsize=16_384)
def _seconds(job: Job, queues: bool, how: Physics) -> MicroBatchSeconds:
    """Return the time of a micro-batch, cached.

    `job` has no pipeline and a batch of 1, because the result does not depend on them. `queues` is true if a pipeline
    sends to other nodes.
    """
    model, layout, framework, device = job.model, job.layout, job.framework, job.cluster.device
    block = compute.block(job.with_layout(shard=1, zero=0, recompute="none"), how)
    recomputes_all = layout.recompute == "full"
    recomputes_sent = layout.recompute == "selective" and framework.selective == "elementwise"
    added = (
        framework.accumulate * experts.unrouted_parameters(model) / layout.tensor / (device.bandwidth * how.bandwidth)
    )
    tensor = _tensor(job, how)
    forward = block.forward + WorkSeconds(elementwise=tensor.copied[0])
    backward = block.backward + _again(job, block) + WorkSeconds(elementwise=added)
    backward += WorkSeconds(elementwise=tensor.copied[1])
    turn, turn_back = _context(job, how)
    gathered, scattered = _shard(job, how)
    sent, sent_back = _experts(job, how)
    tangled = framework.tangled[0] * layout.tensor ** framework.tangled[1] if queues and layout.tensor > 1 else 0.0
    stalled = tangled + framework.across * (tensor.nodes - 1)
    passes = (
        PassSeconds(forward, tensor.total[0], tensor.paired[0], turn, gathered, sent),
        PassSeconds(
            backward, tensor.total[1], tensor.paired[1], turn_back + (turn if recomputes_all else 0.0),
            gathered * (2 if framework.regathers and recomputes_all else 1) + scattered,
            sent_back + (sent if recomputes_all or recomputes_sent else 0.0),
        ),
    )  # fmt: skip
    one, two = (each.exposed(job, stalled, how) for each in passes)
    _, host, tensors, turns, shards, exchanged = (sum(both) for both in zip(one, two, strict=True))
    head_forward, head_backward = compute.head(job, how)
    return MicroBatchSeconds(
        forward=sum(one),
        backward=sum(two),
        embedding=compute.embedding(job, how),
        head_forward=head_forward.seconds + tensor.each,
        head_backward=head_backward.seconds + tensor.each,
        block_work=forward + backward,
        head_work=head_forward + head_backward,
        host=host,
        tensor=tensors,
        context=turns,
        shard=shards,
        expert=exchanged,
        head_tensor=2 * tensor.each,
    )


def _again(job: Job, block: BlockWork) -> WorkSeconds:
    """Return the work of a block that recomputation repeats."""
    if job.layout.recompute == "none":
        return WorkSeconds()
    if job.layout.recompute == "full":
        return block.needed if job.framework.early_stop else block.forward
    elementwise = replace(block.forward, matmuls=0.0, attention=0.0)
    again = {"elementwise": elementwise, "attention": block.scores, "matmuls": block.matmuls_again}
    return again[job.framework.selective]


def _tensor(job: Job, how: Physics) -> TensorSeconds:
    """Return the communication of a block's tensor group.

    With sequence parallelism, an all-reduce becomes an all-gather and a reduce-scatter. Gathered data travels in 8 bits
    if it is cast before.
    """
    layout, framework, wide = job.layout, job.framework, 1.0 * job.stream_bytes
    narrow = job.precision == "fp8" and framework.fp8 == "tensor" and layout.sequence_parallel
    gathers = 1 / 3 if narrow else 0.5  # share of the tensor communication
    pairs = 1 if framework.parallel_block else 2
    group = collectives.of(job.cluster, layout.tensor, 1, how)
    joined = collectives.reduce(group, wide * (0.75 if narrow else 1.0))
    each, repeated = joined * pairs, _tensor_again(job, gathers)
    hides, hides_back = _paired(job, gathers)
    copied = copied_back = 0.0
    if framework.copies and layout.sequence_parallel and layout.tensor > 1 and layout.micro_batch > 1:
        # A copy reads and writes. Communication that is paired with a matmul produces its result in place.
        moved = 2 * pairs * wide * (1.5 if narrow else 2.0) / (job.cluster.device.bandwidth * how.bandwidth)
        left, left_back = (1 - hides, 1 - hides_back) if framework.tensor_overlap else (1.0, 1.0)
        copied, copied_back = moved * left, moved * (left_back + repeated * left)
    again = repeated * each
    paired = hides * each, hides_back * each + hides * again
    return TensorSeconds(joined, (each, each + again), paired, (copied, copied_back), group.nodes)


def _tensor_again(job: Job, gathers: float) -> float:
    """Return the share of a block's forward tensor communication that recomputation repeats.

    `gathers` is the share of all-gathers. Full recomputation repeats everything, or everything except the last sum if
    it stops early. Recomputation of every second matmul repeats the gathers with sequence parallelism, because
    torchtitan's activation checkpointing (_save_list) saves scatters but not gathers.
    """
    layout, framework = job.layout, job.framework
    if layout.recompute == "full":
        last = (1 - gathers) / 2 if layout.sequence_parallel else 0.5
        return 1.0 - (last if framework.early_stop else 0.0)
    is_second = layout.recompute == "selective" and framework.selective == "matmuls"
    return gathers if is_second and layout.sequence_parallel else 0.0


def _paired(job: Job, gathers: float) -> tuple[float, float]:
    """Return the shares of a block's tensor communication, forward and backward, that are paired with a matmul.

    `gathers` is the share of all-gathers. PyTorch's micro-pipelining (torch/_inductor/fx_passes/micro_pipeline_tp.py)
    pairs a gather with the matmuls that read it, except those with row scales (pytorch issue 149990), and a scatter
    with the one matmul that it sums. In the backward pass, the matmuls of queries, keys and values (or both of a gated
    MLP) are added first, so their scatter has no such matmul.
    """
    if job.framework.paired == "all":
        return 1.0, 1.0
    seconds = 0.0 if job.precision == "fp8" and job.framework.fp8 == "row" else gathers
    return seconds + 1 - gathers, seconds


def _experts(job: Job, how: Physics) -> tuple[float, float]:
    """Return the seconds of a block's exchange of tokens with experts, forward and backward.

    Each pass dispatches tokens and returns their results, or the gradients of both. In fp8, tokens are cast before
    dispatch where the program can; sums return in 16 bits. If the host must know the numbers of tokens (`reads_counts`),
    ranks exchange these first, and the device waits for the next kernel.
    """
    layout, framework, wide = job.layout, job.framework, ELEMENT_BYTES[job.precision]
    tokens = job.micro_batch_tokens / (layout.tensor if layout.sequence_parallel else 1)
    narrow = 1 if job.precision == "fp8" and framework.dispatch == "node" else wide
    exchanged = job.model, tokens, layout.expert
    going, coming, counts = (
        experts.exchange(*exchanged, size, job.cluster, framework, how) for size in (narrow, wide, 0)
    )
    waited = counts + experts.mixture_share(job.model) * framework.launch * how.launch
    return going + coming + waited * (framework.reads_counts and layout.expert > 1), 2 * coming


def _context(job: Job, how: Physics) -> tuple[float, float]:
    """Return the seconds of attention's communication among context ranks in a block, forward and backward."""
    model, layout, tokens = job.model, job.layout, job.micro_batch_tokens
    if layout.context == 1:
        return 0.0, 0.0
    around = collectives.of(job.cluster, layout.context, layout.tensor, how)
    heads, kv_heads = experts.heads_of_rank(model, layout.tensor)
    each = 2.0 * ELEMENT_BYTES[job.precision] * tokens * model.head_dim  # keys and values of one head
    if job.framework.context == "exchange":  # exchanges queries, keys, values and the output
        turn = collectives.gather(around, each * (heads + kv_heads))
        return turn, turn
    turn = collectives.gather(around, each * layout.context * (heads if job.framework.repeats_keys else kv_heads))
    return turn, 2 * turn  # backward gathers keys and values again and returns their gradients


def _shard(job: Job, how: Physics) -> tuple[float, float]:
    """Return the seconds to gather a block's weights for a pass and to scatter its gradients, for a micro-batch.

    Context ranks hold the same weights and share them too. Each rank of a tensor group has a part of the gradients of
    experts that are not divided.
    """
    model, layout, framework = job.model, job.layout, job.framework
    weights, routed = (
        experts.unrouted_parameters(model) / layout.tensor,
        model.expert_parameters / model.layers / layout.expert,
    )
    gathered = scattered = 0.0
    groups = []
    if not experts.are_apart(layout, framework):
        weights += routed
        summed = collectives.of(job.cluster, layout.tensor, 1, how)
        scattered = collectives.reduce(summed, routed * ELEMENT_BYTES[job.precision])
    elif routed:
        groups.append((routed, collectives.of(job.cluster, layout.expert_shards, layout.expert, how)))
    if layout.shard > 1:
        weights *= shard_padding(framework, model, layout.tensor, layout.state_shards)
        groups.append((weights, collectives.of(job.cluster, layout.state_shards, layout.tensor, how)))
    for parameters, spread in groups if layout.zero >= 2 else ():
        parts = spread.size * framework.listed
        if layout.zero == 3:
            gathered += collectives.gather(spread, parameters * framework.gather_bytes, framework.gathers)
            gathered += framework.gathers * parts
        if framework.scatter == "micro-batch":
            gradients = parameters * framework.reduce_bytes
            scattered += collectives.summed(spread, gradients, framework.scatters, framework.sums)
            scattered += framework.scatters * parts
    return gathered, scattered
