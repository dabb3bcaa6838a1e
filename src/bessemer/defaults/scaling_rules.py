"""What size and budget of a run say about its tokens, batch and learning rate, by published laws."""

from __future__ import annotations

TOKENS_PER_PARAMETER = 20  # the common reading of Hoffmann et al. 2022, table 3
RATE_COEFFICIENT, RATE_EXPONENT = 0.3118, -0.1250
BATCH_COEFFICIENT, BATCH_EXPONENT = 0.2920, 0.3271


def learning_rate(flops: float) -> float:
    """The peak for a run of so many FLOPs (Bi et al. 2024, DeepSeek LLM, section 3.1: 1e17 to 2e19 FLOPs, AdamW)."""
    return float(RATE_COEFFICIENT * flops**RATE_EXPONENT)


def batch_tokens(flops: float) -> float:
    """The global batch, in tokens, for a run of so many FLOPs (the same section)."""
    return float(BATCH_COEFFICIENT * flops**BATCH_EXPONENT)
