"""Documents in, and results out: which duplicates were found, which parts were cut out of documents, and the counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from bessemer.errors import InputError
from bessemer.recipe import Dedup
from bessemer.run import STAGE_FILE, read_json

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

# gives the documents anew at every call, in the same order, as tables with those of the named columns that exist
Tables: TypeAlias = "Callable[[Sequence[str]], Iterator[pa.Table]]"
KEPT, EXACT, NEAR = 0, 1, 2
VERDICT_ARRAYS, KEEPERS = ("identities", "verdict", "keeper", "similarity"), "keepers.arrow"

HISTOGRAM_BINS = 40  # of the Jaccard: 0.025 each, so that the usual thresholds lie between two


@dataclass(frozen=True)
class Verdicts:
    """What became of each document that passed the rules; rows are sorted by identity: first those of this corpus, then
    those of earlier ones."""

    identities: np.ndarray  # 16-byte strings (dtype S16)
    verdict: np.ndarray  # KEPT, EXACT or NEAR
    keeper: np.ndarray  # row of the document that stays instead; its own row for one that is kept
    # Jaccard to the keeper (near duplicates; else 1), estimated, or the true one where it was verified
    similarity: np.ndarray
    num_documents: int  # rows of this corpus; keepers from this row on are of an earlier one
    keepers: (
        pa.Table
    )  # row and path of each document that others are duplicates of, by row; of earlier ones the corpus too
    statistics: dict[str, Any] = field(default_factory=dict)  # for statistics.json, as `count_verdicts` gives them

    def rows(self, identities: Sequence[str]) -> np.ndarray:
        """Rows of documents of this corpus by their identity in hexadecimal."""
        return rows_of(self.identities[: self.num_documents], identities)

    def reasons(self, rows: np.ndarray) -> Iterator[tuple[str, str]]:
        """Reason and detail of each of these rows, all of which are duplicates."""
        import numpy as np

        keepers = self.keeper[rows]
        # Only the paths that are wanted become Python strings; the rest stays in the mapped file.
        places = np.searchsorted(self.keepers["row"].to_numpy(), keepers)
        paths = self.keepers["path"].take(places).to_pylist()
        for row, keeper, path in zip(rows.tolist(), keepers.tolist(), paths, strict=True):
            detail = f"kept instead: {identity_of(self.identities[keeper])} {path}"
            if self.verdict[row] == EXACT:
                yield "exact_duplicate", detail
                continue
            similarity, found = self.similarity[row], self.statistics
            through = ", linked through others" if similarity < found["min_jaccard"] - 1e-6 else ""
            yield "near_duplicate", f"{detail} ({found['jaccard_is']} Jaccard {similarity:.2f}{through})"

    def save(self, folder: Path) -> None:
        """Write the arrays and the keepers; the receipt of the folder has the rest."""
        import pyarrow as pa

        save_arrays(folder, self, VERDICT_ARRAYS)
        path = str(folder / KEEPERS)
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, self.keepers.schema) as writer:
            writer.write_table(self.keepers)

    @classmethod
    def load(cls, folder: Path) -> Verdicts:
        """The verdicts of a finished step, mapped into memory."""
        import pyarrow as pa

        facts = read_json(folder / STAGE_FILE)
        keepers = pa.ipc.open_file(pa.memory_map(str(folder / KEEPERS))).read_all()
        identities, verdict, keeper, similarity = load_arrays(folder, VERDICT_ARRAYS)
        return cls(identities, verdict, keeper, similarity, facts["documents"], keepers, facts["statistics"])


def save_arrays(folder: Path, value: object, names: Sequence[str]) -> None:
    """Write arrays that are attributes of a value."""
    import numpy as np

    for name in names:
        np.save(folder / f"{name}.npy", getattr(value, name))


def load_arrays(folder: Path, names: Sequence[str]) -> Iterator[np.ndarray]:
    """What `save_arrays` wrote, mapped into memory."""
    import numpy as np

    return (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)


def packed(identities: Sequence[str]) -> np.ndarray:
    """Hexadecimal identities as 16-byte strings, whose order is the same."""
    import numpy as np

    return np.frombuffer(bytes.fromhex("".join(identities)), dtype="S16")


def identity_of(name: bytes) -> str:
    """The identity in hexadecimal of a 16-byte string, of which NumPy drops the zeros at the end."""
    return name.ljust(16, b"\0").hex()


def rows_of(names: np.ndarray, identities: Sequence[str]) -> np.ndarray:
    """Places of hexadecimal identities, all of which occur, among sorted 16-byte strings."""
    import numpy as np

    rows: np.ndarray = np.searchsorted(names, packed(identities))
    return rows


def count_verdicts(
    verdict: np.ndarray, keeper: np.ndarray, similarity: np.ndarray, characters: np.ndarray, num_documents: int,
    settings: Dedup,
) -> dict[str, Any]:  # fmt: skip
    """The counts for statistics.json; arrays by row, earlier corpora's documents included.

    clusters: histogram of cluster sizes, the kept document included. jaccard:
    near duplicates by their similarity to the kept one, `estimated` from signatures or `verified` by shingles.
    min_jaccard: from which documents are near duplicates; through_others: those of the near ones that are less alike to the
    kept one (with `chains`).
    """
    import numpy as np

    removed = keeper[verdict != KEPT]
    through = (verdict == NEAR) & (similarity < settings.min_jaccard - 1e-6)
    of_each = {"exact": verdict == EXACT, "near": verdict == NEAR}
    bins = np.minimum((similarity[of_each["near"]] * HISTOGRAM_BINS + 1e-6).astype(np.int64), HISTOGRAM_BINS - 1)
    clusters = Counter((np.unique(removed, return_counts=True)[1] + 1).tolist())
    return {
        "documents": num_documents,
        "earlier_documents": len(verdict) - num_documents,
        "removed": {name: int(chosen.sum()) for name, chosen in of_each.items()},
        "through_others": int(through.sum()),
        "removed_characters": {name: int(characters[chosen].sum(dtype=np.int64)) for name, chosen in of_each.items()},
        "removed_against_earlier": int((removed >= num_documents).sum()),
        "clusters": [{"documents": size, "clusters": clusters[size]} for size in sorted(clusters)],
        "jaccard": [
            {"from": round(number / HISTOGRAM_BINS, 3), "documents": count}
            for number, count in enumerate(np.bincount(bins, minlength=HISTOGRAM_BINS).tolist())
        ],
        "jaccard_is": "verified" if settings.verify else "estimated",
        "min_jaccard": settings.min_jaccard,
    }


class Edit(NamedTuple):
    """One document that lost something."""

    row: int  # in the table that comes with it
    # characters [start, end) of the text as it was, ascending, apart from each other
    removed: tuple[tuple[int, int], ...]

    @property
    def removed_characters(self) -> int:
        """How many characters went."""
        return sum(end - start for start, end in self.removed)


@dataclass
class EditStatistics:
    """Counts over the documents that went through, for statistics.json."""

    documents: int = 0
    edited: int = 0
    emptied: int = 0  # edited, and nothing but white space is left
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

    for name, values in {"text": texts, "characters": list(map(len, texts))}.items():
        place = table.schema.get_field_index(name)
        if place >= 0:
            of = table.schema.field(place)
            table = table.set_column(place, of, pa.array(values, of.type))
    return table


def parquet_tables(paths: Sequence[Path]) -> Tables:
    """The documents of Parquet files by row group."""

    def read(columns: Sequence[str]) -> Iterator[pa.Table]:
        import pyarrow.parquet as pq

        for path in paths:
            with pq.ParquetFile(path) as file:
                wanted = [name for name in columns if name in file.schema_arrow.names]
                for number in range(file.num_row_groups):
                    yield file.read_row_group(number, columns=wanted)

    return read


def earlier_files(folder: str | Path) -> list[Path]:
    """The Parquet files of a run folder, its corpus folder, or a folder of documents. Raises InputError."""
    root = Path(folder)
    for place in (root / "corpus" / "documents", root / "documents", root):
        found = sorted(place.glob("*.parquet"))
        if found:
            return found
    raise InputError(
        f"corpus.dedup.against: {root} holds no corpus: looked for corpus/documents/*.parquet, documents/*.parquet and "
        "*.parquet below it; name a run folder whose corpus is built, or a folder of Parquet files"
    )
