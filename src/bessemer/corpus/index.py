"""Index of the published corpus: the place of each document and reject by identity.

index/{documents,rejected}-SOURCE.idx: 8 bytes magic "BSMRDOC1", then 28-byte rows sorted by identity: 16 bytes
identity, little-endian uint32 part, row group, row. A look-up is a binary search in the file and one row group read.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from bessemer.errors import BessemerError
from bessemer.run import RunFolder, verify_stage
from bessemer.store_path import open_parquet, stage_files

MAGIC = b"BSMRDOC1"
RECORD = struct.Struct("<16sIII")
KINDS = ("documents", "rejected")


@dataclass(frozen=True)
class IndexEntry:
    """A row of the published corpus."""

    kind: str  # documents or rejected
    source: str
    part: int
    row_group: int
    row: int


def index_file(corpus: Path, kind: str, source: str) -> Path:
    """The index of one source's documents or rejects."""
    return corpus / "index" / f"{kind}-{source}.idx"


def records(identities: list[str], groups: list[tuple[int, int]]) -> bytes:
    """Index records of rows in their order; groups: (part, rows) of each row group, in the order of the rows."""
    packed = bytearray()
    names, next_group = iter(identities), Counter[int]()
    for part, num_rows in groups:
        for row in range(num_rows):
            packed += RECORD.pack(bytes.fromhex(next(names)), part, next_group[part], row)
        next_group[part] += 1
    return bytes(packed)


def shifted(raw: bytes, first_part: int) -> bytes:
    """Index records with `first_part` added to their part numbers: each bucket numbers its parts from 0."""
    rows = np.frombuffer(raw, dtype=[("identity", "V16"), ("part", "<u4"), ("rest", "V8")]).copy()
    rows["part"] += np.uint32(first_part)
    return rows.tobytes()


def find(corpus: Path, identity: str) -> IndexEntry | None:
    """The row of a document or reject; None for an unknown identity. Raises BessemerError for a damaged index."""
    return _find(stage_files(corpus, "index"), identity)


def identities_of(corpus: Path, name: str) -> list[str]:
    """The identities of documents and rejects with this URL, or this path in the corpus or on the disk, by a scan of one
    column. A path that is equal to the name comes before those that end as it does."""
    is_url, equal, alike = name.startswith(("http://", "https://")), list[str](), list[str]()
    key, shared = ("url", name) if is_url else ("path", Path(name).name)
    for part in chain.from_iterable(stage_files(corpus, kind) for kind in KINDS):
        with open_parquet(part, _builder(corpus)) as file:
            for batch in file.iter_batches(columns=["identity", key]) if key in file.schema_arrow.names else ():
                for row in batch.filter(pc.ends_with(batch[key], shared)).to_pylist():
                    if row[key] == name:
                        equal.append(row["identity"])
                    elif not is_url and (f"/{name}".endswith(f"/{row[key]}") or row[key].endswith(f"/{name}")):
                        alike.append(row["identity"])
    return equal or alike


def _find(files: Sequence[Path], identity: str) -> IndexEntry | None:
    """files: of the index, sorted."""
    for path in files:
        kind, _, source = path.stem.partition("-")
        place = _search(path, bytes.fromhex(identity)) if kind in KINDS else None
        if place is not None:
            return IndexEntry(kind, source, *place)
    return None


def _search(path: Path, identity: bytes) -> tuple[int, int, int] | None:
    with path.open("rb") as file:
        num_rows, rest = divmod(path.stat().st_size - len(MAGIC), RECORD.size)
        if file.read(len(MAGIC)) != MAGIC or rest:
            raise BessemerError(f"{path}: not a document index; build the corpus again")
        if not num_rows:
            return None

        def row(number: int) -> tuple[bytes, int, int, int]:
            file.seek(len(MAGIC) + number * RECORD.size)
            return RECORD.unpack_from(file.read(RECORD.size))

        number = bisect_left(range(num_rows), identity, key=lambda number: row(number)[0])
        name, *place = row(number) if number < num_rows else (b"", 0, 0, 0)
        return (place[0], place[1], place[2]) if name == identity else None


def _builder(corpus: Path) -> str:
    """The command that builds a corpus."""
    return RunFolder(corpus.parent).command("corpus") if corpus.name == "corpus" else "bessemer corpus RECIPE"


def look_up(corpus: Path, identities: Iterable[str], columns: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Columns of the rows with these identities, and {kind, part, row_group, row}; unknown identities are left out.

    The index is verified where it is small or lacks an identity. Raises DamagedFile.
    """
    command = _builder(corpus)
    groups: dict[tuple[str, int, int], dict[str, int]] = {}
    files, wanted = stage_files(corpus, "index"), set(identities)
    entries = {identity: entry for identity in wanted if (entry := _find(files, identity)) is not None}
    if len(entries) < len(wanted) or sum(path.stat().st_size for path in files) < 64 << 20:  # 40 ms
        verify_stage(corpus, command, lambda name: name.startswith("index/"))
    for identity, entry in entries.items():
        groups.setdefault((entry.kind, entry.part, entry.row_group), {})[identity] = entry.row
    result: dict[str, dict[str, Any]] = {}
    for (kind, part, group), rows in sorted(groups.items()):
        path = corpus / kind / f"part-{part:05d}.parquet"
        with open_parquet(path, command) as file:
            present = [name for name in columns if name in file.schema_arrow.names]
            table = file.read_row_group(group, columns=["identity", *present])
        for identity, row in rows.items():
            values = table.slice(row, 1).to_pylist()
            if not values or values[0]["identity"] != identity:
                raise BessemerError(f"{path}: does not match the index; build the corpus again")
            result[identity] = {**values[0], "kind": kind, "part": part, "row_group": group, "row": row}
    return result
