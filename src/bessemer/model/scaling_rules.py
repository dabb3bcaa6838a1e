"""Tokens, batch size and learning rate that published scaling laws give for the size and budget of a run."""

from __future__ import annotations

USUAL_RATES = "rates that usually work lie between 1e-5 and 2e-2"
TOKENS_PER_PARAMETER = 20  # the common reading of Hoffmann et al. 2022, table 3
RATE_COEFFICIENT, RATE_EXPONENT = 0.3118, -0.1250
BATCH_COEFFICIENT, BATCH_EXPONENT = 0.2920, 0.3271


def learning_rate(flops: float) -> float:
    """Return the peak learning rate for a run of this number of FLOPs.

    See Bi et al. 2024, DeepSeek LLM, section 3.1, which fitted it on 1e17 to 2e19 FLOPs with AdamW.
    """
    return float(RATE_COEFFICIENT * flops**RATE_EXPONENT)


def batch_tokens(flops: float) -> float:
    """Return the global batch, in tokens, for a run of this number of FLOPs (Bi et al. 2024, DeepSeek LLM, section 3.1)."""
    return float(BATCH_COEFFICIENT * flops**BATCH_EXPONENT)


def critical_batch(parameters: float, tokens: float) -> float:
    """Return the critical batch in tokens at the end of training, 2e8 / L^(1/0.21) (Kaplan et al. 2020, section 5.1).

    L is the loss of a model of N = `parameters` after D = `tokens`, L(N, D) = ((6.4e13 / N)^(0.076 / 0.103) + 1.8e13 /
    D)^0.103 (equations 1.5 and 5.3; constants of table 2, fitted jointly).
    """
    loss = ((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103
    return float(2e8 / loss ** (1.0 / 0.21))


def advised_batch(flops: float, parameters: float, tokens: float) -> float:
    """Return the recommended global batch in tokens for a run of `flops` FLOPs: `batch_tokens`, at most `critical_batch`.

    `parameters` and `tokens` are those of the model and of the run.
    """
    return min(batch_tokens(flops), critical_batch(parameters, tokens))
