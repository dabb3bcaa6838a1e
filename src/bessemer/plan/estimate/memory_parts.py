"""Weights, gradients, optimizer state, buffers and activations on a device, for other training programs.

ZeRO follows Rajbhandari et al. 2020, section 5. Over N ranks, stage 1 divides the optimizer state by N, stage 2 also
the gradients, and stage 3 also the weights. With 2 bytes per weight, 2 per gradient and 12 of optimizer state, a
parameter takes 16 bytes.

Activations follow Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models", section
4.1, equations 1 to 4 and table 2), extended to any number of key and value heads, gated MLPs, attention without
materialized scores, and any width of an element. For their model the count is s b h (34 + 5 a s / h).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from bessemer.distributed.stages import PartParameters, PipelineRank
from bessemer.model.config import ModelConfig
from bessemer.model.sublayers import FP32
from bessemer.plan.estimate import experts
from bessemer.plan.estimate.experts import hidden_widths
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import ELEMENT_BYTES, Job, Recompute
from bessemer.plan.latent_attention import latent_of
from bessemer.recipe.parallel import SCHEDULES


@dataclass(frozen=True)
class Split:
    """A division of a micro-batch's tokens over ranks.

    Attributes:
        tensor: Tensor ranks, which divide the work inside matmuls.
        sequence: True if tensor ranks also divide the tokens between matmuls.
        context: Context ranks, which always divide the tokens.
    """

    tensor: int = 1
    sequence: bool = True
    context: int = 1


def activation_bytes_without_recompute(
    config: ModelConfig, framework: Framework, split: Split, width: int
) -> dict[str, float]:
    """Return the bytes that a block without recomputation saves for each token, by kind.

    `stream` is the inputs of the norms. `attention` is the inputs and outputs of the query, key and value matmuls, and
    the input of the output matmul. `scores` is the softmax, and with dropout its mask and output. `mlp` is the inputs
    of its matmuls and of the activation. `masks` is those of the dropouts on the residual stream. `gathered` is the
    inputs of matmuls that were gathered from the tensor ranks. `width` is the bytes of an element.
    """
    stream = width * config.width / (split.tensor if split.sequence else 1)  # one hidden state
    heads, both = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    inside = width / split.tensor
    gathers = framework.gathered if split.tensor > 1 and split.sequence else 0.0
    read = (1 - gathers) * stream  # a matmul's input as it is saved
    results = (3 if config.gated else 2) + (config.gated and framework.unfused_gate)
    projected, units, copied = hidden_widths(config, split.tensor, split.tensor if split.sequence else 1)
    kinds = {
        "stream": (4 if config.norm_position == "both" else 2) * stream,
        "attention": read + inside * (heads + both + heads),
        "scores": scores(config, framework, split, width),
        "mlp": read + inside * config.mlp_width * results,
        "masks": 2 * stream / width if framework.dropout else 0.0,
        "gathered": gathers * 2.0 * width * config.width,
    }
    if config.experts:
        # Saved: the router's probabilities, the experts' input in expert order, and their results.
        routed = experts.mixture_share(config) * config.experts * FP32 / (split.tensor if split.sequence else 1)
        kinds["mlp"] = read + width * (units * results + copied) + routed
        if (latent := latent_of(config)) is not None:
            # Latents, before and after their norms.
            ranks = 2 * (latent.query_rank + latent.kv_rank) + latent.rotated
            low = ranks / (split.tensor if split.sequence else 1)
            kinds["attention"] = read + width * (projected + low) + inside * config.heads * latent.value
    if config.qk_norm != "none":
        kinds["attention"] += inside * (heads + both // 2)
    return kinds


def scores(config: ModelConfig, framework: Framework, split: Split, width: int) -> float:
    """Return the bytes that attention saves for each token: a row of scores per head, or one sum per head if fused."""
    if framework.attention == "flash":
        return 4.0 * config.heads / split.tensor
    seen = config.sequence_length * config.heads / split.tensor
    return seen * (2 * width + 1 if framework.dropout else width)


@dataclass(frozen=True)
class BlockBytes:
    """Activation bytes of a block for each token.

    Attributes:
        kept: Bytes held until the block's backward pass, by kind, without zeros.
        working: Additional bytes of the backward pass, including recomputed activations.
    """

    kept: tuple[tuple[str, float], ...]
    working: float


@lru_cache(maxsize=16384)
def block_activation_bytes(
    config: ModelConfig, framework: Framework, split: Split, width: int, recompute: Recompute, copies: float
) -> BlockBytes:
    """Return the activation bytes of a block in a recomputation mode.

    `width` is the bytes of an element, and `copies` the share of gathered data that is copied (see `backward`).
    """
    keeps = kept(config, framework, split, width, recompute)
    again = sum(activation_bytes_without_recompute(config, framework, split, width).values()) - sum(keeps.values())
    working = again + backward(config, framework, split, width, copies=copies)
    if framework.gathers_context and split.context > 1:
        # Gathered keys and values, in the recomputed forward pass and in the backward pass.
        working += 4 * width * config.heads * config.head_dim / split.tensor * split.context
    return BlockBytes(tuple((kind, each) for kind, each in keeps.items() if each), working)


def kept(config: ModelConfig, framework: Framework, split: Split, width: int, recompute: Recompute) -> dict[str, float]:
    """Return the bytes, by kind, that a block saves for each token in a recomputation mode; `width` is those of an element."""
    everything = activation_bytes_without_recompute(config, framework, split, width)
    if recompute == "none":
        return everything
    stream = width * config.width / (split.tensor if split.sequence else 1)
    if recompute == "full":
        return {"inputs": stream}
    if framework.selective != "matmuls":
        return everything | {"scores": everything["scores"] if framework.attention == "flash" else 0.0}
    inside = width / split.tensor
    heads, one = config.heads * config.head_dim, config.kv_heads * config.head_dim
    # torchtitan recomputes every second matmul in the order q, k, v, o, gate, up, down. It saves the odd ones and sums over
    # tensor ranks. A compiler drops the last one, because nothing in the backward pass reads it.
    attention = inside * (heads + one + heads)
    mlp = inside * config.mlp_width + (0.0 if framework.fused else stream)
    summed = 2 * stream if split.tensor > 1 else 0.0
    sums = scores(config, framework, split, width)
    return {"inputs": stream + summed, "attention": attention, "scores": sums, "mlp": mlp}


def backward(config: ModelConfig, framework: Framework, split: Split, width: int, *, copies: float = 0.0) -> float:
    """Return the bytes for each token that a block's backward pass needs in addition to saved activations.

    These are the gradients of the hidden units, or of materialized scores if larger, and the gradients of the full
    hidden state at both ends. If tensor ranks gather along a dimension that is not the first, the data is reordered
    into a second buffer: for the two gathered inputs and the two sums of the backward pass, or a share of them
    (`copies`).
    """
    ranks = split.tensor if split.sequence or not config.mixture_layers else 1
    hidden = width * config.sublayers[-1].gradient_elements / ranks
    is_written = framework.attention != "flash"
    written = 2 * width * config.sequence_length * config.heads / split.tensor if is_written else 0.0
    return max(hidden, written) + (2 + 4 * copies) * width * config.width


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state on a device.

    Attributes:
        weights: Weights that the matmuls read, or their shards.
        master: fp32 copies of the weights.
        gradients: Gradients that wait for the optimizer.
        moments: Moments of the optimizer.
        buffers: Gathered weights, and gradients in reduction.
    """

    weights: float
    master: float
    gradients: float
    moments: float
    buffers: float


