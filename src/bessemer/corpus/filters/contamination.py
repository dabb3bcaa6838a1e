"""Detection of evaluation sets in documents by n-gram overlap. Contaminated text is dropped, masked or reported.

An item matches if a document contains 13 of its words in a row (GPT-3: Brown et al. 2020, appendix C). Shorter texts must
match as a whole. bessemer.text.ngrams defines words.
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
from scipy.sparse import csr_array

from bessemer.common.errors import InputError
from bessemer.recipe import Contamination as Settings
from bessemer.recipe import EvaluationSet
from bessemer.text.hashing import hash_ngrams
from bessemer.text.ngrams import find, folded_words, table
from bessemer.text.normalise import normalise_foreign

Span = tuple[int, int]
ROWS_AT_ONCE = 1000  # rows of a Parquet file read at a time


class EvaluationOverlap(NamedTuple):
    """The overlap of a document with the evaluation sets.

    Attributes:
        items: Name of a set -> indices of the matched items in the set's file, from 0, ascending. Sets without a match
            are left out.
        spans: Character ranges [start, end) of the matching text, ascending and disjoint.
    """

    items: dict[str, tuple[int, ...]]
    spans: tuple[Span, ...]


NO_OVERLAP = EvaluationOverlap({}, ())


@dataclass(frozen=True, eq=False)
class GramIndex:
    """An index of the n-grams of all evaluation sets. It is built once per process and is thread-safe.

    Attributes:
        names: Names of the sets.
        sizes: Number of items of each set.
        unsearched: Number of items of each set whose texts are all too short to search for.
        min_share: Minimum share of an item's n-grams that a matching document contains.
        lengths: Lengths of the n-grams in words, ascending.
        slots: Hash table from n-gram to its index, with `numbers` (see text.ngrams.table).
        numbers: The indices in this hash table.
        occurs: Sparse matrix, 1 where an n-gram (row) occurs in an item (column, numbered over all sets).
        grams: Number of distinct n-grams of each item.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    unsearched: tuple[int, ...]
    min_share: float
    lengths: NDArray[np.int64]
    slots: NDArray[np.uint64]
    numbers: NDArray[np.int32]
    occurs: csr_array
    grams: NDArray[np.int64]


def build(settings: Settings) -> GramIndex:
    """Read the evaluation sets and index their n-grams. Raises InputError for a set that cannot be read or searched."""
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
                f"corpus.contamination.sets.{evaluation_set.name}: none of the {size} items has a text of "
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
        occurs=csr_array((np.ones(len(which)), (which, owner)), shape=(len(distinct), len(hashes))),
        grams=grams,
    )


def _grams(texts: list[str], settings: Settings, lengths: set[int]) -> NDArray[np.uint64]:
    """Return the distinct hashes of the n-grams in the texts of one item, and add the values of n to `lengths`.

    A text of fewer than `settings.ngram` words is one n-gram as a whole, and one below `min_words` has none.
    """
    parts = [np.empty(0, dtype=np.uint64)]
    for text in texts:
        hashes, _ = folded_words(normalise_foreign(text))
        length = min(len(hashes), settings.ngram)
        if length >= settings.min_words:
            parts.append(hashes[: hash_ngrams(hashes, len(hashes), length, hashes)])
            lengths.add(length)
    return np.unique(np.concatenate(parts))


def check(text: str, index: GramIndex) -> EvaluationOverlap:
    """Find which items of the evaluation sets a text contains, and where, in one pass over the text."""
    hits, hit_spans = find(text, index.lengths, index.slots, index.numbers)
    if not len(hits):
        return NO_OVERLAP
    distinct = np.unique(hits)
    occurs = index.occurs[distinct]
    counts = occurs.sum(axis=0)
    touched = (counts > 0) & (counts >= index.min_share * index.grams)
    guilty = occurs @ touched.astype(np.float64) > 0
    by_set = {
        name: tuple(np.flatnonzero(touched[first:last]).tolist())
        for name, (first, last) in zip(index.names, pairwise(np.cumsum([0, *index.sizes])), strict=True)
    }
    spans = _merged(hit_spans[guilty[np.searchsorted(distinct, hits)]])
    return EvaluationOverlap({name: numbers for name, numbers in by_set.items() if numbers}, spans)


