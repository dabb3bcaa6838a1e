"""Documents in, and results out: which duplicates were found, which parts were cut out of documents, and the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from bessemer.errors import InputError
from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

Tables: TypeAlias = "Callable[[Sequence[str]], Iterator[pa.Table]]"
"""Gives the documents anew at every call, in the same order, as tables with those of the named columns that exist."""

KEPT, EXACT, NEAR = 0, 1, 2

HISTOGRAM_BINS = 40
"""Bins of the Jaccard histogram: 0.025 each, so that the usual thresholds lie between two."""


@dataclass(frozen=True)
class DedupStatistics:
    """Counts over all documents that were compared; those of earlier corpora are counted apart."""

    documents: int = 0
    earlier_documents: int = 0
    removed: dict[str, int] = field(default_factory=dict)
    """Documents removed, by method (exact, near)."""
    removed_characters: dict[str, int] = field(default_factory=dict)
    """Characters in them."""
    removed_against: int = 0
    """Of these, duplicates of an earlier corpus."""
    clusters: dict[int, int] = field(default_factory=dict)
    """How many groups of so many documents (the one that stays included) share one text, exactly or nearly."""
    jaccard: list[int] = field(default_factory=lambda: [0] * HISTOGRAM_BINS)
    """Near duplicates by their similarity to what stays: bin i holds 0.025 i to 0.025 (i + 1)."""
    jaccard_is: str = "estimated"
    """estimated (from signatures) or verified (from the texts' shingles)."""
    min_jaccard: float = 0.0
    """From which Jaccard on documents were linked; a removed one may be linked to what stays through others."""

    def to_json(self) -> dict[str, Any]:
        """For statistics.json."""
        return {
            "documents": self.documents,
            "earlier_documents": self.earlier_documents,
            "removed": self.removed,
            "removed_characters": self.removed_characters,
            "removed_against_earlier": self.removed_against,
            "clusters": [{"documents": size, "clusters": self.clusters[size]} for size in sorted(self.clusters)],
            "jaccard": [
                {"from": round(number / HISTOGRAM_BINS, 3), "documents": count}
                for number, count in enumerate(self.jaccard)
            ],
            "jaccard_is": self.jaccard_is,
            "min_jaccard": self.min_jaccard,
        }


@dataclass(frozen=True)
class Verdicts:
    """What became of each document that passed the rules; rows are sorted by identity."""

    identities: np.ndarray
    """16-byte strings (dtype S16): first those of this corpus, sorted; behind them, sorted, those of earlier ones."""
    verdict: np.ndarray
    """KEPT, EXACT or NEAR."""
    keeper: np.ndarray
    """Row of the document that stays instead; its own row for one that is kept."""
    similarity: np.ndarray
    """Jaccard to the keeper (near duplicates; else 1), estimated, or the true one where it was verified."""
    num_documents: int
    """Rows of this corpus; keepers from this row on are of an earlier one."""
    earlier: dict[int, str] = field(default_factory=dict)
    """Corpus and path of the keepers of earlier corpora, by row."""
    statistics: DedupStatistics = field(default_factory=DedupStatistics)

    def rows(self, identities: Sequence[str]) -> np.ndarray:
        """Rows of documents of this corpus by their identity in hexadecimal."""
        import numpy as np

        rows: np.ndarray = np.searchsorted(self.identities[: self.num_documents], packed(identities))
        return rows


def packed(identities: Sequence[str]) -> np.ndarray:
    """Hexadecimal identities as 16-byte strings, whose order is the same."""
    import numpy as np

    return np.frombuffer(bytes.fromhex("".join(identities)), dtype="S16")


def identity_of(name: bytes) -> str:
    """The identity in hexadecimal of a 16-byte string, of which NumPy drops the zeros at the end."""
    return name.ljust(16, b"\0").hex()


def statistics(
    verdict: np.ndarray,
    keeper: np.ndarray,
    similarity: np.ndarray,
    characters: np.ndarray,
    num_documents: int,
    settings: Dedup,
) -> DedupStatistics:
    """Count; the first four by row, earlier corpora's documents included."""
    import numpy as np

    removed = np.flatnonzero(verdict != KEPT)
    near = np.flatnonzero(verdict == NEAR)
    of_each = {"exact": verdict == EXACT, "near": verdict == NEAR}
    bins = np.minimum((similarity[near] * HISTOGRAM_BINS + 1e-6).astype(np.int64), HISTOGRAM_BINS - 1)
    _, others = np.unique(keeper[removed], return_counts=True)
    return DedupStatistics(
        documents=num_documents,
        earlier_documents=len(verdict) - num_documents,
        removed={name: int(chosen.sum()) for name, chosen in of_each.items()},
        removed_characters={name: int(characters[chosen].sum(dtype=np.int64)) for name, chosen in of_each.items()},
        removed_against=int((keeper[removed] >= num_documents).sum()),
        clusters=dict(Counter((others + 1).tolist())),
        jaccard=np.bincount(bins, minlength=HISTOGRAM_BINS).tolist(),
        jaccard_is="verified" if settings.verify else "estimated",
        min_jaccard=settings.min_jaccard,
    )


@dataclass(frozen=True)
class Edit:
    """One document that lost something."""

    row: int
    """Its row in the table that comes with it."""
    removed: tuple[tuple[int, int], ...]
    """Characters [start, end) of the text as it was, ascending, apart from each other."""

    @property
    def removed_characters(self) -> int:
        """How many characters went."""
        return sum(end - start for start, end in self.removed)


@dataclass
class EditStatistics:
    """Counts over the documents that went through."""

    documents: int = 0
    edited: int = 0
    emptied: int = 0
    """Edited documents of which nothing but white space is left."""
    spans: int = 0
    removed_characters: int = 0

    def add(self, table: pa.Table, edits: Sequence[Edit]) -> None:
        """Count one table, after its edits."""
        self.documents += table.num_rows
        self.edited += len(edits)
        for edit in edits:
            self.spans += len(edit.removed)
            self.removed_characters += edit.removed_characters
            self.emptied += not table["text"][edit.row].as_py().strip()

    def to_json(self) -> dict[str, Any]:
        """For statistics.json."""
        return dict(vars(self))


def without(text: str, spans: Sequence[tuple[int, int]], mask: str = "") -> str:
    """The text with `mask` in place of the characters [start, end) of each span; spans ascend."""
    pieces, place = [], 0
    for start, end in spans:
        pieces += [text[place:start], mask]
        place = end
    return "".join([*pieces, text[place:]])


def with_texts(table: pa.Table, texts: list[str]) -> pa.Table:
    """The table with other texts, and their lengths where it has a column of them."""
    import pyarrow as pa

    columns: dict[str, Any] = {"text": pa.array(texts, table.schema.field("text").type)}
    if "characters" in table.column_names:
        columns["characters"] = pa.array([len(text) for text in texts], table.schema.field("characters").type)
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), table.schema.field(name), values)
    return table


