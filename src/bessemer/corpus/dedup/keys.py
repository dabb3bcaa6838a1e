"""Selection of the document pairs to compare: equal texts, and texts that share a band of their MinHash signatures.

    DocumentKeys    one task per part: text hash, signature and rank by `keep` of each document
    EqualTexts      one task per range of hashes: edges from the first of equal texts to the others
    BandKeys        one task per part: band keys of the documents that are not copies
    CandidatePairs  one task per range of keys: pairs of documents in the same LSH bucket

Keys are shuffled by range, so that each task sorts an amount that fits in `memory_mib`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bessemer.common.errors import InputError
from bessemer.common.hashing import key_of
from bessemer.corpus.dedup import signatures, task
from bessemer.corpus.dedup.task import EXACT, SplitWriter, identity_of, load_array, packed, read_array, write_split
from bessemer.corpus.global_steps import AnyPart
from bessemer.recipe import Dedup
from bessemer.run_tasks.task import check_stop
from bessemer.text.normalise import fold, text_digest

STORED_COLUMNS = ("identity", "exact", "characters", "signature", "source", "quality", "path")
TEXT_COLUMNS = ("identity", "text", "source", "quality", "path")  # slow to read
CRAWL = re.compile(r"CC-MAIN-\d{4}-\d{2}(?!\d)")  # name of a Common Crawl snapshot

# Each document of an LSH bucket is compared with the first one and with up to 64 before it. This compares buckets of up
# to 65 documents in full and keeps the cost of larger ones linear.
REACH = 64
CHUNK = 1 << 16  # documents whose keys are computed at a time
HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("document", task.DOCUMENT)])
KEY = np.dtype([("key", "<u8"), ("order", "<u8"), ("document", "<u8")])
# Memory per record while a range is sorted: the record, its sort index, and copies
HASH_BYTES, KEY_BYTES = 4 * HASH.itemsize, 4 * KEY.itemsize


def num_hash_ranges(plan: task.DedupPlan) -> int:
    """Return the number of ranges that text hashes are divided into, one per `EqualTexts` task; 0 without `exact`."""
    return plan.num_ranges(HASH_BYTES) if plan.settings.exact else 0


def num_key_ranges(plan: task.DedupPlan) -> int:
    """Return the number of ranges that LSH band keys are divided into, one per `CandidatePairs` task; 0 without `minhash`."""
    return plan.num_ranges(KEY_BYTES * plan.settings.bands) if plan.settings.minhash else 0


# --- Equal texts


@dataclass(frozen=True)
class DocumentKeys(task.DedupTask):
    """A task that computes text hashes, MinHash signatures and sort keys of the documents in one part of the corpus.

    It writes `documents.npy` (records of DOCUMENT), `salts.npy` (see `_salts`), `signatures` (uint32, one row per
    document) and `hashes` (records of HASH, divided by range). Raises InputError if an identity of this corpus repeats,
    or if keep = "quality" has no scores.

    Attributes:
        part: The documents.
        step: The deduplication step, which computes the signatures that cleaning has not stored.
    """

    part: AnyPart
    step: task.AnySigned

    def make(self, folder: Path) -> dict[str, Any]:
        settings, first = self.plan.settings, self.number << 32
        documents, salts, tables = [np.zeros(0, task.DOCUMENT)], [np.zeros(0, "<u8")], list[int]()
        num_ranges = max(num_hash_ranges(self.plan), 1)
        # Another step may have other settings than those with which cleaning stored hashes and signatures.
        columns = STORED_COLUMNS if self.part.has_signatures and self.step.reads_stored else TEXT_COLUMNS
        with SplitWriter(folder / "hashes", num_ranges) as hashes, (folder / "signatures").open("wb") as signed:
            for table in self.part(columns):
                tables.append(table.num_rows)
                if not table.num_rows:
                    continue
                texts = table["text"].to_pylist() if "text" in table.column_names else []
                folded = [fold(text) for text in texts]
                entries = task.records(task.DOCUMENT, table.num_rows, name=packed(table["identity"].to_pylist()))
                entries["number"] = np.arange(first, first + table.num_rows, dtype=np.uint64)
                entries["order"] = _order(table, texts, self.part.corpus != "", self.plan)
                documents.append(entries)
                salts.append(_salts(table, settings))
                if settings.exact:
                    text_hashes = _hashes(table, folded, entries, salts[-1])
                    hashes.write(task.range_of(text_hashes["high"], num_ranges), text_hashes)
                if settings.minhash and "signature" in table.column_names:
                    signed.write(table["signature"].combine_chunks().flatten().to_numpy().tobytes())
                elif settings.minhash:
                    signed.write(self.step.sign(folded).tobytes())
                first += table.num_rows
                check_stop()
        every = np.concatenate(documents)
        if not self.part.corpus:
            _require_unique(every["name"])
        np.save(folder / "documents.npy", every)
        np.save(folder / "salts.npy", np.concatenate(salts))
        return {"tables": tables}


@dataclass(frozen=True)
class EqualTexts(task.DedupTask):
    """A task that finds equal texts and writes an edge from the document to keep to each of its copies.

    The document to keep is the one that `corpus.dedup.keep` ranks first, regardless of length. The output divides edges
    by the part of the corpus that has the copy.
    """

    def make(self, folder: Path) -> dict[str, int]:
        entries = self.gather("DocumentKeys", range(self.plan.num_parts), "hashes", HASH)
        entries = repeated_by(entries, "high")
        documents = entries["document"]
        order = documents["order"] >> task.LENGTH_BITS
        entries = entries[np.lexsort((documents["number"], documents["name"], order, entries["low"], entries["high"]))]
        starts, sizes = task.runs(entries["high"], entries["low"])
        edges = task.records(task.EDGE, len(entries), second=entries["document"], kind=EXACT, similarity=1.0)
        edges["first"] = np.repeat(entries["document"][starts], sizes)
        edges = np.delete(edges, starts)
        write_split(folder / "edges", self.plan.num_parts, task.part_of(edges["second"]["number"]), edges)
        return {}


def _order(table: pa.Table, texts: Sequence[str], is_earlier_corpus: bool, plan: task.DedupPlan) -> np.ndarray:
    """Return the uint64 sort key of each document. Of several duplicates the one with the smallest key is kept.

    Documents of earlier corpora come first, then the ranking by `corpus.dedup.keep` decides, then greater length.
    `texts` give the lengths if the table has no column `characters`.
    """
    settings, count = plan.settings, table.num_rows
    rank: np.ndarray = np.zeros(count, dtype=np.uint64)
    if settings.keep == "quality" and "quality" in table.column_names:
        worth = np.nan_to_num(table["quality"].to_numpy().astype(np.float32), nan=-np.inf)
        bits = (0 - worth).view(np.uint32)
        # Map the bits of the floats to integers of the same order.
        rank = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(np.uint64)
    elif settings.keep == "quality" and not is_earlier_corpus:
        raise InputError('corpus.dedup.keep: "quality" needs scores; set corpus.quality, or keep = "longest"')
    elif settings.keep == "first-source":
        places = {name: index for index, name in enumerate(plan.sources)}
        rank = np.array([places.get(name, len(places)) for name in _strings(table, "source")], dtype=np.uint64)
    has_lengths = "characters" in table.column_names
    characters = table["characters"].to_numpy() if has_lengths else np.array([*map(len, texts)], dtype=int)
    length = task.MAX_CHARACTERS - np.minimum(characters.astype(np.uint64), task.MAX_CHARACTERS)
    return np.asarray(np.uint64(not is_earlier_corpus) << task.IS_OWN_BIT | rank << task.LENGTH_BITS | length)


def _strings(table: pa.Table, name: str) -> list[str]:
    return table[name].to_pylist() if name in table.column_names else [""] * table.num_rows


def _salts(table: pa.Table, settings: Dedup) -> np.ndarray:
    """Return a 32-bit number per document. Only documents with equal numbers are compared, as `corpus.dedup.within` sets."""
    groups = [""] * table.num_rows if settings.within == "corpus" else _strings(table, "source")
    if settings.within == "crawl":
        crawls = map(CRAWL.search, _strings(table, "path"))
        groups = [crawl[0] if crawl else source for crawl, source in zip(crawls, groups, strict=True)]
    numbers = {name: key_of("within", name) >> 32 if name else 0 for name in set(groups)}
    return np.array([numbers[name] for name in groups], dtype=np.uint64)


def _hashes(table: pa.Table, folded: Sequence[str], documents: np.ndarray, salts: np.ndarray) -> np.ndarray:
    """Return a HASH record per document: its DOCUMENT record and the 128-bit hash of its folded text, combined with its salt.

    If `folded` is empty, the text hashes are read from the table's column `exact`.
    """
    exact = [text_digest(text) for text in folded] if folded else table["exact"].to_pylist()
    halves = np.frombuffer(b"".join(exact), dtype="<u8").reshape(-1, 2)
    low = halves[:, 1] ^ salts * np.uint64(0x9E3779B97F4A7C15)
    return task.records(HASH, len(halves), high=halves[:, 0], low=low, document=documents)


def _require_unique(names: np.ndarray) -> None:
    names = np.sort(names)
    twice = names[1:][names[1:] == names[:-1]]
    if len(twice):
        shown = f"{len(twice)} identities occur twice, for example {identity_of(twice[0])}"
        raise InputError(f"corpus: {shown}; a reader must give each document of a file another key")


def repeated_by(entries: np.ndarray, key: str) -> np.ndarray:
    """Return the records of `entries` whose value in the field `key` occurs more than once, sorted by that value.

    Most values occur once, so callers sort by further fields only the few records that remain.
    """
    by_key = np.argsort(entries[key])
    _, sizes = task.runs(entries[key][by_key])
    return entries[by_key[np.repeat(sizes > 1, sizes)]]


# --- Bands


@dataclass(frozen=True)
class BandKeys(task.DedupTask):
    """A task that computes the LSH band keys of the documents in one part of the corpus and writes them divided by key range.

    It skips copies of other documents and texts that are shorter than one shingle.
    """

    def make(self, folder: Path) -> dict[str, int]:
        settings, num_ranges = self.plan.settings, num_key_ranges(self.plan)
        before = self.result("DocumentKeys", self.number)
        documents, salts = (load_array(before / f"{name}.npy") for name in ("documents", "salts"))
        is_compared = np.ones(len(documents), dtype=bool)
        copies = self.gather("EqualTexts", range(num_hash_ranges(self.plan)), "edges", task.EDGE)
        is_compared[task.row_of(copies["second"]["number"])] = False
        width = signatures.num_hashes(settings)
        with SplitWriter(folder / "keys", num_ranges) as file, (before / "signatures").open("rb") as signed:
            for start in range(0, len(documents), CHUNK):
                some = slice(start, start + CHUNK)
                values = read_array(signed, np.uint32, len(salts[some]) * width).reshape(-1, width)
                keys = np.empty((settings.bands, len(values)), dtype=np.uint64)
                signatures.band_keys(values, settings.rows, salts[some] << np.uint64(32), keys)
                chosen = is_compared[some] & (values != signatures.NOTHING).any(axis=1)
                here = documents[some][chosen]
                for key in keys[:, chosen]:
                    entries = task.records(KEY, len(here), key=key, order=here["order"], document=here["number"])
                    file.write(task.range_of(key, num_ranges), entries)
                check_stop()
        return {}


@dataclass(frozen=True)
class CandidatePairs(task.DedupTask):
    """A task that pairs the documents of each LSH bucket: each one with the bucket's first and with up to REACH before it.

    Documents are in the order in which `corpus.dedup.keep` prefers them. Each pair is written twice, for the part of
    the corpus that has its first document and for the part that has its second. Two documents of earlier corpora form
    no pair, because neither can be rejected.
    """

    def make(self, folder: Path) -> dict[str, int]:
        entries = self.gather("BandKeys", range(self.plan.num_parts), "keys", KEY)
        entries = repeated_by(entries, "key")
        entries = entries[np.lexsort((entries["document"], entries["order"], entries["key"]))]
        starts, sizes = task.runs(entries["key"])
        index = np.arange(len(entries)) - np.repeat(starts, sizes)
        wanted, num_parts = ~task.is_earlier(entries["order"]), self.plan.num_parts
        with (
            SplitWriter(folder / "first", num_parts) as by_first,
            SplitWriter(folder / "second", num_parts) as by_second,
        ):
            for step in range(min(REACH, int(sizes.max(initial=0))) + 1):
                second = np.flatnonzero((index > step) & wanted)
                first = second - (step or index[second])
                pairs = unique_pairs(entries["document"][first], entries["document"][second])
                pairs = pairs[pairs["first"] != pairs["second"]]  # keys of two bands may be equal by chance
                by_first.write(task.part_of(pairs["first"]), pairs)
                by_second.write(task.part_of(pairs["second"]), pairs)
                check_stop()
        return {}


def unique_pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the distinct pairs (first[i], second[i]) of document numbers as sorted records of PAIR."""
    by_pair = np.lexsort((second, first))
    first, second = first[by_pair], second[by_pair]
    once = task.is_new(first, second)
    return task.records(task.PAIR, int(once.sum()), first=first[once], second=second[once])
