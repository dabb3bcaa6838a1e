"""Which cases of a parametrised test `make test` runs; `make test-long` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(values: Iterable[Any], *short: Any) -> list[Any]:
    """The values of `pytest.mark.parametrize`, all but `short` marked `long`. A tuple stands for several arguments."""
    return [
        value
        if value in short
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.long)
        for value in values
    ]
