"""Bytes on a device at the peak of a training step, by part, of a model that it holds whole or in part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

from bessemer.layout.flops import is_frozen
from bessemer.layout.pipeline_stages import PipelinePart
from bessemer.model.config import ModelConfig, dropping_chunk
from bessemer.recipe import Dropout, Parallel, Train
from bessemer.recipe.parallel import interleaved_rounds
from bessemer.recipe.train import UPDATE_RULES

# Bytes an element of one moment: fp32, bf16, or a uint8 code and its share of an fp32 scale for 256 elements.
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0 + 4.0 / 256}
# What one of several processes holds on a CPU beyond its tensors, since blocks of many sizes leave holes in the heap: measured
# with glibc on models of 1.4M to 79M parameters and micro-batches of 256 to 1,024 tokens, resident memory less live tensors.
HEAP_SLACK_BYTES = 50_000_000
HEAP_SLACK_SHARE = 0.5  # of what a step allocates and frees: gradients, activations, logits
# The same of a process alone: libraries that training loads and its threads, and the share with one micro-batch a step and
# with several, whose gradients are made while the sum of the earlier ones is held. Two at a time do not reach their peaks
# together, which makes up for the holes. Fitted on the runs marked so in docs/calibration.md.
RUN_BYTES, PAIRED_BYTES = 20_000_000, 30_000_000
SLACK_OF_ONE, SLACK_OF_SEVERAL = 0.25, 0.45
# Of a score where attention weights are dropped: 18 counted in bf16, 20 in fp32, over the forward and backward pass of a chunk.
SCORE_BYTES = 20
# Logits of a chunk on a CPU: 8 MiB of fp32 stay in the last cache, where every pass over them is faster; with 8,192 ids
# that is 256 rows. Matmuls of fewer than 128 rows run slowly (docs/notes/cpu-step.md).
CACHED_LOGITS, MIN_ROWS = 1 << 21, 128


def loss_chunk(asked: int, vocabulary: int, is_cuda: bool) -> int:
    """Tokens whose logits are held at one time, of the number asked for."""
    return asked if is_cuda else min(asked, max(CACHED_LOGITS // vocabulary, MIN_ROWS))


@dataclass(frozen=True)
class Memory:
    """Peak bytes of a step, by part. average: EMA; base: before the model; casts: low-precision weights; slack: heap holes."""

    weights: int
    gradients: int
    optimizer: int
    average: int
    activations: int
    logits: int
    base: int
    casts: int = 0
    slack: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def to_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def memory(
    train: Train, layout: Parallel, config: ModelConfig, bytes_per_activation: int, base: int, *,
    parts: Sequence[PipelinePart] = (), recomputed: int | None = None, bytes_per_cast: int = 0, is_cuda: bool = False,
    together: int = 1,
) -> Memory:  # fmt: skip
    """The fullest process of a layout, at the peak of a step.

    parts: of each place of the pipeline; empty: one process holds the whole model, whatever the layout. Weights and gradients
    are fp32; the moments as the optimizer keeps them, and elsewhere when the recipe asks for it and the device has memory of
    its own (is_cuda). Activations, in elements per token and block, are what autograd keeps of the operations in
    `model/transformer.py`; a test counts them on a CPU in fp32.
    bytes_per_activation: 4 for fp32, 2 for bf16; base: what the process holds before the model; recomputed: blocks, from the
    first, that are recomputed; None: all, if any; bytes_per_cast: of the copies of weights in the type of the matmuls, which
    FSDP2 gathers, or which autocast makes and the backward pass keeps; together: micro-batches at a time, each with gradients
    of its own.
    """
    layout = layout if parts else Parallel()
    blocks = recomputed if recomputed is not None else 0 if train.recompute == "none" else config.layers
    planned = (
        of_part(train, config, layout, part, bytes_per_activation, base, blocks, bytes_per_cast, is_cuda, together)
        for part in parts or (PipelinePart(0, config.layers, True, True),)
    )
    return max(planned, key=lambda found: found.total)


def of_part(
    train: Train, config: ModelConfig, layout: Parallel, part: PipelinePart, width: int, base: int, recomputed: int, cast: int,
    is_cuda: bool, together: int,
) -> Memory:  # fmt: skip
    """What a place of the pipeline holds. width: bytes of an activation; cast: of a weight's copy; the rest as in `memory`."""
    is_alone = layout.world == 1
    assert train.micro_batch is not None, "the recipe is resolved"
    tokens = train.micro_batch * config.sequence_length
    micro_batches = (train.global_batch_tokens or tokens) // tokens // layout.data
    tokens //= layout.context
    held = PartParameters.of(config, part, layout.tensor)
    share = 1.0 if is_alone else held.all / layout.state_shards / config.parameters
    weights, copies, gradients = state_bytes(layout, held, cast or 4, micro_batches)
    activations, working = activation_bytes(
        config, part, tokens, in_flight(layout, part.pipeline_rank, micro_batches), width, recomputed, train.recompute,
        layout.tensor, mask_bytes(train.dropout, config), is_alone=is_alone,
    )  # fmt: skip
    logits = 0
    if part.has_head and not config.labels:  # a classifier forms one row of a few logits a text
        rows = -(-config.vocabulary // layout.tensor)
        chunk = min(loss_chunk(train.loss_chunk, rows, is_cuda), tokens)
        logits = 2 * 4 * chunk * rows + 4 * rows * config.width
        if is_alone and not is_cuda and width < 4:
            logits += (
                2 * width * rows * config.width
            )  # the head's narrow copy, and its gradient before it is added in fp32
    scores = score_bytes(train, config, layout)
    # The blocks' backward pass begins where the logits were.
    activations += max(working + (0 if is_alone else scores) - logits, 0)
    if is_alone:
        trained = config.parameters
        if is_frozen(train):  # no backward pass: one block's working set, and the residual stream
            trained = config.classifier_parameters
            each = activation_elements_per_block(config) * width + mask_bytes(train.dropout, config)
            activations = tokens * (each + 2 * config.width * width)
        activations, logits = together * (activations + scores), together * logits
        # Two at a time: those of each that is under way, and the sum of the ones before, where there are any.
        gradients = 4 * trained * (1 if together == 1 else min(micro_batches, 1 + together))
        weights = 4 * config.parameters
    transient = gradients + activations + logits
    slack = HEAP_SLACK_BYTES + int(HEAP_SLACK_SHARE * transient)
    if is_alone:
        slack = heap_slack(transient, micro_batches, together)
    whole = max(part.blocks - recomputed, 0) * config.block_matrix_parameters // layout.tensor
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=0 if is_cuda and train.optimizer.offload else round(optimizer_bytes(train, config) * share),
        average=round((4 * config.parameters if train.ema else 0) * share),  # in fp32
        activations=activations,
        logits=logits,
        base=base,
        casts=copies if layout.uses_fsdp else whole * cast,
        slack=0 if is_cuda else slack,
    )


