"""Exact and near duplicates among documents, and which copy is kept.

Exact: equal text after folding case and white space. Near: MinHash with locality-sensitive hashing (Broder 1997, with
FineWeb's parameters). Documents that agree in a whole band share a bucket, where each is compared with its neighbours
(`buckets.REACH`) by their signatures or, with `verify`, by the Jaccard similarity of their shingles. One document of
each connected component is kept, by the rule `keep`. Independent of the order of documents. Memory and disk:
docs/dedup.md.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bessemer.corpus.dedup import buckets
from bessemer.corpus.dedup.signatures import (
    Records,
    ShingleSets,
    Signatures,
    compared,
    longest,
    num_hashes,
    shingle_set,
    signatures,
    utf8,
)
from bessemer.corpus.dedup.verdicts import (
    EXACT,
    KEPT,
    NEAR,
    Tables,
    Verdicts,
    earlier_files,
    identity_of,
    packed,
    parquet_tables,
    statistics,
)
from bessemer.corpus.engine import check_stop
from bessemer.corpus.extract import fold
from bessemer.errors import InputError
from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("identity", "exact", "characters", "signature", "source", "quality")

PAIRS_AT_ONCE = 1 << 12
"""Pairs whose similarity is computed at one time."""


def judge(tables: Tables, settings: Dedup, scratch: Path, sources: Sequence[str] = ()) -> Verdicts:
    """Find duplicates. Columns: identity; exact or text; characters; and where needed signature or text, source,
    quality.

    `scratch`: temporary folder for signatures; `sources`: in recipe order (keep = "first-source"). Raises InputError
    for a missing earlier corpus, a repeated identity, and keep = "quality" without scores.
    """
    earlier = [(folder, parquet_tables(earlier_files(folder))) for folder in settings.against]
    scratch.mkdir(parents=True)
    stores = Signatures(scratch, settings.bands, settings.rows) if settings.minhash else None
    try:
        index = scan(tables, [read for _, read in earlier], settings, stores, scratch)
        verdicts = _judge(index, stores, [tables, *(read for _, read in earlier)], settings, scratch, sources)
    finally:
        if stores is not None:
            stores.close()
        shutil.rmtree(scratch, ignore_errors=True)
    verdicts.earlier.update(_places(verdicts, index, earlier))
    return verdicts


def _judge(
    index: Index,
    stores: Signatures | None,
    readers: Sequence[Tables],
    settings: Dedup,
    scratch: Path,
    sources: Sequence[str],
) -> Verdicts:
    num_rows = len(index.identities)
    verdict = np.zeros(num_rows, dtype=np.uint8)
    keeper = np.arange(num_rows, dtype=np.int32)
    similarity = np.ones(num_rows, dtype=np.float32)
    rank = _rank(index, settings, sources)
    if settings.exact:
        same = index.equal_texts()
        stays = _best(same, [rank] if settings.keep != "longest" else [], index.num_documents)
        keeper = stays
        verdict[keeper != np.arange(num_rows)] = EXACT
    index.exact = None
    if settings.minhash and stores is not None and num_rows:
        memory = settings.memory_mib << 20
        compared = index.compared & (verdict == KEPT)
        sets = None
        alike = buckets.Alike(settings.min_jaccard, lenient=settings.verify)
        group = buckets.components(stores, index.row_of_place, compared, alike, memory)
        try:
            if settings.verify:
                compared &= _grouped(group)
                sets = ShingleSets(scratch / "shingles", num_rows)
                _fill(sets, readers, index.row_of_place, compared, settings)
                alike = buckets.Alike(settings.min_jaccard, sets)
                group = buckets.components(stores, index.row_of_place, compared, alike, memory)
            stays = _best(group, [rank, -index.characters], index.num_documents)
            near = np.flatnonzero(stays != np.arange(num_rows))
            verdict[near] = NEAR
            keeper = stays[keeper]  # an exact duplicate of a near duplicate points to what stays in the end
            similarity[near] = _similarity(near, keeper[near], stores, index.row_of_place, sets)
        finally:
            if sets is not None:
                sets.close()
    verdict[index.num_documents :] = KEPT
    keeper[index.num_documents :] = np.arange(index.num_documents, num_rows)
    counts = statistics(verdict, keeper, similarity, index.characters, index.num_documents, settings)
    return Verdicts(index.identities, verdict, keeper, similarity, index.num_documents, {}, counts)


def _rank(index: Index, settings: Dedup, sources: Sequence[str]) -> np.ndarray:
    """Sort key of `keep`, smallest first; 0 for all where the length alone decides."""
    if settings.keep == "quality":
        if index.quality is None:
            raise InputError(
                'corpus.dedup.keep = "quality": the documents have no quality scores; turn the quality classifier on, or '
                'choose "longest" or "first-source"'
            )
        return -index.quality
    if settings.keep == "first-source":
        order = {name: number for number, name in enumerate([*sources, *sorted(set(index.sources) - set(sources))])}
        ranks = np.array([order[name] for name in index.sources] or [0], dtype=np.int16)
        rank: np.ndarray = ranks[index.source]
        return rank
    return np.zeros(len(index.identities), dtype=np.int8)


def _best(group: np.ndarray, keys: list[np.ndarray], num_documents: int) -> np.ndarray:
    """For each row the one of its group that stays: one of an earlier corpus, else by the keys, then the first."""
    rows = np.flatnonzero(_grouped(group)).astype(np.int32)
    best = np.arange(len(group), dtype=np.int32)
    if not len(rows):
        return best
    order = np.lexsort((rows, *[key[rows] for key in reversed(keys)], rows < num_documents, group[rows]))
    rows = rows[order]
    groups = group[rows]
    starts = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
    best[rows] = np.repeat(rows[starts], np.diff(np.append(starts, len(rows))))
    return best


def _grouped(group: np.ndarray) -> np.ndarray:
    """Which rows are in a group with another; `group` names each by its smallest row."""
    others = group != np.arange(len(group), dtype=group.dtype)
    grouped: np.ndarray = others.copy()
    grouped[group[others]] = True
    return grouped


def _fill(
    sets: ShingleSets, readers: Sequence[Tables], row_of_place: np.ndarray, wanted: np.ndarray, settings: Dedup
) -> None:
    """Read the texts of the wanted rows again and keep their shingle sets."""
    place = 0
    for read in readers:
        for table in read(["text"]):
            rows = row_of_place[place : place + table.num_rows]
            place += table.num_rows
            chosen = wanted[rows]
            if chosen.any():
                _fill_table(sets, table.filter(chosen)["text"], rows[chosen], settings)
            check_stop()


def _fill_table(sets: ShingleSets, texts: pa.ChunkedArray, rows: np.ndarray, settings: Dedup) -> None:
    data, offsets = utf8([fold(text) for text in texts.to_pylist()])
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    for number, row in enumerate(rows.tolist()):
        sets.put(row, shingle_set(data[offsets[number] : offsets[number + 1]], settings, buffer))


def _similarity(
    left: np.ndarray, right: np.ndarray, stores: Signatures, row_of_place: np.ndarray, sets: ShingleSets | None
) -> np.ndarray:
    """Jaccard of pairs of rows, in batches."""
    from bessemer.corpus.dedup.kernels import estimates, jaccards

    shares = np.empty(len(left), dtype=np.float32)
    place_of_row = np.empty(len(row_of_place), dtype=np.int32)
    place_of_row[row_of_place] = np.arange(len(row_of_place), dtype=np.int32)
    for start in range(0, len(left), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        rows, pairs = np.unique(np.concatenate([left[part], right[part]]), return_inverse=True)
        half = len(pairs) // 2
        if sets is None:
            estimates(stores.of(place_of_row[rows]), pairs[:half], pairs[half:], shares[part])
        else:
            jaccards(*sets.of(rows), pairs[:half], pairs[half:], shares[part])
        check_stop()
    return shares


def _places(verdicts: Verdicts, index: Index, earlier: Sequence[tuple[str, Tables]]) -> dict[int, str]:
    """Corpus and path of the keepers of earlier corpora, by row."""
    wanted = np.unique(verdicts.keeper[verdicts.keeper >= verdicts.num_documents])
    keepers = wanted[np.isin(wanted, verdicts.keeper[: verdicts.num_documents])]
    places: dict[int, str] = {}
    place = index.num_documents
    for folder, read in earlier:
        for table in read(["identity", "path"]):
            rows = index.row_of_place[place : place + table.num_rows]
            place += table.num_rows
            found = np.isin(rows, keepers)
            if found.any():
                part = table.filter(found)
                paths = part["path"].to_pylist() if "path" in part.column_names else [""] * part.num_rows
                places.update({row: f"{folder}: {path}" for row, path in zip(rows[found].tolist(), paths, strict=True)})
    return places


@dataclass
class Index:
    """Columns by row. Rows are sorted by identity; those of earlier corpora come after those of this one."""

    identities: np.ndarray
    """16-byte strings."""
    num_documents: int
    """Rows of this corpus."""
    exact: np.ndarray | None
    """Digest of the folded text, two uint64 a row; dropped when it has been used."""
    characters: np.ndarray
    source: np.ndarray
    """Number of the source in `sources`."""
    sources: list[str]
    quality: np.ndarray | None
    compared: np.ndarray
    """Has a whole shingle."""
    row_of_place: np.ndarray
    """Row of each document in the order in which it arrived."""

    def equal_texts(self) -> np.ndarray:
        """For each row the smallest row of equal text."""
        assert self.exact is not None
        return first_of_equal(self.exact[:, 0], self.exact[:, 1])


def scan(tables: Tables, earlier: Sequence[Tables], settings: Dedup, stores: Signatures | None, scratch: Path) -> Index:
    """Read all documents once: columns into memory, signatures (taken over, or made from the text) into the stores."""
    columns = _Columns(settings, stores, scratch)
    for table in _with_text(tables, settings):
        columns.add(table, trusted=True)
    num_documents = columns.num_documents
    for read in earlier:
        for table in read(["identity", "text", "source", "quality"]):
            columns.add(table, trusted=False)
    return columns.finish(num_documents)


def _with_text(tables: Tables, settings: Dedup) -> Iterator[pa.Table]:
    """The tables with the text as well, where their columns are not enough; it is costly to read."""
    for table in tables(COLUMNS):
        there = set(table.column_names)
        enough = "exact" in there and "characters" in there and ("signature" in there or not settings.minhash)
        return tables(COLUMNS if enough else (*COLUMNS, "text"))
    return tables(COLUMNS)


TYPES = {"identity": "S16", "exact": "u8", "characters": "i4", "source": "i2", "quality": "f4", "compared": "?"}


class _Columns:
    """Columns in the order of arrival, as they grow: on disk, since lists of small arrays leave holes in memory."""

    def __init__(self, settings: Dedup, stores: Signatures | None, scratch: Path) -> None:
        self.settings, self.stores = settings, stores
        self.numbers: dict[str, int] = {}
        self.num_documents = 0
        self.scored = False
        self.columns = {name: Records(scratch / name, np.dtype(kind)) for name, kind in TYPES.items()}

    def add(self, table: pa.Table, trusted: bool) -> None:
        """One table; hashes and signatures that an earlier version may have made otherwise are not trusted."""
        count, there = table.num_rows, table.column_names
        self.num_documents += count
        folded = [fold(text) for text in table["text"].to_pylist()] if "text" in there else None
        self.columns["identity"].append(packed(table["identity"].to_pylist()))
        exact = table["exact"].to_pylist() if trusted and "exact" in there else [digest(text) for text in folded or ()]
        self.columns["exact"].append(np.frombuffer(b"".join(exact), dtype=">u8").astype(np.uint64).reshape(-1, 2))
        if "characters" in there:
            lengths = table["characters"].to_numpy().astype(np.int32)
        else:
            lengths = np.array([len(text) for text in table["text"].to_pylist()], dtype=np.int32)
        self.columns["characters"].append(lengths)
        names = table["source"].to_pylist() if "source" in there else [""] * count
        source = np.array([self.numbers.setdefault(name, len(self.numbers)) for name in names], dtype=np.int16)
        self.columns["source"].append(source)
        quality = np.full(count, -np.inf, dtype=np.float32)
        if "quality" in there:
            self.scored = True
            quality = np.nan_to_num(table["quality"].to_numpy().astype(np.float32), nan=-np.inf)
        self.columns["quality"].append(quality)
        takes_part = np.zeros(count, dtype=bool)
        if self.stores is not None:
            signed = (
                self._signed(table) if trusted and "signature" in there else signatures(folded or (), self.settings)
            )
            takes_part = compared(signed)
            salts = (source.astype(np.uint64) + np.uint64(1)) << np.uint64(32) if self.settings.within_source else None
            self.stores.append(signed, np.zeros(count, dtype=np.uint64) if salts is None else salts)
        self.columns["compared"].append(takes_part)
        check_stop()

    def _signed(self, table: pa.Table) -> np.ndarray:
        flat: np.ndarray = table["signature"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return flat.astype(np.uint32).reshape(table.num_rows, num_hashes(self.settings))

    def finish(self, num_documents: int) -> Index:
        """Sort the rows. Raises InputError when an identity of this corpus occurs twice."""
        if not self.num_documents:
            for records in self.columns.values():
                records.close()
            none = np.zeros(0, dtype=np.int32)
            return Index(np.zeros(0, "S16"), 0, np.zeros((0, 2), np.uint64), none, none, [], None, none > 0, none)
        names = self._column("identity")
        halves = names.view(">u8").reshape(-1, 2)
        order = _order(halves[:num_documents])
        if len(halves) > num_documents:
            order = np.concatenate([order, num_documents + _order(halves[num_documents:])])
        del halves
        names = names[order]
        twice = np.flatnonzero(names[1:num_documents] == names[: max(num_documents - 1, 0)])
        if len(twice):
            raise InputError(
                f"corpus: identity {identity_of(names[twice[0]])} occurs twice in the corpus ({len(twice)} such); give "
                "each document an identity of its own, and no file to two sources of one name"
            )
        exact = self._column("exact").reshape(-1, 2)[order]
        source = self._column("source")[order]
        if self.settings.within_source:  # texts of two sources are then never equal
            exact[:, 1] ^= (source.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        row_of_place = np.empty(len(order), dtype=np.int32)
        row_of_place[order] = np.arange(len(order), dtype=np.int32)
        characters, takes_part = self._column("characters")[order], self._column("compared")[order]
        quality = self._column("quality")[order] if self.scored else None
        sources = list(self.numbers)
        return Index(names, num_documents, exact, characters, source, sources, quality, takes_part, row_of_place)

    def _column(self, name: str) -> np.ndarray:
        with self.columns[name] as records:
            return records.range(0, records.num_values)


def digest(folded: str) -> bytes:
    """What exact duplicates share: 128 bits of the folded text (BLAKE2b, RFC 7693)."""
    return hashlib.blake2b(folded.encode(), digest_size=16).digest()


def first_of_equal(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """For each row the smallest row with the same value of 128 bits (int32)."""
    first = np.arange(len(high), dtype=np.int32)
    order = np.argsort(high).astype(np.int32)
    ordered = high[order]
    same = np.concatenate([[False], ordered[1:] == ordered[:-1]]) if len(order) else np.zeros(0, dtype=bool)
    rows = order[same | np.append(same[1:], False)]  # only what shares its upper half needs a closer look
    rows = rows[np.lexsort((rows, low[rows], high[rows]))]
    if len(rows):
        new = np.concatenate([[True], (high[rows[1:]] != high[rows[:-1]]) | (low[rows[1:]] != low[rows[:-1]])])
        starts = np.flatnonzero(new)
        first[rows] = np.repeat(rows[starts], np.diff(np.append(starts, len(rows))))
    return first


def _order(halves: np.ndarray) -> np.ndarray:
    """The order of values of 128 bits; equal ones in the order in which they arrived."""
    high = halves[:, 0].astype(np.uint64)
    order = np.argsort(high).astype(np.int32)
    high = high[order]
    if (high[1:] == high[:-1]).any():
        order = np.lexsort((halves[:, 1], halves[:, 0])).astype(np.int32)
    return order
