"""Exact and near duplicates among documents, and which copy is kept.

Exact: equal text after folding case and white space. Near: MinHash with locality-sensitive hashing (Broder 1997, with
FineWeb's parameters). Documents that agree in a whole band share a bucket, where each is compared with its neighbours
(`buckets.REACH`) by their signatures or, with `verify`, by the Jaccard similarity of their shingles. A document goes
when it is similar to one that stays, by the rule `keep`; with `chains` one document of each connected component stays.
Independent of the order of documents. Memory and disk: docs/dedup.md.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bessemer.corpus.dedup import buckets
from bessemer.corpus.dedup.buckets import inverse_of, min_equal_places, runs
from bessemer.corpus.dedup.signatures import (
    Records,
    ShingleSets,
    Signatures,
    longest,
    num_hashes,
    shingle_set,
    signatures,
    utf8,
)  # fmt: skip
from bessemer.corpus.dedup.verdicts import (
    EXACT,
    KEPT,
    NEAR,
    Tables,
    Verdicts,
    count_verdicts,
    earlier_files,
    identity_of,
    packed,
    parquet_tables,
)  # fmt: skip
from bessemer.corpus.engine import check_stop
from bessemer.corpus.extract import fold, text_digest
from bessemer.errors import InputError
from bessemer.hashing import key_of
from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = ("identity", "exact", "characters", "signature", "source", "quality", "path")
CRAWL = re.compile(r"CC-MAIN-\d{4}-\d{2}(?!\d)")  # Common Crawl's names

PAIRS_AT_ONCE = 1 << 12  # whose similarity is computed at one time


def judge(tables: Tables, settings: Dedup, scratch: Path, sources: Sequence[str] = ()) -> Verdicts:
    """Find duplicates. Columns: identity; exact or text; characters; and where needed signature or text, source,
    quality.

    `scratch`: temporary folder for signatures; `sources`: in recipe order (keep = "first-source"). Raises InputError
    for a missing earlier corpus, a repeated identity, and keep = "quality" without scores.
    """
    earlier = {f"{folder}: ": parquet_tables(earlier_files(folder)) for folder in settings.against}
    readers = [tables, *earlier.values()]
    scratch.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            stores = None
            if settings.minhash:
                stores = stack.enter_context(closing(Signatures(scratch, settings.bands, settings.rows)))
            index = scan(readers, settings, stores, scratch)
            rank = _rank(index, settings, sources)
            num_rows = len(index.identities)
            verdict, similarity = np.zeros(num_rows, dtype=np.uint8), np.ones(num_rows, dtype=np.float32)
            keeper = np.arange(num_rows, dtype=np.int32)
            if index.equal is not None:
                keeper = _best(index.equal, [rank] if settings.keep != "longest" else [], index.num_documents)
                verdict[keeper != np.arange(num_rows)] = EXACT
                index.equal = None
            if stores is not None and num_rows:
                compared = index.compared & (verdict == KEPT)
                sets, stays = _near(index, stores, readers, compared, rank, settings, stack, scratch)
                near = np.flatnonzero(stays != np.arange(num_rows))
                verdict[near] = NEAR
                keeper = stays[keeper]  # an exact duplicate of a near duplicate points to what stays in the end
                similarity[near] = _similarity(near, keeper[near], stores, index.row_of_arrival, sets)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    verdict[index.num_documents :] = KEPT
    keeper[index.num_documents :] = np.arange(index.num_documents, num_rows)
    counts = count_verdicts(verdict, keeper, similarity, index.characters, index.num_documents, settings)
    keepers = _keepers(np.unique(keeper[verdict != KEPT]), index, {"": tables, **earlier})
    return Verdicts(index.identities, verdict, keeper, similarity, index.num_documents, keepers, counts)


def _near(
    index: Index, stores: Signatures, readers: Sequence[Tables], compared: np.ndarray, rank: np.ndarray,
    settings: Dedup, stack: ExitStack, scratch: Path,
) -> tuple[ShingleSets | None, np.ndarray]:  # fmt: skip
    """The shingle sets by which near duplicates were verified, and the row that stays in place of each row."""
    least, memory, sets = settings.min_jaccard, settings.memory_mib << 20, None
    min_equal = min_equal_places(least, stores.num_hashes, settings.verify)
    group = buckets.components(stores, None, least, min_equal, index.row_of_arrival, compared, memory)
    compared &= _grouped(group)  # only those that might be alike
    if settings.verify:
        sets = stack.enter_context(closing(ShingleSets(scratch / "shingles", len(compared))))
        _fill(sets, readers, index.row_of_arrival, compared, settings)
        if settings.chains:
            group = buckets.components(stores, sets, least, min_equal, index.row_of_arrival, compared, memory)
    keys = [rank, -index.characters]
    if settings.chains:
        return sets, _best(group, keys, index.num_documents)
    rows = np.arange(len(compared), dtype=np.int32)
    order = inverse_of(np.lexsort((rows, *reversed(keys), rows < index.num_documents)).astype(np.int32))
    return sets, buckets.keepers(
        stores, sets, least, min_equal, index.row_of_arrival, compared, order, index.num_documents, memory
    )


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
        order = [*sources, *sorted(set(index.sources) - set(sources))]
        ranks = np.array([order.index(name) for name in index.sources] or [0], dtype=np.int16)
        rank: np.ndarray = ranks[index.source]
        return rank
    return np.zeros(len(index.identities), dtype=np.int8)


def _best(group: np.ndarray, keys: list[np.ndarray], num_documents: int) -> np.ndarray:
    """For each row the one of its group that stays: one of an earlier corpus, else by the keys, then the first."""
    rows = np.flatnonzero(_grouped(group)).astype(np.int32)
    best = np.arange(len(group), dtype=np.int32)
    rows = rows[np.lexsort((rows, *[key[rows] for key in reversed(keys)], rows < num_documents, group[rows]))]
    starts, sizes = runs(group[rows])
    best[rows] = np.repeat(rows[starts], sizes)
    return best


def _grouped(group: np.ndarray) -> np.ndarray:
    """Which rows are in a group with another; `group` names each by its smallest row."""
    others = group != np.arange(len(group), dtype=group.dtype)
    grouped: np.ndarray = others.copy()
    grouped[group[others]] = True
    return grouped


def _fill(
    sets: ShingleSets, readers: Sequence[Tables], row_of_arrival: np.ndarray, wanted: np.ndarray, settings: Dedup
) -> None:
    """Read the texts of the wanted rows again and keep their shingle sets."""
    place = 0
    for table in (table for read in readers for table in read(["text"])):
        rows = row_of_arrival[place : place + table.num_rows]
        place += table.num_rows
        chosen = wanted[rows]
        data, offsets = utf8([fold(text) for text in table.filter(chosen)["text"].to_pylist()])
        buffer = np.empty(longest(offsets), dtype=np.uint64)
        for number, row in enumerate(rows[chosen].tolist()):
            sets.put(row, shingle_set(data[offsets[number] : offsets[number + 1]], settings, buffer))
        check_stop()


def _similarity(
    left: np.ndarray, right: np.ndarray, stores: Signatures, row_of_arrival: np.ndarray, sets: ShingleSets | None
) -> np.ndarray:
    """Jaccard of pairs of rows, in batches."""
    from bessemer.corpus.dedup.kernels import jaccards

    shares = np.empty(len(left), dtype=np.float32)
    arrival_of_row = inverse_of(row_of_arrival)
    for start in range(0, len(left), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        rows, pairs = np.unique(np.concatenate([left[part], right[part]]), return_inverse=True)
        half = len(pairs) // 2
        if sets is None:
            signed = stores.of(arrival_of_row[rows])
            shares[part] = (signed[pairs[:half]] == signed[pairs[half:]]).mean(axis=1)
        else:
            jaccards(*sets.of(rows), pairs[:half], pairs[half:], shares[part])
        check_stop()
    return shares


def _keepers(kept: np.ndarray, index: Index, readers: dict[str, Tables]) -> pa.Table:
    """Row and path of the documents in the rows `kept`, by row; before the path what `readers` have as key."""
    import pyarrow as pa
    import pyarrow.compute as pc

    schema = pa.schema([("row", pa.int64()), ("path", pa.large_string())])
    parts, place = [schema.empty_table()], 0
    for before, read in readers.items() if len(kept) else ():
        for table in read(["identity", "path"]):
            rows = index.row_of_arrival[place : place + table.num_rows]
            place += table.num_rows
            chosen = np.isin(rows, kept)
            paths = pa.array([""] * int(chosen.sum()), pa.large_string())
            if "path" in table.column_names:
                paths = table.filter(pa.array(chosen))["path"].combine_chunks().cast(pa.large_string())
            prefix, nothing = (pa.scalar(text, pa.large_string()) for text in (before, ""))
            columns = [pa.array(rows[chosen], pa.int64()), pc.binary_join_element_wise(prefix, paths, nothing)]
            parts.append(pa.table(columns, schema=schema))
    return pa.concat_tables(parts).sort_by("row").combine_chunks()


@dataclass
class Index:
    """Columns by row. Rows are sorted by identity; those of earlier corpora come after those of this one."""

    identities: np.ndarray  # 16-byte strings
    num_documents: int  # rows of this corpus
    equal: np.ndarray | None  # the smallest row of equal text, where that is wanted; dropped when it has been used
    characters: np.ndarray
    source: np.ndarray  # number of the source in `sources`
    sources: list[str]
    quality: np.ndarray | None
    compared: np.ndarray  # has a whole shingle
    row_of_arrival: np.ndarray  # row of each document in the order in which it arrived


TYPES = {"identity": "S16", "exact": "S16", "characters": "i4", "source": "i2", "quality": "f4", "compared": "?"}


def scan(readers: Sequence[Tables], settings: Dedup, stores: Signatures | None, scratch: Path) -> Index:
    """Read all documents once: columns, and signatures (taken over, or made from the text) into the stores. Raises
    InputError when an identity of this corpus occurs twice.

    Columns grow on disk, since lists of small arrays leave holes in memory.
    """
    numbers: dict[str, int] = {}
    places, is_scored = [0], False
    with ExitStack() as stack:
        files = {name: stack.enter_context(closing(Records(scratch / name, kind))) for name, kind in TYPES.items()}
        for read in readers:
            is_trusted = read is readers[0]
            for table in (
                _with_text(read, settings) if is_trusted else read(["identity", "text", "source", "quality", "path"])
            ):
                is_scored |= "quality" in table.column_names
                for name, values in _columns(table, is_trusted, settings, numbers, stores).items():
                    files[name].append(values)
                check_stop()
            places.append(files["identity"].num_values)

        def column(name: str) -> np.ndarray:
            return files[name].range(0, places[-1])

        names, num_documents = column("identity"), places[1]
        own = np.argsort(names[:num_documents], kind="stable")
        order = np.append(own, num_documents + np.argsort(names[num_documents:], kind="stable")).astype(np.int32)
        names = names[order]
        twice = names[1:num_documents][names[1:num_documents] == names[: max(num_documents - 1, 0)]]
        if len(twice):
            raise InputError(
                f"corpus: identity {identity_of(twice[0])} occurs twice in the corpus ({len(twice)} such); give "
                "each document an identity of its own, and no file to two sources of one name"
            )
        return Index(
            names, num_documents, first_of_equal(column("exact")[order]) if settings.exact else None,
            column("characters")[order], column("source")[order], list(numbers),
            column("quality")[order] if is_scored else None, column("compared")[order], inverse_of(order),
        )  # fmt: skip


def _with_text(tables: Tables, settings: Dedup) -> Iterator[pa.Table]:
    """The tables with the text as well, where their columns are not enough; it is costly to read."""
    for table in tables(COLUMNS):
        needed = {"exact", "characters", *(["signature"] if settings.minhash else [])}
        return tables(COLUMNS if needed <= set(table.column_names) else (*COLUMNS, "text"))
    return tables(COLUMNS)


def _columns(
    table: pa.Table, is_trusted: bool, settings: Dedup, numbers: dict[str, int], stores: Signatures | None
) -> dict[str, np.ndarray]:
    """The columns of one table; hashes and signatures that an earlier version may have made otherwise are not trusted."""
    count, there = table.num_rows, table.column_names
    texts = table["text"].to_pylist() if "text" in there else []
    folded = [fold(text) for text in texts]
    exact = table["exact"].to_pylist() if is_trusted and "exact" in there else [text_digest(text) for text in folded]
    halves = np.frombuffer(b"".join(exact), dtype="<u8").reshape(-1, 2).copy()
    names = table["source"].to_pylist() if "source" in there else [""] * count
    source = np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int16)
    salts = _salts(table, names, settings)
    halves[:, 1] ^= salts * np.uint64(0x9E3779B97F4A7C15)  # texts of two of them are then never equal
    compared = np.zeros(count, dtype=bool)
    if stores is not None:
        signed = _signatures(table, settings) if is_trusted and "signature" in there else signatures(folded, settings)
        compared = (signed != np.uint32(0xFFFFFFFF)).any(axis=1)
        stores.append(signed, salts << np.uint64(32))
    quality = table["quality"].to_numpy().astype(np.float32) if "quality" in there else np.full(count, np.nan)
    return {
        "identity": packed(table["identity"].to_pylist()),
        "exact": halves.view("S16"),
        "characters": table["characters"].to_numpy() if "characters" in there else np.array(list(map(len, texts))),
        "source": source,
        "quality": np.nan_to_num(quality, nan=-np.inf),
        "compared": compared,
    }


def _salts(table: pa.Table, sources: Sequence[str], settings: Dedup) -> np.ndarray:
    """A number below 2^32 for each document, other where they are not compared."""
    places = [""] * len(sources) if settings.within == "corpus" else sources
    if settings.within == "crawl":
        paths = table["path"].to_pylist() if "path" in table.column_names else [""] * len(sources)
        found = map(CRAWL.search, paths)
        places = [crawl[0] if crawl else source for crawl, source in zip(found, sources, strict=True)]
    numbers = {place: key_of("within", place) >> 32 if place else 0 for place in set(places)}
    return np.array([numbers[place] for place in places], dtype=np.uint64)


def _signatures(table: pa.Table, settings: Dedup) -> np.ndarray:
    flat: np.ndarray = table["signature"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return flat.astype(np.uint32).reshape(table.num_rows, num_hashes(settings))


def first_of_equal(values: np.ndarray) -> np.ndarray:
    """For each row the smallest row with the same value (int32)."""
    order = np.argsort(values, kind="stable").astype(np.int32)
    starts, sizes = runs(values[order])
    first = np.empty_like(order)
    first[order] = np.repeat(order[starts], sizes)
    return first
