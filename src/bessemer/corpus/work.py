"""The work folder of a corpus build, and tasks whose results survive a kill there.

    run/corpus.work/DIGEST/     DIGEST: of the build's inputs; folders of other digests are removed
      context.json              the recipe's [corpus] and the number of buckets per source
      contents/SOURCE/000000/   hashes of some files
      files/SOURCE-FORMAT/000000/  pieces of some files, and what was unpacked of them (look.py); spool/ of sources with max_bytes
      plan/                     the units of each partition
      partitions/000000/        rows.parquet: the cleaned rows of a partition
      merged/SOURCE/000000/     a range of buckets from all partitions, a file for each bucket; where there are many (merge.py)
      classifier/ scores/000000/ decisions/000000/ quality/  of the quality classifier (whole.py)
      duplicates/STEP/000000/   tasks of the search for duplicates (dedup/search.py); repeats/ likewise (dedup/repeats.py)
      published/SOURCE/000000/  an identity bucket of one source: documents, rejects, index, counts

A folder with a receipt (stage.json) was renamed into place as a whole: it is either complete or absent.
"""

from __future__ import annotations

import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bessemer.run import STAGE_FILE, RunFolder, mark_stage, read_json, stage_is_current, sync_folder

TEMPORARY = ".tmp"
LISTING = ".listing-"  # begins the name of a folder of the run in which tasks list files (look.py)


@dataclass(frozen=True)
class CorpusTask(ABC):
    """Work whose result is a folder with a receipt: idempotent, in any order, process and machine. `str` names it."""

    work: Path

    stage: ClassVar[str] = "corpus"  # of the run, which errors name
    is_durable: ClassVar[bool] = True  # the result is synced to disk; else a power loss may cost it

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Where the result lies."""

    @property
    @abstractmethod
    def inputs(self) -> str:
        """What the result depends on besides the inputs of the build."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Amount of work, for the progress bar."""

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the result into a temporary folder; returns the facts for the receipt."""

    def run(self) -> dict[str, Any]:
        """Do the task unless it is done; its receipt."""
        return build_once(self.folder, self.inputs, self.make, self.is_durable)

    def receipt(self) -> dict[str, Any] | None:
        """The receipt of the finished task; None when it has to be done."""
        return receipt(self.folder, self.inputs)


def open_work(run: RunFolder, inputs: str) -> Path:
    """The work folder for these inputs, without the folders of other inputs and what a killed build left half-written."""
    above = _work_folder(run)
    folder = above / inputs[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for other in (*above.iterdir(), *run.path.glob(f"{LISTING}*")):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    steps = (
        step
        for name in ("contents", "files", "merged", "duplicates", "repeats", "published")
        for step in (folder / name).glob("*")
    )
    for place in (folder, *(folder / name for name in ("partitions", "scores", "digits", "decisions")), *steps):
        for path in place.glob(f".*{TEMPORARY}"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def close_work(run: RunFolder) -> None:
    """Remove the work folder: the corpus has been published."""
    shutil.rmtree(_work_folder(run), ignore_errors=True)


def _work_folder(run: RunFolder) -> Path:
    return run.corpus.with_name(f"{run.corpus.name}.work")


def receipt(folder: Path, inputs: str) -> dict[str, Any] | None:
    """The receipt of a folder that is complete and made from these inputs; else None."""
    recorded: dict[str, Any] | None = read_json(folder / STAGE_FILE) if stage_is_current(folder, inputs) else None
    return recorded


def build_once(
    folder: Path, inputs: str, make: Callable[[Path], dict[str, Any]], is_durable: bool = True
) -> dict[str, Any]:
    """The receipt of `folder`, which `make` fills first unless it is finished: a temporary folder that is then renamed.

    The receipt holds what `make` returns, and all file sizes. When two processes write the same folder, the first to
    rename wins.
    """
    if (recorded := receipt(folder, inputs)) is not None:
        return recorded
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{TEMPORARY}")
    temporary.mkdir()
    try:
        facts = make(temporary)
        for path in temporary.rglob("*"):
            if is_durable and path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        mark_stage(temporary, inputs, is_durable, **facts)
        if folder.exists() and not stage_is_current(folder, inputs):
            shutil.rmtree(folder)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not stage_is_current(folder, inputs):
                raise
        if is_durable:
            sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    recorded = receipt(folder, inputs)
    assert recorded is not None
    return recorded
