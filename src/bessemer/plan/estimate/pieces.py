"""A block and the two ends of a model for one micro-batch: compute, host time, communication and the exposed part of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from bessemer.model.config import ModelConfig
from bessemer.plan.estimate import collectives, compute, experts
from bessemer.plan.estimate.compute import WorkSeconds
from bessemer.plan.estimate.frameworks import Framework, shard_padding
from bessemer.plan.estimate.job import ClusterSpec, Job, Physics

CONTEXT_OVERLAP = 0.5  # ring attention sends the next keys while it computes; a gather or an exchange is not overlapped


@dataclass(frozen=True)
class MicroBatchSeconds:
    """Seconds of one block and of the ends for one micro-batch; works: by kind, of both passes together."""

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
        """Seconds by kind of a rank with `layers` blocks, and perhaps an end, over m micro-batches."""
        work = self.block_work.times(layers)
        if has_embedding:
            work += self.embedding
        if has_head:
            work += self.head_work
        return {
            "matmuls": m * work.matmuls,
            "attention": m * work.attention,
            "elementwise": m * work.elementwise,
            "host": m * layers * self.host,
            "tensor": m * (layers * self.tensor + (self.head_tensor if has_head else 0.0)),
            "context": m * layers * self.context,
            "shard": m * layers * self.shard,
            "expert": m * layers * self.expert,
        }


def of(job: Job, how: Physics) -> MicroBatchSeconds:
    """The pieces of a job."""
    layout = job.layout
    piped = layout.pipeline > 1 and layout.world > job.cluster.near
    return _pieces(
        job.model, layout.tensor, layout.context, layout.micro_batch, layout.sequence_parallel, layout.recompute, layout.zero,
        layout.shard, layout.expert, piped, job.precision, job.cluster, job.framework, how,
    )  # fmt: skip


@lru_cache(maxsize=16_384)
def _pieces(
    model: ModelConfig, tensor: int, context: int, micro_batch: int, sequence_parallel: bool, recompute: str, zero: int,
    shard: int, expert: int, piped: bool, precision: str, cluster: ClusterSpec, framework: Framework, how: Physics,
) -> MicroBatchSeconds:  # fmt: skip
    """Everything that does not depend on the pipeline and the number of micro-batches."""
    device = cluster.device
    block = compute.block(
        model, tensor, context, micro_batch, sequence_parallel, precision, device, framework, how, expert
    )
    again = WorkSeconds()
    if recompute == "full":
        again = block.needed if framework.early_stop else block.forward
    elif recompute == "selective":
        elementwise = replace(block.forward, matmuls=0.0, attention=0.0)
        again = {"elementwise": elementwise, "attention": block.scores, "matmuls": block.matmuls_again}[
            framework.selective
        ]
    added = framework.accumulate * model.block_matrix_parameters / tensor / (device.bandwidth * how.bandwidth)
    backward = block.backward + again + WorkSeconds(elementwise=added)
    tokens = micro_batch * model.sequence_length // context
    wide = 1.0 * compute.BYTES[precision] * tokens * model.width
    # With sequence parallelism an all-reduce is a gather and a scatter; what is gathered travels in 8 bits if it is cast before.
    narrow = precision == "fp8" and framework.fp8 == "tensor" and sequence_parallel
    gathers = 1 / 3 if narrow else 0.5  # of the tensor communication
    pairs = 1 if framework.parallel_block else 2
    near = collectives.of(cluster, tensor, 1, how)
    joined = collectives.reduce(near, wide * (0.75 if narrow else 1.0))
    each = joined * pairs
    repeated = _tensor_again(framework, recompute, sequence_parallel, gathers)
    each_again = repeated * each
    hides, hides_back = _hidden(precision, framework, gathers)
    if framework.copies and sequence_parallel and tensor > 1 and micro_batch > 1:
        # Read and written; what is paired with a matmul is produced where it belongs.
        moved = 2 * pairs * wide * (1.5 if narrow else 2.0) / (device.bandwidth * how.bandwidth)
        left, left_back = (1 - hides, 1 - hides_back) if framework.tensor_overlap else (1.0, 1.0)
        block = replace(block, forward=block.forward + WorkSeconds(elementwise=moved * left))
        backward += WorkSeconds(elementwise=moved * (left_back + repeated * left))
    turn, turn_back = _context(model, tensor, context, tokens, precision, cluster, framework, how)
    gathered, scattered = _shard(model, tensor, context, zero, shard, cluster, framework, how)
    shards_back = gathered * (2 if framework.regathers and recompute == "full" else 1) + scattered
    turn_all_back = turn_back + (turn if recompute == "full" else 0.0)
    sent, sent_back = _experts(
        model, tokens / (tensor if sequence_parallel else 1), expert, precision, cluster, framework, how
    )
    sent_back += sent if recompute == "full" else 0.0
    tangled = framework.tangled[0] * tensor ** framework.tangled[1] if piped and tensor > 1 else 0.0
    stalled = tangled + framework.across * (near.nodes - 1)
    ways = []
    for work, tensors, hidden, turns, shards, exchanged in (
        (block.forward, each, hides * each, turn, gathered, sent),
        (backward, each + each_again, hides_back * each + hides * each_again, turn_all_back, shards_back, sent_back),
    ):
        busy = work.seconds
        host = max((work.kernels * framework.launch + stalled) * how.launch - busy - tensors - exchanged, 0.0)
        exchanged -= framework.expert_overlap * min(exchanged, busy)
        tensors -= framework.tensor_overlap * min(hidden, busy)
        turns -= (CONTEXT_OVERLAP if framework.context == "ring" else 0.0) * min(turns, work.attention)
        shards -= framework.data_overlap * min(shards, busy + tensors + host)
        ways.append((busy, host, tensors, turns, shards, exchanged))
    head_forward, head_backward = compute.head(model, tensor, context, micro_batch, precision, device, framework, how)
    one, two = ways
    _, host, tensors, turns, shards, exchanged = (sum(both) for both in zip(one, two, strict=True))
    return MicroBatchSeconds(
        forward=sum(one),
        backward=sum(two),
        embedding=compute.embedding(model, tokens, precision, device, how),
        head_forward=head_forward.seconds + joined,
        head_backward=head_backward.seconds + joined,
        block_work=block.forward + backward,
        head_work=head_forward + head_backward,
        host=host,
        tensor=tensors,
        context=turns,
        shard=shards,
        expert=exchanged,
        head_tensor=2 * joined,
    )


def _experts(
    model: ModelConfig, tokens: float, expert: int, precision: str, cluster: ClusterSpec, framework: Framework, how: Physics
) -> tuple[float, float]:  # fmt: skip
    """Seconds of a block's exchange of tokens with experts, forward and backward: dispatch and return, and their gradients. In
    fp8 what is dispatched is cast before, where the program can; sums return in 16 bits."""
    wide = compute.BYTES[precision]
    narrow = 1 if precision == "fp8" and framework.dispatch == "node" else wide
    going, coming = (experts.exchange(model, tokens, expert, size, cluster, framework, how) for size in (narrow, wide))
    return going + coming, coming + experts.exchange(model, tokens, expert, wide, cluster, framework, how)


def _tensor_again(framework: Framework, recompute: str, sequence_parallel: bool, gathers: float) -> float:
    """Share of a block's forward tensor communication that recompute does again. gathers: the share of the gathers.

    Full: all, or, where it stops early, all but the last sum. Every second matmul: with sequence parallelism the gathers, which
    are not in the list of what is saved, as the scatters are (torchtitan's activation checkpointing, _save_list).
    """
    if recompute == "full":
        last = (1 - gathers) / 2 if sequence_parallel else 0.5
        return 1.0 - (last if framework.early_stop else 0.0)
    return gathers if recompute == "selective" and framework.selective == "matmuls" and sequence_parallel else 0.0


def _hidden(precision: str, framework: Framework, gathers: float) -> tuple[float, float]:
    """Shares of a block's tensor communication, forward and backward, that are paired with a matmul. gathers: their share.

    PyTorch's micro-pipelining (torch/_inductor/fx_passes/micro_pipeline_tp.py) pairs a gather with the matmuls that read it, but
    none that have a scale for each row (pytorch issue 149990), and a scatter with the one matmul that it sums: backward, where
    queries', keys' and values' matmuls (or both of a gated MLP) are added first, there is none.
    """
    if framework.paired == "all":
        return 1.0, 1.0
    found = 0.0 if precision == "fp8" and framework.fp8 == "row" else gathers
    return found + 1 - gathers, found


def _context(
    model: ModelConfig, tensor: int, context: int, tokens: int, precision: str, cluster: ClusterSpec,
    framework: Framework, how: Physics,
) -> tuple[float, float]:  # fmt: skip
    """Seconds of attention's communication among context ranks in a block, forward and backward."""
    if context == 1:
        return 0.0, 0.0
    around = collectives.of(cluster, context, tensor, how)
    size, kv_heads = compute.BYTES[precision], max(model.kv_heads // tensor, 1)
    if framework.context == "exchange":  # queries, keys, values and the output, each way
        turn = collectives.gather(around, 2.0 * size * tokens * (model.heads // tensor + kv_heads) * model.head_dim)
        return turn, turn
    if framework.repeats_keys:
        kv_heads = max(model.heads // tensor, 1)
    turn = collectives.gather(around, 2.0 * size * tokens * context * kv_heads * model.head_dim)
    return turn, 2 * turn  # keys and values again, and their gradients back


def _shard(
    model: ModelConfig, tensor: int, context: int, zero: int, shard: int, cluster: ClusterSpec, framework: Framework, how: Physics
) -> tuple[float, float]:  # fmt: skip
    """Seconds in which a block's weights are gathered for a pass and its gradients scattered, for a micro-batch.

    Context ranks hold the same weights and share them too.
    """
    if zero < 2 or shard == 1:
        return 0.0, 0.0
    spread = collectives.of(cluster, shard * context, tensor, how)
    weights = model.block_matrix_parameters / tensor * shard_padding(framework, model, tensor, shard * context)
    parts = spread.size * framework.listed
    gathered = scattered = 0.0
    if zero == 3:
        gathered = collectives.gather(spread, weights * framework.gather_bytes, framework.gathers)
        gathered += framework.gathers * parts
    if framework.scatter == "micro-batch":
        scattered = collectives.summed(spread, weights * framework.reduce_bytes, framework.scatters, framework.sums)
        scattered += framework.scatters * parts
    return gathered, scattered
