"""FLOPs of a token and of a step, and where the hardware does more than the model asks for."""

from __future__ import annotations

from typing import Literal

from bessemer.model.config import ModelConfig
from bessemer.recipe import ResolvedTrain, Train

# What selective recompute computes again: element-wise work, where the results of matmuls and attention are kept as here;
# attention's scores (Korthikanti et al. 2022, section 5); or every second matmul (torchtitan's per-operation checkpointing).
Selective = Literal["elementwise", "attention", "matmuls"]


def flops_per_token(config: ModelConfig) -> float:
    """FLOPs of forward and backward for one token.

    6 per parameter that multiplies the token (the embedding is looked up, so it counts once, as the head), plus the
    scores and the weighted values of attention over the tokens it sees on average (Chowdhery et al. 2022, appendix B,
    with the causal half and the windows).
    """
    seen = sum(tokens_seen(config, layer) for layer in range(config.layers))
    return 6.0 * config.matrix_parameters + config.score_flops(seen)


def step_flops_per_token(train: Train, config: ModelConfig) -> float:
    """FLOPs that a training step spends on a token.

    Masked: only the hidden tokens go through the output matrix. A frozen transformer has no backward pass; the head it
    leaves, of a few numbers a text, is not counted.
    """
    per_token = flops_per_token(config)
    if train.objective == "masked":
        per_token -= 6.0 * config.head_matrix_parameters * (1.0 - train.masking.share)
    return per_token / 3.0 if train.is_frozen else per_token


def tokens_seen(config: ModelConfig, layer: int) -> float:
    """Tokens that a token of a whole sequence attends to in a layer, itself included, on average."""
    length = config.sequence_length
    window = config.window_of(layer)
    back = min((window - 1 if config.causal else window // 2) if window else length - 1, length - 1)
    one_side = back - back * (back + 1) / (2 * length)  # the first tokens have fewer before them
    return 1 + one_side * (1 if config.causal else 2)


def recomputed_flops_per_token(
    mode: str, config: ModelConfig, recomputed_total: int, selective: Selective = "elementwise", *, stops_early: bool = True
) -> float:  # fmt: skip
    """FLOPs that activation recompute adds to flops_per_token: the forward pass of so many blocks of the model
    (`distributed.stages.recomputed_total`), counted from its first. In a pipeline each rank recomputes its own first ones, so
    where windows differ by layer this is approximate. mode: train.recompute.

    stops_early: a recomputed block stops at what its backward pass needs (`ModelConfig.recomputes_mlp_output`). Fused
    attention's own second look at the scores is left out, as is usual.
    """
    matrices = 2.0 * recomputed_total * config.block_active_parameters
    scores = config.score_flops(sum(tokens_seen(config, layer) for layer in range(recomputed_total))) / 3
    if mode == "selective":
        return {"elementwise": 0.0, "attention": scores, "matmuls": matrices / 2}[selective]
    if mode == "none":
        return 0.0
    last = 0 if config.recomputes_mlp_output or not stops_early else config.block_table["mlp.down.weight"].size
    return matrices - 2.0 * recomputed_total * last + scores


def hardware_flops(train: ResolvedTrain, config: ModelConfig, recomputed_total: int) -> float:
    """FLOPs of a whole step, the recompute's included; a frozen transformer has no backward pass to recompute for."""
    again = 0.0 if train.is_frozen else recomputed_flops_per_token(train.recompute, config, recomputed_total)
    return (step_flops_per_token(train, config) + again) * train.global_batch_tokens
