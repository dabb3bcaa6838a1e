"""Batch size and learning rate: what the published laws say of a plan, side by side, and what changing the batch would do.

The laws disagree, by far more than their authors' error bars, since each holds for one optimizer, schedule, tokenizer and data
set. So none is "the" answer: the spread is what a plan should be read with, and a sweep around it what decides.

N: parameters without embeddings; D: tokens; C: FLOPs without embeddings, 6 N D. Batches are in tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from bessemer.errors import InputError
from bessemer.plan.laws import kaplan


@dataclass(frozen=True)
class Advice:
    """One law's value. fitted: on what, so that a reader sees how far a plan lies outside."""

    law: str
    value: float
    source: str
    fitted: str


def optimal_batches(parameters: float, tokens: float) -> dict[str, Advice]:
    """Tokens of the batch with the lowest loss."""
    flops = _flops(parameters, tokens)
    return {
        "deepseek": Advice(
            "0.2920 C^0.3271",
            0.2920 * flops**0.3271,
            "Bi et al. 2024, DeepSeek LLM, section 3.1",
            "1e17 to 2e19 FLOPs, AdamW, multi-step schedule",
        ),
        "steplaw": Advice(
            "0.58 D^0.571",
            0.58 * tokens**0.571,
            "Li et al. 2025, Step Law",
            "0.06B to 1B parameters, up to 100B tokens, AdamW, cosine schedule to a rate of 1e-5",
        ),
        "moonlight": Advice(
            "0.0065 C^0.4138",
            0.0065 * flops**0.4138,
            "Liu et al. 2025, Moonlight, appendix B, table 9",
            "AdamW; its models: 0.4B to 1.5B parameters, 9B to 39B tokens",
        ),
        "power_lines": Advice(
            "0.0306 D^0.383 sequences of 2,048",
            0.0306 * tokens**0.383 * 2048,
            "Bergsma et al. 2025, Power Lines, figure 1",
            "0.1B to 3.3B parameters, 20 tokens a parameter and more, AdamW, muP",
        ),
    }


def critical_batches(parameters: float, tokens: float, loss: float | None = None) -> dict[str, Advice]:
    """Tokens of the batch beyond which more data parallelism stops paying: where twice the fewest tokens are needed (Kaplan,
    Power Lines), or a fifth more steps than in proportion (Zhang). loss: reached in the end; None: as Kaplan's law has it."""
    _flops(parameters, tokens)
    reached = kaplan.loss(parameters, tokens) if loss is None else loss
    if not reached > 0:
        raise InputError(f"loss: {reached:g} nats is not above zero")
    return {
        "kaplan": Advice(
            "2e8 / L^(1 / 0.21)",
            kaplan.critical_batch(reached),
            "Kaplan et al. 2020, section 5.1",
            "up to 1.5B parameters on WebText2, Adam",
        ),
        # In millions of tokens: only so does it meet the two other fits of the same paper, 93.20 N^0.47 along 20 tokens a
        # parameter (22.91 20^0.47 = 93.7) and 621.341 N^0.087 at 3.072B tokens (N in millions; sections 3.2 and 3.3).
        "zhang": Advice(
            "22.91 (D / 1e6)^0.47 sequences of 512",
            22.91 * (tokens / 1e6) ** 0.47 * 512,
            "Zhang et al. 2024, How does critical batch size scale, section 3.3",
            "85M to 1.2B parameters on C4, Adam, constant learning rate, averaged weights",
        ),
        # Of the fewest tokens that reach the loss; the planned ones stand for them, which are close to it well under the critical
        # batch (a plan at it has twice as many, hence a batch 1.4 times too large).
        "power_lines": Advice(
            "0.0471 D_min^0.462 sequences of 2,048",
            0.0471 * tokens**0.462 * 2048,
            "Bergsma et al. 2025, Power Lines, figure 1",
            "0.1B to 3.3B parameters, 20 tokens a parameter and more, AdamW, muP",
        ),
    }


def learning_rates(parameters: float, tokens: float) -> dict[str, Advice]:
    """Peak learning rates at each law's own batch."""
    flops = _flops(parameters, tokens)
    return {
        "deepseek": Advice(
            "0.3118 C^-0.1250",
            0.3118 * flops**-0.1250,
            "Bi et al. 2024, DeepSeek LLM, section 3.1",
            "1e17 to 2e19 FLOPs, AdamW, multi-step schedule",
        ),
        "steplaw": Advice(
            "1.79 N^-0.713 D^0.307",
            1.79 * parameters**-0.713 * tokens**0.307,
            "Li et al. 2025, Step Law",
            "0.06B to 1B parameters, up to 100B tokens, AdamW, cosine schedule to a rate of 1e-5",
        ),
        "moonlight": Advice(
            "0.0127 C^-0.057",
            0.0127 * flops**-0.057,
            "Liu et al. 2025, Moonlight, appendix B, table 9",
            "AdamW; its models: 0.4B to 1.5B parameters, 9B to 39B tokens; Muon takes the same when its updates are scaled",
        ),
    }


