"""The work folder of a corpus under way: what is finished survives a kill and is not done again.

    run/corpus.work/DIGEST/     DIGEST: what the corpus is made from; another digest's folder is removed
      context.json              the recipe's [corpus] and the number of buckets of each source
      spool/                    compressed JSONL, expanded
      plan/                     the partitions: 000000.json ...
      partitions/000000/        rows.parquet: the cleaned rows of a partition; stage.json: its receipt
      duplicates/               what became of each document that passed the rules
      published/SOURCE/000000/  a bucket of identities of one source: documents, rejects, index, counts

Every folder with a stage.json was written under another name and renamed as a whole, so that it is either
there and finished or not there.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bessemer.run import STAGE_FILE, RunFolder, mark_stage, read_json, stage_is_current, sync_folder

TEMPORARY = ".tmp"


def open_work(run: RunFolder, inputs: str) -> Path:
    """The work folder for these inputs: an older one of other inputs is removed, and so is what a killed build left
    half-written."""
    above = work_folder(run)
    folder = above / inputs[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for other in above.iterdir():
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    for place in (folder, folder / "partitions", *(folder / "published").glob("*")):
        for path in place.glob(f".*{TEMPORARY}"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def close_work(run: RunFolder) -> None:
    """Remove the work folder: the corpus has been published."""
    shutil.rmtree(work_folder(run), ignore_errors=True)


def work_folder(run: RunFolder) -> Path:
    """Where the work of a run's corpus lies."""
    return run.corpus.with_name(f"{run.corpus.name}.work")


@contextmanager
def made(folder: Path, inputs: str, facts: dict[str, Any]) -> Iterator[Path]:
    """A folder under a name of its own that becomes `folder` by one rename when the block ends well.

    facts: filled by the block; goes into the receipt (stage.json) with the sizes of all files. Two processes may make
    the same folder, as when a machine of a cluster is thought dead: one of them wins, the other's work is dropped.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{TEMPORARY}")
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        mark_stage(temporary, inputs, **facts)
        if folder.exists() and not stage_is_current(folder, inputs):
            shutil.rmtree(folder)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not stage_is_current(folder, inputs):
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def receipt(folder: Path, inputs: str) -> dict[str, Any] | None:
    """What `made` recorded, when the folder is there, whole, and made from these inputs; else None."""
    if not stage_is_current(folder, inputs):
        return None
    found: dict[str, Any] = read_json(folder / STAGE_FILE)
    return found


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