def parquet_tables(paths: Sequence[Path]) -> Tables:
    """The documents of Parquet files by row group, without rows that have a `reason` (rejected) or `counted`
    (receipts). A missing `source` column is taken from a folder named source=NAME."""

    def read(columns: Sequence[str]) -> Iterator[pa.Table]:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        for path in paths:
            named = next((part.removeprefix("source=") for part in path.parts if part.startswith("source=")), None)
            with pq.ParquetFile(path) as file:
                there = set(file.schema_arrow.names)
                marks = [name for name in ("reason", "counted") if name in there]
                wanted = [name for name in columns if name in there]
                for number in range(file.num_row_groups):
                    table = file.read_row_group(number, columns=[*wanted, *(set(marks) - set(wanted))])
                    for name in marks:
                        table = table.filter(pc.is_null(table[name]))
                    if "source" in columns and "source" not in there and named is not None:
                        table = table.append_column("source", pa.array([named] * table.num_rows, pa.string()))
                    if table.num_rows:
                        yield table

    return read


def earlier_files(folder: str | Path) -> list[Path]:
    """The Parquet files of an earlier corpus: a run folder, its corpus folder, or a folder of documents. Raises
    InputError."""
    root = Path(folder)
    for place in (root / "corpus" / "documents", root / "documents", root):
        found = sorted(place.glob("*.parquet"))
        if found:
            return found
    raise InputError(
        f"corpus.dedup.against: {root} holds no corpus: looked for corpus/documents/*.parquet, documents/*.parquet and "
        "*.parquet below it; name a run folder whose corpus is built, or a folder of Parquet files"
    )
