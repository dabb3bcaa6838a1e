"""A foreign JSON object (config.json, or one inside it), read with a type and bounds for each value."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
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
        what = f"must be a whole number from {min_value} to {LARGEST}"
        return int(self._value(key, default, lambda x: _is_number(x, min_value, LARGEST) and x == int(x), what))

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0; required without a default."""
        return float(self._value(key, default, _is_positive, "must be a finite number above 0"))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._value(key, default, lambda x: isinstance(x, bool), "must be true or false"))

    def text(self, key: str, default: str) -> str:
        return str(self._value(key, default, lambda x: isinstance(x, str), "must be a string"))

    def numbers(self, key: str) -> list[float]:
        """A list of finite numbers above 0; required."""
        return list(map(float, self._list(key, None, _is_positive, "finite numbers above 0")))

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers; empty when left out."""
        return list(map(int, self._list(key, [], lambda x: isinstance(x, int), "whole numbers")))

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty when left out."""
        return self._list(key, [], lambda x: isinstance(x, str), "strings")

    def table(self, key: str) -> ForeignConfig:
        """A table inside this one; an empty one when left out."""
        return ForeignConfig(self.path, self._value(key, {}), f"{self._inside}{key}.")

    def _list(self, key: str, default: list[Any] | None, fits: Callable[[Any], bool], what: str) -> list[Any]:
        listed: list[Any] = self._value(
            key, default, lambda x: isinstance(x, list) and all(map(fits, x)), f"must be a list of {what}"
        )
        return listed

    def _value(self, key: str, default: Any, fits: Callable[[Any], bool] = lambda x: True, what: str = "") -> Any:
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise InputError(f"{self.path}: {self._inside}{key} is missing")
        if not fits(value):
            raise self.wrong(key, what)
        return value


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _is_positive(value: Any) -> bool:
    return _is_number(value, 0.0, sys.float_info.max) and value > 0


def _kind(value: Any) -> str:
    kinds = {dict: "a table", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
