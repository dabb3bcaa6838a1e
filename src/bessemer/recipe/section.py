"""What every table of the recipe shares: it is frozen, strictly typed and closed to keys that are not declared."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    """A table of the recipe: frozen, strictly typed, and closed to keys that are not declared."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def Words(default: tuple[str, ...], description: str) -> Any:
    """A list of strings; TOML arrays arrive as lists, which strict mode would refuse for a tuple."""
    return Field(default=default, strict=False, description=description)
