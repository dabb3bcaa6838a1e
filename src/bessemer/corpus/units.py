"""The work of reading, cut into units of bounded size: some files, a byte range, a Parquet row group."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bessemer.corpus import storage
from bessemer.corpus.files import File, access, by_format
from bessemer.corpus.inflate import MAX_EXPANSION, Damaged, Member, inflate
from bessemer.corpus.record_files import HEAD_BYTES, Look, look
from bessemer.corpus.tables import MAX_RECORD_BYTES, parquet_layout
from bessemer.errors import InputError
from bessemer.recipe import Source
from bessemer.recipe.endings import compression_of, without_compression

UNIT_BYTES = 4 << 20
"""Small files are read together up to this size, so that a unit is worth handing over and still small in
memory."""

LINE_ENDINGS = (".jsonl", ".ndjson")

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
    reason: str = "bad_record"
    """The reason of document.REASONS for it."""
    layout: str = "lines"
    """How the records of a `jsonl` source lie in it: Look.layout. A piece of another layout than lines is a whole file."""
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
    encoding: str = ""
    """Of what is not UTF-8; "" for none."""
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
    total, units, looks = sum(file.size for file in files), list[Unit](), Looks(source)
    for kind, mine in by_format(source, files).items():
        part = source.model_copy(update={"format": kind})
        if source.max_bytes is not None and len(mine) < len(files):  # each format gives its part of the budget
            share = sum(file.size for file in mine) / max(total, 1)
            part = part.model_copy(update={"max_bytes": max(round(source.max_bytes * share), 1)})
        looks.kind = kind
        units += _plan(part, kind, mine, spool, first + len(units), stop, looks)
    _require_readable(source, looks, units)
    return units


def _plan(
    source: Source, kind: str, files: list[File], spool: Path, first: int, stop: threading.Event, looks: Looks
) -> list[Unit]:
    budget = source.max_bytes
    reach = access(source)
    stamps = {file.path: f"{file.size} {file.mtime_ns}" for file in files if file.mtime_ns}
    if kind in ("jsonl", "warc", "mediawiki"):
        whole = [file for file in files if _is_packed_as_a_whole(file, kind, reach)]
        rest = [file for file in files if file not in whole] if whole else files
        pieces = [piece for file in rest for piece in looks.pieces(file, budget)]
        if budget:
            pieces = _choose(pieces, budget)
            whole.sort(key=lambda file: _order(file.name, 0))
        room = budget - sum(piece.size for piece in pieces) if budget else None
        pieces += _expand_all(whole, looks, spool / source.name, room, stop, reach)
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
            source.encoding or "",
            source.endpoint or "",
        )
        for number, bundle in enumerate(bundles, start=first)
    ]


class Looks:
    """The beginnings of a source's files of records, looked at before anything is read: a file that is no JSON costs
    itself, and a text_key that none of the files knows is an error right away."""

    def __init__(self, source: Source) -> None:
        self.source, self.reach = source, access(source)
        self.kind: str | None = source.format
        """Format of the files that are planned now."""
        self.known = 0
        """Files that could hold text."""
        self.missing: list[str] = []

    def pieces(self, file: File, budget: int | None) -> Iterator[Piece]:
        """A plain file as ranges of lines, or as one piece."""
        if self.kind != "jsonl" or (storage.is_remote(file.path) and file.path.lower().endswith(LINE_ENDINGS)):
            yield from _ranges(file, budget)  # a look into each object of a store would take a request
            return
        try:
            with storage.open_file(file.path, self.reach) as stream:
                head = stream.read(HEAD_BYTES)
        except OSError:
            yield from _ranges(file, budget)  # the reader says what is wrong
            return
        seen = self.at(file, head, is_whole=len(head) >= file.size)
        if seen.reason:
            yield _unreadable(file, seen.reason, seen.detail)
        elif seen.layout in ("lines", ""):
            yield from _ranges(file, budget)
        else:
            yield Piece(file.path, file.name, 0, file.size, file.size, layout=seen.layout)

    def at(self, file: File, head: bytes, is_whole: bool) -> Look:
        """Look at one file's beginning."""
        seen = look(head, is_whole, without_compression(file.name), self.source.text_key, self.source.encoding or "")
        if seen.missing:
            self.missing.append(f"{file.name}: {seen.missing}")
        elif seen.layout:
            self.known += 1
        return seen


