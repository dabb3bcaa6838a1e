"""Lists of the files of a source: folders, globs, single files, URLs of object stores, and folders of the running Python."""

from __future__ import annotations

import glob
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from bessemer.common.errors import InputError
from bessemer.common.hashing import sampled_sha256
from bessemer.corpus.document import printable
from bessemer.corpus.readers.base import File, is_wanted
from bessemer.corpus.readers.formats.descriptions import TOPICS
from bessemer.corpus.readers.inflate import compression_of, without_compression
from bessemer.recipe import Source
from bessemer.storage import filesystem
from bessemer.storage.path import published_folder, stage_files

PLACEHOLDER = "python://"
# Threads wait mostly for disks and file servers. They take several files at a time, because passing one file to a thread
# takes as long as hashing a small one.
SAMPLING_THREADS, SAMPLED_TOGETHER = 16, 32

# Folders that python://stdlib leaves out: other packages, and test inputs
STDLIB_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "idlelib"})
TEST_FOLDERS = ("test", "tests")  # inputs of tests, which the format `descriptions` leaves out of python:// folders


def contents(files: Sequence[File]) -> list[list[Any]]:
    """Return [name, size, hash] of each file, which stay equal if the files are moved or touched.

    The hash is of the content, or the store's ETag for a remote file.
    """

    def content(file: File) -> list[Any]:
        hashed = file.etag or str(file.mtime_ns)
        if "://" not in file.path:
            with suppress(OSError):  # reading the file later reports the error
                hashed = sampled_sha256(file.path)
        return [printable(file.name), file.size, hashed]

    def chunk(start: int) -> list[list[Any]]:
        return [content(file) for file in files[start : start + SAMPLED_TOGETHER]]

    with ThreadPoolExecutor(SAMPLING_THREADS) as pool:
        return list(chain.from_iterable(pool.map(chunk, range(0, len(files), SAMPLED_TOGETHER))))


@dataclass
class Listing:
    """The files that the paths of a source contain: those that it reads, and others.

    Attributes:
        read: Files that the source reads, sorted by name.
        other: Other files in the folders, sorted by name: those with other endings and irregular ones. Hidden files,
            files that `exclude` names, and files in folders of the running Python are left out.
    """

    read: list[File]
    other: list[File]


def find(source: Source) -> list[File]:
    """Return the files of a source, sorted by name. Raises InputError if a path is wrong or has no file of the format."""
    return listing(source).read


def listing(source: Source) -> Listing:
    """Return the files of a source, and the other files in its folders. Raises InputError like `find`."""
    files: dict[str, File] = {}
    other: dict[str, File] = {}
    base = str(base_folder(source.paths))
    for pattern in source.paths:
        matched = False
        for file in _candidates(source, pattern, base):
            is_named = file.path == os.path.expanduser(pattern) or file.name == pattern
            if not is_named and is_excluded(file.name, source.exclude):
                continue
            if file.is_regular and (is_named or is_wanted(source, file)):
                matched, files[file.name] = True, file
            elif not pattern.startswith(PLACEHOLDER):
                other[file.name] = file
        if not matched:
            kind = f"format {source.format}" if source.format else "a known ending"
            raise InputError(
                f"corpus.sources.{source.name}: {pattern}: no visible file of {kind}; change paths or "
                "format, or set suffixes to the endings of text files"
            )
    return Listing([files[name] for name in sorted(files)], [other[name] for name in sorted({*other} - {*files})])


def _candidates(source: Source, pattern: str, base: str) -> Iterator[File]:
    """Yield all files below one entry of `paths` of a source, named relative to the folder `base`."""
    where = f"corpus.sources.{source.name}"
    if pattern.startswith(PLACEHOLDER):
        yield from _of_python(source, pattern)
    elif filesystem.is_remote(pattern):
        yield from _remote(source, pattern, where)
    elif "://" in pattern:
        raise InputError(
            f"{where}: {pattern}: unsupported address; use a local path, s3://, gs://, hf://datasets/, "
            "python://stdlib or python://site-packages, or copy the data and name its folder"
        )
    else:
        expanded = os.path.expanduser(pattern)
        if not os.path.lexists(expanded) and not glob.has_magic(expanded):
            raise InputError(f"{where}: {pattern}: no such file or folder; relative paths start at the recipe's folder")
        roots = [expanded] if os.path.lexists(expanded) else sorted(glob.glob(expanded, recursive=True))
        yield from chain.from_iterable(walk(root, base, source.exclude) for root in roots)


