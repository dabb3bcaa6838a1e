"""Where a plan stands: undertrained, optimal, or overtrained, what that costs, and what would justify it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bessemer.errors import InputError
from bessemer.plan.laws.chinchilla import REPLICATION, RULE, Allocation, Frontier, LossLaw, training_flops
from bessemer.plan.minimum import minimum

Verdict = Literal["undertrained", "optimal", "overtrained"]

UNDERTRAINED_BELOW, OVERTRAINED_ABOVE = 0.5, 2.0
"""Ratios of a plan's tokens to the optimal ones for its size. The valley is flat: at either bound a plan spends 5% more FLOPs
than the cheapest that reaches its loss (by the replication; a test holds it), and the laws differ by more than that."""

INFERENCE_FLOPS = 2.0
"""FLOPs a parameter and token of inference: the forward pass (Sardana et al. 2024, section 2)."""


@dataclass(frozen=True)
class Standing:
    """A plan against the laws.

    optimal_tokens: for this size; ratio: the plan's tokens to those; loss, best_loss: predicted for the plan and for the
    best division of the same FLOPs, nats a token; penalty: their difference; cheapest: the fewest training FLOPs that reach
    the plan's loss; overhead: the plan's FLOPs above those, as a share (de Vries 2023, "Go smol or go home"); break_even: tokens
    of inference from which the plan is cheaper in all than `cheapest`; None when it is not the smaller of the two.
    """

    tokens_per_parameter: float
    optimal_tokens: float
    ratio: float
    verdict: Verdict
    flops: float
    loss: float
    best: Allocation
    best_loss: float
    penalty: float
    cheapest: Allocation
    overhead: float
    break_even: float | None

    @property
    def sentence(self) -> str:
        """The verdict for a person."""
        much = f"{self.tokens_per_parameter:,.1f} tokens a parameter, {self.ratio:.2g}x the compute-optimal"
        if self.verdict == "optimal":
            return f"compute-optimal: {much}"
        cost = f"{self.overhead:.0%} more training FLOPs than the cheapest way to its loss"
        if self.verdict == "undertrained":
            return f"undertrained: {much}; {cost}"
        after = f"; pays from {self.break_even:.2g} tokens of inference on" if self.break_even is not None else ""
        return f"overtrained on purpose: {much}; {cost}{after}"


def standing(parameters: float, tokens: float, frontier: Frontier = RULE, law: LossLaw = REPLICATION) -> Standing:
    """Judge a plan: tokens against `frontier`, losses by `law`. Raises InputError unless both sizes are positive."""
    flops = training_flops(parameters, tokens)
    optimal = frontier.optimal_tokens(parameters)
    ratio = tokens / optimal
    loss = law.loss(parameters, tokens)
    best = law.frontier.optimum(flops)
    best_loss = law.loss(best.parameters, best.tokens)
    cheapest = law.cheapest(loss)
    return Standing(
        tokens_per_parameter=tokens / parameters,
        optimal_tokens=optimal,
        ratio=ratio,
        verdict=verdict(ratio),
        flops=flops,
        loss=loss,
        best=best,
        best_loss=best_loss,
        penalty=loss - best_loss,
        cheapest=cheapest,
        overhead=flops / cheapest.flops - 1.0,
        break_even=break_even(Allocation(parameters, tokens), cheapest),
    )


def verdict(ratio: float) -> Verdict:
    """In a word, by the ratio of a plan's tokens to the optimal ones."""
    if ratio < UNDERTRAINED_BELOW:
        return "undertrained"
    return "overtrained" if ratio > OVERTRAINED_ABOVE else "optimal"


def break_even(plan: Allocation, other: Allocation) -> float | None:
    """Tokens of inference from which a smaller model that took more training FLOPs is cheaper in all; None when it is not
    smaller: 6 N D + 2 N T for each (Sardana et al. 2024, equation 3)."""
    if plan.parameters >= other.parameters:
        return None
    return max(plan.flops - other.flops, 0.0) / (INFERENCE_FLOPS * (other.parameters - plan.parameters))


def lifetime_flops(plan: Allocation, inference_tokens: float) -> float:
    """Training and inference: 6 N D + 2 N T."""
    return plan.flops + INFERENCE_FLOPS * plan.parameters * inference_tokens


def lifetime_optimum(loss: float, inference_tokens: float, law: LossLaw = REPLICATION) -> Allocation:
    """The size and tokens that reach a loss with the fewest FLOPs in all, when `inference_tokens` will be served
    (Sardana et al. 2024, section 2). Raises InputError on a negative demand or a loss that nothing reaches."""
    if not inference_tokens >= 0:
        raise InputError(f"inference tokens: {inference_tokens:g} is below zero")
    cheapest = law.cheapest(loss)
    # Serving only ever asks for a smaller model; none below this size reaches the loss at all.
    least = (law.parameter_term / (loss - law.irreducible)) ** (1.0 / law.alpha)

    def total(logarithm: float) -> float:
        size = math.exp(logarithm)
        return lifetime_flops(Allocation(size, law.tokens_for(size, loss)), inference_tokens)

    parameters = math.exp(minimum(total, math.log(least) + 1e-3, math.log(cheapest.parameters)))
    return Allocation(parameters, law.tokens_for(parameters, loss))


def overhead_of_size(share: float, law: LossLaw = REPLICATION) -> float:
    """Training FLOPs above the optimum, as a share, of a model `share` times the optimal size that reaches the same loss;
    infinite where none does. The same for every loss (de Vries 2023).

    On the optimal line A / N^alpha : B / D^beta = beta : alpha, whence the tokens grow by
    (1 - (share^-alpha - 1) beta / alpha)^(-1 / beta).
    """
    left = 1.0 - (share**-law.alpha - 1.0) * law.beta / law.alpha
    return share * left ** (-1.0 / law.beta) - 1.0 if left > 0 else math.inf
