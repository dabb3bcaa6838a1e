"""What a run computes, holds in memory and takes in time."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bessemer.model.config import ModelConfig, dropping_chunk
from bessemer.plan.devices import catalogue, match
from bessemer.plan.state_bytes import average_bytes, is_frozen, optimizer_bytes
from bessemer.recipe import Batches, Dropout, Recipe


def peak_flops(device_name: str) -> float | None:
    """Published dense bf16 peak of a device by the name its driver gives it (plan/devices.toml); None when it is not listed."""
    device = match(device_name, catalogue())
    return device.flops.get("bf16") if device else None


def flops_per_token(config: ModelConfig) -> float:
    """FLOPs of forward and backward for one token.

    6 per parameter that multiplies the token (the embedding is looked up, so it counts once, as the head), plus the
    scores and the weighted values of attention over the tokens it sees on average (Chowdhery et al. 2022, appendix B,
    with the causal half and the windows).
    """
    seen = sum(tokens_seen(config, layer) for layer in range(config.layers))
    return 6.0 * config.matrix_parameters + 12 * config.heads * config.head_dim * seen


def step_flops_per_token(recipe: Recipe, config: ModelConfig) -> float:
    """FLOPs that a training step of a recipe's objective spends on a token.

    Masked: only the hidden tokens go through the output matrix. A frozen transformer has no backward pass; the head it
    leaves, of a few numbers a text, is not counted.
    """
    per_token = flops_per_token(config)
    if recipe.train.objective == "masked":
        per_token -= 6.0 * config.head_matrix_parameters * (1.0 - recipe.train.masking.share)
    return per_token / 3.0 if is_frozen(recipe.train) else per_token


def tokens_seen(config: ModelConfig, layer: int) -> float:
    """Tokens that a token of a whole sequence attends to in a layer, itself included, on average."""
    length = config.sequence_length
    window = config.window_of(layer)
    back = min((window - 1 if config.causal else window // 2) if window else length - 1, length - 1)
    one_side = back - back * (back + 1) / (2 * length)  # the first tokens have fewer before them
    return 1 + one_side * (1 if config.causal else 2)


def recomputed_flops_per_token(recipe: Recipe, config: ModelConfig, recomputed: int) -> float:
    """FLOPs that activation recompute adds to flops_per_token: the forward pass of the first `recomputed` blocks.

    Selective recompute keeps what products and attention give and adds none that counts. A recomputed block stops at
    what its backward pass needs, which the MLP's last product is not, unless a norm follows it. Fused attention's own
    second look at the scores is left out, as is usual.
    """
    if recipe.train.recompute in ("none", "selective"):
        return 0.0
    last = 0 if config.norm_follows else config.width * config.mlp_width
    seen = sum(tokens_seen(config, layer) for layer in range(recomputed))
    return 2.0 * recomputed * (config.block_matrix_parameters - last) + 4 * config.heads * config.head_dim * seen


def hardware_flops(recipe: Recipe, config: ModelConfig, recomputed: int) -> float:
    """FLOPs of a whole step of a resolved recipe with `recomputed` blocks, the recompute's included."""
    assert recipe.train.global_batch_tokens is not None, "the recipe is resolved"
    per_token = step_flops_per_token(recipe, config) + recomputed_flops_per_token(recipe, config, recomputed)
    return per_token * recipe.train.global_batch_tokens


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
# that is 256 rows. Products of fewer than 128 rows run slowly (docs/notes/cpu-step.md).
CACHED_LOGITS, FEWEST_ROWS = 1 << 21, 128


