"""Text of evaluation sets in documents: found by n-gram overlap, then dropped, masked or reported.

The way of GPT-3 (Brown et al. 2020, appendix C): an item is touched when a document holds 13 words in a row of it.
Shorter texts are looked for as a whole. What a word is says bessemer.corpus.text.ngrams.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus.evaluation_sets import items
from bessemer.errors import InputError
from bessemer.recipe import Contamination as Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

REASONS = {"contaminated": "it holds text of an evaluation set of corpus.contamination.sets"}
"""Why a document can be rejected here."""

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Found:
    """What a document holds of the sets.

    items: by set, the numbers (from 0, in the order of the set's file) of the items touched, ascending;
    spans: where their text stands, in characters, ascending and apart from each other.
    """

    items: dict[str, tuple[int, ...]]
    spans: tuple[Span, ...]

    def __bool__(self) -> bool:
        return bool(self.items)

    def metadata(self) -> dict[str, object]:
        """The field that goes into the document's metadata; none where nothing was found."""
        return {"contamination": {name: list(numbers) for name, numbers in self.items.items()}} if self.items else {}

    def detail(self) -> str:
        """What is said of a rejected document: the sets, and how many items of each."""
        return ", ".join(f"{name}: {len(numbers)} items" for name, numbers in self.items.items())


NOTHING = Found({}, ())


@dataclass(frozen=True, eq=False)
class Index:
    """The n-grams of all sets, to look documents up in. Made once a process, read by any number of threads.

    names, sizes: the sets and their items; unsearched: of each, the items of which no text is long enough to look for.
    lengths: the lengths of the n-grams, in words, ascending. slots, numbers: the hash table from n-gram to its number.
    firsts, owners: n-gram g belongs to the items owners[firsts[g]:firsts[g + 1]], numbered through all sets.
    grams: the distinct n-grams of each item; starts: the number of each set's first item.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    unsearched: tuple[int, ...]
    min_share: float
    lengths: NDArray[np.int64]
    slots: NDArray[np.uint64]
    numbers: NDArray[np.int32]
    firsts: NDArray[np.int64]
    owners: NDArray[np.int32]
    grams: NDArray[np.int64]
    starts: NDArray[np.int64]


@dataclass(frozen=True)
class SetRow:
    """One line of the table: a set over the whole corpus."""

    name: str
    items: int
    searched: int
    """Items of which a text was long enough to look for."""
    items_touched: int
    documents: int
    """Documents that hold something of the set."""
    share: float
    """Items touched, of the items searched."""


def build(settings: Settings) -> Index:
    """Read the sets and index their n-grams. Raises InputError for a set that cannot be read or searched."""
    import numpy as np

    from bessemer.corpus.text.ngrams import table

    hashes: list[NDArray[np.uint64]] = []
    lengths: set[int] = set()
    sizes, unsearched = [], []
    for given in settings.sets:
        size = silent = 0
        for texts in items(given):
            found, used = _grams(texts, settings)
            hashes.append(found)
            lengths |= used
            size, silent = size + 1, silent + (not used)
        if size == silent:
            raise InputError(
                f"corpus.contamination.sets.{given.name}: none of its {size} items has a text of {settings.min_words} words "
                "or more; lower corpus.contamination.min_words, or name other fields"
            )
        sizes.append(size)
        unsearched.append(silent)
    grams = np.array([len(found) for found in hashes], dtype=np.int64)
    owner = np.repeat(np.arange(len(hashes), dtype=np.int32), grams)
    distinct, which = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]), return_inverse=True)
    slots, numbers = table(distinct)
    return Index(
        names=tuple(given.name for given in settings.sets),
        sizes=tuple(sizes),
        unsearched=tuple(unsearched),
        min_share=settings.min_share,
        lengths=np.array(sorted(lengths), dtype=np.int64),
        slots=slots,
        numbers=numbers,
        firsts=np.concatenate([[0], np.cumsum(np.bincount(which, minlength=len(distinct)))]).astype(np.int64),
        owners=owner[np.argsort(which, kind="stable")],
        grams=grams,
        starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )


def check(text: str, index: Index) -> Found:
    """What a text holds of the sets, in one pass over it. A pure function of text and index."""
    import numpy as np

    from bessemer.corpus.text.ngrams import find

    if not len(index.lengths):
        return NOTHING
    found, places = find(text, index.lengths, index.slots, index.numbers)
    if not len(found):
        return NOTHING
    distinct = np.unique(found)
    owners, per_gram = _owners(index, distinct)
    counts = np.bincount(owners, minlength=len(index.grams))
    touched = (counts > 0) & (counts >= index.min_share * index.grams)
    if not touched.any():
        return NOTHING
    guilty = np.bincount(np.repeat(np.arange(len(distinct)), per_gram), weights=touched[owners]) > 0
    places = places[guilty[np.searchsorted(distinct, found)]]
    by_set: dict[str, tuple[int, ...]] = {}
    for number, name in enumerate(index.names):
        first, last = index.starts[number], index.starts[number + 1]
        own = np.flatnonzero(touched[first:last])
        if len(own):
            by_set[name] = tuple(own.tolist())
    return Found(by_set, _merged(places))


def masked(text: str, found: Found, mask: str) -> str:
    """The text with `mask` in place of what was found."""
    parts, position = [], 0
    for start, end in found.spans:
        parts += [text[position:start], mask]
        position = end
    return "".join([*parts, text[position:]])


def tabulate(index: Index, found: Iterable[Mapping[str, Sequence[int]]]) -> list[SetRow]:
    """The table over a corpus, a row a set, from the `items` of every document in which something was found."""
    documents: Counter[str] = Counter()
    items: set[str] = set()
    for by_set in found:
        documents.update(list(by_set))
        items |= {f"{name}/{number}" for name, numbers in by_set.items() for number in numbers}
    return table_of(index, documents, items)


def table_of(index: Index, documents: Mapping[str, int], items_: Collection[str]) -> list[SetRow]:
    """The same, from documents by set and from the items touched, each as SET/NUMBER."""
    touched = Counter(item.rpartition("/")[0] for item in items_)
    rows = []
    for name, size, silent in zip(index.names, index.sizes, index.unsearched, strict=True):
        share = touched[name] / max(size - silent, 1)
        rows.append(SetRow(name, size, size - silent, touched[name], documents.get(name, 0), share))
    return rows


def fingerprint(settings: Settings) -> list[str]:
    """SHA-256 of each set's file: a corpus is made anew when a set has changed. Raises InputError for a missing one."""
    prints = []
    for given in settings.sets:
        try:
            with Path(given.path).expanduser().open("rb") as file:
                prints.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError as error:
            raise InputError(f"corpus.contamination.sets.{given.name}: {given.path}: {error.strerror}") from None
    return prints


def _grams(texts: list[str], settings: Settings) -> tuple[Any, set[int]]:
    """The distinct n-grams of an item, and their lengths."""
    import numpy as np

    from bessemer.corpus.text.ngrams import gram_hashes, num_words

    parts, used = [np.empty(0, dtype=np.uint64)], set()
    for text in texts:
        length = min(num_words(text), settings.ngram)
        if length >= settings.min_words:
            parts.append(gram_hashes(text, length)[0])
            used.add(length)
    return np.unique(np.concatenate(parts)), used


def _owners(index: Index, grams: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """The items that own these n-grams, one n-gram's after another's, and how many each has."""
    import numpy as np

    per_gram = index.firsts[grams + 1] - index.firsts[grams]
    before = np.cumsum(per_gram) - per_gram
    return index.owners[np.repeat(index.firsts[grams] - before, per_gram) + np.arange(per_gram.sum())], per_gram


def _merged(places: NDArray[np.int64]) -> tuple[Span, ...]:
    """Overlapping and touching places as one."""
    spans: list[Span] = []
    for start, end in sorted(map(tuple, places.tolist())):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return tuple(spans)
