"""Which documents stand in the corpus already: exactly, or nearly; and which copy stays.

Exact: documents whose text is equal with case and white space folded.

Near: MinHash with locality-sensitive hashing (Broder 1997; the parameters are FineWeb's). Signatures are cut into
bands; documents that agree in a whole band share a bucket, where each is compared with its neighbours
(`buckets.REACH`). A link stays when the signatures agree well enough or, with `verify`, when the Jaccard of the
texts' shingles is high enough. Of each connected component one document stays, by the rule `keep`.

All of it looks at the documents alone, so that the outcome does not depend on the order in which they were read
nor on how they are spread over files. Memory and disk a document: docs/dedup.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bessemer.corpus.dedup import buckets
from bessemer.corpus.dedup.index import Index, scan
from bessemer.corpus.dedup.reading import Tables, earlier_files, parquet_tables
from bessemer.corpus.dedup.signatures import longest, shingle_set, utf8
from bessemer.corpus.dedup.stores import ShingleSets, Signatures, check_stop
from bessemer.corpus.dedup.verdicts import EXACT, KEPT, NEAR, Verdicts, statistics
from bessemer.corpus.extract import fold
from bessemer.errors import InputError
from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import pyarrow as pa

PAIRS_AT_ONCE = 1 << 12
"""Pairs whose similarity is computed at one time."""


def judge(tables: Tables, settings: Dedup, scratch: Path, sources: Sequence[str] = ()) -> Verdicts:
    """Judge documents wherever they come from: columns identity, exact or text, characters, and where needed
    signature or text, source, quality. The rest is as `find.find_duplicates` says."""
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
    """What `keep` goes by, the smaller the better; 0 for all where the length alone decides."""
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
    from bessemer.corpus.dedup.linking import estimates, jaccards

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
    """Where the keepers of earlier corpora stand."""
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
