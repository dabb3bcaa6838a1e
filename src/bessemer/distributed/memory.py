"""Estimates of the peak memory of a training step on one device, for a model that it holds fully or in part."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

from bessemer.distributed.chunks import loss_chunk
from bessemer.distributed.element_bytes import ElementBytes
from bessemer.distributed.optimizer_bytes import optimizer_bytes, undivided_state_bytes, update_bytes
from bessemer.distributed.schedules import micro_batches_in_flight
from bessemer.distributed.shards import padded, zero_stage
from bessemer.distributed.stages import PartParameters, PipelineRank, pipeline_ranks, rank_rows
from bessemer.model.config import ModelConfig, dropping_chunk
from bessemer.model.sublayers import FP32
from bessemer.recipe import Dropout, Parallel, ResolvedTrain

# On a CPU, allocations of many sizes fragment the heap. Without a measured step, this share of the bytes that a step allocates
# and frees is added: 49 of 58 measured single-process runs need less than their plan (benchmarks/results/memory_cpu.json).
HEAP_SHARE = 0.65
# Factor on the measured peak of training steps, for validation and batches of other lengths, which those steps do not include.
MEASURED_MARGIN = 1.05
# oneDNN compiles each bf16 matmul of another shape: 0.6 to 0.85 MB of machine code for matrices of 64 x 64 to 512 x 1,024. An
# expert has six matmuls, and up to four numbers of rows between two powers of two (`model/mixture_of_experts.py`).
COMPILED_BYTES, MATMULS, SIZES = 700_000, 6, 4
# Bytes per attention score with dropout on attention weights, over the forward and backward pass of a chunk: 18 were counted
# in bf16 and 20 in fp32.
SCORE_BYTES = 20
# Bytes per element of a norm in low precision: its input in fp32 and its result in 2 bytes.
NORM_BYTES = 6


@dataclass(frozen=True)
class Memory:
    """The peak memory of a training step in bytes, by part.

    Attributes:
        weights: Weights that the optimizer updates, or this rank's shards of them.
        gradients: Gradients, full or sharded, with the buffers of their reduction.
        optimizer: State of the optimizer, such as moments.
        ema: Exponential moving average of the weights.
        activations: Activations saved for the backward pass, and the memory that one block's backward allocates; more
            if the gradients' sum over a tensor group or Muon's update needs more than these, logits and buffers.
        logits: Logits of one chunk of the loss, with their gradient and that of the output matrix.
        before_model: Memory of the process before it creates the model; on a CPU, mostly libraries.
        unsharded_weights: Weights in the compute dtype, all-gathered by FSDP2 or cast by autocast.
        fragmentation: Unusable gaps in a CPU's heap, estimated by HEAP_SHARE or measured.
        compiled: Machine code that a CPU compiles for the experts' numbers of rows; a plan counts it as fragmentation.
    """

    weights: int
    gradients: int
    optimizer: int
    ema: int
    activations: int
    logits: int
    before_model: int
    unsharded_weights: int = 0
    fragmentation: int = 0
    compiled: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def as_measured(self, step_bytes: int) -> Memory:
        """Return these parts adjusted to a step that was measured to allocate `step_bytes` beyond `before_model`.

        A larger measurement adds fragmentation. A smaller one scales down activations and logits. If the step took less
        than its weights, gradients and other state, it reused memory that the process had freed, and the parts stay
        unchanged.
        """
        passing = self.activations + self.logits
        held = self.total - self.before_model - self.fragmentation - self.compiled
        missing = round(MEASURED_MARGIN * step_bytes) - held
        if missing >= 0:  # the measured steps compile some of the code
            return replace(self, fragmentation=max(missing - self.compiled, 0))
        if missing <= -passing:
            return self
        share = 1.0 + missing / passing
        return replace(
            self, activations=round(share * self.activations), logits=round(share * self.logits), fragmentation=0
        )

    def to_dict(self) -> dict[str, int]:
        """Return the bytes by part and their total, under the names used in all plans: unsharded weights are `buffers`."""
        parts = asdict(self)
        buffers = parts.pop("unsharded_weights")
        parts["fragmentation"] += parts.pop("compiled")
        return {**parts, "buffers": buffers, "total": self.total}


def peak_memory(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, element_bytes: ElementBytes, *, before_model: int = 0,
    recomputed_per_rank: int | None = None, is_cuda: bool = False, concurrent: int = 1,
) -> Memory:  # fmt: skip
    """Return the peak memory of a step on the rank of a layout that needs the most.

    Activations, in elements per token and block, are those that autograd saves for the operations in
    `model/transformer.py`; a test counts them on a CPU in fp32. On CUDA, parallel.offload keeps everything that FSDP2
    shards out of device memory.

    Args:
        train: The resolved [train] table of the recipe.
        layout: The parallel layout.
        config: The model.
        element_bytes: Bytes per element of weights, gradients and activations.
        before_model: Bytes that the process uses before it creates the model.
        recomputed_per_rank: Blocks that each rank recomputes, counted from its first; None follows `train.recompute`: all
            blocks or none.
        is_cuda: True for a GPU, whose memory is separate from the host's.
        concurrent: Micro-batches computed at the same time, each with its own gradients.
    """
    if recomputed_per_rank is None:
        recomputed_per_rank = 0 if train.recompute == "none" else config.layers
    ranks = (
        rank_memory(
            train, layout, config, rank, element_bytes, before_model=before_model, recomputed_per_rank=recomputed_per_rank,
            is_cuda=is_cuda, concurrent=concurrent,
        )
        for rank in pipeline_ranks(config, layout)
    )  # fmt: skip
    return max(ranks, key=lambda memory: memory.total)


def rank_memory(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, rank: PipelineRank, element_bytes: ElementBytes, *,
    before_model: int = 0, recomputed_per_rank: int, is_cuda: bool, concurrent: int = 1,
) -> Memory:  # fmt: skip
    """Return the peak memory of each rank at one pipeline coordinate.

    The arguments are those of `peak_memory`, and the pipeline rank.
    """
    is_eager = is_cuda and element_bytes.activation < FP32 and train.compile == "off"
    saved, in_backward = activation_bytes(
        train, layout, config, rank, element_bytes.activation, recomputed_per_rank, is_eager
    )
    scores = score_bytes(train, layout, config)
    logits = logits_bytes(train, layout, config, is_cuda) if rank.has_head else 0
    kept_weights = max(rank.blocks - recomputed_per_rank, 0) * config.block_matrix_parameters // layout.tensor
    casts = kept_weights * element_bytes.cast  # the backward pass keeps these
    if layout.world == 1:
        head, narrow = config.vocabulary * config.width if logits else 0, 0
        waiting = FP32 * head if config.is_tied else 0  # the head's gradient, for that of the embedding
        if not is_cuda and element_bytes.activation < FP32 and not train.is_frozen:  # model/casts.py
            casts = narrow = element_bytes.activation * config.layers * config.block_matrix_parameters
            waiting = 2 * element_bytes.activation * head  # its cast, and its gradient before it is added in fp32
            logits += waiting
            if (
                config.labels
            ):  # without logits, the last block's gradients of hidden units have no freed memory to reuse
                hidden = (3 if config.gated else 2) * config.mlp_width + 2 * config.width
                saved += _micro_batches(train, layout, config)[0] * hidden * element_bytes.activation
        recomputed = None
        if recomputed_per_rank and not train.is_frozen:
            unsaved = activation_bytes(train, layout, config, rank, element_bytes.activation, 0)[0]
            again = activation_bytes(train, layout, config, rank, element_bytes.activation, rank.blocks)[1]
            recomputed = RecomputedBytes(concurrent * (again + waiting + narrow), concurrent * (unsaved + scores))
        in_backward += waiting if in_backward else 0
        # Adding the scores to both overestimates the peak by at most the smaller of scores and logits.
        activations = concurrent * (saved + max(in_backward - logits, 0) + scores)
        activations = max(activations, update_bytes(train, layout, config, rank, element_bytes) - concurrent * logits)
        step = StepBytes(activations, concurrent * logits, casts)
        memory = _single_process_memory(train, layout, config, step, element_bytes, concurrent, recomputed)
    else:
        # The blocks' backward reuses the memory of the logits.
        activations = saved + max(in_backward + scores - logits, 0)
        step = StepBytes(activations, logits, casts)
        memory = _sharded_memory(train, layout, config, rank, step, element_bytes, is_cuda)
    if is_cuda:
        memory = replace(memory, fragmentation=0)
    elif config.experts and element_bytes.activation < FP32:
        rows = _micro_batches(train, layout, config)[0] * layout.expert  # an expert has at most one row of a token
        memory = replace(memory, compiled=round(COMPILED_BYTES * MATMULS * SIZES * math.log2(max(rows, 128) / 64)))
    return replace(memory, before_model=before_model) if before_model else memory


class StepBytes(NamedTuple):
    """Bytes that a rank allocates and frees in a step; the fields are those of `Memory`."""

    activations: int
    logits: int
    unsharded_weights: int


class RecomputedBytes(NamedTuple):
    """Activation bytes of a single process that recomputes blocks.

    Attributes:
        at_end: Bytes when the backward pass reaches the first block: its activations, the head's gradient if it waits,
            and the 2-byte gradients of all blocks. They replace `StepBytes`, except for its casts of weights.
        kept: Activations if nothing were recomputed. They still pass through the heap, block after block, and leave
            gaps between the gradients, which stay.
    """

    at_end: int
    kept: int


def _micro_batches(train: ResolvedTrain, layout: Parallel, config: ModelConfig) -> tuple[int, int]:
    """Return (tokens of a micro-batch on one rank, micro-batches of a rank in a step)."""
    tokens = train.micro_batch * config.sequence_length
    return tokens // layout.context, train.global_batch_tokens // tokens // layout.data


def _single_process_memory(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, step: StepBytes, element_bytes: ElementBytes, concurrent: int,
    recomputed: RecomputedBytes | None,
) -> Memory:  # fmt: skip
    """Estimate the memory of a run with one process.

    The result always includes the fragmentation of a CPU's heap, which `rank_memory` removes for other devices. `step`
    has the bytes allocated in a step, and `recomputed` is None if nothing is recomputed.
    """
    micro_batches = _micro_batches(train, layout, config)[1]
    trained = config.head_parameters if train.is_frozen else config.parameters
    whole = element_bytes.gradient * trained
    of_earlier = whole * (micro_batches > concurrent > 1)  # the sum over earlier micro-batches
    # Concurrent micro-batches create their gradients while activations are freed, so one set exists at the peak.
    gradients, activations, kept = whole + of_earlier, step.activations, step.activations
    if recomputed is not None:
        kept, at_end = recomputed.kept, concurrent * whole + of_earlier
        if at_end + recomputed.at_end > gradients + activations + step.logits:
            gradients, activations = at_end, max(recomputed.at_end - step.logits, 0)
    weights = element_bytes.master * config.parameters
    return Memory(
        weights=weights, gradients=gradients,
        optimizer=optimizer_bytes(train, config) + undivided_state_bytes(train, config, config.layers),
        ema=weights if train.ema else 0, before_model=0, fragmentation=int(HEAP_SHARE * (gradients + kept + step.logits)),
        **step._replace(activations=activations)._asdict(),
    )  # fmt: skip


def _sharded_memory(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, rank: PipelineRank, step: StepBytes, element_bytes: ElementBytes,
    is_cuda: bool,
) -> Memory:  # fmt: skip
    """Estimate the memory of one rank of a run with several processes.

    The result always includes the fragmentation of a CPU's heap, which `rank_memory` removes for other devices. `rank`
    has the blocks of its pipeline rank, and `step` the bytes allocated in a step.
    """
    params = PartParameters.count(config, rank, layout.tensor, layout.expert)
    micro_batches = _micro_batches(train, layout, config)[1]
    with_padding = padded(params, config, layout)
    state = trained = state_bytes(layout, params, with_padding, element_bytes, micro_batches)
    of_weights = of_moments = with_padding.shard_bytes(layout, 1) / config.parameters
    if train.is_frozen:
        head = PartParameters(block=0, root=config.head_parameters, blocks=0)
        trained = state_bytes(layout, head, head, element_bytes, micro_batches)
        of_moments = 1 / layout.state_shards
    if layout.uses_fsdp:
        step = step._replace(unsharded_weights=state.unsharded_weights)
    after = update_bytes(train, layout, config, rank, element_bytes)
    if layout.tensor > 1 and not layout.uses_fsdp:  # gradients that are summed over the tensor group, and their sum
        whole = rank.blocks * (config.per_block() - config.per_block(lambda one: one.tensor_dim is not None))
        after = max(after, 2 * element_bytes.gradient * whole)
    more = max(after - sum(step) - trained.gradient_buffers, 0)  # all of these are free after the last backward pass
    step = step._replace(activations=step.activations + more)
    memory = Memory(
        weights=state.weights, gradients=trained.gradients,
        optimizer=round(optimizer_bytes(train, config) * of_moments) + undivided_state_bytes(train, config, rank.blocks),
        ema=round((element_bytes.master * config.parameters if train.ema else 0) * of_weights), before_model=0,
        fragmentation=int(HEAP_SHARE * (trained.gradients + sum(step))), **step._asdict(),
    )  # fmt: skip
    if is_cuda and layout.offload and layout.uses_fsdp:  # sharded tensors are in the host's memory
        return replace(memory, weights=0, gradients=trained.gradient_buffers, optimizer=0, ema=0)
    return memory


def logits_bytes(train: ResolvedTrain, layout: Parallel, config: ModelConfig, is_cuda: bool) -> int:
    """Return the bytes of the loss on one rank: a chunk's logits twice in fp32, and the output matrix's fp32 gradient."""
    if config.labels:  # a classifier has one row of a few logits per text
        return 0
    rows = rank_rows(config.vocabulary, layout.tensor)
    chunk = min(loss_chunk(train.loss_chunk, rows, is_cuda), _micro_batches(train, layout, config)[0])
    return 2 * FP32 * chunk * rows + FP32 * rows * config.width


def mask_bytes(dropout: Dropout, config: ModelConfig) -> int:
    """Return the bytes per token of the dropout masks that a block keeps, at one byte per element.

    Masks of attention weights are not kept.
    """
    if config.inner_dropout:
        return (config.mlp_width if dropout.hidden else 0) + (config.width if dropout.attention else 0)
    return 2 * config.width if dropout.hidden else 0


def score_bytes(train: ResolvedTrain, layout: Parallel, config: ModelConfig) -> int:
    """Return the bytes of working memory of a block's attention with dropout on attention weights; 0 without it.

    It holds the scores of one chunk of queries, with their softmax, random bits and gradients.
    """
    rows = train.micro_batch or 1
    if not train.dropout.attention:
        return 0
    heads, queries = config.heads // layout.tensor, config.sequence_length // layout.context
    chunk = min(dropping_chunk(rows, heads, config.sequence_length), queries)
    return SCORE_BYTES * rows * heads * chunk * config.sequence_length


def checkpointed_elements_per_block(recompute: str, config: ModelConfig) -> int:
    """Return the elements per token that a recomputed block saves.

    It saves its input, and with `selective` also the results of matmuls and attention.
    """
    if recompute != "selective":
        return config.width
    return config.width + sum(sublayer.selective_elements for sublayer in config.sublayers)


class RankState(NamedTuple):
    """Bytes of a rank's parameters and gradients.

    Attributes:
        weights: This rank's shards of the weights, which parallel.offload keeps in the host's memory.
        unsharded_weights: All-gathered weights.
        gradient_shard: This rank's shards of the gradients, which parallel.offload keeps in the host's memory.
        gradient_buffers: Unsharded gradients and reduce-scatter buffers.
    """

    weights: int
    unsharded_weights: int
    gradient_shard: int
    gradient_buffers: int

    @property
    def gradients(self) -> int:
        return self.gradient_shard + self.gradient_buffers


def state_bytes(
    layout: Parallel, params: PartParameters, with_padding: PartParameters, element_bytes: ElementBytes, micro_batches: int
) -> RankState:  # fmt: skip
    """Return the bytes of a rank's weights and gradients at the peak of a step.

    Shards take the bytes of all parameters divided by N, as in ZeRO (Rajbhandari et al. 2020, section 5: P_os, P_os+g,
    P_os+g+p). Unlike there, stages 1 and 2 shard the fp32 master weights too, and keep an unsharded copy in the compute
    dtype during a step.

    Args:
        layout: The parallel layout.
        params: Parameters of the rank's part of the model.
        with_padding: The same with FSDP's padding (`shards.padded`).
        element_bytes: Bytes per element of weights and gradients.
        micro_batches: Micro-batches per step of each rank.
    """
    zero, bytes_gathered = zero_stage(layout), element_bytes.gathered
    weights = with_padding.shard_bytes(layout, element_bytes.master)
    gradients = with_padding.shard_bytes(layout, element_bytes.gradient)
    if not layout.uses_fsdp:
        return RankState(weights, 0, gradients, 0)
    # One block is in use, one being gathered. Divided experts are gathered and reduced apart from the rest of their block.
    rest, experts = with_padding.block - params.experts, params.experts * (params.blocks > 0)
    two_blocks = min(2, params.blocks) * rest + experts
    unsharded_weights = bytes_gathered * (with_padding.all if zero < 3 else params.root + two_blocks)
    # The buffer of the block that is reduce-scattered.
    reduced = element_bytes.gradient * (with_padding.block if params.blocks else params.root)
    if zero == 1 and micro_batches > 1:
        # Gradients are unsharded until the last micro-batch's backward pass. A block's gathered weights are resharded when its
        # reduce-scatter buffer is allocated.
        buffers = element_bytes.gradient * params.all + reduced - bytes_gathered * with_padding.block
        return RankState(weights, unsharded_weights, 0, buffers)
    # Gradients are unsharded until their reduce-scatter: those of one block, and half of those outside of blocks, since the
    # output matrix gets its gradient at the start of the backward pass and the embedding at the end.
    unsharded = bytes_gathered * (max(params.block - params.experts, params.experts) + params.root // 2)
    return RankState(weights, unsharded_weights, gradients, reduced + unsharded)


def activation_bytes(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, rank: PipelineRank, bytes_per_activation: int,
    recomputed_per_rank: int, is_eager: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Return the bytes saved for backward by all micro-batches in flight, and the bytes that one block's backward allocates.

    Between matmuls each rank of a tensor group holds its tokens' part of the residual stream. Inside of them it holds all
    tokens of its heads and hidden units (Korthikanti et al. 2022, section 4.2.2). The gathered inputs of matmuls are saved.

    Args:
        train: The resolved [train] table of the recipe.
        layout: The parallel layout.
        config: The model.
        rank: The rank of the pipeline axis.
        bytes_per_activation: Bytes per element of activations.
        recomputed_per_rank: Blocks that each rank recomputes, counted from its first.
        is_eager: True if blocks run on a GPU in low precision without being compiled.
    """
    tokens, micro_batches = _micro_batches(train, layout, config)
    tensor, recomputed_per_rank = layout.tensor, min(recomputed_per_rank, rank.blocks)
    stream = config.width / tensor  # elements of the residual stream, per token
    gathered_inputs = 2 * config.width * (tensor > 1)  # the full inputs of attention and MLP
    masks = mask_bytes(train.dropout, config)
    elements: float = sum(part.saved_elements for part in config.sublayers)
    if is_eager:
        elements = sum(part.eager_bytes for part in config.sublayers) / bytes_per_activation
    block = (elements + masks / bytes_per_activation) / tensor + gathered_inputs
    if train.is_frozen:  # no backward pass: one block's working set, and the residual stream
        return round(tokens * (block + 2 * stream) * bytes_per_activation), 0
    checkpointed = checkpointed_elements_per_block(train.recompute, config) / tensor
    saved = recomputed_per_rank * checkpointed + (rank.blocks - recomputed_per_rank) * block + 2 * stream
    if layout.world == 1:
        # Measured: the other blocks' activations are free by then, so only recomputing all blocks needs more.
        is_all = 0 < rank.blocks == recomputed_per_rank
        in_backward = (block - checkpointed) * bytes_per_activation if is_all else 0.0
    else:
        # Two gradients of the residual stream, unsharded even in a tensor group: the one gathered for the last matmul of a
        # sublayer, and that of its input before its reduce-scatter.
        hidden = max(sublayer.gradient_elements for sublayer in config.sublayers) / tensor
        whole_stream = 2 * config.width
        in_backward = ((block if recomputed_per_rank else 0) + hidden + whole_stream) * bytes_per_activation
        if bytes_per_activation < FP32:  # the two norms of a block compute in fp32 and save it
            in_backward += 2 * stream * NORM_BYTES
    in_flight = micro_batches_in_flight(
        layout.schedule, layout.pipeline, layout.stages_per_rank, rank.pipeline_rank, micro_batches
    )
    return round(tokens * in_flight * saved * bytes_per_activation), round(tokens * in_backward)