def each(framework: Framework, zero: int, ranks: int) -> tuple[float, float, float, float]:
    """Return the bytes per parameter of weights, master copies, gradients and moments for a ZeRO stage.

    `ranks` is the number of ranks that share the state (Rajbhandari et al. 2020, figure 1).
    """
    one, two, three = (ranks if zero >= stage else 1 for stage in (1, 2, 3))
    states = framework.master_bytes / one, framework.gradient_bytes / two, framework.moment_bytes / one
    return framework.weight_bytes / three, *states


def state_job(job: Job) -> Job:
    """Return the job without what has no effect on model state: only buffers like FSDP's depend on the micro-batches."""
    return job if job.framework.fully_sharded else job.with_layout(micro_batch=1, recompute="none")


@lru_cache(maxsize=65_536)
def state(job: Job, rank: PipelineRank) -> StateBytes:
    """Return the bytes of model state on a pipeline rank at the peak of a step."""
    framework, layout = job.framework, job.layout
    blocks = experts.by_kind(job.model, rank.blocks, rank.has_embedding)
    kinds = [(PartParameters.count(kind, rank, layout.tensor, layout.expert), count) for kind, count in blocks]
    own = kinds[-1][0] if kinds else PartParameters.count(job.model, rank, layout.tensor)
    n = job.layout.state_shards
    width = ELEMENT_BYTES[job.precision]
    placed = experts.held(job.model, rank.blocks, rank.has_embedding, layout.expert)
    everything = own.root + sum(count * part.block for part, count in kinds) - placed
    framework = _wide(framework) if width == FP32 else framework
    if framework.fully_sharded:
        if not experts.are_apart(layout, framework):
            everything, placed = everything + placed, 0.0
        buffers = _fsdp_buffers(job, own, everything + placed, width) if layout.zero else 0.0
    else:
        buffers = framework.bucket_bytes
        fresh = everything if layout.zero < 2 else 2 * own.block
        buffers += framework.fresh_bytes * (fresh + placed) + framework.copy_bytes * everything * (layout.data > 1)
        buffers += framework.step_bytes * everything / (n if layout.zero else 1)
        if layout.zero == 3 and n > 1:
            buffers += framework.weight_bytes * (2 * own.block + own.root)
        if framework.scratch_gradients and width < FP32 and rank.blocks:
            buffers += 2.0 * scratch(job.model, layout.tensor)
    # Ranks with copies of the same experts shard their state among themselves. FSDP shards all state or none.
    zero = 3 if framework.fully_sharded and layout.zero else layout.zero
    rest, theirs = each(framework, zero, n), each(framework, zero, layout.expert_shards)
    weights, master, gradients, moments = (a * everything + b * placed for a, b in zip(rest, theirs, strict=True))
    return StateBytes(weights, master, gradients, moments, buffers)


