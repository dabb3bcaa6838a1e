"""Files of a run: atomic writes, JSON and JSON Lines, hard links, and verification of stages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.common.console import warn
from bessemer.common.errors import BessemerError, InputError, first_line
from bessemer.common.hashing import verify_files

if TYPE_CHECKING:
    from bessemer.storage.filesystem import AnyPath

STAGE_FILE = "stage.json"
MAX_JSON_BYTES = 1 << 28  # ten times the checkpoint manifest of thousands of processes


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replace a file atomically, so that after a crash it holds either the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    raw = data.encode() if isinstance(data, str) else data
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # as for a full disk
            error.filename = str(path)
        raise
    sync_folder(path.parent)


def require_output_path(path: Path, option: str, mark: str) -> Path:
    """Return a path given by the user for an output file, after checking that it may be written.

    Args:
        path: Path of the output file. Its folder must exist.
        option: Command-line option, for messages.
        mark: Text within the first 8 KiB of every file that this program writes there. A file without it is not overwritten.

    Raises:
        InputError: The path cannot be used.
    """
    if path.is_dir():
        raise InputError(f"{option}: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise InputError(f"{option}: {path.parent} does not exist; create the folder first")
    if path.exists():
        with open(path, "rb") as file:
            if mark.encode() not in file.read(8 << 10):
                raise InputError(f"{option}: {path} was not written by Bessemer; choose another name or remove it")
    return path


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, atomically."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def read_json(path: AnyPath, command: str | None = None) -> Any:
    """Read a JSON file of the run directory.

    With `command`, the command that writes the file again, the file is first verified by the receipt of its stage. Raises
    InputError if the file is missing or damaged, and DamagedFile if it differs from the receipt.
    """
    if command is not None and isinstance(path, Path):
        verify_stage(path.parent, command, lambda name: name == path.name)
    try:
        with path.open("rb") as file:
            return json.loads(file.read(MAX_JSON_BYTES))  # a longer file is damaged, and then not JSON
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; run the stage that writes it") from None
    except OSError as error:
        raise BessemerError(f"{path}: cannot be read ({error.strerror}); check the disk and the permissions") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path}: damaged, not JSON ({first_line(error)}); restore or remove the file") from None


def read_json_or_none(path: Path) -> Any:
    """Return the object in a JSON file, which the caller can recreate; None if it is missing or, with a warning, damaged."""
    try:
        value = read_json(path) if path.exists() else None
        if isinstance(value, dict | None):
            return value
        problem = f"{path}: damaged, not a JSON object"
    except InputError as error:
        problem = str(error).partition(";")[0]
    warn(f"{problem}; making it again")
    return None


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a JSON Lines file, without damaged or incomplete lines."""
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        with suppress(ValueError):
            if isinstance(row := json.loads(line), dict):
                rows.append(row)
    return rows


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a log such as metrics.jsonl or incidents.jsonl, without those that have no integer `step`."""
    return [row for row in read_json_lines(path) if type(row.get("step")) is int]


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link_or_copy(source: Path, target: Path) -> None:
    """Copy a file or a folder by hard links, so that the copy survives removal of `source` and takes no space.

    Content is copied if links are impossible, and for logs (.jsonl), because they are appended in place.
    """

    def link_file(file: str, target: str) -> None:
        with suppress(OSError):  # another file system, or one without hard links
            if not file.endswith(".jsonl"):
                os.link(file, target)
                return
        shutil.copy2(file, target)

    if source.is_dir():
        shutil.copytree(source, target, copy_function=link_file, dirs_exist_ok=True)
    else:
        link_file(str(source), str(target))


def recorded_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return, by file name, {"bytes": size, "sha256": hash} of a stage's files, from the receipt that `mark_stage` wrote.

    The hash is None for stages of earlier versions, which recorded sizes only.
    """
    facts = stage_facts(folder)
    hashes = facts["sha256"] if isinstance(facts.get("sha256"), dict) else {}
    return {name: {"bytes": size, "sha256": hashes.get(name)} for name, size in facts.get("outputs", {}).items()}


def verify_stage(folder: Path, command: str, reads: Callable[[str], bool] = bool) -> None:
    """Raise DamagedFile for the first file of a stage that differs from what `mark_stage` recorded.

    `command` is the command that writes the stage again, for the error. `reads(name)` is True for files to verify (default:
    all).
    """
    verify_files(folder, {name: facts for name, facts in recorded_files(folder).items() if reads(name)}, command)


def stage_facts(folder: AnyPath) -> dict[str, Any]:
    """Return the receipt of a stage (its `inputs`, `outputs`, ...; see `mark_stage`); empty if it is missing or damaged."""
    try:
        facts = read_json(folder / STAGE_FILE)
    except InputError:
        return {}
    return facts if isinstance(facts, dict) and isinstance(facts.get("outputs"), dict) else {}
