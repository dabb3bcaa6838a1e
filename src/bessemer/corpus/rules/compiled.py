"""The one way in which the passes over a text are compiled: without Python's lock, and kept on disk when possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile at the first call; the machine code is kept beside the source, in the user's cache folder, or nowhere."""
    try:
        return cast(Function, njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:  # no folder of the machine code can be written
        return cast(Function, njit(nogil=True, error_model="numpy")(function))
