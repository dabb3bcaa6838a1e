"""Bytes on a device at the peak of a training step, by part, of a model that it holds whole or in part."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from bessemer.distributed.schedules import micro_batches_in_flight
from bessemer.distributed.shards import padded
from bessemer.distributed.stages import PartParameters, PipelineRank, pipeline_ranks, rank_rows
from bessemer.model.config import ModelConfig, dropping_chunk, loss_chunk
from bessemer.model.element_bytes import FP32, ElementBytes
from bessemer.recipe import Dropout, Parallel, ResolvedTrain

# Bytes an element of one moment: fp32, bf16, or a uint8 code and its share of an fp32 scale for 256 elements.
MOMENT_BYTES = {"fp32": 4.0, "8bit": 1.0 + 4.0 / 256}
# On a CPU blocks of many sizes leave holes in the heap. Where no step was measured, this share of what a step allocates and frees
# is planned for them: 49 of 58 measured trainings of one process take less than their plan (benchmarks/results/memory_cpu.json).
HEAP_SHARE = 0.65
# Of the measured peak of steps, for what they do not show: validation, and batches of other lengths.
MEASURED_MARGIN = 1.05
# Of a score where attention weights are dropped: 18 counted in bf16, 20 in fp32, over the forward and backward pass of a chunk.
SCORE_BYTES = 20
# Of an element that a norm works on in low precision: its input in fp32, and its result in 2 bytes.
NORM_BYTES = 6


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a step, by part.

    weights: that the optimizer updates, or this rank's shards of them.
    gradients: whole or sharded, with the buffers of their reduction.
    optimizer: moments.
    ema: the exponential moving average of the weights.
    activations: saved for the backward pass, and what one block's backward allocates.
    logits: of a chunk of the loss, with their gradient and that of the output matrix.
    before_model: what the process held before it made the model: libraries, on a CPU.
    unsharded_weights: in the compute dtype: all-gathered by FSDP2, or cast by autocast.
    fragmentation: holes of a CPU's heap, by HEAP_SHARE or as measured.
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

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def as_measured(self, step_bytes: int) -> Memory:
        """The parts of a step that was measured to take `step_bytes` beyond what the process held before: what the tensors lack
        is fragmentation, what they have too much is taken off the activations and logits. Unchanged where the step took less
        than its state, since it used memory that the process had freed."""
        held, passing = self.total - self.before_model - self.fragmentation, self.activations + self.logits
        missing = round(MEASURED_MARGIN * step_bytes) - held
        if missing >= 0:
            return replace(self, fragmentation=missing)
        if missing <= -passing:
            return self
        share = 1.0 + missing / passing
        return replace(
            self, activations=round(share * self.activations), logits=round(share * self.logits), fragmentation=0
        )

    def to_dict(self) -> dict[str, int]:
        """Bytes by part, by the names that every plan has them under: unsharded weights are buffers."""
        parts = asdict(self)
        buffers = parts.pop("unsharded_weights")
        return {**parts, "buffers": buffers, "total": self.total}


def peak_memory(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, element_bytes: ElementBytes, *, before_model: int = 0,
    recomputed_per_rank: int | None = None, is_cuda: bool = False, concurrent: int = 1,
) -> Memory:  # fmt: skip
    """The fullest rank of a layout, at the peak of a step; the moments are as the optimizer keeps them.

    Where the device has memory of its own (is_cuda), parallel.offload keeps out of it all that FSDP2 shards. Activations, in
    elements per token and block, are what autograd saves of the operations in `model/transformer.py`; a test counts them on a
    CPU in fp32. before_model: bytes that the process holds before the model; recomputed_per_rank: blocks that each rank
    recomputes, from its first; None: all, if any; concurrent: micro-batches computed at the same time, each with its own
    gradients.
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
    """What each rank at one pipeline coordinate holds; arguments as of `peak_memory`."""
    is_eager = is_cuda and element_bytes.activation < FP32 and train.compile == "off"
    saved, in_backward = activation_bytes(
        train, layout, config, rank, element_bytes.activation, recomputed_per_rank, is_eager
    )
    scores = score_bytes(train, layout, config)
    logits = logits_bytes(train, layout, config, is_cuda) if rank.has_head else 0
    kept = max(rank.blocks - recomputed_per_rank, 0) * config.block_matrix_parameters // layout.tensor
    casts = kept * element_bytes.cast  # which the backward pass keeps
    if layout.world == 1:
        head, narrow = config.vocabulary * config.width if logits else 0, 0
        waiting = FP32 * head if config.is_tied else 0  # the head's gradient, for that of the embedding
        if not is_cuda and element_bytes.activation < FP32 and not train.is_frozen:  # model/casts.py
            casts = narrow = element_bytes.activation * config.layers * config.block_matrix_parameters
            waiting = 2 * element_bytes.activation * head  # its cast, and its gradient before it is added in fp32
            logits += waiting
            if config.labels:  # no logits were there whose memory the last block's gradients of hidden units could take
                hidden = (3 if config.gated else 2) * config.mlp_width + 2 * config.width
                saved += _micro_batches(train, layout, config)[0] * hidden * element_bytes.activation
        recomputed = None
        if recomputed_per_rank and not train.is_frozen:
            unsaved = activation_bytes(train, layout, config, rank, element_bytes.activation, 0)[0]
            again = activation_bytes(train, layout, config, rank, element_bytes.activation, rank.blocks)[1]
            recomputed = RecomputedBytes(concurrent * (again + waiting + narrow), concurrent * (unsaved + scores))
        in_backward += waiting if in_backward else 0
        # The scores come on top of both, which is more than the peak by at most the smaller of scores and logits.
        activations = concurrent * (saved + max(in_backward - logits, 0) + scores)
        step = StepBytes(activations, concurrent * logits, casts)
        memory = _single_process_memory(train, layout, config, step, element_bytes, concurrent, recomputed)
    else:
        activations = saved + max(in_backward + scores - logits, 0)  # the blocks' backward begins where the logits were
        step = StepBytes(activations, logits, casts)
        memory = _sharded_memory(train, layout, config, rank, step, element_bytes, is_cuda)
    if is_cuda:
        memory = replace(memory, fragmentation=0)
    return replace(memory, before_model=before_model) if before_model else memory


