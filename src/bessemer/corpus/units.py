"""The work of reading, cut into units of bounded size: some files, a byte range of JSONL, a Parquet row
group."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bessemer.corpus.files import File
from bessemer.errors import InputError
from bessemer.recipe import Source

UNIT_BYTES = 4 << 20
"""Small files are read together up to this size, so that a unit is worth handing over and still small in
memory."""

UNIT_FILES = 256
"""Files in a unit, at the most: a hundred thousand tiny ones still make a few hundred units."""

RANGE_BYTES = 32 << 20
"""Bytes of JSONL in a unit."""

MAX_RECORD_BYTES = 64 << 20
"""A longer record is rejected unread: no model reads one that long, and it must fit in memory."""

MAX_EXPANSION = 100
"""A compressed file may expand this many times; text reaches 3 to 10, a bomb 1000."""

FULL = 0.95
"""A byte budget counts as spent at this share: filling up the rest would pick small and empty files."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True)
class Piece:
    """A part of one file."""

    path: str
    name: str
    """Path of the file in the corpus."""
    start: int
    """JSONL: the first byte. Parquet: the number of the row group. Else 0."""
    end: int
    """JSONL: the byte after the last. Parquet: the number of the row group + 1. Else the size of the file."""
    size: int
    """Bytes to read, for the budget and the progress bar."""
    offset: int = 0
    """Added to byte offsets of records: where this file begins in the one it was expanded from."""
    damage: str = ""
    """Why this piece cannot be read, when that is known already."""


