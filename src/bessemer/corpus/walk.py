"""The files below a folder, folder by folder: on the driver, and by tasks from LISTED_HERE files on.

A task walks some folders until it has listed MAX_FILES, and leaves the rest to tasks of the next round. So the memory of each is
bounded, and a tree of any shape is divided. What tasks found is put into the order of one walk, and a folder that several of
them came to by links counts where that walk would have come to it first.

    WORK/000012/    one task: folders.pickle
"""

from __future__ import annotations

import os
import pickle
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from bessemer import storage
from bessemer.corpus.inflate import beginning
from bessemer.corpus.work import CorpusTask
from bessemer.errors import InputError
from bessemer.recipe import Source
from bessemer.recipe.corpus import Format
from bessemer.recipe.endings import compression_of, guessed_format, has_format

LISTED_HERE = 20_000  # files of a folder that the driver lists before tasks do the rest
MAX_FILES, TASK_FOLDERS = 20_000, 16  # that a task lists, about, and folders that it begins with
FOUND = "folders.pickle"


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source."""

    path: str  # where it lies: on this machine, or its URL in an object store
    name: str  # its path in the corpus: relative to what the recipe names, so that it is the same on every machine
    size: int  # bytes
    mtime_ns: int
    etag: str = ""  # a hash of the content, from stores that have one instead of a time
    is_regular: bool = True  # false for pipes, sockets and devices: reading them could wait for ever


@dataclass(slots=True)
class Folder:
    """A folder that was listed. files: those that `exclude` does not name, with whether the source reads them."""

    path: str
    identity: tuple[int, int]  # device and inode
    files: list[tuple[File, bool]] = field(default_factory=list)
    is_denied: bool = False  # it cannot be listed


@dataclass(frozen=True)
class Place:
    """A folder that a source names. base: that names are relative to; left_out: names of folders that are not walked."""

    source: Source
    root: str
    base: str
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class ListFolders(CorpusTask):
    """List some folders of a place, and what is below them."""

    place: Place
    number: int
    folders: tuple[str, ...]

    is_durable = False
    inputs = "list"

    @property
    def folder(self) -> Path:
        return self.work / f"{self.number:06d}"

    @property
    def size(self) -> int:
        return len(self.folders)

    def __str__(self) -> str:
        return f"folders of {self.place.source.name} from {self.folders[0]} on"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk; what is wrong with a folder is in its entry."""
        found = walk_some(self.place, self.folders, MAX_FILES, _folders_above(self.place.root, self.folders))
        (folder / FOUND).write_bytes(pickle.dumps(found))
        return {}


# Does tasks, one for each tuple of folders of a place; what they listed and left
ListByTasks = Callable[[Place, Sequence[tuple[str, ...]]], Sequence["list[Folder | str]"]]


def walk(place: Place, by_tasks: ListByTasks | None = None) -> Iterator[tuple[File, bool]]:
    """The files below a folder in the order of a walk, or the file itself, but for those that `exclude` names; and whether the
    source reads each. Hidden folders, caches and link loops are skipped. Raises InputError for a folder that cannot be listed.

    by_tasks: does the folders that are left after LISTED_HERE files; without it they are listed here.
    """
    if not os.path.isdir(place.root):
        yield from _judged(place, [place.root])
        return
    found = walk_some(place, [place.root], LISTED_HERE if by_tasks else None, set())
    while by_tasks and any(isinstance(part, str) for part in found):
        parts = list[Folder | tuple[str, ...]]()
        for is_left, some in groupby(found, lambda part: isinstance(part, str)):
            here = list(some)
            if is_left:
                starts = range(0, len(here), TASK_FOLDERS)
                parts += [tuple(map(str, here[start : start + TASK_FOLDERS])) for start in starts]
            else:
                parts += [part for part in here if isinstance(part, Folder)]
        listed = iter(by_tasks(place, [part for part in parts if isinstance(part, tuple)]))
        found = [one for part in parts for one in ([part] if isinstance(part, Folder) else next(listed))]
    yield from _in_order(found)