class StepBytes(NamedTuple):
    """Bytes that a rank allocates and frees in a step: fields of `Memory`."""

    activations: int
    logits: int
    unsharded_weights: int


class RecomputedBytes(NamedTuple):
    """Bytes of a process alone that recomputes blocks.

    at_end: when the backward pass reaches the first block, instead of `StepBytes` but for the casts
    of weights: the block's activations, the head's gradient where it waits, those in 2 bytes of all blocks. kept: activations
    without recompute. They pass through the heap all the same, block after block, and leave holes between gradients, which stay.
    """

    at_end: int
    kept: int


def _micro_batches(train: ResolvedTrain, layout: Parallel, config: ModelConfig) -> tuple[int, int]:
    """Tokens that a rank has of a micro-batch, and its micro-batches a step."""
    tokens = train.micro_batch * config.sequence_length
    return tokens // layout.context, train.global_batch_tokens // tokens // layout.data


def _single_process_memory(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, step: StepBytes, element_bytes: ElementBytes, concurrent: int,
    recomputed: RecomputedBytes | None,
) -> Memory:  # fmt: skip
    """What the only process of a run holds. Fragmentation is that of a CPU's heap; `rank_memory` leaves it out for devices."""
    micro_batches = _micro_batches(train, layout, config)[1]
    trained = config.classifier_parameters if train.is_frozen else config.parameters
    whole = element_bytes.gradient * trained
    of_earlier = whole * (micro_batches > concurrent > 1)  # their sum, apart from the gradients that are computed
    # Gradients of several micro-batches are made while the activations are freed, so that one set exists at the peak.
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
    """What one of several processes holds. Fragmentation is that of a CPU's heap; `rank_memory` leaves it out for devices."""
    params, micro_batches = PartParameters.of(config, rank, layout.tensor), _micro_batches(train, layout, config)[1]
    with_padding = padded(params, config, layout)
    state = trained = state_bytes(layout, params, with_padding, element_bytes, micro_batches)
    of_weights = of_moments = with_padding.all / layout.state_shards / config.parameters
    if train.is_frozen:
        head = PartParameters(block=0, root=config.classifier_parameters, blocks=0)
        trained = state_bytes(layout, head, head, element_bytes, micro_batches)
        of_moments = 1 / layout.state_shards
    if layout.uses_fsdp:
        step = step._replace(unsharded_weights=state.unsharded_weights)
    memory = Memory(
        weights=state.weights, gradients=trained.gradients,
        optimizer=round(optimizer_bytes(train, config) * of_moments) + undivided_state_bytes(train, config, rank.blocks),
        ema=round((element_bytes.master * config.parameters if train.ema else 0) * of_weights), before_model=0,
        fragmentation=int(HEAP_SHARE * (trained.gradients + sum(step))), **step._asdict(),
    )  # fmt: skip
    if is_cuda and layout.offload and layout.uses_fsdp:  # what is sharded lies in the host's memory
        return replace(memory, weights=0, gradients=trained.gradient_buffers, optimizer=0, ema=0)
    return memory


