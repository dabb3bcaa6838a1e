"""What tokens are worth that were seen before: the data-constrained law of Muennighoff et al. 2023.

Each repetition of the same tokens adds less than the one before, and parameters beyond what the unique tokens call for add less
too. Fitted on 182 runs of 7M to 9B parameters and 1 to 500 epochs, all with dropout 0.1 and weight decay 0.1, which forgive
repetition; beyond some 40 epochs the law only flattens where real losses rise (their section 6.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.errors import InputError
from bessemer.plan.laws.chinchilla import FLOPS_PER_PARAMETER_TOKEN, Allocation, LossLaw
from bessemer.plan.minimum import minimum

REPEATED_TOKENS, EXCESS_PARAMETERS = 15.387756, 5.309743
"""R*_D and R*_N: repetitions after which the value of another has fallen to 1/e (appendix A)."""

C4 = LossLaw(
    "Muennighoff 2023 (C4)",
    irreducible=math.exp(0.6254804),
    parameter_term=math.exp(6.255414),
    token_term=math.exp(7.3049974),
    alpha=0.3526596,
    beta=0.3526596,
    source="Muennighoff et al. 2023, appendix A, equation 17; constants unrounded as in their repository",
)


def _worth(unique: float, all_of_them: float, decay: float) -> float:
    """U + U R* (1 - exp(-R / R*)) with R = repetitions beyond the first (equations 5 and 6)."""
    repetitions = max(all_of_them / unique - 1.0, 0.0)
    return unique * (1.0 - decay * math.expm1(-repetitions / decay))


@dataclass(frozen=True)
class Repetition:
    """epochs: times each unique token is seen; effective_tokens: fresh tokens that would do as well; worth: of a token, on
    average, against a fresh one; last_epoch_worth: of one more token now; ceiling: effective tokens after endless epochs."""

    epochs: float
    effective_tokens: float
    worth: float
    last_epoch_worth: float
    ceiling: float


def repetition(tokens: float, unique: float) -> Repetition:
    """What `tokens` drawn from `unique` ones are worth. Raises InputError unless both are positive."""
    if not tokens > 0 or not unique > 0:
        raise InputError(f"tokens: {tokens:g} from {unique:g} unique ones: both must be above zero")
    unique = min(unique, tokens)
    effective = _worth(unique, tokens, REPEATED_TOKENS)
    return Repetition(
        epochs=tokens / unique,
        effective_tokens=effective,
        worth=effective / tokens,
        last_epoch_worth=math.exp(-(tokens / unique - 1.0) / REPEATED_TOKENS),
        ceiling=unique * (1.0 + REPEATED_TOKENS),
    )


def effective_parameters(parameters: float, unique: float) -> float:
    """Parameters that count when there are `unique` tokens to learn from: those beyond the optimum for them count less."""
    base = min(C4.frontier.optimal_parameters(unique), parameters)
    return _worth(base, parameters, EXCESS_PARAMETERS)


def loss(parameters: float, tokens: float, unique: float) -> float:
    """Loss after `tokens` tokens of which `unique` differ. In one epoch, up to the optimal size, it is C4.loss."""
    seen = repetition(tokens, unique)
    return C4.loss(effective_parameters(parameters, min(unique, tokens)), seen.effective_tokens)


def optimum(flops: float, unique: float) -> Allocation:
    """The division of a budget with the lowest loss when there are only `unique` tokens: more epochs before more parameters.

    By golden section over the logarithm of the size, along which the loss has one valley.
    """
    if not flops > 0:
        raise InputError(f"flops: {flops:g} is not above zero")

    def at(logarithm: float) -> float:
        size = math.exp(logarithm)
        return loss(size, flops / (FLOPS_PER_PARAMETER_TOKEN * size), unique)

    free = math.log(C4.frontier.optimum(flops).parameters)
    parameters = math.exp(minimum(at, free - 8.0, free + 4.0))
    return Allocation(parameters, flops / (FLOPS_PER_PARAMETER_TOKEN * parameters))
