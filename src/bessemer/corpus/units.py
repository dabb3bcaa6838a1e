"""The work of reading, cut into units of bounded size: some files, a byte range, a Parquet row group."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, TypeVar

from bessemer import storage
from bessemer.corpus.engine import STOP
from bessemer.corpus.files import File, by_format
from bessemer.corpus.inflate import MAX_EXPANSION, CompressedMember, Damaged, inflate, start_of
from bessemer.corpus.record_files import HEAD_BYTES, look
from bessemer.corpus.tables import parquet_layout
from bessemer.errors import FileChanged, InputError
from bessemer.recipe import Source
from bessemer.recipe.corpus import text_keys
from bessemer.recipe.endings import compression_of, without_compression

# small files are read together up to this size, so that a unit is worth a hand-over and still small in memory
UNIT_BYTES = 4 << 20
ARC = "an ARC file, which WARC has replaced: convert it, e.g. warcio recompress FILE.arc.gz FILE.warc.gz"
LINE_ENDINGS = (".jsonl", ".ndjson")
RANGED = ("jsonl", "warc", "mediawiki")  # formats of which a unit is a byte range of one file
UNIT_FILES = 256  # files in a unit, at the most: a hundred thousand tiny ones still make a few hundred units
RANGE_BYTES = 32 << 20  # bytes of JSONL, of a plain WARC or of a plain dump in a unit
PACKED_RANGE_BYTES = 16 << 20  # bytes of a compressed WARC or dump in a unit; they hold four to five times as many
# Of a source: where ranges of these sizes would be fewer they are shorter, down to UNIT_BYTES, so that all workers are busy to
# the end; where they would be more (two a partition) they are longer
FEW_UNITS, MANY_UNITS = 64, 800_000
# a compressed WARC or dump whose first member holds more than this was packed as a whole: unless it is as small itself
# it is unpacked before it is cut
MEMBER_BYTES = 8 << 20
FULL = 0.95  # a byte budget counts as spent at this share: filling up the rest would pick small and empty files


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one file."""

    path: str
    name: str  # path of the file in the corpus
    start: int  # JSONL, WARC, dumps: the first byte. Parquet: the number of the row group. Else 0.
    end: int  # the end of [start, end) in the same terms; the size of a whole file
    size: int  # bytes to read, for the budget and the progress bar
    damage: str = ""  # why this piece cannot be read, when that is known already
    reason: str = "bad_record"  # the reason of document.REASONS for it
    # how the records of a `jsonl` source lie in it (record_files.Look); of another layout than lines it is a whole file
    layout: str = "lines"
    # precedes the byte offsets in the keys of what was unpacked: the member's place in the packed file
    prefix: str = ""
    stamp: str = ""  # size and time of the file as it was listed; "" for what was unpacked from it


@dataclass(frozen=True, slots=True)
class Unit:
    """Pieces of one source and format that one call of the reader handles."""

    source: Source
    format: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(piece.size for piece in self.pieces)


@dataclass
class LookedFiles:
    """What the planner found in files of one source."""

    pieces: list[Piece] = field(default_factory=list)
    num_with_text: int = 0  # files of records that may hold text
    missing: list[str] = field(default_factory=list)  # what the others hold instead
    keys: set[str] = field(default_factory=set)  # of text_key that a file has, or may have

    def add(self, other: LookedFiles) -> None:
        """Add what was found in more files."""
        self.pieces += other.pieces
        self.num_with_text += other.num_with_text
        self.missing += other.missing
        self.keys |= other.keys


def plan(source: Source, files: list[File], spool: Path, looked: Mapping[str, LookedFiles] | None = None) -> list[Unit]:
    """The units of a source, format by format. What cannot be split (compressed JSONL, large archives
    packed as a whole) is unpacked into `spool` on the way, until engine.STOP is set.

    looked: of formats whose files were looked at before, what was found (look.py).
    """
    total, units = sum(file.size for file in files), list[Unit]()
    planner = FilePlanner(source, spool / source.name, total)
    for kind, mine in by_format(source, files).items():
        budget = source.max_bytes
        if budget is not None and len(mine) < len(files):  # each format contributes its part of the budget
            budget = max(round(budget * (sum(file.size for file in mine) / max(total, 1))), 1)
        if looked is not None and kind in looked:
            planner.looked.add(looked[kind])
            pieces = sorted(looked[kind].pieces, key=_place)
        else:
            pieces = planner.pieces(kind, mine, budget)
        alone = kind in (*RANGED, "parquet")

        def apart(bundle: list[Piece], _: Piece, alone: bool = alone) -> bool:
            return alone or len(bundle) == UNIT_FILES

        units += [Unit(source, kind, some) for some in in_groups(pieces, UNIT_BYTES, attrgetter("size"), apart)]
    planner.require_readable(units)
    return units


