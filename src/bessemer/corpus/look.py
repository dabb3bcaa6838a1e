"""Tasks that look at the files of the sources before the work is cut: how each can be split, and what cannot be is unpacked.

    WORK/files/SOURCE-FORMAT/000012/    pieces.pickle, and 000000/unpacked, ... of the files that are compressed as a whole

A source of `max_bytes` is looked at by the driver: how much of a file is unpacked depends on those before it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bessemer.corpus import engine
from bessemer.corpus.files import File, Listing, by_format
from bessemer.corpus.units import RANGED, FilePlanner, LookedFiles, min_range_bytes
from bessemer.corpus.work import CorpusTask
from bessemer.recipe import Corpus, Source
from bessemer.recipe.endings import compression_of

PIECES = "pieces.pickle"
TASK_BYTES = 64 << 20  # of compressed JSONL in a task, or one file
# What it costs to look at a file that need not be unpacked, in bytes of one that is: its beginning, or its first member
HEAD_COST, MEMBER_COST = 64 << 10, 1 << 20


@dataclass(frozen=True)
class LookAtFiles(CorpusTask):
    """Cut some files of one source and format into pieces, and unpack those that cannot be read from their middle on."""

    source: Source
    kind: str
    number: int
    files: tuple[File, ...]
    min_bytes: int  # of a file of records in a unit

    @property
    def folder(self) -> Path:
        return self.work / "files" / f"{self.source.name}-{self.kind}" / f"{self.number:06d}"

    @property
    def inputs(self) -> str:
        return "look"

    @property
    def size(self) -> int:
        return sum(cost(file, self.kind) for file in self.files)

    def __str__(self) -> str:
        return f"files of {self.source.name} from {self.files[0].name} on"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk; what is wrong with a file is in its piece."""
        planner = FilePlanner(self.source, folder, self.min_bytes)
        pieces = planner.pieces(self.kind, list(self.files), None)
        engine.check_stop()  # else a file whose unpacking was stopped would be taken for whole
        moved = [
            replace(piece, path=str(self.folder / Path(piece.path).relative_to(folder)))
            if Path(piece.path).is_relative_to(folder)
            else piece
            for piece in pieces
        ]
        (folder / PIECES).write_bytes(pickle.dumps(replace(planner.looked, pieces=moved)))
        return {}

    def looked(self) -> LookedFiles:
        """What the finished task found."""
        found: LookedFiles = pickle.loads((self.folder / PIECES).read_bytes())
        return found


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
                groups, size = list[list[File]](), 0
                for file in mine:
                    if not groups or size + cost(file, kind) > TASK_BYTES:
                        groups.append([])
                        size = 0
                    groups[-1].append(file)
                    size += cost(file, kind)
                smallest = min_range_bytes(files)
                tasks += [
                    LookAtFiles(work, source, kind, number, tuple(some), smallest) for number, some in enumerate(groups)
                ]
    return tasks


def looked_by_source(tasks: list[LookAtFiles]) -> dict[str, dict[str, LookedFiles]]:
    """What finished tasks found, by source and format."""
    found: dict[str, dict[str, LookedFiles]] = {}
    for task in tasks:
        found.setdefault(task.source.name, {}).setdefault(task.kind, LookedFiles()).add(task.looked())
    return found