def loss_chunk(asked: int, vocabulary: int, is_cuda: bool) -> int:
    """Tokens whose logits are held at one time, of the number asked for."""
    return asked if is_cuda else min(asked, max(CACHED_LOGITS // vocabulary, FEWEST_ROWS))


@dataclass(frozen=True)
class Memory:
    """Bytes on the device at the peak of a training step, by part. casts: narrow copies of the blocks' weights."""

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
    recipe: Recipe,
    config: ModelConfig,
    bytes_per_activation: int,
    base: int,
    *,
    recomputed: int | None = None,
    bytes_per_cast: int = 0,
    is_cuda: bool = False,
    together: int = 1,
) -> Memory:
    """Memory of one device that holds the whole model.

    Weights and gradients are fp32; the moments as the optimizer keeps them, and elsewhere when the recipe asks for it and
    the device has memory of its own (is_cuda). Activations, in elements per token and block,
    are what autograd keeps of the operations in `model/transformer.py`; a test counts them on a CPU in fp32.
    bytes_per_activation: 4 for fp32, 2 for bf16; base: what the process holds before the model; recomputed: blocks,
    from the first, that are recomputed; None: all, if any; bytes_per_cast: of the copies of the blocks' weights that
    autocast makes and the backward pass keeps; together: micro-batches at a time, each with gradients of its own.
    """
    train = recipe.train
    assert train.micro_batch is not None, "the recipe is resolved"
    tokens = train.micro_batch * config.sequence_length
    per_block = kept_by_a_block(config) * bytes_per_activation + mask_bytes(train.dropout, config)
    chunk = min(loss_chunk(train.loss_chunk, config.vocabulary, is_cuda), tokens)
    # A classifier forms one row of a few logits a text.
    head = config.vocabulary * config.width
    logits = 0 if config.labels else 2 * 4 * chunk * config.vocabulary + 4 * head
    if not is_cuda and bytes_per_activation < 4 and not config.labels:
        logits += 2 * bytes_per_activation * head  # the head's narrow copy, and its gradient before it is added in fp32
    blocks = recomputed if recomputed is not None else 0 if train.recompute == "none" else config.layers
    selected = kept(train.recompute, config) * bytes_per_activation
    activations = tokens * (blocks * selected + 2 * config.width * bytes_per_activation)
    # The blocks that are not recomputed are done, and their memory free, by the time the others are. When there are
    # none, the last block is recomputed after the loss, in the place of its logits.
    whole = config.layers - blocks
    activations += tokens * whole * per_block
    if blocks and not whole:
        activations += max(tokens * (per_block - selected) - logits, 0)
    trained = config.parameters
    if is_frozen(recipe.train):  # nothing is kept for a way back: what one block works on, and the stream through all
        trained = config.classifier_parameters
        activations = tokens * (per_block + 2 * config.width * bytes_per_activation)
    activations += score_bytes(recipe, config)
    activations, logits = together * activations, together * logits
    micro_batches = (train.global_batch_tokens or tokens) // tokens
    # Two at a time: those of each that is under way, and the sum of the ones before, where there are any.
    gradients = 4 * trained * (1 if together == 1 else min(micro_batches, 1 + together))
    transient = gradients + activations + logits
    return Memory(
        weights=4 * config.parameters,
        gradients=gradients,
        optimizer=0 if is_cuda and train.optimizer.offload else optimizer_bytes(train, config),
        average=average_bytes(train, config),
        activations=activations,
        logits=logits,
        base=base,
        casts=whole * config.block_matrix_parameters * bytes_per_cast,
        slack=0 if is_cuda else heap_slack(transient, micro_batches, together),
    )


def heap_slack(transient: int, micro_batches: int, together: int) -> int:
    """Bytes that a process alone holds on a CPU beyond its tensors; transient: bytes that a step allocates and frees."""
    if together > 1:
        return PAIRED_BYTES
    return RUN_BYTES + int((SLACK_OF_SEVERAL if micro_batches > 1 else SLACK_OF_ONE) * transient)


def kept_by_a_block(config: ModelConfig) -> int:
    """Elements per token that autograd keeps of a block that is not recomputed."""
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    # Of a norm before a sublayer its input and its result, which the sublayer reads; of one after it the input.
    norms = (6 if config.norm_position == "both" else 4) * config.width
    # Rotated queries and keys, values, the output by head and by token; without rotation the parts of the joined product
    # are attended to where they are; what QK-norm normalises keeps the whole product.
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


def score_bytes(recipe: Recipe, config: ModelConfig) -> int:
    """Bytes that the attention of a block works in where its weights are dropped: the scores of some queries at a time, with
    their softmax, their random bits and their gradients."""
    layout, rows = recipe.parallel, recipe.train.micro_batch or 1
    if not recipe.train.dropout.attention:
        return 0
    heads, queries = config.heads // layout.tensor, config.sequence_length // layout.context
    chunk = min(dropping_chunk(rows, heads, config.sequence_length), queries)
    return SCORE_BYTES * rows * heads * chunk * config.sequence_length


def kept(recompute: str, config: ModelConfig) -> int:
    """Elements per token that a recomputed block keeps: its input; selective: also what products and attention give."""
    if recompute != "selective":
        return config.width
    heads, kv_heads = config.heads * config.head_dim, config.kv_heads * config.head_dim
    products = heads + 2 * kv_heads + config.width + config.mlp_width * (1 + config.gated)
    last = config.width if config.norm_follows else 0
    return config.width + products + heads + last


@dataclass(frozen=True)
class Plan:
    """What a run is said to take, before it starts."""

    device: str
    parameters: int
    parameters_by_part: dict[str, int]
    flops_per_token: float
    total_flops: float
    steps: int
    tokens: int
    tokens_per_parameter: float
    memory_bytes: dict[str, int]
    peak_flops: float
    step_seconds: float
    step_seconds_from: str
    seconds: float
    tokens_per_second: float
    mfu: float
    validation_seconds: float = 0.0  # within `seconds`
    step_interval: tuple[float, float] | None = None  # seconds, in which a predicted step is expected

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parameters_of(plan: dict[str, Any]) -> tuple[int | None, int | None]:
    """All parameters, and those without embeddings, of a plan.json; of one written before 2026-11 too, where both stood under
    `parameters`. None for what is missing or no number."""
    whole = plan.get("parameters")
    parts = whole if isinstance(whole, dict) else plan.get("parameters_by_part")
    inner = parts.get("non_embedding") if isinstance(parts, dict) else None
    if isinstance(whole, dict):
        whole = whole.get("total")
    numbers = (each if isinstance(each, int) and not isinstance(each, bool) else None for each in (whole, inner))
    return next(numbers), next(numbers)


# Shares of the peak that well-tuned runs reach on one device, for a plan without a measurement: published MFU of dense
# models of 1B to 70B on A100 and H100 lies at 0.38 to 0.55.
ASSUMED_MFU = 0.40


def devices_of(recipe: Recipe, is_cuda: bool) -> int:
    """Devices that a run works with: each process has a GPU of its own, those of a node share its CPU's cores."""
    return recipe.parallel.world if is_cuda else min(recipe.cluster.nodes, recipe.parallel.world)


def plan(
    recipe: Recipe,
    config: ModelConfig,
    *,
    device: str,
    peak: float,
    memory: Memory,
    step_seconds: float | None,
    devices: int = 1,
    source: str = "measured on this machine",
    interval: tuple[float, float] | None = None,
    validation_share: float = 0.0,
) -> Plan:
    """Plan a resolved recipe; peak, memory: of one of `devices`. step_seconds: of a step on one device, known from `source`
    within `interval`; None: from ASSUMED_MFU of the peak. Several are said to take their share of it, with nothing for what
    processes tell each other. validation_share: time of the validations as a share of the steps'.
    """
    steps, batch = recipe.train.steps, recipe.train.global_batch_tokens
    assert steps is not None and batch is not None, "the recipe is resolved"
    per_token = step_flops_per_token(recipe, config)
    tokens = Batches.of(recipe).tokens_before(steps)
    seconds = (step_seconds if step_seconds is not None else per_token * batch / (peak * ASSUMED_MFU)) / devices
    each = f" of each of {devices:,} devices" if devices > 1 else ""
    return Plan(
        device=device,
        parameters=config.parameters,
        parameters_by_part={
            "embedding": config.embedding_parameters,
            "non_embedding": config.parameters - config.embedding_parameters,
        },
        flops_per_token=per_token,
        total_flops=per_token * tokens,
        steps=steps,
        tokens=tokens,
        tokens_per_parameter=tokens / config.parameters,
        memory_bytes=memory.to_dict(),
        peak_flops=peak,
        step_seconds=seconds,
        step_seconds_from=f"{ASSUMED_MFU:.0%} of the peak{each}"
        if step_seconds is None
        else source + (f", over {devices:,} devices" if devices > 1 else ""),
        seconds=seconds * tokens / batch * (1.0 + validation_share),  # a smaller batch takes its part of a full step
        validation_seconds=seconds * tokens / batch * validation_share,
        tokens_per_second=batch / seconds,
        mfu=per_token * batch / seconds / (peak * devices),
        step_interval=None if interval is None else (interval[0] / devices, interval[1] / devices),
    )
