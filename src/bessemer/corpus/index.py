"""Where each document and each reject lies in the published Parquet files: found by identity, without a scan.

index/documents-SOURCE.idx, index/rejected-SOURCE.idx: 8 bytes magic "BSMRDOC1", then 28 bytes for each row in
the order of the identities: 16 bytes identity, and little-endian uint32 part, row group, row in the row group.
A look-up is a binary search in the mapped file (24 steps for 10 million documents) and one row group read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError

MAGIC = b"BSMRDOC1"
RECORD = struct.Struct("<16sIII")
KINDS = ("documents", "rejected")


@dataclass(frozen=True)
class Place:
    """A row of the published corpus."""

    kind: str
    """documents or rejected."""
    source: str
    part: int
    row_group: int
    row: int


def index_file(corpus: Path, kind: str, source: str) -> Path:
    """The index of one source's documents or rejects."""
    return corpus / "index" / f"{kind}-{source}.idx"


def records(identities: list[str], parts: list[tuple[int, int]]) -> bytes:
    """Index records of rows in their order. parts: (part, rows) of each row group, in the order of the rows."""
    made = bytearray()
    names = iter(identities)
    number_of: dict[int, int] = {}
    for part, num_rows in parts:
        group = number_of.get(part, 0)
        number_of[part] = group + 1
        for row in range(num_rows):
            made += RECORD.pack(bytes.fromhex(next(names)), part, group, row)
    return bytes(made)


def shifted(raw: bytes, first_part: int) -> bytes:
    """Index records with their part numbers raised: buckets count their parts from 0, the corpus over all of them."""
    import numpy as np

    if not raw or not first_part:
        return raw
    rows = np.frombuffer(raw, dtype=np.uint8).reshape(-1, RECORD.size).copy()
    parts = rows[:, 16:20].copy().view("<u4") + np.uint32(first_part)
    rows[:, 16:20] = parts.view(np.uint8)
    return rows.tobytes()


def find(corpus: Path, identity: str) -> Place | None:
    """Where a document or a reject lies; None when the corpus has none of this identity.

    Raises BessemerError for an index that is damaged.
    """
    wanted = bytes.fromhex(identity)
    for kind in KINDS:
        for path in sorted((corpus / "index").glob(f"{kind}-*.idx")):
            found = _search(path, wanted)
            if found is not None:
                return Place(kind, path.stem.partition("-")[2], *found)
    return None


def _search(path: Path, wanted: bytes) -> tuple[int, int, int] | None:
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC or (path.stat().st_size - len(MAGIC)) % RECORD.size:
            raise BessemerError(f"{path}: not a document index; build the corpus again")
        low, high = 0, (path.stat().st_size - len(MAGIC)) // RECORD.size
        if not high:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            while low < high:
                middle = (low + high) // 2
                name, *place = RECORD.unpack_from(mapped, len(MAGIC) + middle * RECORD.size)
                if name == wanted:
                    return place[0], place[1], place[2]
                if name < wanted:
                    low = middle + 1
                else:
                    high = middle
    return None


def look_up(corpus: Path, identities: Iterable[str], columns: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Columns of the rows with these identities, and {kind, part, row_group, row}; only their row groups are read.

    An identity that the corpus does not have is left out.
    """
    import pyarrow.parquet as pq

    places: dict[tuple[str, int], dict[str, Place]] = {}
    for identity in dict.fromkeys(identities):
        place = find(corpus, identity)
        if place is not None:
            places.setdefault((place.kind, place.part), {})[identity] = place
    found: dict[str, dict[str, Any]] = {}
    for (kind, part), rows in sorted(places.items()):
        path = corpus / kind / f"part-{part:05d}.parquet"
        with pq.ParquetFile(path) as file:
            wanted = [name for name in columns if name in file.schema_arrow.names]
            for group in sorted({place.row_group for place in rows.values()}):
                table = file.read_row_group(group, columns=["identity", *wanted])
                for identity, place in rows.items():
                    if place.row_group != group:
                        continue
                    values = table.slice(place.row, 1).to_pylist()
                    if not values or values[0]["identity"] != identity:
                        raise BessemerError(f"{path}: not what the index says; build the corpus again")
                    where = {"kind": kind, "part": part, "row_group": group, "row": place.row}
                    found[identity] = {**values[0], **where}
    return found