def _in_order(found: Sequence[Folder | str]) -> Iterator[tuple[File, bool]]:
    seen: set[tuple[int, int]] = set()
    denied = ""
    for folder in found:
        assert isinstance(folder, Folder)
        if folder.identity not in seen:
            seen.add(folder.identity)
            denied = denied or (folder.path if folder.is_denied else "")
            yield from folder.files
    if denied:
        raise InputError(
            f"{denied}: this folder cannot be listed; grant read permission, name it in `exclude`, or name other paths"
        )


def walk_some(
    place: Place, folders: Sequence[str], limit: int | None, seen: set[tuple[int, int]]
) -> list[Folder | str]:
    """The folders from these on, each before what is below it; from so many files on, those that are left, by their paths. seen:
    those that are not walked (again)."""
    found: list[Folder | str] = []
    left, num_files = list(reversed(folders)), 0
    while left and (limit is None or num_files < limit):
        path = left.pop()
        try:
            status = os.stat(path)
            identity = status.st_dev, status.st_ino
            if identity in seen:
                continue
            with os.scandir(path) as entries:
                names = sorted((entry.name, _is_folder(entry)) for entry in entries if entry.name[0] != ".")
        except FileNotFoundError:
            continue  # vanished meanwhile
        except OSError:
            found.append(Folder(path, (-1, len(found)), is_denied=True))
            continue
        seen.add(identity)
        files = [os.path.join(path, name) for name, is_folder in names if not is_folder]
        found.append(Folder(path, identity, list(_judged(place, files))))
        num_files += len(files)
        for name, is_folder in reversed(names):
            if is_folder and name != "__pycache__" and not is_excluded(name, place.left_out):
                left.append(os.path.join(path, name))
    return found + list(reversed(left))


def _judged(place: Place, paths: Sequence[str]) -> Iterator[tuple[File, bool]]:
    """Files that `exclude` does not name, and whether the source reads them."""
    for path in paths:
        file = file_at(path, os.path.relpath(os.path.abspath(path), place.base).replace(os.sep, "/"))
        if not is_excluded(file.name, place.source.exclude):
            yield file, file.is_regular and is_wanted(place.source, file)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _folders_above(root: str, folders: Sequence[str]) -> set[tuple[int, int]]:
    """The folders from the root down to these, without them: a link to one of them would lead round in a circle."""
    above = {root}
    for folder in folders:
        while (folder := os.path.dirname(folder)) not in above and len(folder) > len(root):
            above.add(folder)
    found = set()
    for place in above:
        with suppress(OSError):
            status = os.stat(place)
            found.add((status.st_dev, status.st_ino))
    return found


def file_at(path: str, name: str) -> File:
    """A local file under its name in the corpus."""
    try:
        status = os.stat(path)
    except OSError:
        return File(path, name, 0, 0)  # vanished or a dangling link: counted as unreadable when it is read
    return File(path, name, status.st_size, status.st_mtime_ns, is_regular=stat.S_ISREG(status.st_mode))


def is_excluded(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether `exclude` names a file or one of its folders."""
    return bool(patterns) and any(fnmatchcase(part, pattern) for part in path.split("/") for pattern in patterns)


def is_wanted(source: Source, file: File) -> bool:
    """Whether a file found below one of the paths is of the source's format."""
    if source.suffixes is not None:
        return file.name.lower().endswith(tuple(suffix.lower() for suffix in source.suffixes))
    return format_of(file.path) is not None if source.format is None else has_format(file.name, source.format)


def format_of(path: str) -> Format | None:
    """The format by the name of a file, or by the beginning of an .xml file: other XML than dumps of wikis is not read."""
    by_name = guessed_format(path)
    if by_name is not None or storage.is_remote(path) or not has_format(path, "mediawiki"):
        return by_name
    with suppress(OSError), open(path, "rb") as file:
        return "mediawiki" if b"<mediawiki" in beginning(file, compression_of(path)) else None
    return None
