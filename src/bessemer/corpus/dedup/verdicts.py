"""Documents in, and results out: which duplicates were found, which parts were cut out of documents, and the counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from bessemer.corpus.dedup.exchange import read_split
from bessemer.recipe import Dedup
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import open_parquet
from bessemer.text.normalise import normalise_foreign

EXACT, NEAR = 1, 2
VERDICTS, PATHS = "verdicts", "paths"  # files of NameKeepers (keepers.py), cut by part: VERDICT and UTF-8
VERDICT = [("row", "<u4"), ("kind", "u1"), ("similarity", "<f4"), ("keeper", "S16"), ("path_bytes", "<i8")]

HISTOGRAM_BINS = 40  # of the Jaccard: 0.025 each, so that the usual thresholds lie between two


@dataclass(frozen=True)
class PartVerdicts:
    """The documents of one part that are duplicates, by row, and what stays in their place."""

    found: np.ndarray  # VERDICT, sorted by row; keeper: the identity of what stays
    paths: list[str]  # of what stays; of an earlier corpus that comes first
    settings: Dedup

    def stays(self, num_rows: int) -> np.ndarray:
        """Which of so many rows are no duplicates."""
        stays = np.ones(num_rows, dtype=bool)
        stays[self.found["row"]] = False
        return stays

    def reasons(self) -> dict[int, tuple[str, str]]:
        """Reason and detail of each row that goes."""
        made = "verified" if self.settings.verify else "estimated"
        reasons = {}
        for (row, kind, similarity, keeper, _), path in zip(self.found.tolist(), self.paths, strict=True):
            detail = f"kept instead: {identity_of(keeper)} {path}"
            if kind == NEAR:
                detail += f" ({made} Jaccard {similarity:.2f})"
            reasons[row] = "near_duplicate" if kind == NEAR else "exact_duplicate", detail
        return reasons


@dataclass(frozen=True)
class DuplicateVerdicts:
    """The result of the search for duplicates, table by table of all parts of this corpus."""

    step: AnyPath  # folder of the tasks `NameKeepers`
    num_parts: int
    settings: Dedup
    spans: Sequence[tuple[int, int, int]]  # part, first row and end of each table

    def __call__(self, number: int) -> PartVerdicts:
        """The verdicts on a table, by its rows."""
        part, first, end = self.spans[number]
        folders = [self.step / f"{number:06d}" for number in range(self.num_parts)]
        found = read_split((folder / VERDICTS for folder in folders), part, VERDICT)
        text = read_split((folder / PATHS for folder in folders), part, np.uint8).tobytes()
        ends = np.cumsum(found["path_bytes"]).tolist()
        paths = [text[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
        order = np.argsort(found["row"])
        order = order[slice(*found["row"][order].searchsorted((first, end)).tolist())]
        found = found[order]
        found["row"] -= first
        return PartVerdicts(found, [paths[place] for place in order.tolist()], self.settings)


def packed(identities: Sequence[str]) -> np.ndarray:
    """Hexadecimal identities as 16-byte strings, whose order is the same."""
    return np.frombuffer(bytes.fromhex("".join(identities)), dtype="S16")


def identity_of(name: bytes) -> str:
    """The identity in hexadecimal of a 16-byte string, of which NumPy drops the zeros at the end."""
    return name.ljust(16, b"\0").hex()


def without(text: str, spans: Sequence[tuple[int, int]], mask: str = "") -> str:
    """The text with `mask` in place of the characters [start, end) of each span; spans ascend."""
    pieces, place = [], 0
    for start, end in spans:
        pieces += [text[place:start], mask]
        place = end
    return "".join([*pieces, text[place:]])


def with_texts(table: pa.Table, texts: list[str]) -> pa.Table:
    """The table with other texts, and their lengths where it has a column of them."""
    for name, values in {"text": texts, "characters": list(map(len, texts))}.items():
        place = table.schema.get_field_index(name)
        if place >= 0:
            of = table.schema.field(place)
            table = table.set_column(place, of, pa.array(values, of.type))
    return table


@dataclass(frozen=True)
class ParquetPart:
    """The documents of a Parquet file by row group. corpus: the earlier corpus that they are of; "" for this one."""

    path: AnyPath
    corpus: str = ""

    @property
    def size(self) -> int:
        """Documents."""
        with open_parquet(self.path, "bessemer corpus RECIPE") as file:
            return int(file.metadata.num_rows)

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Tables with those of the columns that exist. Texts of an earlier corpus, which another tool may have written, are
        normalised as those of this one."""
        with open_parquet(self.path, "bessemer corpus RECIPE") as file:
            wanted = [name for name in columns if name in file.schema_arrow.names]
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=wanted)
                if self.corpus and "text" in wanted:
                    table = with_texts(table, [normalise_foreign(text or "") for text in table["text"].to_pylist()])
                yield table
