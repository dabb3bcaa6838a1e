"""Folders of `corpus.storage`, where a run builds and publishes its corpus and tokens, in an object store or a folder.

    STORAGE/RUN/ID/corpus.work/DIGEST/  the work folder until the corpus is published; also tokens.work/
    STORAGE/RUN/ID/corpus-DIGEST/       documents/, rejected/, and stage.json, which is written last
    STORAGE/RUN/ID/tokens-DIGEST/       SOURCE-train-*.bin, and stage.json

ID is random, and RUN/storage.json lists the folders that this run directory has made. So a run never uses files of
another run, and removes only what is in a folder that it made. A run directory that was copied or moved makes a new
folder.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

from bessemer.common.console import warn
from bessemer.common.errors import BessemerError
from bessemer.run.files import STAGE_FILE, read_json_or_none, stage_facts, write_json
from bessemer.run_tasks.task import TEMPORARY
from bessemer.storage.filesystem import AnyPath, parse_path, require_writable
from bessemer.storage.path import STORED_AT, entries, make_folder, remove_tree, wrong_size

FOLDERS = "storage.json"  # in a run directory
BEGUN = "begun"  # marker in a work folder; it is removed first, so that a partly removed folder is not used


def require_storage(run: Path, storage: str | None) -> None:
    """Raise InputError if a run cannot write to `corpus.storage`."""
    if storage is not None:
        require_writable("corpus.storage", parse_path(storage) / run.absolute().name)


def open_work(stage: Path, inputs: str, storage: str | None) -> AnyPath:
    """Create or reuse the work folder of a stage, which keeps the results of tasks until the stage is published.

    Removes the stage's work folders for other inputs, and files that a killed build left half-written. `stage` is the
    stage's folder in the run, `inputs` the digest of its inputs, `storage` the value of `corpus.storage`.
    """
    above = (stage.absolute().parent if storage is None else _own_folder(stage.parent, storage)) / f"{stage.name}.work"
    folder = above / inputs[:16]
    for other in entries(above):
        if other != folder:
            remove_tree(other)
    if not (folder / BEGUN).exists():
        _remove(folder)
        make_folder(folder)
        (folder / BEGUN).write_bytes(b"1")
    for path in list(folder.rglob(f".*{TEMPORARY}")) if isinstance(folder, Path) else ():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return folder


def begin_publishing(stage: Path, inputs: str, storage: str | None) -> AnyPath | None:
    """Return the folder in `corpus.storage` for the large files of a stage; None if `storage` is None.

    `stage` is the stage's folder in the run, `inputs` the digest of its inputs. Removes the receipt in the folder returned,
    so that it does not look complete before `end_publishing`.
    """
    if storage is None:
        return None
    target = _own_folder(stage.parent, storage) / f"{stage.name}-{inputs[:16]}"
    (target / STAGE_FILE).unlink(missing_ok=True)
    make_folder(target)
    return target


def end_publishing(target: AnyPath, inputs: str, written: dict[str, int]) -> dict[str, Any]:
    """Write a receipt into the folder `target`, which marks it as complete, and return entries for the stage's own receipt.

    The entries are the folder and the files in it. `written` has the expected size in bytes of each file. Raises
    BessemerError for a file that is missing or incomplete.
    """
    stored = dict(sorted(written.items()))
    if damage := wrong_size(target, stored):
        raise BessemerError(f"{damage}; rerun the command to write it again")
    (target / STAGE_FILE).write_bytes(json.dumps({"inputs": inputs, "outputs": stored}).encode())
    return {STORED_AT: str(target), "stored": stored}


def close_work(stage: Path) -> None:
    """Remove the work folder of a finished stage, and its older results in `corpus.storage` that no run uses.

    Only folders that this run made are searched. A result is kept if any run in the same `run.dir` refers to it.
    """
    remove_tree(stage.with_name(f"{stage.name}.work"))
    run = stage.parent.absolute()
    if not (folders := _own_folders(run)):
        return
    stages = [folder for name in (stage.name, f".{stage.name}.tmp") for folder in run.parent.glob(f"*/{name}")]
    used = {stage_facts(folder).get(STORED_AT) for folder in stages}
    try:
        for path in (path for folder in folders for path in entries(parse_path(folder))):
            is_unused = path.name.startswith(f"{stage.name}-") and str(path) not in used
            if is_unused or path.name == f"{stage.name}.work":
                _remove(path)
    except BessemerError as error:
        warn(f"corpus.storage: unused files of {stage.name} cannot be removed: {error}")


def _own_folder(run: Path, storage: str) -> AnyPath:
    """Return the folder below `storage` that only this run directory uses. It is chosen and recorded at the first call."""
    above, known = f"{storage.rstrip('/')}/{run.absolute().name}/", _own_folders(run)
    folder = next((folder for folder in known if folder.startswith(above)), None)
    if folder is None:
        folder = above + secrets.token_hex(4)
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / FOLDERS, {"path": str(run.resolve()), "folders": [*known, folder]})
    return parse_path(folder)


def _own_folders(run: Path) -> list[str]:
    """Return the folders in stores that a run directory has recorded as its own; empty if it was copied or moved."""
    known = read_json_or_none(run / FOLDERS) or {}
    return list(known["folders"]) if known.get("path") == str(run.resolve()) else []


def _remove(folder: AnyPath) -> None:
    """Remove a folder, its marker files first, so that a partly removed folder never looks complete."""
    for name in (BEGUN, STAGE_FILE):
        (folder / name).unlink(missing_ok=True)
    remove_tree(folder)
