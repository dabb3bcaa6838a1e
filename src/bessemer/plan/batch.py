"""Batch size and learning rate: what the published laws say of a plan, side by side, and what changing the batch would do.

The laws disagree, by far more than their authors' error bars, since each holds for one optimizer, schedule, tokenizer and data
set. So none is "the" answer: the spread is what a plan should be read with, and a sweep around it what decides.

N: parameters without embeddings; D: tokens; C: FLOPs without embeddings, 6 N D. Batches are in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bessemer.defaults import scaling_rules
from bessemer.defaults.scaling_rules import kaplan_critical_batch, kaplan_loss
from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.terminal import counted

BatchVerdict = Literal["small", "efficient", "near critical", "beyond critical"]
BEYOND: BatchVerdict = "beyond critical"


@dataclass(frozen=True)
class Advice:
    """One law's value. fitted: on what, so that a reader sees how far a plan lies outside."""

    law: str
    value: float
    source: str
    fitted: str


_DEEPSEEK = "Bi et al. 2024, DeepSeek LLM, section 3.1", "1e17 to 2e19 FLOPs, AdamW, multi-step schedule"
_STEP_LAW = (
    "Li et al. 2025, Step Law",
    "0.06B to 1B parameters, up to 100B tokens, AdamW, cosine schedule to a rate of 1e-5",
)
_MOONLIGHT = (
    "Liu et al. 2025, Moonlight, appendix B, table 9",
    "AdamW; its models: 0.4B to 1.5B parameters, 9B to 39B tokens",
)
_POWER_LINES = (
    "Bergsma et al. 2025, Power Lines, figure 1",
    "0.1B to 3.3B parameters, 20 tokens a parameter and more, AdamW, muP",
)
_KAPLAN = "Kaplan et al. 2020, section 5.1", "up to 1.5B parameters on WebText2, Adam"
_ZHANG = (
    "Zhang et al. 2024, How does critical batch size scale, section 3.3",
    "85M to 1.2B parameters on C4, Adam, constant learning rate, averaged weights",
)


def optimal_batches(parameters: float, tokens: float) -> dict[str, Advice]:
    """Tokens of the batch with the lowest loss."""
    flops = 6.0 * parameters * tokens
    return {
        "deepseek": Advice("0.2920 C^0.3271", scaling_rules.batch_tokens(flops), *_DEEPSEEK),
        "steplaw": Advice("0.58 D^0.571", 0.58 * tokens**0.571, *_STEP_LAW),
        "moonlight": Advice("0.0065 C^0.4138", 0.0065 * flops**0.4138, *_MOONLIGHT),
        "power_lines": Advice("0.0306 D^0.383 sequences of 2,048", 0.0306 * tokens**0.383 * 2048, *_POWER_LINES),
    }


def critical_batches(parameters: float, tokens: float) -> dict[str, Advice]:
    """Tokens of the batch beyond which more data parallelism stops paying: where twice the fewest tokens are needed (Kaplan,
    Power Lines), or a fifth more steps than in proportion (Zhang). The loss
    that is reached is that of Kaplan's law."""
    reached = kaplan_loss(parameters, tokens)
    # Zhang's law in millions of tokens: only so does it meet the two other fits of the same paper, 93.20 N^0.47 along 20 tokens a
    # parameter (22.91 20^0.47 = 93.7) and 621.341 N^0.087 at 3.072B tokens (N in millions; sections 3.2 and 3.3). Power Lines: of
    # the fewest tokens that reach the loss; the planned ones stand for them, which are close to it well under the critical batch
    # (a plan at it has twice as many, hence a batch 1.4 times too large).
    zhang, power_lines = 22.91 * (tokens / 1e6) ** 0.47 * 512, 0.0471 * tokens**0.462 * 2048
    return {
        "kaplan": Advice("2e8 / L^(1 / 0.21)", kaplan_critical_batch(reached), *_KAPLAN),
        "zhang": Advice("22.91 (D / 1e6)^0.47 sequences of 512", zhang, *_ZHANG),
        "power_lines": Advice("0.0471 D_min^0.462 sequences of 2,048", power_lines, *_POWER_LINES),
    }


def learning_rates(parameters: float, tokens: float) -> dict[str, Advice]:
    """Peak learning rates at each law's own batch."""
    flops, (source, fitted) = 6.0 * parameters * tokens, _MOONLIGHT
    fitted += "; Muon takes the same when its updates are scaled"
    step_law = 1.79 * parameters**-0.713 * tokens**0.307
    return {
        "deepseek": Advice("0.3118 C^-0.1250", scaling_rules.learning_rate(flops), *_DEEPSEEK),
        "steplaw": Advice("1.79 N^-0.713 D^0.307", step_law, *_STEP_LAW),
        "moonlight": Advice("0.0127 C^-0.057", 0.0127 * flops**-0.057, source, fitted),
    }


ROUNDED_BATCH = 1.1
"""Times all tokens up to which a batch is one that was rounded to whole sequences."""


def require_batch_of_tokens(recipe: Recipe, proposed_for: int | None = None) -> None:
    """Raises InputError for a batch of more tokens than the run has. proposed_for: devices that it was proposed for; None: it
    was given."""
    tokens, batch = recipe.train.tokens, recipe.train.global_batch_tokens
    if tokens is None or batch is None or batch <= ROUNDED_BATCH * tokens:
        return
    if proposed_for is not None:
        raise InputError(
            f"plan: the batch that is proposed for {counted(proposed_for, 'device')} is of {batch:,} tokens, more than all "
            f"{tokens:,} tokens of the run (train.tokens); take fewer devices, or more tokens"
        )
    raise InputError(
        f"train.global_batch_tokens = {batch:,}: a step would read more than all {tokens:,} tokens of the run (train.tokens); "
        "take a smaller batch, or more tokens"
    )


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
    fewest = tokens / (1 + batch / critical)
    needed = fewest * (1 + new_batch / critical)
    steps = needed / new_batch
    return Trade(new_batch, steps, needed, steps_ratio=steps / (tokens / batch), tokens_ratio=needed / tokens)


@dataclass(frozen=True)
class BatchOutlook:
    """A planned batch against the laws. halved, doubled: what those take."""

    batch: float
    steps: float
    optimal: dict[str, Advice]
    critical: dict[str, Advice]
    learning_rates: dict[str, Advice]
    middle_critical: float
    verdict: BatchVerdict
    halved: Trade
    doubled: Trade


def batch_outlook(parameters: float, tokens: float, batch: float) -> BatchOutlook:
    """Judge a batch of `batch` tokens. small: under a tenth of the middle critical batch, where devices could be added at no
    cost in tokens; efficient: up to half of it, at most a third of the tokens for speed; near critical: above that; beyond
    critical: by every law more than half of the tokens are spent on speed."""
    critical = critical_batches(parameters, tokens)
    values = sorted(each.value for each in critical.values())
    middle = values[len(values) // 2]
    return BatchOutlook(
        batch=batch,
        steps=tokens / batch,
        optimal=optimal_batches(parameters, tokens),
        critical=critical,
        learning_rates=learning_rates(parameters, tokens),
        middle_critical=middle,
        verdict=_verdict(batch, middle, values[-1]),
        halved=trade(batch, tokens, middle, batch / 2),
        doubled=trade(batch, tokens, middle, batch * 2),
    )


def _verdict(batch: float, middle: float, largest: float) -> BatchVerdict:
    if batch < middle / 10:
        return "small"
    if batch <= middle / 2:
        return "efficient"
    return "near critical" if batch <= largest else BEYOND