def _require_readable(source: Source, looks: Looks, units: list[Unit]) -> None:
    """Raise InputError when not one of the files can be read, with the first of each reason, or when the first records
    of every file lack the text."""
    pieces = [piece for unit in units for piece in unit.pieces]
    if pieces and all(_is_refused(piece) for piece in pieces):
        first = {piece.reason: piece for piece in reversed(pieces)}
        told = "; ".join(f"{piece.name}: {piece.damage}" for piece in sorted(first.values(), key=lambda one: one.name))
        what = f"none of its {len(pieces)} files can be read" if len(pieces) > 1 else "its file cannot be read"
        raise InputError(f"corpus.sources.{source.name}: {what}: {told}{_by_set(source, told)}")
    others = any(not _is_refused(piece) for unit in units if unit.format != "jsonl" for piece in unit.pieces)
    if looks.missing and not looks.known and not others:
        more = f" (and {len(looks.missing) - 1} more files)" if len(looks.missing) > 1 else ""
        raise InputError(f"corpus.sources.{source.name}: {looks.missing[0]}{more}{_by_set(source, looks.missing[0])}")


def _by_set(source: Source, told: str) -> str:
    """How to follow a hint on the command line: there may be no recipe file."""
    return f"; or --set corpus.sources.{source.name}.text_key=NAME" if "set text_key" in told else ""


def _is_refused(piece: Piece) -> bool:
    return bool(piece.damage) and piece.reason != "bad_record"


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
    try:
        with storage.open_file(file.path, access(source)) as stream:
            head = stream.read(HEAD_BYTES)
            stream.seek(0)
            place = stream if storage.is_remote(file.path) else file.path
            sizes, reason, detail = parquet_layout(place, head, source.text_key, source.label_key or "")
    except OSError as error:
        sizes, reason, detail = [], "unreadable", error.strerror or str(error)
    if reason:
        yield _unreadable(file, reason, detail)
    for number, size in enumerate(sizes):
        yield Piece(file.path, file.name, number, number + 1, size)


def _unreadable(file: File, reason: str, detail: str) -> Piece:
    return Piece(file.path, file.name, 0, 0, file.size, damage=detail, reason=reason)


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
    files: list[File], looks: Looks, spool: Path, room: int | None, stop: threading.Event, reach: storage.Access
) -> list[Piece]:
    """Expand compressed files one after the other until `room` bytes are reached (None: all of them)."""
    pieces: list[Piece] = []
    for number, file in enumerate(files):
        if room is not None and room <= 0:
            break
        folder = spool / f"{number:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        for piece in _expand(file, looks, folder, room, stop, reach):
            pieces.append(piece)
            if room is not None:
                room -= piece.size
    return pieces


def _expand(
    file: File, looks: Looks, folder: Path, room: int | None, stop: threading.Event, reach: storage.Access
) -> Iterator[Piece]:
    """Unpack one file as its beginning asks for."""
    if looks.kind != "jsonl":
        yield from _expand_archive(file, folder, room, stop, _expanded(file, reach))
        return
    first, length, damage = list[bytes](), 0, ""
    blocks = _expanded(file, reach)
    try:
        for block in blocks:
            first.append(block)
            length += len(block)
            if length >= HEAD_BYTES:
                break
    except Damaged as error:
        damage = str(error)
    seen = looks.at(file, b"".join(first)[:HEAD_BYTES], is_whole=length < HEAD_BYTES)
    if seen.reason:
        yield _unreadable(file, seen.reason, seen.detail)
        return
    all_of_it = _then_damage(first, blocks, damage)
    if seen.layout in ("lines", ""):
        yield from _expand_lines(file, folder, room, stop, all_of_it)
        return
    for piece in _expand_archive(file, folder, None, stop, all_of_it):
        if piece.damage:
            yield piece
        elif not piece.start:
            size = Path(piece.path).stat().st_size
            yield replace(piece, end=size, size=size, prefix="", layout=seen.layout)


def _then_damage(first: list[bytes], blocks: Iterator[bytes], damage: str) -> Iterator[bytes]:
    """What was decoded already and what follows; or the damage that ended it."""
    yield from first
    if damage:
        raise Damaged(damage)
    yield from blocks


def _expand_lines(
    file: File, folder: Path, room: int | None, stop: threading.Event, blocks: Iterator[bytes]
) -> Iterator[Piece]:
    """Stream a compressed JSONL file into plain pieces that end at line ends; the lines before a damage are kept.
    Nothing is extracted to a path it names."""
    begin = expanded = 0  # of `rest`, and of what is still to come
    damage = ""
    rest = bytearray()
    try:
        for block in blocks:
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
    file: File, folder: Path, room: int | None, stop: threading.Event, blocks: Iterator[bytes]
) -> Iterator[Piece]:
    """Unpack a WARC or a dump that was packed as a whole, and cut it into ranges."""
    path = folder / "unpacked"
    size, damage = 0, ""
    try:
        with open(path, "wb") as plain:
            for block in blocks:
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
