"""Bytes of an optimizer: its state, and the working memory of its update."""

from __future__ import annotations

import math
from typing import Any

from bessemer.distributed.element_bytes import ElementBytes
from bessemer.distributed.stages import PipelineRank
from bessemer.model.config import ModelConfig
from bessemer.model.sublayers import FP32
from bessemer.recipe import Parallel, ResolvedTrain

# Bytes per element of one moment: fp32, or a uint8 code and its share of an fp32 scale for 256 elements.
MOMENT_BYTES = {"fp32": 4.0, "8bit": 1.0 + 4.0 / 256}
# Elements that Muon orthogonalises together, to batch small matmuls in limited memory.
STACK_ELEMENTS = 1 << 25


def optimizer_bytes(train: ResolvedTrain, config: ModelConfig) -> int:
    """Return the bytes of an optimizer's moments.

    Tensors that stay fp32 because they are small (vectors, or a classifier's head on a frozen transformer) are counted as
    fp32.
    """
    moved, rest = len(train.optimizer.rule.moments), len(train.optimizer.rest_rule.moments)
    if train.is_frozen:
        return round(MOMENT_BYTES["fp32"] * rest * config.head_parameters)
    each = MOMENT_BYTES[train.optimizer.state]
    matrices = config.layers * config.block_matrix_parameters
    vectors = config.parameters - matrices - config.embedding_parameters
    return round(each * (moved * matrices + rest * config.embedding_parameters) + MOMENT_BYTES["fp32"] * rest * vectors)


def update_bytes(
    train: ResolvedTrain, layout: Parallel, config: ModelConfig, rank: PipelineRank, element_bytes: ElementBytes
) -> int:
    """Return the bytes that Muon's update allocates at its peak; 0 for other optimizers and frozen transformers.

    They are directions and their stack in fp32, and four matrices of that size for matmuls in low precision
    (`muon.orthogonalise`). A process that owns a sharded parameter also holds its full update.
    """
    if train.is_frozen or not train.optimizer.rule.is_for_matrices:
        return 0
    matrices = [part for part in config.block_table.values() if part.is_matrix]
    elements, owned = rank.blocks * config.block_matrix_parameters, 0
    if layout.uses_fsdp or layout.tensor > 1:
        elements = owned = max(part.size // (layout.expert if part.is_routed else 1) for part in matrices)
    return (2 * FP32 + 4 * element_bytes.activation) * min(elements, STACK_ELEMENTS) + FP32 * owned


def undivided_state_bytes(train: ResolvedTrain, config: ModelConfig, blocks: int) -> int:
    """Return the bytes of optimizer state in tensors of another shape than their parameter's.

    They are those of `blocks` blocks, and of the embedding and output matrix.
    """

    def size(rule: Any, shape: tuple[int, ...]) -> int:
        return sum(math.prod(other) for other in (shape_for(shape) for shape_for in rule.others.values()) if other)

    if train.is_frozen:
        return 0
    rule = train.optimizer.rule
    block = sum(size(rule, part.shape) for part in config.block_table.values() if part.is_matrix)
    embeddings = config.tables() * size(train.optimizer.rest_rule, (config.vocabulary, config.width))
    return FP32 * (blocks * block + embeddings)
