"""Documents with edits of known Jaccard, and the same decisions by brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from bessemer.corpus.document import identity
from bessemer.corpus.extract import fold

Document = dict[str, Any]


def document(key: int | str, text: str, source: str = "s", **more: Any) -> Document:
    return {
        "identity": identity(source, "f", str(key)), "source": source, "path": f"f{key}", "text": text,
        "characters": len(text), **more,
    }  # fmt: skip


def tables(documents: Sequence[Document], size: int = 7) -> Callable[[Sequence[str]], Iterator[pa.Table]]:
    """A reader of documents in tables of `size` rows."""

    def read(columns: Sequence[str]) -> Iterator[pa.Table]:
        for start in range(0, len(documents), size):
            part = documents[start : start + size]
            yield pa.table({name: [row[name] for row in part] for name in columns if name in documents[0]})

    return read


def edited(words: list[str], changes: int, draw: random.Random) -> list[str]:
    """Words, with some replaced by words that stand nowhere else."""
    changed = list(words)
    for place in draw.sample(range(len(words)), changes):
        changed[place] = f"x{draw.getrandbits(48):x}"
    return changed


def shingles(text: str, length: int = 5) -> set[tuple[str, ...]]:
    words = fold(text).split()
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def jaccard(left: str, right: str, length: int = 5) -> float:
    one, other = shingles(left, length), shingles(right, length)
    return len(one & other) / len(one | other) if one | other else 0.0


def all_pairs_components(texts: list[str], least: float) -> list[int]:
    """The smallest number of each text's component, when all pairs of at least that Jaccard are linked."""
    component = list(range(len(texts)))

    def root(number: int) -> int:
        while component[number] != number:
            number = component[number]
        return number

    sets = [shingles(text) for text in texts]
    for right in range(len(texts)):
        for left in range(right):
            union = len(sets[left] | sets[right])
            if union and len(sets[left] & sets[right]) / union >= least:
                low, high = sorted((root(left), root(right)))
                component[high] = low
    return [root(number) for number in range(len(texts))]
