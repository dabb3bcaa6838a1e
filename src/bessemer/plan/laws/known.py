"""Models whose size and training tokens are published, and where each stood."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

from bessemer.plan.laws.standing import Standing, standing


@dataclass(frozen=True)
class KnownModel:
    """parameters: all; active: those a token meets, fewer in a mixture of experts; tokens: seen, repetitions included."""

    name: str
    parameters: float
    active: float
    tokens: float
    date: str
    source: str

    @property
    def tokens_per_parameter(self) -> float:
        """Tokens to active parameters, which is what a token costs."""
        return self.tokens / self.active

    @property
    def standing(self) -> Standing:
        """By the laws, which were fitted on dense models: of a mixture, the dense model of its active parameters."""
        return standing(self.active, self.tokens)


@cache
def known() -> tuple[KnownModel, ...]:
    """The table (known.toml), by date."""
    text = resources.files(__package__).joinpath("known.toml").read_text(encoding="utf-8")
    rows = (KnownModel(**{"active": row["parameters"], **row}) for row in tomllib.loads(text)["model"])
    return tuple(sorted(rows, key=lambda model: (model.date, model.parameters)))


def nearest(parameters: float, tokens: float, count: int = 5) -> tuple[KnownModel, ...]:
    """The known models nearest to a plan by the ratios of sizes and of tokens, for comparison beside it."""

    def distance(model: KnownModel) -> float:
        size, seen = model.active / parameters, model.tokens / tokens
        return max(size, 1 / size) * max(seen, 1 / seen)

    return tuple(sorted(known(), key=distance)[:count])
