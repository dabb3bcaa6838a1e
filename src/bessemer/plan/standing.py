"""Where a plan stands among the scaling laws and the known models."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from bessemer.plan.laws import REPLICATION, RULE, Allocation, Repetition, optimal_tokens, training_flops
from bessemer.terminal import amount

Verdict = Literal["undertrained", "optimal", "overtrained", "repeated"]

UNDERTRAINED_BELOW, OVERTRAINED_ABOVE = 0.5, 2.0
"""Ratios of a plan's tokens to the optimal ones for its size. The valley is flat: at either bound a plan spends 5% more FLOPs
than the cheapest that reaches its loss (by the replication; a test holds it), and the laws differ by more than that."""

MOST_OVERHEAD = 0.1
"""FLOPs above the cheapest way to a loss, as a share, up to which a plan that repeats its text may be called optimal."""

NEAR = 0.1  # from the optimal ratio up to which a plan is called compute-optimal and not near it

INFERENCE_FLOPS = 2.0
"""FLOPs a parameter and token of inference: the forward pass (Sardana et al. 2024, section 2)."""


@dataclass(frozen=True)
class Standing:
    """A plan against the laws.

    effective_tokens: new ones that would do as well as the plan's, where these are repeated; optimal_tokens: for this size;
    ratio: the effective tokens to those; loss: predicted, nats a token; cheapest: the fewest training FLOPs on new tokens that
    reach it; overhead: the plan's FLOPs above those, as a share (de Vries 2023, "Go smol or go home"); break_even: tokens of
    inference from which the plan is cheaper in all than `cheapest`; None when it is not the smaller of the two.
    """

    parameters: float
    tokens_per_parameter: float
    effective_tokens: float
    optimal_tokens: float
    ratio: float
    verdict: Verdict
    flops: float
    loss: float
    cheapest: Allocation
    overhead: float
    break_even: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the JSON of every plan."""
        return {
            "effective_tokens": self.effective_tokens,
            "optimal_tokens": self.optimal_tokens,
            "ratio": self.ratio,
            "verdict": self.verdict,
            "loss": self.loss,
            "break_even_inference_tokens": self.break_even,
            "optimal_tokens_by_law": optimal_tokens(self.parameters),
        }

    @property
    def sentence(self) -> str:
        """The verdict for a person."""
        ratio = self.tokens_per_parameter
        worth = self.effective_tokens / self.parameters
        is_repeated = worth < 0.995 * ratio
        much = f"{_few(ratio)} tokens a parameter, {f'worth {_few(worth)} new ones, ' if is_repeated else ''}"
        much += f"{amount(self.ratio)}x the compute-optimal"
        if self.verdict == "optimal":
            return f"{'' if abs(self.ratio - 1) < NEAR else 'near '}compute-optimal: {much}"
        more = f"{self.overhead:.0%} more" if self.overhead < 10 else "over ten times the"
        cost = f"{more} training FLOPs {'than' if self.overhead < 10 else 'of'} the cheapest way to its loss"
        cost += " with new text" if is_repeated else ""
        if self.verdict in ("undertrained", "repeated"):
            return f"{'short of new text' if is_repeated else 'undertrained'}: {much}; {cost}"
        after = f"; pays from {amount(self.break_even)} tokens of inference on" if self.break_even is not None else ""
        return f"overtrained on purpose: {much}; {cost}{after}"


def _few(ratio: float) -> str:
    return f"{ratio:,.1f}" if ratio >= 1 else f"{ratio:.1g}"


def standing(parameters: float, tokens: float, repeated: Repetition | None = None) -> Standing:
    """Judge a plan: tokens by the rule, losses by the replication, repeated tokens by what they are worth. Raises InputError
    unless both sizes are positive."""
    flops = training_flops(parameters, tokens)
    worth = tokens if repeated is None else repeated.effective_tokens
    optimal = RULE.optimal_tokens(parameters)
    ratio = worth / optimal
    loss = REPLICATION.loss(parameters, worth)
    cheapest = REPLICATION.cheapest(loss)
    overhead, found = flops / cheapest.flops - 1.0, verdict(ratio)
    if found == "optimal" and repeated is not None and overhead > MOST_OVERHEAD:
        found = "repeated"
    return Standing(
        parameters=parameters,
        tokens_per_parameter=tokens / parameters,
        effective_tokens=worth,
        optimal_tokens=optimal,
        ratio=ratio,
        verdict=found,
        flops=flops,
        loss=loss,
        cheapest=cheapest,
        overhead=overhead,
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


@dataclass(frozen=True)
class KnownModel:
    """parameters: all; active: those a token meets, fewer in a mixture of experts; tokens: seen, repetitions included."""

    name: str
    parameters: int
    active: int
    tokens: int
    date: str
    source: str


@cache
def known() -> tuple[KnownModel, ...]:
    """The table (known_models.toml), by date."""
    text = resources.files(__package__).joinpath("known_models.toml").read_text(encoding="utf-8")
    counts = ("parameters", "active", "tokens")  # written as 6.7e9, which TOML reads as a float
    rows = ({"active": row["parameters"], **row} for row in tomllib.loads(text)["model"])
    models = (KnownModel(**{**row, **{name: round(row[name]) for name in counts}}) for row in rows)
    return tuple(sorted(models, key=lambda model: (model.date, model.parameters)))


def nearest(parameters: float, tokens: float, count: int = 5) -> tuple[KnownModel, ...]:
    """The known models nearest to a plan by the ratios of sizes and of tokens, for comparison."""

    def distance(model: KnownModel) -> float:
        size, seen = model.active / parameters, model.tokens / tokens
        return max(size, 1 / size) * max(seen, 1 / seen)

    return tuple(sorted(known(), key=distance)[:count])
