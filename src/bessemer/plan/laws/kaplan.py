"""Kaplan et al. 2020, for comparison: parameters as C^0.73, which Hoffmann et al. 2022 overturned.

Their N leaves out the embeddings; C_min is what a budget comes to at a batch far below the critical one. Trained at the
critical batch, as they advise, C = 2 C_min (section 5.1). Losses are nats a token of WebText2.
"""

from __future__ import annotations

from bessemer.plan.laws.chinchilla import FLOPS_PER_PARAMETER_TOKEN, Allocation, Frontier

PETAFLOP_DAY = 1e15 * 86_400
CRITICAL_BATCH_TOKENS, CRITICAL_BATCH_EXPONENT = 2e8, 0.21  # section 5.1, equation 5.3

# N_opt = 1.3e9 x C_min^0.73, C_min in petaflop-days (appendix A, table 6). Hoffmann et al. (2022, section D.4) take the same
# to 4.68B parameters for 1e21 FLOPs.
FRONTIER = Frontier(
    name="Kaplan 2020",
    exponent=0.73,
    coefficient=1.3e9 * (2 * PETAFLOP_DAY) ** -0.73,
    interval=None,
    token_interval=None,
    source="Kaplan et al. 2020, table 6, at the critical batch",
)


def loss_of_size(parameters: float) -> float:
    """Loss at convergence, data without end: (8.8e13 / N)^0.076 (equation 1.1)."""
    return float((8.8e13 / parameters) ** 0.076)


def loss_of_tokens(tokens: float) -> float:
    """Loss of a large enough model on this much data: (5.4e13 / D)^0.095 (equation 1.2)."""
    return float((5.4e13 / tokens) ** 0.095)


def loss(parameters: float, tokens: float) -> float:
    """L(N, D) = ((6.4e13 / N)^(0.076 / 0.103) + 1.8e13 / D)^0.103 (equation 1.5; constants of table 2, fitted jointly)."""
    return float(((6.4e13 / parameters) ** (0.076 / 0.103) + 1.8e13 / tokens) ** 0.103)


def critical_batch(reached: float) -> float:
    """Tokens of the critical batch when the loss is `reached`: 2e8 / L^(1/0.21), whatever the model's size (section 5.1)."""
    return float(CRITICAL_BATCH_TOKENS / reached ** (1.0 / CRITICAL_BATCH_EXPONENT))


def optimum(flops: float) -> Allocation:
    """What they would have trained for a budget."""
    parameters = FRONTIER.optimum(flops).parameters
    return Allocation(parameters, flops / (FLOPS_PER_PARAMETER_TOKEN * parameters))
