"""Lists of words and names that a recipe points to: read once in a process, never shipped."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from bessemer.errors import InputError


@cache
def entries(path: str, key: str) -> frozenset[str]:
    """Entries of a file, one a line or one JSON list, trimmed and in lower case; # begins a comment line.

    Raises InputError, which names the recipe's `key`, for a file that cannot be read.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        found = json.loads(text) if path.endswith(".json") else [line for line in text.splitlines() if line[:1] != "#"]
    except (OSError, ValueError) as error:
        raise InputError(f"{key}: the list {path} cannot be read: {error}") from None
    if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
        raise InputError(f"{key}: {path} is not a JSON list of strings")
    return frozenset(entry.strip().lower() for entry in found) - {""}


@cache
def language_file(path: str, language: str, key: str) -> str | None:
    """The list for a language: the file itself, or the one in a folder; None when the folder has none for it.

    Raises InputError when the path leads nowhere.
    """
    place = Path(path)
    if place.is_file():
        return path
    if not place.is_dir():
        raise InputError(f"{key}: {path} is neither a file nor a folder of word lists")
    names = [f"{language}{ending}" for ending in ("", ".txt", ".json")]
    return next((str(place / name) for name in names if (place / name).is_file()), None)
