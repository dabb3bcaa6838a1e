"""The files below a folder, in the order of a walk."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

from bessemer import storage
from bessemer.corpus.inflate import beginning
from bessemer.errors import InputError
from bessemer.recipe import Source
from bessemer.recipe.corpus import Format
from bessemer.recipe.endings import compression_of, guessed_format, has_format


@dataclass(frozen=True, slots=True)
class File:
    """A file of a source."""

    path: str  # where it lies: on this machine, or its URL in an object store
    name: str  # its path in the corpus: relative to what the recipe names, so that it is the same on every machine
    size: int  # bytes
    mtime_ns: int
    etag: str = ""  # a hash of the content, from stores that have one instead of a time
    is_regular: bool = True  # false for pipes, sockets and devices: reading them could wait for ever


def walk(root: str, base: str, left_out: tuple[str, ...]) -> Iterator[File]:
    """The files below a folder in the order of a walk, or the file itself, named relative to `base`. Folders that `left_out`
    names, hidden ones, caches and link loops are skipped. Raises InputError for a folder that cannot be listed."""
    if not os.path.isdir(root):
        yield file_at(root, base)
        return
    seen, errors = set[tuple[int, int]](), list[OSError]()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=errors.append):
        with suppress(FileNotFoundError):  # vanished meanwhile
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(
            name for name in folders if name[0] != "." and name != "__pycache__" and not is_excluded(name, left_out)
        )
        yield from (file_at(os.path.join(folder, name), base) for name in sorted(names) if name[0] != ".")
    if denied := [error.filename for error in errors if not isinstance(error, FileNotFoundError)]:
        raise InputError(
            f"{denied[0]}: this folder cannot be listed; grant read permission, name it in `exclude`, or name other paths"
        )


def file_at(path: str, base: str) -> File:
    """A local file, named relative to `base`."""
    name = os.path.relpath(os.path.abspath(path), base).replace(os.sep, "/")
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
