"""Texts that pass the rules, and recipes from a few lines."""

from __future__ import annotations

import random
from typing import Any

from bessemer.recipe import Recipe, parse


def prose(seed: int, num_words: int = 120) -> str:
    """Text of random words: long enough to keep, and unlike any other seed's."""
    words = random.Random(seed)
    lines = []
    for _ in range(num_words // 10):
        lines.append(" ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(10)))
    return "\n".join(lines)


def recipe(*sources: dict[str, Any], rules: str = "", dedup: str = "") -> Recipe:
    """A recipe of these sources; `rules` and `dedup` are TOML lines."""
    text = '[run]\nname = "t"\n[model]\ndepth = 2\n'
    text += f"[corpus.rules]\n{rules}\n[corpus.dedup]\n{dedup}\n"
    for source in sources:
        text += "[[corpus.sources]]\n"
        text += "".join(f"{key} = {value!r}\n" for key, value in source.items())
    return parse(text, "test")