def logits_bytes(train: ResolvedTrain, layout: Parallel, config: ModelConfig, is_cuda: bool) -> int:
    """Bytes of a chunk's fp32 logits with a copy, and of the head's fp32 gradient, on one rank."""
    if config.labels:  # a classifier forms one row of a few logits a text
        return 0
    rows = rank_rows(config.vocabulary, layout.tensor)
    chunk = min(loss_chunk(train.loss_chunk, rows, is_cuda), _micro_batches(train, layout, config)[0])
    return 2 * FP32 * chunk * rows + FP32 * rows * config.width


def mask_bytes(dropout: Dropout, config: ModelConfig) -> int:
    """Bytes per token that a block keeps of its dropout's masks, one an element; those of attention weights are not kept."""
    if config.inner_dropout:
        return (config.mlp_width if dropout.hidden else 0) + (config.width if dropout.attention else 0)
    return 2 * config.width if dropout.hidden else 0


def score_bytes(train: ResolvedTrain, layout: Parallel, config: ModelConfig) -> int:
    """Bytes that the attention of a block works in where its weights are dropped: the scores of some queries at a time, with
    their softmax, their random bits and their gradients."""
    rows = train.micro_batch or 1
    if not train.dropout.attention:
        return 0
    heads, queries = config.heads // layout.tensor, config.sequence_length // layout.context
    chunk = min(dropping_chunk(rows, heads, config.sequence_length), queries)
    return SCORE_BYTES * rows * heads * chunk * config.sequence_length


def checkpointed_elements_per_block(recompute: str, config: ModelConfig) -> int:
    """Elements per token that a recomputed block saves: its input; selective: also the results of matmuls and attention."""
    if recompute != "selective":
        return config.width
    return config.width + sum(sublayer.selective_elements for sublayer in config.sublayers)


def optimizer_bytes(train: ResolvedTrain, config: ModelConfig) -> int:
    """Return the bytes of an optimizer's moments.

    Tensors that stay fp32 because they are small (vectors, a classifier's head above a frozen transformer) are counted
    as such.
    """
    moved, rest = len(train.optimizer.rule.moments), len(train.optimizer.rest_rule.moments)
    if train.is_frozen:
        return round(MOMENT_BYTES["fp32"] * rest * config.classifier_parameters)
    each = MOMENT_BYTES[train.optimizer.state]
    matrices = config.layers * config.block_matrix_parameters
    vectors = config.parameters - matrices - config.embedding_parameters
    return round(each * (moved * matrices + rest * config.embedding_parameters) + MOMENT_BYTES["fp32"] * rest * vectors)


def undivided_state_bytes(train: ResolvedTrain, config: ModelConfig, blocks: int) -> int:
    """Return the bytes of an optimizer's state of other shapes than the parameters: of `blocks` blocks and the embeddings."""

    def size(rule: Any, shape: tuple[int, ...]) -> int:
        return sum(math.prod(other) for other in (shape_for(shape) for shape_for in rule.others.values()) if other)

    if train.is_frozen:
        return 0
    block = sum(size(train.optimizer.rule, part.shape) for part in config.block_table.values() if part.is_matrix)
    embeddings = config.tables() * size(train.optimizer.rest_rule, (config.vocabulary, config.width))
    return FP32 * (blocks * block + embeddings)


