"""`corpus.storage`: where a run works on its corpus and tokens and publishes them, in an object store or a folder.

    STORAGE/RUN/ID/corpus.work/DIGEST/  work.py, until the corpus is published; tokens.work/ is the same for tokens
    STORAGE/RUN/ID/corpus-DIGEST/       documents/, rejected/, and stage.json, which is written last
    STORAGE/RUN/ID/tokens-DIGEST/       SOURCE-train-*.bin, and stage.json

ID is random, and RUN/storage.json lists the folders that this run directory has made. So a run meets no file of another one, and
removes nothing but what is in a folder that it made. A run directory that was copied or moved makes a new one.
"""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

from bessemer.common.console import warn
from bessemer.common.errors import BessemerError, InputError
from bessemer.run.files import STAGE_FILE, read_json_or_none, stage_facts, write_json
from bessemer.run_tasks.task import TEMPORARY
from bessemer.storage.filesystem import AccessError, AnyPath, parse_path, require_writable
from bessemer.storage.path import STORED_AT, entries, make_folder, remove_tree, wrong_size

FOLDERS = "storage.json"  # in a run directory
BEGUN = "begun"  # in a work folder: written first and removed first, as a part of one is not to be taken for whole


def require_storage(run: Path, storage: str | None) -> None:
    """Raise InputError where a run cannot write to `corpus.storage`."""
    if storage is None:
        return
    try:
        require_writable(parse_path(storage) / run.absolute().name)
    except AccessError as error:
        raise InputError(f"corpus.storage: {error}") from None


def open_work(stage: Path, inputs: str, storage: str | None) -> AnyPath:
    """The work folder of a stage for these inputs, without the folders of other inputs and what a killed build left half-written.

    stage: its folder in the run; storage: `corpus.storage`.
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
    """The folder in `corpus.storage` for the large files of a stage; None without the key."""
    if storage is None:
        return None
    place = _own_folder(stage.parent, storage) / f"{stage.name}-{inputs[:16]}"
    (place / STAGE_FILE).unlink(missing_ok=True)
    make_folder(place)
    return place


def end_publishing(place: AnyPath, inputs: str, written: dict[str, int]) -> dict[str, Any]:
    """Mark a published folder as complete; returns what the stage's own receipt says of it. written: the sizes of its files.

    Raises BessemerError for a file that is not there as a whole.
    """
    stored = dict(sorted(written.items()))
    if damage := wrong_size(place, stored):
        raise BessemerError(f"{damage}; write it again")
    (place / STAGE_FILE).write_bytes(json.dumps({"inputs": inputs, "outputs": stored}).encode())
    return {STORED_AT: str(place), "stored": stored}


def close_work(stage: Path) -> None:
    """Remove the work on a stage that is published, and what this run published of it and no run under its `run.dir` uses."""
    remove_tree(stage.with_name(f"{stage.name}.work"))
    run = stage.parent.absolute()
    if not (folders := _own_folders(run)):
        return
    stages = [folder for name in (stage.name, f".{stage.name}.tmp") for folder in run.parent.glob(f"*/{name}")]
    used = {stage_facts(folder).get(STORED_AT) for folder in stages}
    try:
        for place in (place for folder in folders for place in entries(parse_path(folder))):
            is_unused = place.name.startswith(f"{stage.name}-") and str(place) not in used
            if is_unused or place.name == f"{stage.name}.work":
                _remove(place)
    except BessemerError as error:
        warn(f"what the {stage.name} left in corpus.storage could not be removed: {error}")


def _own_folder(run: Path, storage: str) -> AnyPath:
    """The folder in `corpus.storage` of this run directory alone."""
    above, known = f"{storage.rstrip('/')}/{run.absolute().name}/", _own_folders(run)
    folder = next((folder for folder in known if folder.startswith(above)), None)
    if folder is None:
        folder = above + secrets.token_hex(4)
        run.mkdir(parents=True, exist_ok=True)
        write_json(run / FOLDERS, {"path": str(run.resolve()), "folders": [*known, folder]})
    return parse_path(folder)


def _own_folders(run: Path) -> list[str]:
    """The folders that a run directory has made; none of them where it was copied or moved."""
    known = read_json_or_none(run / FOLDERS) or {}
    return list(known["folders"]) if known.get("path") == str(run.resolve()) else []


def _remove(folder: AnyPath) -> None:
    """Remove a folder that this run made; while a part of it is left it is not taken for whole."""
    for name in (BEGUN, STAGE_FILE):
        (folder / name).unlink(missing_ok=True)
    remove_tree(folder)
