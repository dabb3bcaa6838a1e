"""FLOPs per token that the model needs; `distributed.step_flops` has those of a training step."""

from __future__ import annotations

from bessemer.model.config import ModelConfig


def flops_per_token(config: ModelConfig) -> float:
    """Return the FLOPs of forward and backward for one token.

    They are 6 per parameter that multiplies the token (the embedding is a lookup, so a tied matrix counts once, as the
    head), plus the scores and the weighted values of attention over the tokens it sees on average (Chowdhery et al. 2022,
    appendix B, with causality and windows).
    """
    seen = sum(tokens_seen(config, layer) for layer in range(config.layers))
    return 6.0 * config.matrix_parameters + config.score_flops(seen)


def tokens_seen(config: ModelConfig, layer: int) -> float:
    """Return the average number of tokens that a token of a full sequence attends to in a layer, including itself."""
    length = config.sequence_length
    window = config.window_of(layer)
    back = min((window - 1 if config.causal else window // 2) if window else length - 1, length - 1)
    one_side = back - back * (back + 1) / (2 * length)  # the first tokens have fewer before them
    return 1 + one_side * (1 if config.causal else 2)
