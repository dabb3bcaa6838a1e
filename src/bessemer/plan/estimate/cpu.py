"""Seconds of a training step of our own trainer on a machine that was measured: every operation of the step, by its size.

The operations are those of model/transformer.py, train/objective.py and train/step.py in eager mode; what each takes comes from
the calibration (plan/machine.py), and nothing here is fitted to a step of a real model.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from bessemer.layout.memory import loss_chunk
from bessemer.model.config import ModelConfig
from bessemer.plan.machine import PAIRS, WHOLE, Machine
from bessemer.recipe import Recipe

# What the prediction itself is off by, beside the spread of what was timed: the median error on the runs of
# docs/calibration.md was below it.
MODEL_ERROR = 0.10
# Of the six products of attention's two ways (two forward, four backward), the forward's, for blocks that are recomputed. The
# recomputation that a fused backward does by itself is in its time.
FORWARD_SHARE = 1.0 / 3.0


@dataclass(frozen=True)
class Parts:
    """Seconds by what they go into."""

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    host: float = 0.0

    def __add__(self, other: Parts) -> Parts:
        mine, theirs = asdict(self), asdict(other)
        return Parts(**{name: mine[name] + theirs[name] for name in mine})

    def times(self, factor: float) -> Parts:
        """So many of them."""
        return Parts(**{name: factor * value for name, value in asdict(self).items()})

    @property
    def total(self) -> float:
        return self.products + self.attention + self.passes + self.host


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step, and the interval in which it is expected; parts: gradients by kind, and the update."""

    seconds: float
    low: float
    high: float
    parts: dict[str, float]


def why_not(recipe: Recipe, config: ModelConfig) -> str | None:
    """What keeps a step of a resolved recipe from being predicted, in words; None when nothing does."""
    train = recipe.train
    reasons = (
        (recipe.parallel.world > 1, "it runs on several processes"),
        (train.objective != "causal", f"the objective is {train.objective}"),
        (train.optimizer.kind != "adamw" or train.optimizer.state != "fp32", "the optimizer is not AdamW in fp32"),
        (train.compile == "on", "the blocks are compiled"),
        (train.precision not in ("fp32", "auto"), f"the precision is {train.precision}"),
        (bool(config.window or config.attention_soft_cap), "attention has windows or soft caps"),
        (recipe.tokens.document_mask, "attention stays within documents, whose lengths are not known"),
        (train.recompute == "budget", "how much is recomputed depends on free memory"),
    )
    return next((reason for found, reason in reasons if found), None)


def step(recipe: Recipe, config: ModelConfig, machine: Machine) -> Predicted:
    """A training step of a resolved recipe that why_not has nothing against."""
    batch, micro = recipe.train.global_batch_tokens, recipe.train.micro_batch
    assert batch is not None and micro is not None, "the recipe is resolved"
    count = batch // config.sequence_length // micro
    paired = count >= 2 and machine.threads >= 2 and PAIRS in machine.ways
    way = PAIRS if paired else WHOLE
    chunk = loss_chunk(recipe.train.loss_chunk, config.vocabulary, is_cuda=False)
    each = micro_batch(config, micro * config.sequence_length, chunk, machine, way, recipe.train.recompute)
    turns = math.ceil(count / 2) if paired else count
    summed = (count - 1) * machine.pass_seconds("accumulate", config.parameters)
    gradients = each.times(turns) + Parts(passes=summed + machine.pass_seconds("square", config.parameters))
    updated = update(config, machine, average=bool(recipe.train.ema))
    whole = gradients + updated
    off = math.hypot(MODEL_ERROR, _spread(whole, machine, way))
    return Predicted(
        whole.total,
        whole.total * (1.0 - off),
        whole.total * (1.0 + off),
        {**asdict(gradients), "update": updated.total},
    )


def micro_batch(
    config: ModelConfig, tokens: int, chunk: int, machine: Machine, way: str, recompute: str = "none"
) -> Parts:
    """Forward and backward of one micro-batch of so many tokens; chunk: tokens whose logits are held at a time."""
    once = block(config, tokens, machine, way)
    if recompute == "full":
        once = once + forward_of(config, tokens, machine, way)
    elif recompute == "selective":
        once = once + Parts(passes=once.passes / 3.0)
    host = machine.ways[way].host
    return once.times(config.layers) + _ends(config, tokens, chunk, machine, way) + Parts(host=host.micro_batch)


def shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Products of a block: (outputs, inputs)."""
    heads, groups = config.heads * config.head_dim, config.kv_heads * config.head_dim
    inside = config.mlp_width * (2 if config.gated else 1)
    return {
        "qkv": (heads + 2 * groups, config.width),
        "out": (config.width, heads),
        "mlp_in": (inside, config.width),
        "mlp_out": (config.width, config.mlp_width),
    }


def product_seconds(rows: int, outputs: int, inputs: int, machine: Machine, way: str) -> dict[str, float]:
    """Seconds of a layer's products over so many rows: forward, gradient of the input, gradient of the weight."""
    flops = 2.0 * rows * outputs * inputs
    return {
        "forward": flops / machine.matmul_rate(rows, outputs, inputs, way=way, transpose="nt"),
        "to_input": flops / machine.matmul_rate(rows, inputs, outputs, way=way, transpose="nn"),
        "to_weight": flops / machine.matmul_rate(outputs, inputs, rows, way=way, transpose="tn"),
    }


def block(config: ModelConfig, tokens: int, machine: Machine, way: str) -> Parts:
    """Forward and backward of one block."""
    heads, groups = config.heads * config.head_dim, config.kv_heads * config.head_dim
    products = sum(sum(product_seconds(tokens, *shape, machine, way).values()) for shape in shapes(config).values())
    attention = machine.attention_seconds(
        config.heads * (tokens // config.sequence_length), config.sequence_length, config.head_dim, way=way
    )
    norm = "norm" if config.norm == "rms" else "layer_norm"
    stream = tokens * config.width
    moved = [(norm, stream)] * config.norms_each
    moved += [("add", stream)] * 4  # two sums on the way there, two of gradients on the way back
    if config.qk_norm != "none":
        kind = "head_norm" if config.qk_norm == "head" else norm
        moved += [(kind, tokens * heads), (kind, tokens * groups)]
    rotating = sum(config.rope_of(layer) is not None for layer in range(config.layers)) / config.layers
    if rotating:
        share = rotating * config.rotary_fraction
        moved += [("rotate", round(tokens * heads * share)), ("rotate", round(tokens * groups * share))]
    moved += [("copy", tokens * groups), ("copy", tokens * (heads + 2 * groups))]  # values by head; gradients joined
    is_swiglu = config.gated and config.activation == "silu"
    moved += [("swiglu" if is_swiglu else "gelu", tokens * config.mlp_width)]
    if config.gated and not is_swiglu:
        moved += [("add", tokens * config.mlp_width)] * 2
    if config.block_bias_parameters:
        moved += [("square", tokens * config.block_bias_parameters)]  # sums of gradients
    passes = sum(machine.pass_seconds(name, elements, way=way) for name, elements in moved)
    return Parts(products, attention, passes, machine.ways[way].host.block)


def forward_of(config: ModelConfig, tokens: int, machine: Machine, way: str) -> Parts:
    """The forward pass of one block again, without the MLP's last product, which no backward pass needs."""
    whole = block(config, tokens, machine, way)
    needed = [shape for name, shape in shapes(config).items() if name != "mlp_out" or config.norm_follows]
    forward = sum(product_seconds(tokens, *shape, machine, way)["forward"] for shape in needed)
    return Parts(forward, FORWARD_SHARE * whole.attention, whole.passes / 3.0, whole.host / 3.0)


def _ends(config: ModelConfig, tokens: int, chunk: int, machine: Machine, way: str) -> Parts:
    """Embedding, last norm and loss of a micro-batch, both ways."""
    chunk = min(chunk, tokens)
    head = product_seconds(chunk, config.vocabulary, config.width, machine, way)
    table, stream = config.vocabulary * config.width, tokens * config.width
    moved = [
        ("norm" if config.norm == "rms" else "layer_norm", stream),
        ("copy", stream),  # rows of the embedding, looked up
        ("add", stream),  # and their gradients, added where they belong
        ("copy", table / 2),  # in a table that is cleared first
        ("copy", stream + table),  # the loss's gradients, scaled
        *([("accumulate", table)] if config.tie_embeddings else []),
    ]
    passes = sum(machine.pass_seconds(name, elements, way=way) for name, elements in moved)
    in_loss = tokens / chunk * machine.pass_seconds("softmax", chunk * config.vocabulary, way=way)
    return Parts(products=tokens / chunk * sum(head.values()), passes=passes + in_loss)


def update(config: ModelConfig, machine: Machine, average: bool = False) -> Parts:
    """Clipping and AdamW, with all threads."""
    host = machine.ways[WHOLE].host
    moved = ["copy", "adamw", *(["accumulate"] if average else [])]
    passes = sum(machine.pass_seconds(name, config.parameters) for name in moved)
    return Parts(passes=passes, host=host.update + config.layers * host.update_block)


def _spread(whole: Parts, machine: Machine, way: str) -> float:
    """Half of the interquartile range of what was timed, weighted by where the step's seconds go."""
    found = {name: machine.spread_of(name, way) for name in ("products", "attention", "passes")}
    weighted = (
        found["products"] * whole.products + found["attention"] * whole.attention + found["passes"] * whole.passes
    )
    return 0.5 * weighted / whole.total
