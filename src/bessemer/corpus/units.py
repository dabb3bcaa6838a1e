"""The work of reading, cut into units of bounded size: some files, a byte range, a Parquet row group."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bessemer.corpus import storage
from bessemer.corpus.endings import compression_of
from bessemer.corpus.files import File, access, by_format
from bessemer.corpus.inflate import MAX_EXPANSION, Damaged, Member, inflate
from bessemer.corpus.tables import MAX_RECORD_BYTES
from bessemer.errors import InputError
from bessemer.recipe import Source

UNIT_BYTES = 4 << 20
"""Small files are read together up to this size, so that a unit is worth handing over and still small in
memory."""

UNIT_FILES = 256
"""Files in a unit, at the most: a hundred thousand tiny ones still make a few hundred units."""

RANGE_BYTES = 32 << 20
"""Bytes of JSONL, of a plain WARC or of a plain dump in a unit."""

PACKED_RANGE_BYTES = 16 << 20
"""Bytes of a compressed WARC or dump in a unit; they hold four to five times as many."""

MEMBER_BYTES = 8 << 20
"""A compressed WARC or dump whose first member holds more than this was packed as a whole: unless it is as small
itself it is unpacked before it is cut."""

FULL = 0.95
"""A byte budget counts as spent at this share: filling up the rest would pick small and empty files."""


@dataclass(frozen=True)
class Piece:
    """A part of one file."""

    path: str
    name: str
    """Path of the file in the corpus."""
    start: int
    """JSONL, WARC, dumps: the first byte. Parquet: the number of the row group. Else 0."""
    end: int
    """JSONL, WARC, dumps: the byte after the last. Parquet: the number of the row group + 1. Else the size of the
    file."""
    size: int
    """Bytes to read, for the budget and the progress bar."""
    offset: int = 0
    """Added to byte offsets of records: where this file begins in the one it was expanded from."""
    damage: str = ""
    """Why this piece cannot be read, when that is known already."""
    prefix: str = ""
    """Put before the byte offsets in the keys of what was unpacked: the member's place in the packed file."""
    stamp: str = ""
    """Size and time of the file as it was listed; "" for what was unpacked from it."""


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
    anonymous: bool = False
    endpoint: str = ""
    """How an object store is reached; see storage.Access."""

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
    """The units of a source, numbered from `first`, format by format. What cannot be entered in its middle (compressed
    JSONL, large archives packed as a whole) is unpacked into `spool` on the way."""
    total, units = sum(file.size for file in files), list[Unit]()
    for kind, mine in by_format(source, files).items():
        part = source.model_copy(update={"format": kind})
        if source.max_bytes is not None and len(mine) < len(files):  # each format gives its part of the budget
            share = sum(file.size for file in mine) / max(total, 1)
            part = part.model_copy(update={"max_bytes": max(round(source.max_bytes * share), 1)})
        units += _plan(part, kind, mine, spool, first + len(units), stop)
    return units


