"""Published scaling laws: compute-optimal size, predicted loss, batch size and learning rate.

Size and tokens follow the three approaches of Hoffmann et al. 2022 ("Chinchilla"), and the third as refitted by
Besiroglu et al. 2024. N is the number of parameters including embeddings, D the number of tokens and C the FLOPs, taken
as 6 N D throughout, as both papers do. Losses are nats per token on the text and with the tokenizer of Hoffmann et al.,
so differences between plans carry over and absolute values do not.

Approaches 1 and 2 agree with each other and with the replication that tokens and parameters grow in proportion, at
about 20 tokens per parameter. The published fit of approach 3 (parameters as C^0.46) stopped before it converged
(Besiroglu et al. 2024, section 4). At 1e26 FLOPs it asks for 92 tokens per parameter where the others ask for 16 to 26.

Batch size and learning rate follow Bi et al. 2024 (DeepSeek LLM, section 3.1), Li et al. 2025 (Step Law), Liu et al.
2025 (Moonlight, appendix B), Bergsma et al. 2025 (Power Lines, figure 1), Kaplan et al. 2020 (section 5.1) and Zhang et
al. 2024 (section 3.3). For these N excludes embeddings, and batches are in tokens. The laws disagree by far more than
their authors' error bars, since each holds for one optimizer, schedule, tokenizer and data set. Use a sweep around
their spread to decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bessemer.common.errors import InputError
from bessemer.model import scaling_rules
from bessemer.model.scaling_rules import TOKENS_PER_PARAMETER, critical_batch

FLOPS_PER_PARAMETER_TOKEN = 6.0


def training_flops(parameters: float, tokens: float) -> float:
    """Return the training FLOPs C = 6 N D (Kaplan et al. 2020, section 2.1).

    The forward pass takes 2 and the backward pass 4 FLOPs per parameter and token; a multiply and an add count as one
    each.
    """
    return FLOPS_PER_PARAMETER_TOKEN * _positive("parameters", parameters) * _positive("tokens", tokens)


@dataclass(frozen=True)
class Allocation:
    """A compute budget divided into parameters and tokens: 6 x parameters x tokens = FLOPs."""

    parameters: float
    tokens: float

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens per parameter, D / N."""
        return self.tokens / self.parameters


@dataclass(frozen=True)
class Frontier:
    """A compute-optimal frontier N = coefficient x C^exponent, with D = C / 6N.

    Attributes:
        name: Name of the law, for output.
        exponent: Exponent of C.
        coefficient: Parameters at C = 1.
    """

    name: str
    exponent: float
    coefficient: float

    def optimum(self, flops: float) -> Allocation:
        """Return the parameters and tokens of the lowest loss for a budget in FLOPs.

        Raises:
            InputError: `flops` is not positive.
        """
        parameters = self.coefficient * _positive("flops", flops) ** self.exponent
        return Allocation(parameters, flops / (FLOPS_PER_PARAMETER_TOKEN * parameters))

    def flops_for(self, parameters: float) -> float:
        """Return the budget in FLOPs at which a model with this number of parameters is optimal."""
        return float((_positive("parameters", parameters) / self.coefficient) ** (1.0 / self.exponent))

    def optimal_tokens(self, parameters: float) -> float:
        """Return the number of training tokens at which a model with this number of parameters is optimal."""
        return self.flops_for(parameters) / (FLOPS_PER_PARAMETER_TOKEN * parameters)


