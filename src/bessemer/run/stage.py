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
    """Yield a temporary folder, which replaces `folder` if the block succeeds and is removed otherwise."""
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
    """Replace `folder` by the finished folder `temporary`, durably if the caller has synced its files.

    If the process is killed meanwhile, `folder` is the old one, the new one, or missing. In the last case the old one has
    another name, and `restore_replaced` restores it.
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
    """Restore the old checkpoints that a process killed in `publish_folder` left under another name.

    An old checkpoint that a new one has replaced is removed instead.
    """
    for replaced in checkpoints.glob(".step-*.old"):
        target = checkpoints / replaced.name[1 : -len(".old")]
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with suppress(OSError):  # a reader may lack the permission, and the next writer restores it too
                os.rename(replaced, target)


def mark_stage(folder: Path, inputs: str, known: Any = None, **facts: Any) -> None:
    """Write the receipt of a stage's folder: the digest `inputs`, and size and SHA-256 of each file.

    Call it after all files are written, before the folder is published. `known` has size and SHA-256 of files that were
    hashed while they were written, by name, and `facts` are further entries of the receipt.
    """
    (folder / STAGE_FILE).unlink(missing_ok=True)  # a receipt left by a stop before the rename is not an output
    files = fingerprints(folder, known)
    outputs, hashes = ({name: row[key] for name, row in files.items()} for key in ("bytes", "sha256"))
    write_json(folder / STAGE_FILE, {"inputs": inputs, "outputs": outputs, "sha256": hashes, **facts})


def stage_is_current(folder: AnyPath, inputs: str) -> bool:
    """Return True if a stage's receipt has the digest `inputs` and all of its files have the recorded size.

    In an object store only the receipt is read, because it is written last.
    """
    stage = stage_facts(folder)
    if stage.get("inputs") != inputs:
        return False
    return not isinstance(folder, Path) or all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in stage["outputs"].items()
    )
