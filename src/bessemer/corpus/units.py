"""The work of reading, cut into units of bounded size: some files, a byte range, a Parquet row group."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bessemer.corpus import storage
from bessemer.corpus.files import File, access, by_format
from bessemer.corpus.inflate import MAX_EXPANSION, CompressedMember, Damaged, inflate
from bessemer.corpus.record_files import HEAD_BYTES, look
from bessemer.corpus.tables import parquet_layout
from bessemer.errors import InputError
from bessemer.recipe import Source
from bessemer.recipe.endings import compression_of, without_compression

UNIT_BYTES = 4 << 20
"""Small files are read together up to this size, so that a unit is worth a hand-over and still small in memory."""

LINE_ENDINGS = (".jsonl", ".ndjson")
RANGED = ("jsonl", "warc", "mediawiki")
"""Formats of which a unit is a byte range of one file."""

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
    """How the records of a `jsonl` source lie in it (record_files.Look). A piece of another layout than lines is a
    whole file."""
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

    @staticmethod
    def from_json(values: dict[str, Any]) -> Unit:
        """The inverse of dataclasses.asdict."""
        return Unit(**{**values, "pieces": tuple(Piece(**piece) for piece in values["pieces"])})


def plan(source: Source, files: list[File], spool: Path, first: int, stop: threading.Event) -> list[Unit]:
    """The units of a source, numbered from `first`, format by format. What cannot be entered in its middle (compressed
    JSONL, large archives packed as a whole) is unpacked into `spool` on the way."""
    total, units, planner = sum(file.size for file in files), list[Unit](), _Planner(source, spool / source.name, stop)
    options: dict[str, Any] = {
        name: getattr(source, name) or "" for name in ("text_key", "label", "label_key", "encoding", "endpoint")
    }
    options["anonymous"] = source.anonymous
    for kind, mine in by_format(source, files).items():
        budget = source.max_bytes
        if budget is not None and len(mine) < len(files):  # each format contributes its part of the budget
            budget = max(round(budget * (sum(file.size for file in mine) / max(total, 1))), 1)
        for bundle in _bundles(planner.pieces(kind, mine, budget), alone=kind in (*RANGED, "parquet")):
            units.append(Unit(first + len(units), source.name, kind, pieces=tuple(bundle), **options))
    planner.require_readable(units)
    return units


@dataclass
class _Planner:
    """Cuts the files of a source into pieces, and looks at the beginnings of its files of records before anything is
    read: a file that is no JSON costs itself, and a text_key that none of the files has is an error right away."""

    source: Source
    spool: Path
    stop: threading.Event
    num_with_text: int = 0
    """Files of records that may hold text."""
    missing: list[str] = field(default_factory=list)
    """What the others hold instead."""

    def pieces(self, kind: str, files: list[File], budget: int | None) -> list[Piece]:
        """The pieces of the files of one format, in their order; of a part of them that fits the budget in bytes."""
        whole: list[File] = []
        if kind in RANGED:
            whole = [file for file in files if self._is_packed_as_a_whole(file, kind)]
            plain = [file for file in files if file not in whole] if whole else files
            pieces = [piece for file in plain for piece in self._plain(file, kind, budget)]
        elif kind == "parquet":
            pieces = [piece for file in files for piece in self._row_groups(file)]
        else:
            pieces = [Piece(file.path, file.name, 0, file.size, file.size) for file in files]
        if budget:
            pieces = _choose(pieces, budget)
            whole.sort(key=lambda file: _order(file.name, 0))
        room = budget - sum(piece.size for piece in pieces) if budget else None
        for number, file in enumerate(whole):
            if room is not None and room <= 0:
                break
            unpacked = [*self._unpacked(file, kind, self.spool / f"{number:06d}", room)]
            pieces += unpacked
            room = room - sum(piece.size for piece in unpacked) if room is not None else None
        stamps = {file.path: stamp(file.size, file.mtime_ns) for file in files if file.mtime_ns}
        pieces = [replace(piece, stamp=stamps.get(piece.path, "")) for piece in pieces]
        return sorted(pieces, key=lambda piece: (piece.name, piece.offset, piece.start))

    def _open(self, file: File) -> Any:
        return storage.open_file(file.path, access(self.source))

    def _is_packed_as_a_whole(self, file: File, kind: str) -> bool:
        """Whether a file is compressed so that it cannot be read from its middle on, and too large for one unit."""
        compression = compression_of(file.path)
        if not compression or (kind != "jsonl" and file.size <= MEMBER_BYTES):
            return False
        if kind == "jsonl":
            return True
        length = 0
        with suppress(OSError, Damaged), self._open(file) as stream:  # whoever reads it says what is wrong
            for block in CompressedMember(stream, 0, compression).blocks():
                length += len(block)
                if length > MEMBER_BYTES:
                    return True
        return False

    def _plain(self, file: File, kind: str, budget: int | None) -> Iterator[Piece]:
        """A file as byte ranges, or as one piece where it is no lines of JSON."""
        layout = ""
        # A look into each object of a store would take a request.
        if kind == "jsonl" and not (storage.is_remote(file.path) and file.path.lower().endswith(LINE_ENDINGS)):
            with suppress(OSError):  # the reader says what is wrong
                with self._open(file) as stream:
                    head = stream.read(HEAD_BYTES)
                layout, refused = self._look(file, head, is_whole=len(head) >= file.size)
                if refused is not None:
                    yield refused
                    return
        if layout in ("lines", ""):
            yield from _ranges(file, budget)
        else:
            yield Piece(file.path, file.name, 0, file.size, file.size, layout=layout)

    def _look(self, file: File, head: bytes, is_whole: bool) -> tuple[str, Piece | None]:
        """The layout of a file of records by its beginning, and the damaged piece for one that cannot be read."""
        source = self.source
        seen = look(head, is_whole, without_compression(file.name), source.text_key, source.encoding or "")
        if seen.missing:
            self.missing.append(f"{file.name}: {seen.missing}")
        elif seen.layout:
            self.num_with_text += 1
        return seen.layout, _unreadable(file, seen.reason, seen.detail) if seen.reason else None

    def _row_groups(self, file: File) -> Iterator[Piece]:
        try:
            with self._open(file) as stream:
                head = stream.read(HEAD_BYTES)
                stream.seek(0)
                place = stream if storage.is_remote(file.path) else file.path
                sizes, reason, detail = parquet_layout(place, head, self.source.text_key, self.source.label_key or "")
        except OSError as error:
            sizes, reason, detail = [], "unreadable", error.strerror or str(error)
        if reason:
            yield _unreadable(file, reason, detail)
        for number, size in enumerate(sizes):
            yield Piece(file.path, file.name, number, number + 1, size)

    def _unpacked(self, file: File, kind: str, folder: Path, room: int | None) -> Iterator[Piece]:
        """Decompress a file into `folder`, up to about `room` bytes (None: all of it), and cut it into pieces."""
        layout = ""
        if kind == "jsonl":
            head = b""
            with suppress(Damaged):
                for block in self._expanded(file):
                    head += block
                    if len(head) >= HEAD_BYTES:
                        break
            layout, refused = self._look(file, head[:HEAD_BYTES], is_whole=len(head) < HEAD_BYTES)
            if refused is not None:
                yield refused
                return
        in_lines = kind == "jsonl" and layout in ("lines", "")
        if layout not in ("lines", ""):
            room = None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "unpacked"
        size, end_of_lines, damage, ended = 0, 0, "", True
        with open(path, "wb") as plain:
            try:
                for block in self._expanded(file):
                    if (line_end := block.rfind(b"\n")) >= 0:
                        end_of_lines = size + line_end + 1
                    size += plain.write(block)
                    if self.stop.is_set() or (room is not None and size >= room):
                        ended = False
                        break
            except Damaged as error:
                damage = f"{error}, after {size} bytes" + " of text" * in_lines
            if in_lines and (damage or not ended):  # a line that was cut is no record
                plain.truncate(end_of_lines)
        length = path.stat().st_size
        if layout not in ("lines", ""):
            yield Piece(str(path), file.name, 0, length, length, layout=layout)
        elif length:
            for piece in _ranges(File(str(path), file.name, length, 0), None if in_lines else room):
                yield piece if in_lines else replace(piece, prefix="0+")
        if damage:
            yield Piece(file.path, file.name, size, size, 0, offset=size, damage=damage)

    def _expanded(self, file: File) -> Iterator[bytes]:
        """The content of a compressed file. Raises Damaged, after everything before the damage, for bombs, and when the
        file cannot be read."""
        num_bytes, allowed = 0, MAX_EXPANSION * max(file.size, 1)
        try:
            with self._open(file) as stream:
                for block in inflate(stream, compression_of(file.path)):
                    num_bytes += len(block)
                    if num_bytes > allowed:
                        raise Damaged(f"expands more than {MAX_EXPANSION} times")
                    yield block
        except OSError as error:
            raise Damaged(error.strerror or str(error)) from None

    def require_readable(self, units: list[Unit]) -> None:
        """Raise InputError when not one of the files can be read, with the first of each reason, or when the first
        records of every file lack the text."""
        pieces = [piece for unit in units for piece in unit.pieces]
        where = f"corpus.sources.{self.source.name}"
        if pieces and all(_is_refused(piece) for piece in pieces):
            first = {piece.reason: piece for piece in reversed(pieces)}
            shown = sorted(first.values(), key=lambda one: one.name)
            problem = "; ".join(f"{piece.name}: {piece.damage}" for piece in shown)
            what = f"none of its {len(pieces)} files can be read" if len(pieces) > 1 else "its file cannot be read"
            raise InputError(f"{where}: {what}: {problem}{self._by_set(problem)}")
        others = any(not _is_refused(piece) for unit in units if unit.format != "jsonl" for piece in unit.pieces)
        if self.missing and not self.num_with_text and not others:
            more = f" (and {len(self.missing) - 1} more files)" if len(self.missing) > 1 else ""
            raise InputError(f"{where}: {self.missing[0]}{more}{self._by_set(self.missing[0])}")

    def _by_set(self, problem: str) -> str:
        """How to follow a hint on the command line: there may be no recipe file."""
        name = self.source.name
        return f"; or --set corpus.sources.{name}.text_key=NAME" if "set text_key" in problem else ""


def stamp(size: int, mtime_ns: int) -> str:
    """Identifies the version of a file that was listed."""
    return f"{size} {mtime_ns}"


def _is_refused(piece: Piece) -> bool:
    return bool(piece.damage) and piece.reason != "bad_record"


def _unreadable(file: File, reason: str, detail: str) -> Piece:
    return Piece(file.path, file.name, 0, 0, file.size, damage=detail, reason=reason)


def expected_documents(unit: Unit) -> int | None:
    """How many documents a unit holds, where that is known before it is read."""
    return len(unit.pieces) if unit.format in ("text", "code", "html") else None


def _order(name: str, start: int) -> bytes:
    """A pseudo-random rank that depends on nothing but the name."""
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


def _bundles(pieces: list[Piece], alone: bool) -> list[list[Piece]]:
    bundles: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not bundles or alone or size + piece.size > UNIT_BYTES or len(bundles[-1]) == UNIT_FILES:
            bundles.append([])
            size = 0
        bundles[-1].append(piece)
        size += piece.size
    return bundles


def _ranges(file: File, budget: int | None) -> Iterator[Piece]:
    """Byte ranges of a file; a record belongs to the range in which it begins, so none is searched for here."""
    length = PACKED_RANGE_BYTES if compression_of(file.path) else RANGE_BYTES
    if budget:  # fine enough that a small part of one huge file can be taken
        length = min(max(budget // 16, 1 << 16), length)
    for start in range(0, max(file.size, 1), length):
        end = min(start + length, file.size)
        yield Piece(file.path, file.name, start, end, end - start)