def _remote(source: Source, pattern: str, where: str) -> Iterator[File]:
    """Yield the files below the URL `pattern`, without hidden files and folders. Errors name the recipe key `where`."""
    filesystem.check_url(pattern, where)
    try:
        for url, size, mtime_ns, etag in filesystem.entries(pattern, source):
            if not any(part.startswith(".") for part in url.removeprefix(pattern).split("/")):
                yield File(url, url, size, mtime_ns, etag)
    except InputError:
        raise
    except Exception as error:  # the client of the Hugging Face hub raises many types of errors
        raise InputError(
            f"{where}: {pattern} cannot be listed: {filesystem.redact(error)}; check the URL, the credentials of the "
            "environment, and the source's keys anonymous and endpoint (left out, s3:// follows AWS_ENDPOINT_URL)"
        ) from None


def _of_python(source: Source, pattern: str) -> Iterator[File]:
    """Yield the files below a URL python://stdlib or python://site-packages of the running Python."""
    library, _, below = pattern.removeprefix(PLACEHOLDER).partition("/")
    paths = sysconfig.get_paths()
    folders = {
        "stdlib": [paths["stdlib"]],
        "site-packages": list(dict.fromkeys(map(os.path.realpath, (paths["purelib"], paths["platlib"])))),
    }
    if library not in folders:
        raise InputError(
            f"corpus.sources.{source.name}: {pattern}: unknown folder of Python; use python://stdlib "
            "or python://site-packages"
        )
    left_out = (*source.exclude, *(TEST_FOLDERS if source.format == "descriptions" else ()))
    for folder, name in zip(folders[library], (library, f"{library}~2"), strict=False):
        roots = sorted(glob.glob(os.path.join(glob.escape(folder), below), recursive=True)) if below else [folder]
        for file in chain.from_iterable(walk(root, folder, left_out) for root in roots):
            is_left_out = library == "stdlib" and file.name.split("/", 1)[0] in STDLIB_LEFT_OUT
            # The help topics are prose in a string literal, so only the format `descriptions` reads them.
            if not (is_left_out or (source.format == "code" and file.name.endswith(TOPICS))):
                yield replace(file, name=f"{PLACEHOLDER}{name}/{file.name}")


def walk(root: str, base: str, left_out: tuple[str, ...]) -> Iterator[File]:
    """Yield the files below a folder in sorted order, or the file itself, named relative to `base`.

    Folders that `left_out` names, hidden ones, caches and link loops are skipped. Raises InputError for a folder that cannot
    be listed.
    """
    if not os.path.isdir(root):
        yield file_at(root, base)
        return
    seen, errors = set[tuple[int, int]](), list[OSError]()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=errors.append):
        with suppress(FileNotFoundError):  # the folder was deleted meanwhile
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
    """Return the `File` of a local path, named relative to `base`."""
    name = os.path.relpath(os.path.abspath(path), base).replace(os.sep, "/")
    try:
        status = os.stat(path)
    except OSError:
        return File(path, name, 0, 0)  # deleted or a dangling link: counted as unreadable when it is read
    return File(path, name, status.st_size, status.st_mtime_ns, is_regular=stat.S_ISREG(status.st_mode))


def is_excluded(path: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a pattern of `exclude` matches a file or one of its folders."""
    return bool(patterns) and any(fnmatchcase(part, pattern) for part in path.split("/") for pattern in patterns)


def ending(name: str) -> str:
    """Return the lower-case ending under which an unread file is counted, such as ".csv.gz"; "no ending" for none."""
    base = os.path.basename(name).lower()
    last = os.path.splitext(base)[1]
    before = os.path.splitext(without_compression(base))[1] if compression_of(base) else ""
    return before + last or "no ending"


def base_folder(patterns: tuple[str, ...]) -> Path:
    """Return the common parent of the local paths among a source's `paths`. The names of its files are relative to it.

    Names and identities thus stay the same when the data is moved.
    """
    parents = []
    for pattern in patterns:
        if "://" not in pattern:
            path = os.path.abspath(os.path.expanduser(pattern))
            if os.path.lexists(path):
                path = os.path.dirname(path)
            else:
                while glob.has_magic(path):
                    path = os.path.dirname(path)
            parents.append(path)
    return Path(os.path.commonpath(parents)) if parents else Path("/")


def earlier_files(folder: str | Path) -> list[filesystem.AnyPath]:
    """Return the Parquet files of a run directory, a corpus folder or a folder of documents.

    Raises InputError if there are none.
    """
    root = Path(folder)
    for stage in (published_folder(root / "corpus"), published_folder(root)):
        paths = stage_files(stage, "documents") if (stage / "documents").exists() else []
        if paths := [path for path in paths if path.suffix == ".parquet"]:
            return paths
    if here := sorted(root.glob("*.parquet")):
        return [*here]
    raise InputError(
        f"corpus.dedup.against: {root} holds no corpus: looked for corpus/documents/*.parquet, documents/*.parquet and "
        "*.parquet below it; name a run directory whose corpus is built, or a folder of Parquet files"
    )
