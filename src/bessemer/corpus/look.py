"""Tasks that look at the files of the sources before the work is cut: which there are, what they hold, and how each can be split;
what cannot be is unpacked.

    RUN/.listing-*/000012/              folders of one round (walk.py), until they are listed
    WORK/contents/SOURCE/000012/        rows.pickle: name, size and hash of some files
    WORK/files/SOURCE-FORMAT/000012/    pieces.pickle, and 000000/unpacked, ... of the files that are compressed as a whole

A source of `max_bytes` is looked at by the driver: how much of a file is unpacked depends on those before it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bessemer.corpus import engine, worker
from bessemer.corpus.files import File, Listing, by_format, contents
from bessemer.corpus.units import RANGED, FilePlanner, LookedFiles, in_groups
from bessemer.corpus.work import CorpusTask
from bessemer.hashing import SAMPLE_BYTES
from bessemer.recipe import Corpus, Source
from bessemer.recipe.endings import compression_of
from bessemer.storage import OWN
from bessemer.store_path import StorePath

PIECES = "pieces.pickle"
TASK_BYTES = 64 << 20  # of compressed JSONL in a task, or one file
# What it costs to look at a file that need not be unpacked, in bytes of one that is: its beginning, or its first member
HEAD_COST, MEMBER_COST = 64 << 10, 1 << 20
# Bytes to hash in a task, of which opening a file takes as long as OPEN_COST; a corpus of less is hashed by the driver
HASHED_BYTES, OPEN_COST = 1 << 30, 32 << 10
HASHING = 64  # bytes that are hashed in the time of cleaning one
ROWS = "rows.pickle"


@dataclass(frozen=True)
class HashFiles(CorpusTask):
    """Hash some files of a source at three places."""

    source: str
    number: int
    files: tuple[File, ...]

    is_durable = False
    inputs = "contents 2"

    @property
    def folder(self) -> Path:
        return self.work / "contents" / self.source / f"{self.number:06d}"

    @property
    def size(self) -> int:
        return sum(map(_hashed_bytes, self.files))

    def __str__(self) -> str:
        return f"hashes of {self.source} from {self.files[0].name} on"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk."""
        (folder / ROWS).write_bytes(pickle.dumps(contents(self.files)))
        return {}


def contents_by_source(corpus: Corpus, listings: Mapping[str, Listing], work: Path) -> dict[str, list[list[Any]]]:
    """Name, size and hash of every input file, by source; of many files by tasks."""
    names = sorted(listings)
    if sum(_hashed_bytes(file) for name in names for file in listings[name].read) <= HASHED_BYTES:
        return {name: contents(listings[name].read) for name in names}
    tasks = [
        HashFiles(work, name, number, some)
        for name in names
        for number, some in enumerate(in_groups(listings[name].read, HASHED_BYTES, _hashed_bytes))
    ]
    for _ in worker.run_tasks("hashing files", "B", tasks, 1 / HASHING, corpus):
        pass
    rows: dict[str, list[list[Any]]] = {name: [] for name in names}
    for task in tasks:
        rows[task.source] += task.load(ROWS)
    return rows


def _hashed_bytes(file: File) -> int:
    """What it takes to hash a file, in bytes; those of object stores are known by their time or hash."""
    return 0 if "://" in file.path else OPEN_COST + min(file.size, 3 * SAMPLE_BYTES)


@dataclass(frozen=True)
class LookAtFiles(CorpusTask):
    """Cut some files of one source and format into pieces, and unpack those that cannot be read from their middle on."""

    source: Source
    kind: str
    number: int
    files: tuple[File, ...]
    source_bytes: int  # of all files of the source

    inputs = "look 2"

    @property
    def folder(self) -> Path:
        return self.work / "files" / f"{self.source.name}-{self.kind}" / f"{self.number:06d}"

    @property
    def size(self) -> int:
        return sum(cost(file, self.kind) for file in self.files)

    def __str__(self) -> str:
        return f"files of {self.source.name} from {self.files[0].name} on"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk; what is wrong with a file is in its piece."""
        planner = FilePlanner(self.source, folder, self.source_bytes)
        pieces = planner.pieces(self.kind, list(self.files), None)
        engine.check_stop()  # else a file whose unpacking was stopped would be taken for whole
        moved = [replace(piece, path=moved_path(piece.path, folder, self.folder)) for piece in pieces]
        (folder / PIECES).write_bytes(pickle.dumps(replace(planner.looked, pieces=moved)))
        return {}


def moved_path(path: str, made: Path, folder: Path) -> str:
    """The path of a piece after what was `made` has become `folder`."""
    if not Path(path).is_relative_to(made):
        return path
    place = folder / Path(path).relative_to(made)
    return f"{OWN}{place}" if isinstance(place, StorePath) else str(place)


def cost(file: File, kind: str) -> int:
    """What it takes to look at a file, in bytes to unpack."""
    if not compression_of(file.path) or kind == "parquet":
        return HEAD_COST
    return file.size if kind == "jsonl" else MEMBER_COST


def look_tasks(corpus: Corpus, listings: Mapping[str, Listing], work: Path) -> list[LookAtFiles]:
    """The tasks for all sources without `max_bytes`, whose files have to be looked at."""
    tasks = []
    for source in corpus.sources:
        files = listings[source.name].read
        for kind, mine in by_format(source, files).items():
            if source.max_bytes is None and kind in (*RANGED, "parquet"):
                groups, total = in_groups(mine, TASK_BYTES, partial(cost, kind=kind)), sum(file.size for file in files)
                tasks += [LookAtFiles(work, source, kind, number, some, total) for number, some in enumerate(groups)]
    return tasks


def looked_by_source(tasks: list[LookAtFiles]) -> dict[str, dict[str, LookedFiles]]:
    """What finished tasks found, by source and format."""
    found: dict[str, dict[str, LookedFiles]] = {}
    for task in tasks:
        found.setdefault(task.source.name, {}).setdefault(task.kind, LookedFiles()).add(task.load(PIECES))
    return found
