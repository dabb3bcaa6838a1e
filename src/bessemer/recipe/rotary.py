"""The recipe's tables [model.rope_scaling] and [model.window_rope_scaling]."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section

Factors = tuple[Annotated[float, Field(gt=0)], ...]
# The keys that each kind reads besides `kind` and `factor`.
KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_length",),
    "llama3": ("original_length", "low_frequency", "high_frequency"),
    "yarn": ("original_length", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "longrope": ("original_length", "attention_factor", "short_factor", "long_factor"),
}


class RopeScaling(Section):
    """How rotary positions are stretched beyond the length a model was first trained on."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"] = Field(
        description="linear: all positions divided by the factor; dynamic: the base grows with the length of a sequence; "
        "llama3, yarn: only slow frequencies are divided; longrope: each frequency by a factor of its own."
    )
    factor: float = Field(ge=1, description="How many times longer the new length is.")
    original_length: Positive = Field(
        8192, description="The length the model was first trained on (all kinds but linear)."
    )
    low_frequency: float = Field(
        1.0, gt=0, description="Frequencies with fewer turns over original_length are divided by the factor (llama3)."
    )
    high_frequency: float = Field(
        4.0, gt=0, description="Frequencies with more turns over original_length stay as they are (llama3)."
    )
    beta_fast: float = Field(
        32.0, gt=0, description="Frequencies with more turns over original_length stay as they are (yarn)."
    )
    beta_slow: float = Field(
        1.0, gt=0, description="Frequencies with fewer turns over original_length are divided by the factor (yarn)."
    )
    truncate: bool = Field(True, description="The bounds between these are rounded to whole dimensions (yarn).")
    attention_factor: float | None = Field(
        None, gt=0, description="Cosines and sines are multiplied by it (yarn, longrope); left out: as the method says."
    )
    mscale: float = Field(
        0.0, ge=0, description="Numerator of yarn's own attention_factor in its general form; 0: off."
    )
    mscale_all_dim: float = Field(0.0, ge=0, description="Denominator of the same; 0: off.")
    short_factor: Factors = Field(
        (),
        strict=False,
        description="Divisor of each frequency in sequences of up to original_length tokens (longrope).",
    )
    long_factor: Factors = Field(
        (), strict=False, description="Divisor of each frequency in longer sequences (longrope)."
    )

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        for key, field in type(self).model_fields.items():
            if key not in ("kind", "factor", *KEYS[self.kind]) and getattr(self, key) != field.default:
                raise ValueError(f"{key} has no effect with kind = {self.kind!r}; remove it, or choose another kind")
        if self.kind == "llama3" and self.low_frequency >= self.high_frequency:
            raise ValueError(
                f"low_frequency = {self.low_frequency} must be below high_frequency = {self.high_frequency}"
            )
        if self.kind == "yarn" and self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow = {self.beta_slow} must be below beta_fast = {self.beta_fast}")
        if self.kind == "longrope" and (not self.short_factor or len(self.short_factor) != len(self.long_factor)):
            raise ValueError(
                f"longrope needs short_factor and long_factor, as many of one as of the other; there are "
                f"{len(self.short_factor)} and {len(self.long_factor)}"
            )
        return self