def heap_slack(transient: int, micro_batches: int, together: int) -> int:
    """Bytes that a process alone holds on a CPU beyond its tensors; transient: bytes that a step allocates and frees."""
    if together > 1:
        return PAIRED_BYTES
    return RUN_BYTES + int((SLACK_OF_SEVERAL if micro_batches > 1 else SLACK_OF_ONE) * transient)


def activation_elements_per_block(config: ModelConfig) -> int:
    """Elements per token that autograd keeps of a block that is not recomputed."""
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    # Of a norm before a sublayer its input and its result, which the sublayer reads; of one after it the input.
    norms = (6 if config.norm_position == "both" else 4) * config.width
    # Rotated queries and keys, values, the output by head and by token; without rotation the parts of the joined matmul
    # are attended to where they are; what QK-norm normalises keeps the whole matmul.
    attention = (heads + 2 * kv_heads) + 2 * heads
    if config.positions == "learned":
        attention += kv_heads - heads  # which attention then gives by token
    elif config.qk_norm == "head":
        attention += heads + 2 * kv_heads
    if config.qk_norm == "full":  # which joins the heads anew before it
        attention += heads + kv_heads
    # gate and up, silu(gate) * up in one; what an activation reads and gives, where it stands alone
    parts = 2 if not config.gated else 3 if config.activation == "silu" else 4
    mlp = (parts + (config.activation in ("gelu_quick", "relu2"))) * config.mlp_width
    return norms + attention + mlp


