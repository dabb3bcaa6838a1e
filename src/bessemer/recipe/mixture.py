"""[[tokens.schedule]] of the recipe: how the mixture of the sources changes over the training."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Section

Packing = Literal["concatenate", "best-fit", "document"]


class MixturePhase(Section):
    """A stretch of the training with a mixture of its own, up to the next one or the end."""

    from_: float | Literal["decay"] = Field(
        alias="from",
        description="Where it begins: a share of the run's samples, in [0, 1), or decay: with the learning rate's decay "
        "(train.schedule.kind = wsd).",
    )
    weights: dict[str, float] = Field(
        description="Each source's share of the tokens in this phase, in proportion; 0: the source is not read in it."
    )

    @model_validator(mode="after")
    def _sane(self) -> Self:
        if not isinstance(self.from_, str) and not 0.0 <= self.from_ < 1.0:
            raise ValueError(f"from = {self.from_}: a share of the run's samples lies in [0, 1)")
        negative = [name for name, weight in self.weights.items() if weight < 0.0]
        if negative:
            raise ValueError(f"weights: {negative[0]} is negative; a source that is not to be read has 0")
        if not any(self.weights.values()):
            raise ValueError("weights: no source has a share; give one at least")
        return self