@dataclass
class FilePlanner:
    """Cuts the files of a source into pieces, and looks at the beginnings of its files of records before anything is
    read: a file that is no JSON costs itself, and a text_key that none of the files has is an error right away."""

    source: Source
    spool: Path
    source_bytes: int  # of all its files
    looked: LookedFiles = field(default_factory=LookedFiles)

    def pieces(self, kind: str, files: list[File], budget: int | None) -> list[Piece]:
        """The pieces of the files of one format, in their order; of a part of them that fits the budget in bytes."""
        packed: list[File] = []
        pieces: list[Piece] = []
        for file in files:
            if kind == "parquet":
                pieces += self._row_groups(file)
            elif kind == "warc" and without_compression(file.name).lower().endswith(".arc"):
                pieces.append(_unreadable(file, "wrong_format", ARC))
            elif kind not in RANGED:
                pieces.append(Piece(file.path, file.name, 0, file.size, file.size))
            elif self._is_packed_as_a_whole(file, kind):
                packed.append(file)
            else:
                pieces += self._ranges(file, kind, budget)
        if budget:
            pieces = _sample(pieces, budget)
            packed.sort(key=lambda file: _sampling_key(file.name, 0))
        room = budget - sum(piece.size for piece in pieces) if budget else None
        for number, file in enumerate(packed):
            if room is not None and room <= 0:
                break
            unpacked = [*self._unpacked(file, kind, self.spool / f"{number:06d}", room)]
            pieces += unpacked
            room = room - sum(piece.size for piece in unpacked) if room is not None else None
        stamps = {file.path: stamp(file.size, file.mtime_ns) for file in files if file.mtime_ns}
        pieces = [replace(piece, stamp=stamps.get(piece.path, "")) for piece in pieces]
        return sorted(pieces, key=_place)

    def _open(self, file: File) -> BinaryIO:
        return storage.open_file(file.path, self.source)

    def _is_packed_as_a_whole(self, file: File, kind: str) -> bool:
        """Whether a file is compressed so that it cannot be read from its middle on, and too large for one unit."""
        compression = compression_of(file.path)
        if not compression or (kind != "jsonl" and file.size <= MEMBER_BYTES):
            return False
        first = b""
        if kind != "jsonl":
            with suppress(OSError, Damaged), self._open(file) as stream:  # whoever reads it says what is wrong
                first = start_of(CompressedMember(stream, 0, compression).blocks(), MEMBER_BYTES + 1)
        return kind == "jsonl" or len(first) > MEMBER_BYTES

    def _ranges(self, file: File, kind: str, budget: int | None) -> Iterator[Piece]:
        """A file as byte ranges, or as one piece where it is no lines of JSON."""
        layout = "lines"
        if storage.is_remote(file.path):
            self.looked.keys.update(text_keys(self.source.text_key))
        # A look into each object of a store would take a request.
        if kind == "jsonl" and not (storage.is_remote(file.path) and file.path.lower().endswith(LINE_ENDINGS)):
            with suppress(OSError):  # the reader says what is wrong
                with self._open(file) as stream:
                    head = stream.read(HEAD_BYTES)
                layout, refused = self._look(file, head, is_whole=len(head) >= file.size)
                if refused is not None:
                    yield refused
                    return
        yield from _cut(file, layout, budget, self.source_bytes)

    def _look(self, file: File, head: bytes, is_whole: bool) -> tuple[str, Piece | None]:
        """The layout of a file of records by its beginning, and the damaged piece for one that cannot be read."""
        source = self.source
        name, encoding = without_compression(file.name), source.encoding or ""
        every = {key: look(head, is_whole, name, key, encoding) for key in text_keys(source.text_key)}
        good = [key for key, one in every.items() if not one.reason and not one.missing]
        self.looked.keys.update(good)
        seen = every[good[0]] if good else next(iter(every.values()))
        if seen.missing:
            self.looked.missing.append(f"{file.name}: {seen.missing}")
        elif seen.layout:
            self.looked.num_with_text += 1
        return seen.layout or "lines", _unreadable(file, seen.reason, seen.detail) if seen.reason else None

    def _row_groups(self, file: File) -> Iterator[Piece]:
        try:
            with self._open(file) as stream:
                head = stream.read(HEAD_BYTES)
                stream.seek(0)
                place = stream if storage.is_remote(file.path) else file.path
                sizes, reason, detail, keys = parquet_layout(place, head, self.source)
                self.looked.keys.update(keys)
        except OSError as error:
            sizes, reason, detail = [], "unreadable", error.strerror or str(error)
        if reason:
            yield _unreadable(file, reason, detail)
        for number, size in enumerate(sizes):
            yield Piece(file.path, file.name, number, number + 1, size)

    def _unpacked(self, file: File, kind: str, folder: Path, room: int | None) -> Iterator[Piece]:
        """Decompress a file into `folder`, up to about `room` bytes (None: all of it), and cut it into pieces."""
        layout, is_records = "lines", kind == "jsonl"
        if is_records:
            head = start_of(self._expanded(file), HEAD_BYTES, despite_damage=True)
            layout, refused = self._look(file, head, is_whole=len(head) < HEAD_BYTES)
            if refused is not None:
                yield refused
                return
        if layout != "lines":
            room = None
        in_lines = is_records and layout == "lines"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "unpacked"
        size, end_of_lines, damage, ended = 0, 0, "", True
        with open(path, "wb") as plain:
            try:
                for block in self._expanded(file):
                    if (line_end := block.rfind(b"\n")) >= 0:
                        end_of_lines = size + line_end + 1
                    size += plain.write(block)
                    if STOP.is_set() or (room is not None and size >= room):
                        ended = False
                        break
                if file.mtime_ns:
                    require_unchanged(file, self.source)
            except Damaged as error:
                damage = f"{error}, after {size} bytes" + " of text" * in_lines
            if in_lines and (damage or not ended):  # a line that was cut is no record
                plain.truncate(end_of_lines)
        unpacked = File(str(path), file.name, path.stat().st_size, 0)
        if unpacked.size or layout != "lines":
            for piece in _cut(unpacked, layout, None if in_lines else room, self.source_bytes):
                yield piece if is_records else replace(piece, prefix="0+")
        if damage:
            yield Piece(file.path, file.name, size, size, 0, damage=damage)

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
            raise InputError(f"{where}: {what}: {problem}{self._set_option_hint(problem)}")
        others = any(not _is_refused(piece) for unit in units if unit.format != "jsonl" for piece in unit.pieces)
        if self.looked.missing and not self.looked.num_with_text and not others:
            more = f" (and {len(self.looked.missing) - 1} more files)" if len(self.looked.missing) > 1 else ""
            raise InputError(f"{where}: {self.looked.missing[0]}{more}{self._set_option_hint(self.looked.missing[0])}")

        unknown = [key for key in text_keys(self.source.text_key) if key not in self.looked.keys]
        if self.looked.keys and unknown:
            raise InputError(
                f"{where}.text_key: the first records of no file have a field {unknown[0]!r}; correct its name"
            )

    def _set_option_hint(self, problem: str) -> str:
        """How to follow a hint on the command line: there may be no recipe file."""
        option = (
            "format=chat"
            if 'which format = "chat"' in problem
            else "text_key=NAME"
            if "set text_key" in problem
            else ""
        )
        return option and f"; or --set corpus.sources.{self.source.name}.{option}"


