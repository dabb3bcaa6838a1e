"""Stages on disk: written into a temporary folder, published by a rename, with a receipt of their inputs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.common.hashing import fingerprints
from bessemer.run.files import STAGE_FILE, stage_facts, sync_folder, write_json

if TYPE_CHECKING:
    from bessemer.storage.filesystem import AnyPath


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` if the block succeeds, and is removed otherwise."""
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
    """Replace `folder` by a finished temporary folder, durably if its files are synced.

    After a kill, `folder` is the old one, the new one, or missing; then the old one has another name, and `restore_replaced`
    restores it.
    """
    sync_folder(temporary)
    replaced = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(checkpoints: Path) -> None:
    """Restore each checkpoint that a kill within `publish_folder` left under another name.

    It is removed if a new checkpoint has replaced it.
    """
    for replaced in checkpoints.glob(".step-*.old"):
        target = checkpoints / replaced.name[1 : -len(".old")]
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with suppress(OSError):  # a reader may lack the permission, and the next writer restores it too
                os.rename(replaced, target)


def mark_stage(folder: Path, inputs: str, known: Any = None, **facts: Any) -> None:
    """Write the receipt of a staged folder: its inputs, and size and SHA-256 of its files.

    Call it last, before publishing. `known` has size and SHA-256 of files that were hashed while they were written, and
    `facts` are further entries of the receipt.
    """
    (folder / STAGE_FILE).unlink(missing_ok=True)  # a receipt left by a stop before the rename is not an output
    files = fingerprints(folder, known)
    outputs, hashes = ({name: row[key] for name, row in files.items()} for key in ("bytes", "sha256"))
    write_json(folder / STAGE_FILE, {"inputs": inputs, "outputs": outputs, "sha256": hashes, **facts})


def stage_is_current(folder: AnyPath, inputs: str) -> bool:
    """Return True if a stage was made from these inputs and all its files have their full length.

    In a store the receipt is written last, so only it is read.
    """
    stage = stage_facts(folder)
    if stage.get("inputs") != inputs:
        return False
    return not isinstance(folder, Path) or all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in stage["outputs"].items()
    )