def _merged(all_spans: NDArray[np.int64]) -> tuple[Span, ...]:
    """Merge overlapping and adjacent spans, given as rows [start, end)."""
    spans: list[Span] = []
    for start, end in sorted(map(tuple, all_spans.tolist())):
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    return tuple(spans)


def statistics(index: GramIndex, documents: Mapping[str, int], matches: Collection[str]) -> list[dict[str, Any]]:
    """Return one row per evaluation set for statistics.json.

    Args:
        index: The n-grams of the sets.
        documents: Number of documents that match each set.
        matches: The matched items, as SET/NUMBER.

    Returns:
        Rows {name, items, searched, items_touched, documents, share}. `searched` counts the items with a text that is
            long enough to search for, `items_touched` those that a document matches, and `share` is items_touched /
            searched.
    """
    touched = Counter(item.rpartition("/")[0] for item in matches)
    rows = []
    for name, size, silent in zip(index.names, index.sizes, index.unsearched, strict=True):
        row = {"name": name, "items": size, "searched": size - silent, "items_touched": touched[name]}
        rows.append(row | {"documents": documents.get(name, 0), "share": touched[name] / max(size - silent, 1)})
    return rows


# --- The files of evaluation sets


def items(evaluation_set: EvaluationSet) -> Iterator[list[str]]:
    """Yield the list of texts of each item of an evaluation set, in file order.

    An unreadable item raises InputError, because skipping it would let the model train on it.
    """
    path, fields = Path(evaluation_set.path).expanduser(), evaluation_set.fields
    where, suffix = f"corpus.contamination.sets.{evaluation_set.name}: {path}", path.suffix.lower()
    is_empty = True
    try:
        for position, row in _parquet(path) if suffix == ".parquet" else _lines(path):
            is_empty = False
            yield [str(row)] if suffix == ".txt" else _texts(row, fields, f"{where}{position}")
    except (OSError, ValueError) as error:
        raise InputError(f"{where}: cannot be read: {error}") from None
    if is_empty:
        raise InputError(f"{where}: the file has no items; remove the set, or correct its path")


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield (position, value) of each line that is not blank. The position, such as ": line 3", is for error messages.

    The value is the line itself in a .txt file, else its parsed JSON, or None if that is invalid.
    """
    with pa.input_stream(str(path), compression="detect") as stream:
        for number, raw in enumerate(io.BufferedReader(stream), 1):
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            value: object = line if path.suffix.lower() == ".txt" else None
            with suppress(ValueError, RecursionError):
                value = value or json.loads(line)
            if line:
                yield f": line {number}", value


def _parquet(path: Path) -> Iterator[tuple[str, object]]:
    """Yield ("", row as a dict) for each row of a Parquet file. The empty string takes the place of the position in `_lines`."""
    with pq.ParquetFile(path) as parquet:
        for batch in parquet.iter_batches(ROWS_AT_ONCE):
            yield from (("", row) for row in batch.to_pylist())


def _texts(row: object, fields: Sequence[str], where: str) -> list[str]:
    if not isinstance(row, dict):
        raise InputError(f"{where}: the item is not a JSON object; write one object per line")
    if missing := [name for name in fields if name not in row]:
        raise InputError(
            f"{where}: the item has no field {missing[0]!r}; its fields are: {', '.join([*row][:20]) or 'none'}"
        )
    texts = [text for name in fields for text in _strings(row[name], f"{where}: field {name!r}")]
    return [text for text in texts if text.strip()]


def _strings(value: object, where: str) -> list[str]:
    """Return all strings in a field, including those in nested lists and objects (choices, answers), but no numbers.

    Raises InputError for a value of another type, at the position `where`.
    """
    if isinstance(value, str):
        return [value]
    if value is None or isinstance(value, int | float):
        return []
    if isinstance(value, list | dict):
        entries = value.values() if isinstance(value, dict) else value
        return [text for entry in entries for text in _strings(entry, where)]
    raise InputError(f"{where} is {type(value).__name__}; name fields with text, lists or objects")