def weight_decay(parameters: float, tokens: float, batch: float, learning_rate: float) -> float:
    """AdamW's weight decay: B / (rate D tau) with tau = 1.084 (D / N)^-0.527, the share of the run over which the weights average
    their updates (Bergsma et al. 2025, Power Lines, section 2 and figure 1). The rate is that of muP's matrices."""
    _flops(parameters, tokens)
    if not batch > 0 or not learning_rate > 0:
        raise InputError(f"a batch of {batch:g} tokens at a rate of {learning_rate:g}: both must be above zero")
    return float(batch / (learning_rate * tokens * 1.084 * (tokens / parameters) ** -0.527))


def spread(advice: dict[str, Advice]) -> float:
    """Largest value over smallest."""
    values = [each.value for each in advice.values()]
    return max(values) / min(values)


def mup_learning_rate(rate: float, tuned_width: int, width: int) -> float:
    """Adam's rate of the hidden matrices at `width`, tuned at another, under the maximal update parametrization: as one over the
    width (Yang et al. 2022, table 3). Embeddings, vectors and biases keep theirs; the output matrix is scaled likewise."""
    if tuned_width < 1 or width < 1 or not rate > 0:
        raise InputError(f"a rate of {rate:g} from width {tuned_width} to {width}: all must be above zero")
    return rate * tuned_width / width


def rescaled_learning_rate(
    rate: float,
    batch: float,
    new_batch: float,
    rule: Literal["sqrt", "linear", "noise"] = "sqrt",
    critical: float | None = None,
) -> float:
    """The learning rate for another batch. sqrt: for Adam (Malladi et al. 2022); linear: for SGD (Goyal et al. 2017,
    section 2.1); noise: linear below the critical batch and level above it, rate proportional to 1 / (1 + critical / batch)
    (McCandlish et al. 2018, section 2, for SGD)."""
    if not rate > 0 or not batch > 0 or not new_batch > 0:
        raise InputError(
            f"a rate of {rate:g} from a batch of {batch:g} to one of {new_batch:g}: all must be above zero"
        )
    if rule == "noise":
        if critical is None or not critical > 0:
            raise InputError("the rule by noise needs the critical batch, in tokens")
        return rate * (1 + critical / batch) / (1 + critical / new_batch)
    growth = new_batch / batch
    return rate * (math.sqrt(growth) if rule == "sqrt" else growth)


@dataclass(frozen=True)
class Trade:
    """A run at one batch: steps and tokens to the same loss, against the planned batch; steps_ratio and tokens_ratio to it."""

    batch: float
    steps: float
    tokens: float
    steps_ratio: float
    tokens_ratio: float


def trade(batch: float, tokens: float, critical: float, new_batch: float) -> Trade:
    """What another batch would take to the loss that `tokens` reach at `batch`: (S / S_min - 1) (E / E_min - 1) = 1, so that
    E = E_min (1 + B / B_crit) and S = E / B (McCandlish et al. 2018, section 2)."""
    if not batch > 0 or not tokens > 0 or not critical > 0 or not new_batch > 0:
        raise InputError(
            f"a batch of {batch:g} to {new_batch:g} over {tokens:g} tokens, critical at {critical:g}: all must be above zero"
        )
    fewest = tokens / (1 + batch / critical)
    needed = fewest * (1 + new_batch / critical)
    return Trade(
        batch=new_batch,
        steps=needed / new_batch,
        tokens=needed,
        steps_ratio=(needed / new_batch) / (tokens / batch),
        tokens_ratio=needed / tokens,
    )


@dataclass(frozen=True)
class BatchOutlook:
    """A planned batch against the laws. verdict: against the middle of the critical batches; halved, doubled: what those take."""

    batch: float
    steps: float
    optimal: dict[str, Advice]
    critical: dict[str, Advice]
    learning_rates: dict[str, Advice]
    middle_critical: float
    verdict: Literal["small", "efficient", "beyond critical"]
    halved: Trade
    doubled: Trade


def batch_outlook(parameters: float, tokens: float, batch: float, loss: float | None = None) -> BatchOutlook:
    """Judge a batch of `batch` tokens. small: under a tenth of the critical batch, where devices could be added at no cost in
    tokens; beyond critical: more than half of the tokens are spent on speed."""
    if not 0 < batch <= tokens:
        raise InputError(
            f"a batch of {batch:,.0f} tokens does not fit a run of {tokens:,.0f}; it takes a step at least"
        )
    critical = critical_batches(parameters, tokens, loss)
    middle = sorted(each.value for each in critical.values())[len(critical) // 2]
    return BatchOutlook(
        batch=batch,
        steps=tokens / batch,
        optimal=optimal_batches(parameters, tokens),
        critical=critical,
        learning_rates=learning_rates(parameters, tokens),
        middle_critical=middle,
        verdict="small" if batch < middle / 10 else "efficient" if batch <= middle else "beyond critical",
        halved=trade(batch, tokens, middle, batch / 2),
        doubled=trade(batch, tokens, middle, batch * 2),
    )


def _flops(parameters: float, tokens: float) -> float:
    if not parameters > 0 or not tokens > 0:
        raise InputError(f"{parameters:g} parameters and {tokens:g} tokens: both must be above zero")
    return 6.0 * parameters * tokens