def stamp(size: int, mtime_ns: int) -> str:
    """Identifies the version of a file that was listed."""
    return f"{size} {mtime_ns}"


def require_unchanged(file: File | Piece, source: Source) -> None:
    """Raise FileChanged where a file is not the one that was listed; OSError where it is gone."""
    listed = file.stamp if isinstance(file, Piece) else stamp(file.size, file.mtime_ns)
    if listed and listed != stamp(*storage.version(file.path, source)):
        raise FileChanged(
            f"corpus.sources.{source.name}: {file.name} changed while it was read; a file has to be whole before"
        )


def _place(piece: Piece) -> tuple[str, int]:
    return piece.name, piece.start


def _is_refused(piece: Piece) -> bool:
    return bool(piece.damage) and piece.reason != "bad_record"


def _unreadable(file: File, reason: str, detail: str) -> Piece:
    return Piece(file.path, file.name, 0, 0, file.size, damage=detail, reason=reason)


def _sampling_key(name: str, start: int) -> bytes:
    """A pseudo-random rank that depends on nothing but the name."""
    return hashlib.blake2b(f"{name}\0{start}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _sample(pieces: list[Piece], budget: int) -> list[Piece]:
    """Pieces in the order of their hash that fit into the budget; the first one when none does."""
    chosen: list[Piece] = []
    room = budget
    ordered = sorted(pieces, key=lambda piece: _sampling_key(piece.name, piece.start))
    for piece in ordered:
        if room <= budget * (1 - FULL):
            break
        if piece.size <= room:
            chosen.append(piece)
            room -= piece.size
    return chosen or ordered[:1]


Item = TypeVar("Item")


def in_groups(
    items: Iterable[Item],
    limit: int,
    cost: Callable[[Item], int],
    apart: Callable[[list[Item], Item], bool] = lambda group, item: False,
) -> list[tuple[Item, ...]]:
    """Items in their order, in groups that cost at most `limit`, or of one item; a new one begins where they are `apart`."""
    groups, total = list[list[Item]](), 0
    for item in items:
        if not groups or total + cost(item) > limit or apart(groups[-1], item):
            groups.append([])
            total = 0
        groups[-1].append(item)
        total += cost(item)
    return [tuple(group) for group in groups]


def _cut(file: File, layout: str, budget: int | None, source_bytes: int) -> Iterator[Piece]:
    """Byte ranges of a file; a record belongs to the range in which it begins, so none is searched for here. A file of
    another layout than lines is one piece."""
    longest = max(PACKED_RANGE_BYTES if compression_of(file.path) else RANGE_BYTES, source_bytes // MANY_UNITS)
    # With a budget fine enough that a small part of one huge file can be taken
    wanted = max(budget // 16, 1 << 16) if budget else max(source_bytes // FEW_UNITS, UNIT_BYTES)
    length = min(wanted, longest)
    if layout != "lines":
        length = max(file.size, 1)
    for start in range(0, max(file.size, 1), length):
        end = min(start + length, file.size)
        yield Piece(file.path, file.name, start, end, end - start, layout=layout)
