"""The work of reading, cut into units of bounded size: some files, a byte range of plain JSONL, a Parquet row group.

A compressed file, a crawl archive and a dump are one unit each: none is read from its middle on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TypeVar

from bessemer.common.errors import FileChanged, InputError
from bessemer.corpus.readers.files import File, by_format
from bessemer.corpus.readers.inflate import beginning
from bessemer.corpus.readers.record_files import HEAD_BYTES, look
from bessemer.corpus.readers.tables import parquet_layout
from bessemer.recipe import Source
from bessemer.recipe.corpus import text_keys
from bessemer.recipe.file_formats import compression_of, without_compression
from bessemer.run_tasks.task import check_stop
from bessemer.storage import filesystem

# small files are read together up to this size, so that a unit is worth a hand-over and still small in memory
UNIT_BYTES = 4 << 20
ARC = "an ARC file, which WARC has replaced: convert it, e.g. warcio recompress FILE.arc.gz FILE.warc.gz"
ALONE = ("jsonl", "parquet", "warc", "mediawiki")  # formats of which a unit has one piece
PROBED = ("jsonl", "parquet")  # formats whose files are opened to cut them
UNIT_FILES = 256  # files in a unit, at the most: a hundred thousand tiny ones still make a few hundred units
RANGE_BYTES = 32 << 20  # bytes of plain JSONL in a unit
EXPANSION = 4  # times that a compressed file is assumed to expand
# Of a source: where ranges of this size would be fewer they are shorter, down to UNIT_BYTES, so that all workers are busy to
# the end; where they would be more (two a partition) they are longer
FEW_UNITS, MANY_UNITS = 64, 800_000
SAMPLED_PIECES, SAMPLED_BYTES = 16, 1 << 16  # pieces that fill a byte budget, and the least bytes of one
FULL = 0.95  # a byte budget counts as spent at this share: filling up the rest would pick small and empty files
THREADS = 16  # they wait for disks and file servers


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of one file."""

    path: str
    name: str  # path of the file in the corpus
    start: int  # plain JSONL: the first byte. Parquet: the number of the row group. Else 0.
    # the end of [start, end) in the same terms; of a file that is not split in unpacked bytes, None: all of it
    end: int | None
    size: int  # bytes to read, for the budget and the progress bar; of compressed JSONL about those that it unpacks to
    damage: str = ""  # why this piece cannot be read, when that is known already
    reason: str = "bad_record"  # the reason of reasons.REASONS for it
    # how the records of a `jsonl` source lie in it (record_files.Look); of another layout than lines it is a whole file
    layout: str = "lines"
    stamp: str = ""  # size and time of the file as it was listed


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
class Probed:
    """Pieces of files, and what their beginnings show."""

    pieces: list[Piece] = field(default_factory=list)
    num_with_text: int = 0  # files of records that may hold text
    missing: list[str] = field(default_factory=list)  # what the others hold instead
    keys: set[str] = field(default_factory=set)  # of text_key that a file has, or may have

    def add(self, other: Probed) -> None:
        """Add what was found in more files."""
        self.pieces += other.pieces
        self.num_with_text += other.num_with_text
        self.missing += other.missing
        self.keys |= other.keys


def plan(source: Source, files: list[File]) -> list[Unit]:
    """Return the units of a source, format by format. The beginnings of its files of records are looked at before anything is
    read: a file that is no JSON costs itself, and a text_key that none of the files has raises InputError."""
    total, units, every = sum(file.size for file in files), list[Unit](), Probed()
    for kind, mine in by_format(source, files).items():
        budget = source.max_bytes
        if budget is not None and len(mine) < len(files):  # each format contributes its part of the budget
            budget = max(round(budget * (sum(file.size for file in mine) / max(total, 1))), 1)
        cutter, probed = FileCutter(source, kind, budget, total, len(mine)), Probed()
        with ThreadPoolExecutor(THREADS) as pool:
            for one in (pool.map if kind in PROBED else map)(cutter.cut, mine):
                probed.add(one)
        every.add(probed)
        pieces = sorted(_sample(probed.pieces, budget) if budget else probed.pieces, key=attrgetter("name", "start"))
        most = 1 if kind in ALONE else UNIT_FILES
        groups = in_groups(pieces, UNIT_BYTES, attrgetter("size"), lambda group, _, most=most: len(group) == most)  # type: ignore[misc]
        units += [Unit(source, kind, some) for some in groups]
    _require_readable(source, units, every)
    return units


