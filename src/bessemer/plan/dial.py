"""The one dial: from `model.depth` to width, heads, learning rate, batch and horizon; and every other default that
depends on something else in the recipe.

Each derived value can be overridden by its own key. Where each rule comes from:

width          64 x depth: an aspect ratio of 64, in the flat valley that Kaplan et al. (2020, section 3.1, figure 5)
               measured for width / depth between 30 and 150.
heads          of 64 elements up to a width of 1024, of 128 from there on (the head sizes of Llama and Qwen3).
learning rate  0.003239 - 0.0001395 ln(N), N without embeddings (Kaplan et al. 2020, equation D.1).
batch          the critical batch is some 2^18 tokens at the loss of a 100M model and grows as the loss falls (Kaplan et
               al. 2020, section 5.1: 2e8 tokens x L^(-1/0.21), with L from equation 1.1); rounded to a power of two
               of sequences, and never so large that a run would have fewer than MIN_STEPS steps.
horizon        20 tokens per parameter (Hoffmann et al. 2022, table 3).
"""

from __future__ import annotations

import math
from typing import Any

from bessemer.model.config import ModelConfig, swiglu_width
from bessemer.recipe import Model, Recipe, Train

TOKENS_PER_PARAMETER = 20
MIN_STEPS = 1000  # a run needs at least so many updates to leave warmup and decay behind, whatever its tokens
WARMUP_SHARE, WARMUP_LIMIT = 0.02, 2000


def resolve(recipe: Recipe, vocabulary: int, measured_steps: int | None = None) -> Recipe:
    """The recipe with every derived value filled in.

    vocabulary: ids of the tokenizer; measured_steps: steps that `train.minutes` comes to on this machine.
    """
    model = _dimensions(recipe.model)
    length = recipe.tokens.sequence_length
    config = ModelConfig.of(recipe.model_copy(update={"model": model}), vocabulary)
    train = recipe.train
    batch = train.global_batch_tokens or _batch(config, length, train)
    horizon = train.tokens or TOKENS_PER_PARAMETER * config.parameters
    steps = train.steps or measured_steps or max(math.ceil(horizon / batch), 1)
    sequences = batch // length
    warmup = train.schedule.warmup_steps
    optimizer = train.optimizer
    filled: dict[str, Any] = {
        "global_batch_tokens": batch,
        "steps": steps,
        "tokens": None,  # steps says it from here on
        "micro_batch": train.micro_batch or _micro_batch(sequences, length),
        "validate_every": train.validate_every or max(steps // 10, 1),
        "schedule": train.schedule.model_copy(
            update={"warmup_steps": max(min(int(steps * WARMUP_SHARE), WARMUP_LIMIT), 1) if warmup is None else warmup}
        ),
        "optimizer": optimizer.model_copy(
            update={"learning_rate": optimizer.learning_rate or _learning_rate(config)}
        ),
    }
    checkpoint = recipe.checkpoint.model_copy(
        update={"every": recipe.checkpoint.every or min(max(steps // 10, 1), 1000)}
    )
    return recipe.model_copy(
        update={"model": model, "train": train.model_copy(update=filled), "checkpoint": checkpoint}
    )


def _dimensions(model: Model) -> Model:
    depth = model.depth or model.layers
    assert depth is not None, "the schema lets no model through without depth or layers"
    width = model.width or 64 * depth
    if model.heads is not None:
        heads = model.heads
        head_dim = model.head_dim or width // heads
    else:
        head_dim = model.head_dim or (64 if width <= 1024 else 128)
        heads = max(width // head_dim, 1)
    return model.model_copy(
        update={
            "layers": model.layers or depth,
            "width": width,
            "heads": heads,
            "kv_heads": model.kv_heads or heads,
            "head_dim": head_dim,
            "mlp_width": model.mlp_width or swiglu_width(width),
        }
    )


def _learning_rate(config: ModelConfig) -> float:
    body = config.layers * config.block_matrix_parameters
    return round(max(0.003239 - 0.0001395 * math.log(body), 1e-5), 6)


def _batch(config: ModelConfig, length: int, train: Train) -> int:
    """Tokens of a global batch: the critical batch at the loss this model should reach, as a power of two of sequences."""
    body = config.layers * config.block_matrix_parameters
    loss = (8.8e13 / body) ** 0.076  # Kaplan et al. 2020, equation 1.1
    critical = 2.0e8 * loss ** (-1 / 0.21)  # equation 1.4
    horizon = train.tokens or TOKENS_PER_PARAMETER * config.parameters
    if train.steps is None and train.minutes is None:
        critical = min(critical, horizon / MIN_STEPS)
    return length * 2 ** max(round(math.log2(max(critical / length, 1))), 0)


def _micro_batch(sequences: int, length: int) -> int:
    """The largest divisor of the batch's sequences that holds at most 8,192 tokens: enough to fill a device's matrix
    units; activations beyond that only cost memory."""
    fitting = [size for size in range(1, sequences + 1) if sequences % size == 0 and size * length <= 8192]
    return max(fitting, default=1)
