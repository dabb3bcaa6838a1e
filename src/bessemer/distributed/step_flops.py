"""FLOPs of a training step, required by the model and executed by the hardware, which recomputes activations."""

from __future__ import annotations

from typing import Literal

from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token, tokens_seen
from bessemer.recipe import ResolvedTrain, Train

# The operations that selective recompute computes again: element-wise operations, when results of matmuls and attention are
# saved, as Bessemer does; attention scores (Korthikanti et al. 2022, section 5); or every second matmul (torchtitan's
# per-operation checkpointing).
Selective = Literal["elementwise", "attention", "matmuls"]


def step_flops_per_token(train: Train, config: ModelConfig) -> float:
    """Return the FLOPs that a training step uses per token.

    With the masked objective only the masked tokens go through the output matrix. A frozen transformer has no backward
    pass, and its trained head, with a few numbers per text, is not counted.
    """
    per_token = flops_per_token(config)
    if train.objective == "masked":
        per_token -= 6.0 * config.head_matrix_parameters * (1.0 - train.masking.share)
    return per_token / 3.0 if train.is_frozen else per_token


def recomputed_flops_per_token(
    mode: str, config: ModelConfig, recomputed_total: int, selective: Selective = "elementwise", *, stops_early: bool = True
) -> float:  # fmt: skip
    """Return the FLOPs that activation recompute adds to `flops_per_token`.

    These are the forward pass of `recomputed_total` blocks, counted from the model's first. In a pipeline each rank
    recomputes its first blocks, so the result is approximate if windows differ by layer. Fused attention also recomputes
    the scores in its backward pass; as is usual, this is not counted.

    Args:
        mode: The recipe's `train.recompute`.
        config: The model.
        recomputed_total: Number of recomputed blocks (`distributed.stages.recomputed_total`).
        selective: The operations that selective recompute computes again.
        stops_early: True if a recomputed block stops once its backward pass has its inputs
            (`ModelConfig.recomputes_mlp_output`).
    """
    matrices = 2.0 * recomputed_total * config.block_active_parameters
    scores = config.score_flops(sum(tokens_seen(config, layer) for layer in range(recomputed_total))) / 3
    if mode == "selective":
        return {"elementwise": 0.0, "attention": scores, "matmuls": matrices / 2}[selective]
    if mode == "none":
        return 0.0
    down = config.width * (config.expert_width if config.experts else config.mlp_width)
    last = 0 if config.recomputes_mlp_output or not stops_early else down
    return matrices - 2.0 * recomputed_total * last + scores


def hardware_flops(train: ResolvedTrain, config: ModelConfig, recomputed_total: int) -> float:
    """Return the FLOPs of a full step, including recompute; a frozen transformer has no backward pass and no recompute."""
    again = 0.0 if train.is_frozen else recomputed_flops_per_token(train.recompute, config, recomputed_total)
    return (step_flops_per_token(train, config) + again) * train.global_batch_tokens