@dataclass(frozen=True)
class FileCutter:
    """Cuts files of one source and format into pieces."""

    source: Source
    kind: str
    budget: int | None  # bytes of which a sample is taken
    source_bytes: int  # of all files of the source
    num_files: int  # of this format

    def cut(self, file: File) -> Probed:
        """Return the pieces of a file."""
        check_stop()
        if self.kind == "parquet":
            return self._row_groups(file)
        if self.kind == "jsonl":
            return self._records(file)
        if self.kind == "warc" and without_compression(file.name).lower().endswith(".arc"):
            return Probed([_unreadable(file, "wrong_format", ARC)])
        if self.budget and self.kind in ALONE:
            return Probed([self._beginning(file)])
        return Probed([_piece(file, 0, None, file.size)])

    def _beginning(self, file: File) -> Piece:
        """The part of a file that cannot be split that fits a sample of the budget."""
        assert self.budget is not None
        end = max(self.budget // min(self.num_files, SAMPLED_PIECES), SAMPLED_BYTES)
        return _piece(file, 0, end, min(end, _unpacked_size(file)))

    def _records(self, file: File) -> Probed:
        """Byte ranges of plain lines of JSON; one piece of a compressed file, or of one in another layout."""
        found, layout, compression = Probed(), "lines", compression_of(file.path)
        if filesystem.is_remote(file.path):
            found.keys.update(text_keys(self.source.text_key))
        # A look into each object of a store would take a request.
        if not (filesystem.is_remote(file.path) and file.path.lower().endswith((".jsonl", ".ndjson"))):
            # Of an error the reader says what is wrong.
            with suppress(OSError), filesystem.open_file(file.path, self.source) as stream:
                head = beginning(stream, compression, HEAD_BYTES)
                is_whole = len(head) < HEAD_BYTES if compression else len(head) >= file.size
                layout = self._look(file, head, is_whole, found)
        if found.pieces:
            return found
        if compression and layout == "lines" and self.budget:
            found.pieces = [self._beginning(file)]
        elif compression or layout != "lines":
            found.pieces = [_piece(file, 0, None, _unpacked_size(file), layout)]
        else:
            found.pieces = [*self._ranges(file)]
        return found

    def _look(self, file: File, head: bytes, is_whole: bool, found: Probed) -> str:
        """Return the layout of a file of records by its beginning; adds the refused piece of one that cannot be read."""
        source = self.source
        name, encoding = without_compression(file.name), source.encoding or ""
        every = {key: look(head, is_whole, name, key, encoding) for key in text_keys(source.text_key)}
        good = [key for key, one in every.items() if not one.reason and not one.missing]
        found.keys.update(good)
        seen = every[good[0]] if good else next(iter(every.values()))
        if seen.missing:
            found.missing.append(f"{file.name}: {seen.missing}")
        elif seen.layout:
            found.num_with_text += 1
        if seen.reason:
            found.pieces.append(_unreadable(file, seen.reason, seen.detail))
        return seen.layout or "lines"

    def _ranges(self, file: File) -> Iterator[Piece]:
        """Byte ranges; a line belongs to the range in which it begins, so none is searched for here."""
        # With a budget fine enough that a small part of one huge file can be taken
        wanted = max(self.source_bytes // FEW_UNITS, UNIT_BYTES)
        if self.budget:
            wanted = max(self.budget // SAMPLED_PIECES, SAMPLED_BYTES)
        length = min(wanted, max(RANGE_BYTES, self.source_bytes // MANY_UNITS))
        for start in range(0, max(file.size, 1), length):
            end = min(start + length, file.size)
            yield _piece(file, start, end, end - start)

    def _row_groups(self, file: File) -> Probed:
        found = Probed()
        try:
            with filesystem.open_file(file.path, self.source) as stream:
                head = stream.read(HEAD_BYTES)
                stream.seek(0)
                place = stream if filesystem.is_remote(file.path) else file.path
                sizes, reason, detail, keys = parquet_layout(place, head, self.source)
                found.keys.update(keys)
        except OSError as error:
            sizes, reason, detail = [], "unreadable", error.strerror or str(error)
        if reason:
            found.pieces.append(_unreadable(file, reason, detail))
        found.pieces += [_piece(file, number, number + 1, size) for number, size in enumerate(sizes)]
        return found


def _require_readable(source: Source, units: list[Unit], probed: Probed) -> None:
    """Raise InputError when not one of the files can be read, with the first of each reason, or when the first
    records of every file lack the text."""
    pieces = [piece for unit in units for piece in unit.pieces]
    where = f"corpus.sources.{source.name}"
    if pieces and all(piece.damage for piece in pieces):
        first = {piece.reason: f"{piece.name}: {piece.damage}" for piece in reversed(pieces)}
        raise InputError(f"{where}: none of its files can be read: {'; '.join(sorted(first.values()))}")
    others = any(not piece.damage for unit in units if unit.format != "jsonl" for piece in unit.pieces)
    if probed.missing and not probed.num_with_text and not others:
        raise InputError(f"{where}: {probed.missing[0]}")
    unknown = [key for key in text_keys(source.text_key) if key not in probed.keys]
    if probed.keys and unknown:
        raise InputError(f"{where}.text_key: the first records of no file have a field {unknown[0]!r}")


def stamp(size: int, mtime_ns: int) -> str:
    """Identifies the version of a file that was listed."""
    return f"{size} {mtime_ns}"


def require_unchanged(piece: Piece, source: Source) -> None:
    """Raise FileChanged where a file is not the one that was listed; OSError where it is gone."""
    if piece.stamp and piece.stamp != stamp(*filesystem.version(piece.path, source)):
        raise FileChanged(f"corpus.sources.{source.name}: {piece.name} changed while it was read")


def _piece(file: File, start: int, end: int | None, size: int, layout: str = "lines") -> Piece:
    listed = stamp(file.size, file.mtime_ns) if file.mtime_ns else ""
    return Piece(file.path, file.name, start, end, size, layout=layout, stamp=listed)


def _unpacked_size(file: File) -> int:
    """About as many bytes as a file has unpacked."""
    return file.size * (EXPANSION if compression_of(file.path) else 1)


def _unreadable(file: File, reason: str, detail: str) -> Piece:
    return replace(_piece(file, 0, 0, file.size), damage=detail, reason=reason)


def _sample(pieces: list[Piece], budget: int) -> list[Piece]:
    """Pieces in the order of their hash that fit into the budget; the first one when none does."""
    chosen, room = list[Piece](), budget
    ordered = sorted(pieces, key=lambda piece: hashlib.blake2b(
        f"{piece.name}\0{piece.start}".encode("utf-8", "surrogatepass"), digest_size=16
    ).digest())  # fmt: skip
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
