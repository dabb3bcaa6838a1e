"""A stage on disk: written into a temporary folder, published by one rename, with a receipt of its inputs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bessemer.common.hashing import fingerprints
from bessemer.run.files import STAGE_FILE, stage_facts, sync_folder, write_json


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `folder` when the block ends well, and vanishes when it does not."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish_folder(temporary: Path, folder: Path) -> None:
    """Put a finished folder in the place of `folder`, durably where its files are synced. A kill leaves the old one there, or the
    new one, or the old one under another name, from which `restore_replaced` brings it back."""
    sync_folder(temporary)
    replaced = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(checkpoints: Path) -> None:
    """Bring back each checkpoint that a kill within `publish_folder` left under another name, and remove it where a new one has
    taken its place."""
    for replaced in checkpoints.glob(".step-*.old"):
        target = checkpoints / replaced.name[1 : -len(".old")]
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with suppress(OSError):  # a reader need not be allowed to, and the writer does it too
                os.rename(replaced, target)


def mark_stage(folder: Path, inputs: str, is_durable: bool = True, known: Any = None, **facts: Any) -> None:
    """Record inside a staged folder what it was made from, and size and SHA-256 of its files; called last, before it is
    published. `is_durable`: as for `write_atomic`; known: as for `fingerprints`."""
    (folder / STAGE_FILE).unlink(missing_ok=True)  # of a stop between this and the rename: no output of the stage
    files = fingerprints(folder, known)
    outputs, hashes = ({name: of[key] for name, of in files.items()} for key in ("bytes", "sha256"))
    write_json(folder / STAGE_FILE, {"inputs": inputs, "outputs": outputs, "sha256": hashes, **facts}, is_durable)


def stage_is_current(folder: Path, inputs: str) -> bool:
    """Return True if a stage was made from these inputs and all its files have their full length."""
    stage = stage_facts(folder)
    return bool(stage.get("inputs") == inputs) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in stage["outputs"].items()
    )
