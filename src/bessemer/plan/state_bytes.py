"""What the optimizer and the average of the weights hold between steps, in bytes."""

from __future__ import annotations

from bessemer.model.config import ModelConfig
from bessemer.recipe import Train

# Bytes an element of one moment: fp32, bf16, or a uint8 code and its share of an fp32 scale for 256 elements.
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "8bit": 1.0 + 4.0 / 256}
MOMENTS = {"adamw": 2, "lion": 1, "muon": 1}


def is_frozen(train: Train) -> bool:
    """Whether only the head of a classifier is trained."""
    return train.objective == "classify" and train.classify.frozen


def optimizer_bytes(train: Train, config: ModelConfig) -> int:
    """Bytes of the moments: one an element for Lion, and for Muon in the hidden matrices; two for AdamW.

    Tensors that stay fp32 because they are small (vectors, a classifier's head above a frozen transformer) are counted
    as such.
    """
    if is_frozen(train):
        moments = MOMENTS["lion" if train.optimizer.kind == "lion" else "adamw"]
        return round(MOMENT_BYTES["fp32"] * moments * config.classifier_parameters)
    each = MOMENT_BYTES[train.optimizer.state]
    matrices = config.layers * config.block_matrix_parameters
    vectors = config.parameters - matrices - config.embedding_parameters
    rest = MOMENTS["lion" if train.optimizer.kind == "lion" else "adamw"]
    moved = MOMENTS[train.optimizer.kind] * matrices + rest * config.embedding_parameters
    return round(each * moved + MOMENT_BYTES["fp32"] * rest * vectors)


def average_bytes(train: Train, config: ModelConfig) -> int:
    """Bytes of the weights' moving average, in fp32."""
    return 4 * config.parameters if train.ema else 0
