"""The base class of all tables of the recipe: frozen, strictly typed, with only declared and described keys."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Words = Annotated[tuple[str, ...], Field(strict=False)]  # TOML arrays are lists, which strict mode rejects for a tuple
SbatchOptions = Annotated[tuple[Annotated[str, Field(pattern=r"^--?[A-Za-z][^\r\n]*$")], ...], Field(strict=False)]


def first_duplicate(names: Sequence[str]) -> str | None:
    """Return the first name that occurs more than once; None if all are distinct."""
    return next((name for name in names if names.count(name) > 1), None)


def store_or_folder(folder: str | None) -> str | None:
    """Validate a storage location: return an s3:// or gs:// URL, an absolute folder or None unchanged.

    Raises ValueError for anything else.
    """
    parts = urlsplit(folder or "")
    is_store = parts.scheme in ("s3", "gs") and parts.netloc and not parts.query
    if folder is not None and not is_store and not Path(folder).expanduser().is_absolute():
        raise ValueError(f"{folder!r}: give an absolute folder, s3://BUCKET/PATH or gs://BUCKET/PATH")
    return folder


StoreOrFolder = Annotated[str | None, AfterValidator(store_or_folder)]


def read_table(name: str) -> dict[str, Any]:
    """Return the content of a TOML file in this package."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


DESCRIPTIONS: dict[str, dict[str, Any]] = read_table("keys.toml")


class Section(BaseModel):
    """Base of the tables of a recipe. keys.toml has the descriptions of the keys, under the name of the class.

    The pydantic validation context may have `is_draft` (if true, combinations of keys are not checked) and `loaded` (names
    of extensions whose code may be loaded to check their settings).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Set the description of each key of a new subclass from keys.toml."""
        super().__pydantic_init_subclass__(**kwargs)
        known = {
            key: text for base in reversed(cls.__mro__) for key, text in DESCRIPTIONS.get(base.__name__, {}).items()
        }
        for name, info in cls.model_fields.items():
            info.description = " ".join(known.get(info.alias or name, info.description or "").split())

    @field_validator("*", mode="before")
    @classmethod
    def _require_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError("is too large; give a number below 2^63")
        return value

    def _complaints(self) -> Iterator[str]:
        """Yield an error text for each invalid combination of keys in the table; the validation reports the first."""
        yield from ()

    @model_validator(mode="after")
    def _require_no_complaint(self, info: ValidationInfo) -> Self:
        for complaint in () if (info.context or {}).get("is_draft") else self._complaints():
            raise ValueError(complaint)
        return self

    def changed(self, **values: Any) -> Self:
        """Return a copy with these values, without validation. A dict for an inner table changes only the keys in the dict."""
        update = {
            key: inner.changed(**value) if isinstance(value, dict) and isinstance(inner, Section) else value
            for key, value in values.items()
            for inner in [getattr(self, key)]
        }
        return self.model_copy(update=update)
