"""A foreign JSON object (config.json, or one inside it), read with a type and bounds for each value."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bessemer.errors import InputError

LARGEST = 2**31 - 1  # of a whole number: more than any dimension of a model


class ForeignConfig:
    """A table of someone else's file. A value of the wrong type or out of bounds is an InputError that names file and key.

    A key whose value is null counts as left out, as in `transformers`.
    """

    def __init__(self, path: Path, values: Any, inside: str = "") -> None:
        if not isinstance(values, Mapping):
            what = f"{inside.rstrip('.')} is" if inside else "holds"
            raise InputError(f"{path}: {what} {_kind(values)}; a table of settings is expected")
        self.path = path
        self._values, self._inside = values, inside

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, be it null."""
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def raw(self, key: str) -> Any:
        """The value as it is; None where there is none."""
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        """Whether the key is there and its value null."""
        return key in self._values and self._values[key] is None

    def wrong(self, key: str, reason: str) -> InputError:
        """The error about a key's value, to be raised."""
        return InputError(f"{self.path}: {self._inside}{key} = {_short(self.raw(key))} {reason}")

    def integer(self, key: str, default: int | None = None, min_value: int = 1) -> int:
        """A whole number from `min_value` to LARGEST; required without a default."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not min_value <= value <= LARGEST:
            raise self.wrong(key, f"must be a whole number from {min_value} to {LARGEST}")
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A finite number above `above`; required without a default."""
        value = self._value(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value < math.inf:
            raise self.wrong(key, f"must be a finite number above {above:g}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "must be a string")
        return value

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers above 0; required."""
        value = self._value(key, None)
        if not isinstance(value, list) or not all(
            isinstance(item, (int, float)) and not isinstance(item, bool) and 0 < item < math.inf for item in value
        ):
            raise self.wrong(key, "must be a list of finite numbers above 0")
        return [float(item) for item in value]

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers; empty when left out."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.wrong(key, "must be a list of whole numbers")
        return [int(item) for item in value]

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty when left out."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "must be a list of strings")
        return value

    def table(self, key: str) -> ForeignConfig:
        """A table inside this one; an empty one when left out."""
        return ForeignConfig(self.path, self._value(key, {}), f"{self._inside}{key}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise InputError(f"{self.path}: {self._inside}{key} is missing")
            return default
        return value


def _kind(value: Any) -> str:
    kinds = {dict: "a table", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
