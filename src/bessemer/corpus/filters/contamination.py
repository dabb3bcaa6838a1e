"""Contamination with evaluation sets, by n-gram overlap; contaminated text is dropped, masked or reported.

As in GPT-3 (Brown et al. 2020, appendix C): an item matches when a document contains 13 of its words in a row. Shorter
texts are matched as a whole. Words: bessemer.text.ngrams.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bessemer.common.errors import InputError
from bessemer.recipe import Contamination as Settings
from bessemer.recipe import EvaluationSet
from bessemer.text.hashing import hash_ngrams
from bessemer.text.ngrams import find, folded_words, table
from bessemer.text.normalise import normalise_foreign

Span = tuple[int, int]
ROWS_AT_ONCE = 1000  # of a table


class EvaluationOverlap(NamedTuple):
    """What a document holds of evaluation sets."""

    # by set, numbers of the items (from 0, in the order of the set's file), ascending; none: no overlap
    items: dict[str, tuple[int, ...]]
    spans: tuple[Span, ...]  # of the matching text, in characters, ascending and disjoint


NO_OVERLAP = EvaluationOverlap({}, ())


@dataclass(frozen=True, eq=False)
class GramIndex:
    """The n-grams of all sets; built once per process, thread-safe."""

    names: tuple[str, ...]  # of the sets
    sizes: tuple[int, ...]  # items of each set
    unsearched: tuple[int, ...]  # items of each set whose texts are all too short to search for
    min_share: float
    lengths: NDArray[np.int64]  # of the n-grams, in words, ascending
    slots: NDArray[np.uint64]  # with `numbers` the hash table from n-gram to its number
    numbers: NDArray[np.int32]
    firsts: NDArray[np.int64]  # n-gram g occurs in the items owners[firsts[g]:firsts[g + 1]], numbered over all sets
    owners: NDArray[np.int32]
    grams: NDArray[np.int64]  # distinct n-grams of each item


def build(settings: Settings) -> GramIndex:
    """Read the sets and index their n-grams. Raises InputError for a set that cannot be read or searched."""
    hashes: list[NDArray[np.uint64]] = []
    lengths: set[int] = set()
    sizes, unsearched = [], []
    for evaluation_set in settings.sets:
        size = silent = 0
        for texts in items(evaluation_set):
            hashes.append(_grams(texts, settings, lengths))
            size, silent = size + 1, silent + (not len(hashes[-1]))
        if size == silent:
            raise InputError(
                f"corpus.contamination.sets.{evaluation_set.name}: none of its {size} items has a text of "
                f"{settings.min_words} words or more; lower corpus.contamination.min_words, or name other fields"
            )
        sizes.append(size)
        unsearched.append(silent)
    grams = np.array([len(of_item) for of_item in hashes], dtype=np.int64)
    owner = np.repeat(np.arange(len(hashes), dtype=np.int32), grams)
    distinct, which = np.unique(np.concatenate([np.empty(0, np.uint64), *hashes]), return_inverse=True)
    slots, numbers = table(distinct)
    return GramIndex(
        names=tuple(evaluation_set.name for evaluation_set in settings.sets),
        sizes=tuple(sizes),
        unsearched=tuple(unsearched),
        min_share=settings.min_share,
        lengths=np.array(sorted(lengths), dtype=np.int64),
        slots=slots,
        numbers=numbers,
        firsts=np.concatenate([[0], np.cumsum(np.bincount(which, minlength=len(distinct)))]).astype(np.int64),
        owners=owner[np.argsort(which, kind="stable")],
        grams=grams,
    )


def _grams(texts: list[str], settings: Settings, lengths: set[int]) -> NDArray[np.uint64]:
    """The distinct n-grams of an item; their lengths are added to `lengths`."""
    parts = [np.empty(0, dtype=np.uint64)]
    for text in texts:
        hashes, _ = folded_words(normalise_foreign(text))
        length = min(len(hashes), settings.ngram)
        if length >= settings.min_words:
            parts.append(hashes[: hash_ngrams(hashes, len(hashes), length, hashes)])
            lengths.add(length)
    return np.unique(np.concatenate(parts))


def check(text: str, index: GramIndex) -> EvaluationOverlap:
    """What a text holds of the sets, in one pass over it. A pure function of text and index."""
    found, places = find(text, index.lengths, index.slots, index.numbers)
    if not len(found):
        return NO_OVERLAP
    distinct = np.unique(found)
    per_gram = index.firsts[distinct + 1] - index.firsts[distinct]
    before = np.cumsum(per_gram) - per_gram
    owners = index.owners[np.repeat(index.firsts[distinct] - before, per_gram) + np.arange(per_gram.sum())]
    counts = np.bincount(owners, minlength=len(index.grams))
    touched = (counts > 0) & (counts >= index.min_share * index.grams)
    if not touched.any():
        return NO_OVERLAP
    guilty = np.bincount(np.repeat(np.arange(len(distinct)), per_gram), weights=touched[owners]) > 0
    by_set = {
        name: tuple(np.flatnonzero(touched[first:last]).tolist())
        for name, (first, last) in zip(index.names, pairwise(np.cumsum([0, *index.sizes])), strict=True)
    }
    spans = _merged(places[guilty[np.searchsorted(distinct, found)]])
    return EvaluationOverlap({name: numbers for name, numbers in by_set.items() if numbers}, spans)


def _merged(places: NDArray[np.int64]) -> tuple[Span, ...]:
    """Overlapping and touching spans as one."""
    spans: list[Span] = []
    for start, end in sorted(map(tuple, places.tolist())):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return tuple(spans)


def statistics(index: GramIndex, documents: Mapping[str, int], items_: Collection[str]) -> list[dict[str, Any]]:
    """A row {name, items, searched, items_touched, documents, share} per set, from counts of documents by set and
    SET/NUMBER of the items matched. searched: items with a text long enough; share: of these."""
    touched = Counter(item.rpartition("/")[0] for item in items_)
    rows = []
    for name, size, silent in zip(index.names, index.sizes, index.unsearched, strict=True):
        row = {"name": name, "items": size, "searched": size - silent, "items_touched": touched[name]}
        rows.append(row | {"documents": documents.get(name, 0), "share": touched[name] / max(size - silent, 1)})
    return rows


# --- The files of evaluation sets


def items(evaluation_set: EvaluationSet) -> Iterator[list[str]]:
    """The texts of each item in file order. Raises InputError: an item that were skipped would be trained on."""
    path, fields = Path(evaluation_set.path).expanduser(), evaluation_set.fields
    where, suffix = f"corpus.contamination.sets.{evaluation_set.name}: {path}", path.suffix.lower()
    is_empty = True
    try:
        for place, row in _parquet(path) if suffix == ".parquet" else _lines(path):
            is_empty = False
            yield [str(row)] if suffix == ".txt" else _texts(row, fields, f"{where}{place}")
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read: {error}") from None
    if is_empty:
        raise InputError(f"{where}: holds no item; remove the set, or give its path")


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    """Lines that are not blank, each with its place: of .txt as they are, of others as JSON."""
    with pa.input_stream(str(path), compression="detect") as stream:
        for number, raw in enumerate(io.BufferedReader(stream), 1):
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            value: object = line if path.suffix.lower() == ".txt" else None
            with suppress(ValueError, RecursionError):  # what is no JSON stays None
                value = value or json.loads(line)
            if line:
                yield f": line {number}", value


def _parquet(path: Path) -> Iterator[tuple[str, object]]:
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(ROWS_AT_ONCE):
            yield from (("", row) for row in batch.to_pylist())


def _texts(row: object, fields: Sequence[str], where: str) -> list[str]:
    if not isinstance(row, dict):
        raise InputError(f"{where} is not an object of JSON")
    if missing := [name for name in fields if name not in row]:
        raise InputError(f"{where}: no field {missing[0]!r}; there are: {', '.join([*row][:20]) or 'none'}")
    texts = [text for name in fields for text in _strings(row[name], f"{where}: field {name!r}")]
    return [text for text in texts if text.strip()]


def _strings(value: object, where: str) -> list[str]:
    """A field's texts: itself, or those in a list or an object (choices, answers), however deep; no numbers."""
    if isinstance(value, str):
        return [value]
    if value is None or isinstance(value, int | float):
        return []
    if isinstance(value, list | dict):
        entries = value.values() if isinstance(value, dict) else value
        return [text for entry in entries for text in _strings(entry, where)]
    raise InputError(f"{where} is {type(value).__name__}, not text")
