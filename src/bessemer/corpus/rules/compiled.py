"""The one way in which the passes over a text are compiled: without Python's lock, and kept on disk when possible."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])

SOURCES = blake2b(
    b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))), digest_size=6
).hexdigest()
"""Hash of this folder's files. Numba looks only at the file of a function to see whether its machine code is current,
not at the functions and constants of other files that were compiled into it; so the hash is part of the name under
which machine code is kept."""


def compiled(function: Function) -> Function:
    """Compile at the first call; the machine code is kept beside the source, in the user's cache folder, or nowhere."""
    function.__qualname__ = f"{function.__qualname__}_{SOURCES}"
    try:
        return cast(Function, njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:  # no folder of the machine code can be written
        return cast(Function, njit(nogil=True, error_model="numpy")(function))