@dataclass(frozen=True)
class Unit:
    """Pieces that one call of the reader handles."""

    number: int
    source: str
    format: str
    text_key: str
    pieces: tuple[Piece, ...]
    label: str = ""
    """The class of all its documents; "" for none."""
    label_key: str = ""
    """Field or column that holds each document's class; "" for none."""

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(piece.size for piece in self.pieces)

    def to_json(self) -> str:
        """As text for a column of the engine; file names that are not UTF-8 survive as escapes."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Unit:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return Unit(**{**values, "pieces": tuple(Piece(**piece) for piece in values["pieces"])})


def plan(source: Source, files: list[File], spool: Path, first: int, stop: threading.Event) -> list[Unit]:
    """The units of a source, numbered from `first`; compressed JSONL is expanded into `spool` on the way."""
    if source.format == "jsonl":
        plain = [file for file in files if os.path.splitext(file.name)[1] not in COMPRESSIONS]
        pieces = [piece for file in plain for piece in _ranges(file, source.max_bytes)]
        packed = [file for file in files if os.path.splitext(file.name)[1] in COMPRESSIONS]
        if source.max_bytes:
            pieces = _choose(pieces, source.max_bytes)
            packed.sort(key=lambda file: _order(file.name, 0))
        room = source.max_bytes - sum(piece.size for piece in pieces) if source.max_bytes else None
        pieces += _expand_all(packed, spool / source.name, room, stop)
    else:
        if source.format == "parquet":
            pieces = [piece for file in files for piece in _row_groups(file, source)]
        else:
            pieces = [Piece(file.path, file.name, 0, file.size, file.size) for file in files]
        if source.max_bytes:
            pieces = _choose(pieces, source.max_bytes)
    pieces.sort(key=lambda piece: (piece.name, piece.offset, piece.start))
    bundles = _bundles(pieces, alone=source.format in ("jsonl", "parquet"))
    return [
        Unit(
            number,
            source.name,
            source.format,
            source.text_key,
            tuple(bundle),
            source.label or "",
            source.label_key or "",
        )
        for number, bundle in enumerate(bundles, start=first)
    ]


def expected_documents(unit: Unit) -> int | None:
    """How many documents a unit holds, where that is known before it is read."""
    if unit.format in ("text", "code", "html"):
        return len(unit.pieces)
    return None


def _order(name: str, start: int) -> bytes:
    """A pseudo-random place in line that depends on nothing but the name."""
    return hashlib.blake2b(f"{name}\0{start}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _choose(pieces: list[Piece], budget: int) -> list[Piece]:
    """Pieces in the order of their hash that fit into the budget; the first one when none does."""
    chosen: list[Piece] = []
    room = budget
    ordered = sorted(pieces, key=lambda piece: _order(piece.name, piece.start))
    for piece in ordered:
        if room <= budget * (1 - FULL):
            break
        if piece.size <= room:
            chosen.append(piece)
            room -= piece.size
    return chosen or ordered[:1]


def _bundles(pieces: Iterable[Piece], alone: bool) -> Iterator[list[Piece]]:
    bundle: list[Piece] = []
    size = 0
    for piece in pieces:
        if bundle and (alone or size + piece.size > UNIT_BYTES or len(bundle) == UNIT_FILES):
            yield bundle
            bundle, size = [], 0
        bundle.append(piece)
        size += piece.size
    if bundle:
        yield bundle


def _ranges(file: File, budget: int | None) -> Iterator[Piece]:
    """Byte ranges of a JSONL file; a line belongs to the range in which it begins, so no line is looked for
    here."""
    length = RANGE_BYTES
    if budget:  # fine enough that a small part of one huge file can be taken
        length = min(max(budget // 16, 1 << 16), RANGE_BYTES)
    for start in range(0, max(file.size, 1), length):
        end = min(start + length, file.size)
        yield Piece(file.path, file.name, start, end, end - start)


def _row_groups(file: File, source: Source) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as parquet:
            schema, footer = parquet.schema_arrow, parquet.metadata
            sizes = [footer.row_group(number).total_byte_size for number in range(footer.num_row_groups)]
    except (OSError, pa.ArrowException) as error:
        yield Piece(file.path, file.name, 0, 0, file.size, damage=f"not a Parquet file: {_first_line(error)}")
        return
    where = f"corpus.sources.{source.name}: {file.path}"
    for name, key in (("text_key", source.text_key), ("label_key", source.label_key or source.text_key)):
        if key not in schema.names:
            raise InputError(
                f"{where}: no column {key!r}; the columns are: {', '.join(schema.names)}; set {name} to one of them"
            )
    kind = schema.field(source.text_key).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not any(
        test(kind)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
        )
    ):
        raise InputError(
            f"{where}: column {source.text_key!r} holds {kind}, not text; set text_key to a column of strings"
        )
    for number, size in enumerate(sizes):
        yield Piece(file.path, file.name, number, number + 1, size)


def _expand_all(files: list[File], spool: Path, room: int | None, stop: threading.Event) -> list[Piece]:
    """Expand compressed JSONL one file after the other until `room` bytes are reached (None: all of it)."""
    pieces: list[Piece] = []
    for number, file in enumerate(files):
        if room is not None and room <= 0:
            break
        for piece in _expand(file, spool / f"{number:06d}", room, stop):
            pieces.append(piece)
            if room is not None:
                room -= piece.size
    return pieces


def _expand(file: File, folder: Path, room: int | None, stop: threading.Event) -> Iterator[Piece]:
    """Stream a compressed JSONL file into plain pieces that end at line ends. Nothing is extracted to a path
    it names."""
    import pyarrow as pa

    folder.mkdir(parents=True)
    expanded = 0
    allowed = MAX_EXPANSION * max(file.size, 1)
    damage = ""
    try:
        with pa.input_stream(file.path, compression=COMPRESSIONS[os.path.splitext(file.name)[1]]) as stream:
            rest = b""
            while not stop.is_set():
                block = stream.read(min(RANGE_BYTES, allowed - expanded + 1))
                if expanded + len(block) > allowed:
                    damage = f"expands more than {MAX_EXPANSION} times"
                    break
                if not block:
                    if rest:
                        yield _spooled(folder, file, rest, expanded - len(rest))
                    return
                expanded += len(block)
                cut = block.rfind(b"\n") + 1
                if cut:
                    yield _spooled(folder, file, rest + block[:cut], expanded - len(block) - len(rest))
                    rest = block[cut:]
                    if room is not None and expanded >= room:
                        return
                elif len(rest) > MAX_RECORD_BYTES:
                    damage = f"a record is longer than {MAX_RECORD_BYTES} bytes"
                    break
                else:
                    rest += block
    except FileNotFoundError as error:
        damage = error.strerror or "vanished"
    except (OSError, pa.ArrowException) as error:
        damage = f"cannot be expanded: {_first_line(error)}"
    yield Piece(file.path, file.name, expanded, expanded, 0, damage=damage)


def _spooled(folder: Path, file: File, data: bytes, offset: int) -> Piece:
    path = folder / f"{offset:016d}.jsonl"
    path.write_bytes(data)
    return Piece(str(path), file.name, 0, len(data), len(data), offset=offset)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