class RankState(NamedTuple):
    """Bytes of a rank's parameters and gradients. weights, gradient_shard: its shards, which parallel.offload keeps in the host's
    memory; unsharded_weights: all-gathered ones; gradient_buffers: unsharded gradients and reduce-scatter buffers."""

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
    """Bytes of a rank's weights and gradients at the fullest moment of a step. with_padding: of `shards.padded`.

    Shards take the bytes of all parameters, divided by N (Rajbhandari et al. 2020, "ZeRO", section 5: P_os, P_os+g, P_os+g+p);
    but where there the weights of stages 1 and 2 are not sharded, here fp32 masters are, and a copy in the compute dtype is
    unsharded while a step lasts.
    """
    zero, bytes_gathered = layout.effective_zero, element_bytes.gathered
    weights = element_bytes.master * with_padding.all // layout.state_shards
    gradients = element_bytes.gradient * with_padding.all // layout.state_shards
    if not layout.uses_fsdp:
        return RankState(weights, 0, gradients, 0)
    two_blocks = min(2, params.blocks) * with_padding.block  # one in use, one being gathered
    unsharded_weights = bytes_gathered * (with_padding.all if zero < 3 else params.root + two_blocks)
    # The buffer of the block that is reduce-scattered.
    reduced = element_bytes.gradient * (with_padding.block if params.blocks else params.root)
    if zero == 1 and micro_batches > 1:
        # Whole until the last micro-batch's backward pass; a block's gathered weights are resharded when its reduce-scatter
        # buffer is allocated.
        buffers = element_bytes.gradient * params.all + reduced - bytes_gathered * with_padding.block
        return RankState(weights, unsharded_weights, 0, buffers)
    # Gradients are unsharded until their reduce-scatter: of a block, and of one half of what lies outside of blocks, since the
    # output matrix has its gradient at the beginning of the backward pass and the embedding at the end.
    unsharded = bytes_gathered * (params.block + params.root // 2)
    return RankState(weights, unsharded_weights, gradients, reduced + unsharded)


def activation_bytes(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, rank: PipelineRank, bytes_per_activation: int,
    recomputed_per_rank: int, is_eager: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Bytes of activations saved for backward by all micro-batches in flight, and bytes that one block's backward allocates.

    Between the matmuls each rank of a tensor group has its tokens' part of the residual stream, inside of them all
    tokens of its heads and hidden units (Korthikanti et al. 2022, section 4.2.2); what it gathered as their input is saved.
    is_eager: blocks are not compiled, and run on a GPU in low precision.
    """
    tokens, micro_batches = _micro_batches(train, layout, config)
    tensor, recomputed_per_rank = layout.tensor, min(recomputed_per_rank, rank.blocks)
    stream = config.width / tensor  # elements of the residual stream, per token
    gathered_inputs = 2 * config.width * (tensor > 1)  # of attention and MLP, whole
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
        # Measured so: the other blocks' activations are free by then, so that only recompute takes more.
        is_all = 0 < rank.blocks == recomputed_per_rank
        in_backward = (block - checkpointed) * bytes_per_activation if is_all else 0.0
    else:
        # Of the stream two gradients, whole in a tensor group too: as gathered for the last matmul of a sublayer, and of its
        # input before its reduce-scatter.
        hidden = max(sublayer.gradient_elements for sublayer in config.sublayers) / tensor
        whole_stream = 2 * config.width
        in_backward = ((block if recomputed_per_rank else 0) + hidden + whole_stream) * bytes_per_activation
        if bytes_per_activation < FP32:  # the two norms of a block work in fp32, and save that
            in_backward += 2 * stream * NORM_BYTES
    in_flight = micro_batches_in_flight(
        layout.schedule, layout.pipeline, layout.stages_per_rank, rank.pipeline_rank, micro_batches
    )
    return round(tokens * in_flight * saved * bytes_per_activation), round(tokens * in_backward)