@dataclass(frozen=True)
class LossLaw:
    """A parametric loss L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, equation 2).

    Attributes:
        name: Name of the law, for output.
        irreducible: E, in nats per token.
        parameter_term: A.
        token_term: B.
        alpha: Exponent of N.
        beta: Exponent of D.
    """

    name: str
    irreducible: float
    parameter_term: float
    token_term: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the predicted loss, in nats per token, after training on `tokens` unique tokens."""
        by_size = self.parameter_term / _positive("parameters", parameters) ** self.alpha
        return float(self.irreducible + by_size + self.token_term / _positive("tokens", tokens) ** self.beta)

    @property
    def exponent(self) -> float:
        """Exponent of C in the optimal N: beta / (alpha + beta) (Hoffmann et al. 2022, equation 4)."""
        return self.beta / (self.alpha + self.beta)

    @property
    def frontier(self) -> Frontier:
        """Compute-optimal frontier in closed form (Hoffmann et al. 2022, equation 4).

        N = G (C/6)^a with a = beta / (alpha + beta) and G = (alpha A / beta B)^(1 / (alpha + beta)).
        """
        ratio = self.alpha * self.parameter_term / (self.beta * self.token_term)
        scale = ratio ** (1.0 / (self.alpha + self.beta))
        return Frontier(self.name, self.exponent, scale * FLOPS_PER_PARAMETER_TOKEN**-self.exponent)


def _positive(what: str, value: float) -> float:
    if not value > 0 or math.isinf(value):
        raise InputError(f"{what}: {value:g} is not a positive number; give one above zero")
    return value


def _line(small: tuple[float, float], large: tuple[float, float]) -> tuple[float, float]:
    """Return exponent and coefficient of the power law through two rows (parameters, FLOPs) of a published table."""
    exponent = math.log(large[0] / small[0]) / math.log(large[1] / small[1])
    return exponent, small[0] / small[1] ** exponent


# Tables 3 and A3 project approaches 1 and 2 to sizes from 400M to 10T. Table 2 prints the exponents to two places only, so the
# lines here run through the first and the last row of each table. The seven rows between were used as a check.
APPROACH_1 = Frontier("Chinchilla approach 1 (envelope of training curves)", *_line((400e6, 1.92e19), (10e12, 1.30e28)))
APPROACH_2 = Frontier("Chinchilla approach 2 (IsoFLOP profiles)", *_line((400e6, 1.84e19), (10e12, 1.75e28)))
# The unrounded constants are in the paper's TeX source (Besiroglu et al. 2024, section 2). Rounding them as in equation 10
# moves the optimum of 6e23 FLOPs from 41B parameters to 33B. Table A3 was made with other constants: for a given size, its
# budgets are 6% (400M) to 16% (10T) below the ones computed here.
APPROACH_3 = LossLaw(
    "Chinchilla approach 3 (parametric loss, as published)", 1.6934, 406.4, 410.7, alpha=0.3392, beta=0.2849
)
# Besiroglu et al. 2024, table 1, on 240 runs read from figure 4 of Hoffmann et al.
REPLICATION = LossLaw(
    "Chinchilla approach 3 fitted again (Besiroglu 2024)", 1.8172, 482.01, 2085.43, alpha=0.3478, beta=0.3658
)
RULE = Frontier(
    "20 tokens a parameter, N = sqrt(C / 120)", 0.5, (FLOPS_PER_PARAMETER_TOKEN * TOKENS_PER_PARAMETER) ** -0.5
)

FRONTIERS: dict[str, Frontier] = {
    "rule": RULE,
    "approach_1": APPROACH_1,
    "approach_2": APPROACH_2,
    "approach_3": APPROACH_3.frontier,
    "replication": REPLICATION.frontier,
}
"""Compute-optimal frontiers, by the name that output uses."""


def optimal_tokens(parameters: float) -> dict[str, float]:
    """Return the optimal number of training tokens for a model size, by law."""
    return {key: law.optimal_tokens(parameters) for key, law in FRONTIERS.items()}


def compare(parameters: float, tokens: float) -> dict[str, Any]:
    """Compare a model size and its training tokens to the scaling laws, as plain values for the JSON of a plan.

    `optimal_tokens` is the optimum by 20 tokens per parameter, and `ratio` the tokens over it. `loss` is the predicted
    loss in nats per token by the constant fit `REPLICATION`, and `optimal_tokens_by_law` the optimum of each law.

    Args:
        parameters: Number of parameters.
        tokens: Number of training tokens.
    """
    optimal = RULE.optimal_tokens(parameters)
    return {
        "optimal_tokens": optimal,
        "ratio": tokens / optimal,
        "loss": REPLICATION.loss(parameters, tokens),
        "optimal_tokens_by_law": optimal_tokens(parameters),
    }


def optimal_batches(parameters: float, tokens: float) -> dict[str, float]:
    """Return the batch size with the lowest loss, in tokens, by law."""
    flops = training_flops(parameters, tokens)
    return {
        "deepseek": scaling_rules.batch_tokens(flops),
        "steplaw": 0.58 * tokens**0.571,
        "moonlight": 0.0065 * flops**0.4138,
        "power_lines": 0.0306 * tokens**0.383 * 2048,
    }


def critical_batches(parameters: float, tokens: float) -> dict[str, float]:
    """Return the critical batch size in tokens, beyond which more data parallelism stops paying, by law (paper).

    At this size a run needs twice the fewest tokens ("kaplan", "power_lines"), or a fifth more steps than if the steps
    fell in proportion to the batch ("zhang").
    """
    # Zhang's law takes tokens in millions. Only then does it agree with the paper's two other fits, 93.20 N^0.47 along 20 tokens
    # per parameter (22.91 20^0.47 = 93.7) and 621.341 N^0.087 at 3.072B tokens (N in millions). Power Lines takes the fewest
    # tokens that reach the loss. The planned tokens replace them here, since both are close well under the critical batch.
    return {
        "kaplan": critical_batch(parameters, tokens),
        "zhang": 22.91 * (tokens / 1e6) ** 0.47 * 512,
        "power_lines": 0.0471 * tokens**0.462 * 2048,
    }


def learning_rates(parameters: float, tokens: float) -> dict[str, float]:
    """Return the peak learning rate of each law, for the batch size that this law recommends."""
    flops = training_flops(parameters, tokens)
    return {
        "deepseek": scaling_rules.learning_rate(flops),
        "steplaw": 1.79 * parameters**-0.713 * tokens**0.307,
        "moonlight": 0.0127 * flops**-0.057,
    }