def mask_bytes(dropout: Dropout, config: ModelConfig) -> int:
    """Bytes per token that a block keeps of its dropout's masks, one an element; those of attention weights are not kept."""
    if config.inner_dropout:
        return (config.mlp_width if dropout.hidden else 0) + (config.width if dropout.attention else 0)
    return 2 * config.width if dropout.hidden else 0


def score_bytes(train: Train, config: ModelConfig, layout: Parallel) -> int:
    """Bytes that the attention of a block works in where its weights are dropped: the scores of some queries at a time, with
    their softmax, their random bits and their gradients."""
    rows = train.micro_batch or 1
    if not train.dropout.attention:
        return 0
    heads, queries = config.heads // layout.tensor, config.sequence_length // layout.context
    chunk = min(dropping_chunk(rows, heads, config.sequence_length), queries)
    return SCORE_BYTES * rows * heads * chunk * config.sequence_length


def kept(recompute: str, config: ModelConfig) -> int:
    """Elements per token that a recomputed block keeps: its input; selective: also what matmuls and attention give."""
    if recompute != "selective":
        return config.width
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matmuls = heads + 2 * kv_heads + config.width + config.mlp_width * (1 + config.gated)
    last = config.width if config.norm_follows else 0
    return config.width + matmuls + heads + last


def optimizer_bytes(train: Train, config: ModelConfig) -> int:
    """Bytes of the moments: one an element for Lion, and for Muon in the hidden matrices; two for AdamW.

    Tensors that stay fp32 because they are small (vectors, a classifier's head above a frozen transformer) are counted
    as such.
    """
    if is_frozen(train):
        moments = len(UPDATE_RULES[train.optimizer.rest_kind].moments)
        return round(MOMENT_BYTES["fp32"] * moments * config.classifier_parameters)
    each = MOMENT_BYTES[train.optimizer.state]
    matrices = config.layers * config.block_matrix_parameters
    vectors = config.parameters - matrices - config.embedding_parameters
    rest = len(UPDATE_RULES[train.optimizer.rest_kind].moments)
    moved = len(UPDATE_RULES[train.optimizer.kind].moments) * matrices + rest * config.embedding_parameters
    return round(each * moved + MOMENT_BYTES["fp32"] * rest * vectors)


