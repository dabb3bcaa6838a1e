"""Bytes of weights, gradients, optimizer state, buffers and activations of a device, for other training programs.

ZeRO (Rajbhandari et al. 2020, section 5): with N ranks stage 1 divides the optimizer's part by N, stage 2 the gradients too,
stage 3 the weights too; with 2 bytes a weight, 2 a gradient and 12 of optimizer, 16 bytes a parameter in all.

Activations: the count of Korthikanti et al. 2022 ("Reducing activation recomputation in large transformer models", section
4.1, equations 1 to 4 and table 2), written for any number of key and value heads, gated MLPs, attention that writes no scores,
and any width of an element; for their model it gives s b h (34 + 5 a s / h).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from bessemer.distributed.stages import PartParameters, PipelineRank
from bessemer.model.config import ModelConfig
from bessemer.model.element_bytes import FP32
from bessemer.plan.estimate import experts
from bessemer.plan.estimate.experts import hidden_widths
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import ELEMENT_BYTES, Job, Recompute
from bessemer.plan.mixture_of_experts import MixtureConfig, by_kind
from bessemer.recipe.parallel import SCHEDULES


@dataclass(frozen=True)
class Split:
    """How a micro-batch's tokens are divided: over tensor ranks inside of matmuls, between them too (sequence), over
    context ranks always."""

    tensor: int = 1
    sequence: bool = True
    context: int = 1


def activation_bytes_without_recompute(
    config: ModelConfig, framework: Framework, split: Split, width: int
) -> dict[str, float]:
    """Bytes that a block without recompute keeps for each token, by kind; width: bytes of an element.

    stream: the inputs of the norms; attention: what the query, key and value matmuls read, their results, and what the
    output matmul reads; scores: softmax, and with dropout its mask and result; mlp: what its matmuls read and what the
    activation reads; masks: of the dropouts on the stream; gathered: inputs of matmuls gathered from the tensor ranks.
    """
    stream = width * config.width / (split.tensor if split.sequence else 1)  # one tensor between the matmuls
    heads, both = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    inside = width / split.tensor
    gathers = framework.gathered if split.tensor > 1 and split.sequence else 0.0
    read = (1 - gathers) * stream  # a matmul's input, as it is kept
    results = (3 if config.gated else 2) + (config.gated and framework.unfused_gate)
    projected, units, copied = hidden_widths(config, split.tensor, split.tensor if split.sequence else 1)
    kinds = {
        "stream": config.norms_each * stream,
        "attention": read + inside * (heads + both + heads),
        "scores": scores(config, framework, split, width),
        "mlp": read + inside * config.mlp_width * results,
        "masks": 2 * stream / width if framework.dropout else 0.0,
        "gathered": gathers * 2.0 * width * config.width,
    }
    if isinstance(config, MixtureConfig):
        # The router's probabilities, and the experts' input in their order, wait with what they make of it.
        routed = config.mixture_share * config.num_experts * FP32 / (split.tensor if split.sequence else 1)
        kinds["mlp"] = read + width * (units * results + copied) + routed
        if config.latent is not None:
            # Latents, and what their norms give.
            ranks = 2 * (config.latent.query_rank + config.latent.kv_rank) + config.latent.rotated
            low = ranks / (split.tensor if split.sequence else 1)
            kinds["attention"] = read + width * (projected + low) + inside * config.heads * config.latent.value
    if config.qk_norm != "none":
        kinds["attention"] += inside * (heads + both // 2)
    return kinds


def scores(config: ModelConfig, framework: Framework, split: Split, width: int) -> float:
    """Bytes that attention itself keeps for each token: a row of scores a head, or one sum a head where it is fused."""
    if framework.attention == "flash":
        return 4.0 * config.heads / split.tensor
    seen = config.sequence_length * config.heads / split.tensor
    return seen * (2 * width + 1 if framework.dropout else width)


@dataclass(frozen=True)
class BlockBytes:
    """Bytes for each token. kept: until the block's backward pass, by kind, none of them 0; working: what that pass takes on
    top, with what is computed again for it."""

    kept: tuple[tuple[str, float], ...]
    working: float


@lru_cache(maxsize=16384)
def block_activation_bytes(
    config: ModelConfig, framework: Framework, split: Split, width: int, recompute: Recompute, copies: float
) -> BlockBytes:
    """A block in a mode of recompute; copies: see `backward`."""
    keeps = kept(config, framework, split, width, recompute)
    again = sum(activation_bytes_without_recompute(config, framework, split, width).values()) - sum(keeps.values())
    working = again + backward(config, framework, split, width, copies=copies)
    if framework.gathers_context and split.context > 1:
        # Keys and values of all ranks, in the recomputed forward pass and in the backward pass.
        working += 4 * width * config.heads * config.head_dim / split.tensor * split.context
    return BlockBytes(tuple((kind, each) for kind, each in keeps.items() if each), working)


def kept(config: ModelConfig, framework: Framework, split: Split, width: int, recompute: Recompute) -> dict[str, float]:
    """Bytes that a block keeps for each token in a mode of recompute, by kind."""
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
    # torchtitan: of the matmuls in order (q, k, v, o, gate, up, down) every second one is recomputed, the odd ones and what
    # is added up over tensor ranks are kept; a compiler sees that nothing in the backward pass reads the last.
    attention = inside * (heads + one + heads)
    mlp = inside * config.mlp_width + (0.0 if framework.fused else stream)
    summed = 2 * stream if split.tensor > 1 else 0.0
    sums = scores(config, framework, split, width)
    return {"inputs": stream + summed, "attention": attention, "scores": sums, "mlp": mlp}


def backward(config: ModelConfig, framework: Framework, split: Split, width: int, *, copies: float = 0.0) -> float:
    """Bytes for each token that a block's way back takes on top of what it kept: gradients of its widest tensors.

    Those of the hidden units (and of scores that were written out), and of the stream, whole, going in and coming out. Where
    tensor ranks gather along a dimension that is not the first, what arrives is put in order in a second block: of the two
    gathered inputs and of the two sums of the backward pass, or of a share of them (copies).
    """
    inside = width / split.tensor
    hidden = inside * config.mlp_width * (3 if config.gated else 2)
    if isinstance(config, MixtureConfig):
        share = split.tensor if split.sequence else 1
        routed = config.active_experts * (3 * config.expert_width + 2 * config.width) * width / share
        hidden = max(hidden if config.dense_layers else 0.0, routed)
    is_written = framework.attention != "flash"
    written = 2 * width * config.sequence_length * config.heads / split.tensor if is_written else 0.0
    return max(hidden, written) + (2 + 4 * copies) * width * config.width


@dataclass(frozen=True)
class StateBytes:
    """Bytes of a device. master: fp32 copies of the weights; buffers: gathered weights, and gradients in reduction."""

    weights: float
    master: float
    gradients: float
    moments: float
    buffers: float


def each(framework: Framework, zero: int, ranks: int) -> tuple[float, float, float, float]:
    """Bytes for each parameter of a device's part: of weights, master copies, gradients and moments, in ZeRO's stages 0 to 3
    over so many ranks (Rajbhandari et al. 2020, figure 1)."""
    one, two, three = (ranks if zero >= stage else 1 for stage in (1, 2, 3))
    states = framework.master_bytes / one, framework.gradient_bytes / two, framework.moment_bytes / one
    return framework.weight_bytes / three, *states


def state(job: Job, rank: PipelineRank) -> StateBytes:
    """What a place of the pipeline holds between and during the passes of a step."""
    framework, layout = job.framework, job.layout
    blocks = by_kind(job.model, rank.blocks, rank.has_embedding)
    kinds = [(PartParameters.of(kind, rank, layout.tensor), count) for kind, count in blocks]
    own = kinds[-1][0] if kinds else PartParameters.of(job.model, rank, layout.tensor)
    n = job.layout.state_shards
    width = ELEMENT_BYTES[job.precision]
    placed = experts.held(job.model, rank.blocks, rank.has_embedding, layout.expert)
    if framework.fully_sharded:
        return _fully_sharded(job, own, n if layout.zero else 1, width)
    framework = _wide(framework) if width == FP32 else framework
    everything = own.root + sum(count * part.block for part, count in kinds)
    buffers = framework.bucket_bytes
    fresh = everything if layout.zero < 2 else 2 * own.block
    buffers += framework.fresh_bytes * fresh + framework.copy_bytes * everything * (layout.data > 1)
    buffers += framework.step_bytes * everything / (n if layout.zero else 1)
    if layout.zero == 3 and n > 1:
        buffers += framework.weight_bytes * (2 * own.block + own.root)
    if framework.scratch_gradients and width < FP32:
        buffers += 2.0 * scratch(job.model, rank, layout.tensor)
    # The ranks with copies of the same experts divide their optimizer state.
    rest, theirs = each(framework, layout.zero, n), each(framework, layout.zero, experts.ranks(layout))
    weights, master, gradients, moments = (a * everything + b * placed for a, b in zip(rest, theirs, strict=True))
    return StateBytes(weights, master, gradients, moments, buffers + framework.fresh_bytes * placed)


@lru_cache(maxsize=64)
def _wide(framework: Framework) -> Framework:
    """The same program in fp32: the weights are their own master copies."""
    return replace(framework, weight_bytes=4.0, master_bytes=0.0, gradient_bytes=4.0, fresh_bytes=0.0)


def scratch(config: ModelConfig, rank: PipelineRank, tensor: int) -> float:
    """Numbers of one matrix of each kind: Transformer Engine keeps an empty gradient of each shape (`get_dummy_wgrad`, since
    2.3), which autograd is handed where the sum goes to the fp32 buffer."""
    if isinstance(config, MixtureConfig):
        return (config.attention_parameters / tensor + config.one_expert) * (rank.blocks > 0)
    return config.block_matrix_parameters / tensor * (rank.blocks > 0)


def _fully_sharded(job: Job, own: PartParameters, n: int, narrow: int) -> StateBytes:
    """FSDP: everything is kept divided by n; a block is whole, in the matmuls' width, while it is used.

    Stage 3: gathered blocks are given back after each pass, but for two (one in use, one on its way) and what lies outside
    of blocks; else, and in a pipeline (whose micro-batches would gather again and again), they stay. Gradients are whole, in
    fp32, until the last micro-batch of a step where there are several.
    """
    framework, layout = job.framework, job.layout
    # In a round of an interleaved schedule a stage has all its backward passes before the device's next one begins.
    is_one_round = job.micro_batches <= layout.pipeline or (framework.scatter == "round" and layout.zero >= 2)
    by_stage = SCHEDULES[layout.schedule].has_equal_rounds and is_one_round
    at_once = own.all / layout.stages_per_rank if by_stage else own.all
    several = at_once if layout.pipeline > 1 or (job.micro_batches > 1 and layout.zero < 2) else 0.0
    buffers = 0.0
    if n > 1:
        whole = own.all if layout.zero < 3 or layout.pipeline > 1 else own.root + min(2, own.blocks) * own.block
        buffers = narrow * whole
        # One of the two vocabulary matrices at a time, as in `distributed.memory.state_bytes`.
        fresh = narrow * (own.block + own.root / 2) + framework.gradient_bytes * own.block
        buffers += max(fresh, framework.gradient_bytes * several)
    weights, master, gradients, moments = (one * own.all for one in each(framework, 3, n))
    return StateBytes(weights, master, gradients, moments, buffers)
