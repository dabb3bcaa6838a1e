"""The work folder of a corpus build, and tasks whose results survive a kill there.

    run/corpus.work/DIGEST/     DIGEST: of the build's inputs; folders of other digests are removed
      context.json              the recipe's [corpus] and the number of buckets per source
      plan/                     the units of each partition
      partitions/000000/        rows.parquet: the cleaned rows of a partition
      steps/NAME/               a step over all documents, such as duplicates (corpus/global_steps.py)
      published/SOURCE/000000/  an identity bucket of one source: documents, rejects, counts

A folder with a receipt (stage.json) was renamed into place as a whole: it is either complete or absent.

With `corpus.storage` DIGEST is there in place of the run directory (stage_storage.py). In an object store a task writes its
result on its own machine and copies it, the receipt last; what a kill leaves without a receipt is written over.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bessemer.run.files import STAGE_FILE, sync_folder
from bessemer.run.stage import mark_stage, stage_is_current
from bessemer.run_tasks.stage_storage import begin_work, work_folder
from bessemer.storage.filesystem import AnyPath, Location
from bessemer.storage.path import copy_folder, entries, is_complete, read_receipt, remove_tree

TEMPORARY = ".tmp"


@dataclass(frozen=True)
class CorpusTask(ABC):
    """Work whose result is a folder with a receipt: idempotent, in any order, process and machine. `str` names it."""

    work: AnyPath

    stage: ClassVar[str] = "corpus"  # of the run, which errors name
    is_durable: ClassVar[bool] = True  # the result is synced to disk; else a power loss may cost it

    @property
    @abstractmethod
    def folder(self) -> AnyPath:
        """Where the result lies."""

    @property
    @abstractmethod
    def inputs(self) -> str:
        """What the result depends on besides the inputs of the build."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Amount of work, for the progress bar."""

    @property
    def progress(self) -> Path | None:
        """The file that says which document is read (time_limit.py), of a task in which one may take so long that only the
        end of the process stops it."""
        return None

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the result into a temporary folder; returns the facts for the receipt."""

    def run(self) -> dict[str, Any]:
        """Do the task unless it is done; its receipt."""
        return build_once(self.folder, self.inputs, self.make, self.is_durable)

    def receipt(self) -> dict[str, Any] | None:
        """The receipt of the finished task; None when it has to be done."""
        return receipt(self.folder, self.inputs)

    def load(self, name: str) -> Any:
        """What the finished task pickled into a file."""
        return pickle.loads((self.folder / name).read_bytes())


def open_work(stage: Path, inputs: str, storage: str | None) -> AnyPath:
    """The work folder of a stage for these inputs, without the folders of other inputs and what a killed build left half-written.

    stage: its folder in the run; storage: `corpus.storage`.
    """
    above = work_folder(stage, storage)
    folder = above / inputs[:16]
    for other in entries(above):
        if other != folder:
            remove_tree(other)
    begin_work(folder)
    if isinstance(folder, Location):  # where a file appears as a whole
        return folder
    for path in list(folder.rglob(f".*{TEMPORARY}")):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def receipt(folder: AnyPath, inputs: str) -> dict[str, Any] | None:
    """The receipt of a folder that is complete and made from these inputs; else None."""
    return read_receipt(folder) if is_complete(folder, inputs) else None


def build_once(
    folder: AnyPath, inputs: str, make: Callable[[Path], dict[str, Any]], is_durable: bool = True
) -> dict[str, Any]:
    """The receipt of `folder`, which `make` fills first unless it is finished: a temporary folder that is then renamed.

    The receipt holds what `make` returns, and all file sizes. When two processes write the same folder, the first to
    rename wins.
    """
    if (recorded := receipt(folder, inputs)) is not None:
        return recorded
    if isinstance(folder, Location):
        return _build_in_store(folder, inputs, make)
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


def _build_in_store(folder: Location, inputs: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bessemer-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        mark_stage(made, inputs, is_durable=False, **make(made))
        recorded = read_receipt(made)
        mark = (made / STAGE_FILE).rename(Path(scratch) / STAGE_FILE)
        (folder / STAGE_FILE).unlink(missing_ok=True)  # of other inputs
        copy_folder(made, folder)
        (folder / STAGE_FILE).write_bytes(mark.read_bytes())
        return recorded