@dataclass(frozen=True)
class PartParameters:
    """Parameters of a process's part of the model, after tensor parallelism and before ZeRO. block: of one block; root: of
    all that lies in none."""

    block: int
    root: int
    blocks: int

    @property
    def all(self) -> int:
        return self.blocks * self.block + self.root

    @classmethod
    def of(cls, config: ModelConfig, part: PipelinePart, tensor: int) -> PartParameters:
        """Matrices are divided over the tensor group; vectors, and what has no row of its own for an id, are not."""
        outside = config.parameters - config.layers * config.block_matrix_parameters - config.embedding_parameters
        vectors = outside // (
            config.layers + 1
        )  # norms and biases, those outside of blocks as if they were of one more
        tables = config.tables(part.has_embedding, part.has_head)
        table = -(-config.vocabulary // tensor) * config.width
        rest = (tables * table) + (vectors if part.has_head else 0)
        return cls(config.block_matrix_parameters // tensor + vectors, rest, part.blocks)


def in_flight(layout: Parallel, place: int, micro_batches: int) -> float:
    """Micro-batches whose activations a process of the pipeline holds at the most, all of its stages together counted as one."""
    return micro_batches_in_flight(layout.schedule, layout.pipeline, layout.stages_each, place, micro_batches)


@lru_cache(maxsize=4096)
def micro_batches_in_flight(schedule: str, stages: int, virtual: int, place: int, micro_batches: int) -> float:
    """Peak micro-batches in flight on one rank of a pipeline of `stages` ranks with `virtual` stages each.

    All of them in GPipe (Huang et al. 2019); one for each stage from here on in 1F1B (Narayanan et al. 2021, section 2.2.1),
    with (p - 1) / (p v) as many again where v stages are interleaved (there, section 2.2.2), in rounds of more than p
    micro-batches more; at most p and a half in a V (Qi et al. 2024).
    """
    if stages == 1:
        return 1.0
    if schedule == "gpipe":
        return float(micro_batches)
    if schedule == "1f1b":
        most = float(stages - place)
    elif schedule == "interleaved":
        round_size = micro_batches // interleaved_rounds(stages, micro_batches)
        most = (2 * (stages - place - 1) + (virtual - 1) * round_size + 1) / virtual
    else:
        most = stages + 0.5
    return min(most, float(micro_batches))


def state_bytes(layout: Parallel, held: PartParameters, narrow: int, micro_batches: int) -> tuple[int, int, int]:
    """Bytes of a process's weight shards, of its gathered weights, and of gradients with their reduction buffers.

    narrow: bytes of a gathered weight. What is kept is 4 bytes each, divided by N (Rajbhandari et al. 2020, "ZeRO", section
    5: P_os, P_os+g, P_os+g+p); but where there the weights of stages 1 and 2 are whole, here fp32 masters are divided and a
    narrow copy is whole while a step lasts.
    """
    divided, n = layout.uses_fsdp, layout.state_shards
    # torch's V-shaped schedules keep weights gathered and gradients whole over all micro-batches.
    zero = 1 if layout.is_v_shaped else layout.zero
    kept = 4 * held.all // n
    if not divided:
        return kept, 0, kept
    two = min(2, held.blocks) * held.block  # one in use, one on its way
    whole = held.all if zero < 3 else held.root + two
    buffer = 4 * (held.block if held.blocks else held.root)  # of the block that is being added up
    # Gradients of a block and of what lies outside of blocks are whole until they are added up.
    fresh = narrow * (held.block + held.root // 2)
    if zero == 1 and micro_batches > 1:
        # A block's gathered weights are resharded when its reduction buffer is allocated.
        return kept, narrow * whole, 4 * held.all + buffer - narrow * held.block
    return kept, narrow * whole, kept + buffer + fresh


def activation_bytes(
    config: ModelConfig, part: PipelinePart, tokens: int, waiting: float, width: int, recomputed: int, recompute: str,
    tensor: int, masks: int = 0, *, is_alone: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """Bytes of activations kept for backward by all micro-batches in flight, and bytes that one block's backward allocates.

    tokens: of a micro-batch, on this process; waiting: micro-batches in flight; width: bytes of an element; masks: bytes a
    token that a block keeps of dropout's masks; is_alone: one process holds the whole model.
    Between the matmuls each process of a tensor group has its tokens' part of the residual stream, inside of them all
    tokens of its heads and hidden units (Korthikanti et al. 2022, section 4.2.2); what it gathered as their input is kept.
    """
    again = min(recomputed, part.blocks)
    entry = config.width / tensor  # the residual stream
    gathered = 2 * config.width * (tensor > 1)
    block = (activation_elements_per_block(config) + masks / width) / tensor + gathered
    keeps = kept(recompute, config) / tensor
    waits = again * keeps + (part.blocks - again) * block + 2 * entry
    widest = (3 if config.gated else 2) * config.mlp_width / tensor
    # Norms of narrow streams work in fp32 and keep that; the backward pass adds gradients of the hidden units and of the stream.
    working = (block if again else 0) * width + widest * width + 2 * entry * 6 * (width < 4) + 2 * config.width * width
    if is_alone:  # measured so: what is kept of the other blocks is free by then, so that only recompute takes more
        working = (block - keeps) * width if part.blocks and again == part.blocks else 0.0
    return round(tokens * waiting * waits * width), round(tokens * working)