def _plan(source: Source, kind: str, files: list[File], spool: Path, first: int, stop: threading.Event) -> list[Unit]:
    budget = source.max_bytes
    reach = access(source)
    stamps = {file.path: f"{file.size} {file.mtime_ns}" for file in files if file.mtime_ns}
    if kind in ("jsonl", "warc", "mediawiki"):
        whole = [file for file in files if _is_packed_as_a_whole(file, kind, reach)]
        rest = [file for file in files if file not in whole] if whole else files
        pieces = [piece for file in rest for piece in _ranges(file, budget)]
        if budget:
            pieces = _choose(pieces, budget)
            whole.sort(key=lambda file: _order(file.name, 0))
        room = budget - sum(piece.size for piece in pieces) if budget else None
        pieces += _expand_all(whole, kind, spool / source.name, room, stop, reach)
    else:
        if kind == "parquet":
            pieces = [piece for file in files for piece in _row_groups(file, source)]
        else:
            pieces = [Piece(file.path, file.name, 0, file.size, file.size) for file in files]
        if budget:
            pieces = _choose(pieces, budget)
    pieces = [replace(piece, stamp=stamps.get(piece.path, "")) for piece in pieces]
    pieces.sort(key=lambda piece: (piece.name, piece.offset, piece.start))
    bundles = _bundles(pieces, alone=kind in ("jsonl", "parquet", "warc", "mediawiki"))
    return [
        Unit(
            number,
            source.name,
            kind,
            source.text_key,
            tuple(bundle),
            source.label or "",
            source.label_key or "",
            source.anonymous,
            source.endpoint or "",
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
    """Byte ranges of a file; a record belongs to the range in which it begins, so none is looked for here."""
    length = PACKED_RANGE_BYTES if compression_of(file.path) else RANGE_BYTES
    if budget:  # fine enough that a small part of one huge file can be taken
        length = min(max(budget // 16, 1 << 16), length)
    for start in range(0, max(file.size, 1), length):
        end = min(start + length, file.size)
        yield Piece(file.path, file.name, start, end, end - start)


def _row_groups(file: File, source: Source) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        place = storage.open_file(file.path, access(source)) if storage.is_remote(file.path) else file.path
        with pq.ParquetFile(place) as parquet:
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


def _is_packed_as_a_whole(file: File, format: str, reach: storage.Access) -> bool:
    """Whether a file is compressed so that it cannot be read from its middle on, and too large for one unit."""
    compression = compression_of(file.path)
    if not compression or (format != "jsonl" and file.size <= MEMBER_BYTES):
        return False
    if format == "jsonl":
        return True
    length = 0
    try:
        with storage.open_file(file.path, reach) as stream:
            for block in Member(stream, 0, compression).blocks():
                length += len(block)
                if length > MEMBER_BYTES:
                    return True
    except (OSError, Damaged):
        pass  # whoever reads it says what is wrong
    return False


def _expand_all(
    files: list[File], format: str, spool: Path, room: int | None, stop: threading.Event, reach: storage.Access
) -> list[Piece]:
    """Expand compressed files one after the other until `room` bytes are reached (None: all of them)."""
    pieces: list[Piece] = []
    for number, file in enumerate(files):
        if room is not None and room <= 0:
            break
        folder = spool / f"{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        expand = _expand_lines if format == "jsonl" else _expand_archive
        for piece in expand(file, folder, room, stop, reach):
            pieces.append(piece)
            if room is not None:
                room -= piece.size
    return pieces


def _expand_lines(
    file: File, folder: Path, room: int | None, stop: threading.Event, reach: storage.Access
) -> Iterator[Piece]:
    """Stream a compressed JSONL file into plain pieces that end at line ends; the lines before a damage are kept.
    Nothing is extracted to a path it names."""
    begin = expanded = 0  # of `rest`, and of what is still to come
    damage = ""
    rest = bytearray()
    try:
        for block in _expanded(file, reach):
            expanded += len(block)
            rest += block
            cut = rest.rfind(b"\n", max(len(rest) - len(block), 0)) + 1
            if cut and len(rest) >= RANGE_BYTES:
                yield _spooled(folder, file, bytes(rest[:cut]), begin)
                del rest[:cut]
                begin += cut
            if len(rest) > MAX_RECORD_BYTES:
                damage = f"a record is longer than {MAX_RECORD_BYTES} bytes"
                break
            if stop.is_set() or (room is not None and expanded >= room):
                del rest[rest.rfind(b"\n") + 1 :]
                break
    except Damaged as error:
        damage = f"{error}, after {expanded} bytes of text"
    if damage:
        del rest[rest.rfind(b"\n") + 1 :]  # a line cut by the damage is part of it
    if rest:
        yield _spooled(folder, file, bytes(rest), begin)
    if damage:
        yield Piece(file.path, file.name, expanded, expanded, 0, offset=expanded, damage=damage)


def _expand_archive(
    file: File, folder: Path, room: int | None, stop: threading.Event, reach: storage.Access
) -> Iterator[Piece]:
    """Unpack a WARC or a dump that was packed as a whole, and cut it into ranges."""
    path = folder / "unpacked"
    size, damage = 0, ""
    try:
        with open(path, "wb") as plain:
            for block in _expanded(file, reach):
                size += plain.write(block)
                if stop.is_set() or (room is not None and size >= room):
                    break
    except Damaged as error:
        damage = f"{error}, after {size} bytes"
    for piece in _ranges(File(str(path), file.name, size, 0), room) if size else ():
        yield replace(piece, prefix="0+")
    if damage:
        yield Piece(file.path, file.name, size, size, 0, offset=size, damage=damage)


def _expanded(file: File, reach: storage.Access) -> Iterator[bytes]:
    """What a compressed file holds. Raises Damaged, after everything before the damage, for bombs, and when the
    file cannot be read."""
    expanded, allowed = 0, MAX_EXPANSION * max(file.size, 1)
    try:
        with storage.open_file(file.path, reach) as stream:
            for block in inflate(stream, compression_of(file.path)):
                expanded += len(block)
                if expanded > allowed:
                    raise Damaged(f"expands more than {MAX_EXPANSION} times")
                yield block
    except OSError as error:
        raise Damaged(error.strerror or str(error)) from None


def _spooled(folder: Path, file: File, data: bytes, offset: int) -> Piece:
    path = folder / f"{offset:016d}.jsonl"
    path.write_bytes(data)
    return Piece(str(path), file.name, 0, len(data), len(data), offset=offset)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
