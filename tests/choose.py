"""Selection of the cases of a parametrised test that `make test` runs; `make test-long` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(values: Iterable[Any], *short: Any) -> list[Any]:
    """Return values for `pytest.mark.parametrize`, all marked `long` except `short`. A tuple is a row of arguments."""
    return [
        value
        if value in short
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
        for value in values
    ]