@lru_cache(maxsize=64)
def _wide(framework: Framework) -> Framework:
    """Return the profile for fp32 training, in which weights are their own master copies."""
    return replace(framework, weight_bytes=4.0, master_bytes=0.0, gradient_bytes=4.0, fresh_bytes=0.0)


@lru_cache(maxsize=256)
def scratch(config: ModelConfig, tensor: int) -> float:
    """Return the number of elements in one matrix of each shape of a block.

    Transformer Engine keeps an empty gradient of each shape (`get_dummy_wgrad`, since 2.3). Autograd receives it when
    the real gradient is added to the fp32 buffer.
    """
    matrices = [part for facts in config.sublayers for part in facts.parameters if part.is_matrix]
    return sum(part.size / (config.experts if part.is_routed else tensor) for part in matrices)


def _fsdp_buffers(job: Job, own: PartParameters, parameters: float, narrow: int) -> float:
    """Return the bytes of full blocks and gradients while FSDP uses them.

    `own` counts the parameters of the pipeline rank, `parameters` is their sum, and `narrow` is the bytes of an element in
    the matmul dtype.

    In stage 3, gathered blocks are freed after each pass, except two (one in use, one prefetched) and the weights
    outside blocks. In lower stages, and in a pipeline, whose micro-batches would gather again and again, they stay.
    With several micro-batches, gradients are full and in fp32 until the last one of a step.
    """
    framework, layout = job.framework, job.layout
    # In a round of an interleaved schedule, a stage completes all its backward passes before the device's next stage starts.
    is_one_round = job.micro_batches <= layout.pipeline or (framework.scatter == "round" and layout.zero >= 2)
    by_stage = SCHEDULES[layout.schedule].has_equal_rounds and is_one_round
    at_once = parameters / layout.stages_per_rank if by_stage else parameters
    several = at_once if layout.pipeline > 1 or (job.micro_batches > 1 and layout.zero < 2) else 0.0
    whole = parameters if layout.zero < 3 or layout.pipeline > 1 else own.root + min(2, own.blocks) * own.block
    # Only one of the two vocabulary matrices has an unsharded gradient at a time, as in `distributed.memory.state_bytes`.
    fresh = narrow * (own.block + own.root / 2) + framework.gradient_bytes * own.block
    return narrow * whole + max(fresh, framework.gradient_bytes * several)
