"""Loading of fastText models: language identification, flagged content, quality."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from bessemer.errors import InputError


@cache
def load_model(path: str, key: str) -> Any:
    """Open a .bin or .ftz file (only trusted ones: it is parsed in C++), once in a process. Raises InputError."""
    try:
        import fasttext
    except ImportError:
        raise InputError(
            f"{key}: the package fasttext-predict is not installed; pip install 'bessemer[corpus]'"
        ) from None
    if not Path(path).is_file():
        raise InputError(f"{key}: {path}: no such file; name a fastText .bin or .ftz file")
    try:
        return fasttext.load_model(path)
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise InputError(f"{key}: {path}: not a fastText model: {error}") from None
