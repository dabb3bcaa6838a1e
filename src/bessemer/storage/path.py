"""Operations on files, folders and published stages, local or in an object store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bessemer.common import interrupt
from bessemer.common.console import warn
from bessemer.common.errors import BessemerError, DamagedFile, first_line
from bessemer.run.files import STAGE_FILE, link_or_copy, stage_facts, write_atomic
from bessemer.run.stage import stage_is_current
from bessemer.storage.filesystem import AnyPath, StorePath, arrow_location, located, parse_path, store_errors

if TYPE_CHECKING:  # commands that only inspect files start without numpy
    import numpy.typing as npt

COPIED_BYTES = 4 << 20  # bytes copied at a time
STORED_AT = "store"  # key of a stage's receipt: the folder of its large files in `corpus.storage`
REQUESTS, AHEAD = 16, 256  # parallel requests to a store; files read ahead into memory

Result = TypeVar("Result")


def entries(folder: AnyPath) -> list[AnyPath]:
    """Return the entries of a folder, sorted; empty if it does not exist."""
    return sorted(folder / info.base_name for info in _listed(folder))  # type: ignore[type-var]


def sizes(folder: AnyPath) -> dict[str, int]:
    """Return the size of each file below a folder, by relative path."""
    inner = arrow_location(folder)[1]
    files = [info for info in _listed(folder, recursive=True) if info.is_file]
    return {info.path.removeprefix(f"{inner}/"): info.size for info in sorted(files, key=lambda info: info.path)}


def wrong_size(folder: AnyPath, wanted: dict[str, int]) -> str | None:
    """Return an error message for the first file whose size differs from `wanted` (path in the folder -> bytes), or None."""
    there = sizes(folder)
    wrong = next((name for name, size in wanted.items() if there.get(name) != size), None)
    return wrong and f"{folder / wrong}: missing, or not of the {wanted[wrong]} bytes that were written"


def _listed(folder: AnyPath, recursive: bool = False) -> list[Any]:
    from pyarrow import fs

    with located(folder) as (files, inner):
        return list(files.get_file_info(fs.FileSelector(inner, allow_not_found=True, recursive=recursive)))


def make_folder(folder: AnyPath) -> None:
    """Create a local folder; a store needs none."""
    if isinstance(folder, Path):
        folder.mkdir(parents=True, exist_ok=True)


def write_file(path: AnyPath, data: bytes) -> None:
    """Replace a file atomically."""
    make_folder(path.parent)
    path.write_bytes(data) if isinstance(path, StorePath) else write_atomic(path, data)


def copy(source: AnyPath, target: AnyPath) -> None:
    """Copy the content of a file, in local folders or stores. A local copy is flushed to disk."""
    from pyarrow import fs

    make_folder(target.parent)
    (files, inner), (to_files, to_inner) = arrow_location(source), arrow_location(target)
    with store_errors(f"{source} to {target}"):
        fs.copy_files(inner, to_inner, files, to_files, chunk_size=COPIED_BYTES)
    if isinstance(target, Path):
        with open(target, "rb") as file:
            os.fsync(file.fileno())


def copy_files(copies: Sequence[tuple[AnyPath, AnyPath]]) -> None:
    """Copy (source, target) pairs of files in parallel, by hard links between local paths. Existing files are replaced."""
    in_parallel(_copy_or_link, copies)


def _copy_or_link(copied: tuple[AnyPath, AnyPath]) -> None:
    source, target = copied
    if isinstance(source, Path) and isinstance(target, Path):
        target.unlink(missing_ok=True)
        link_or_copy(source, target)
    else:
        copy(source, target)


def copy_folder(source: AnyPath, target: AnyPath) -> None:
    """Copy the content of all files below a folder in parallel."""
    in_parallel(lambda name: copy(source / name, target / name), sizes(source))


def remove_tree(folder: AnyPath) -> None:
    """Remove a folder if it exists; errors in a local folder are ignored."""
    if isinstance(folder, Path):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with suppress(FileNotFoundError), located(folder) as (files, key):
        files.delete_dir(key)


def stage_files(stage: AnyPath, folder: str) -> list[AnyPath]:
    """Return the files in the folder named `folder` of a stage that the stage's receipt lists, sorted.

    Without a receipt, returns all files of a local stage, and raises BessemerError for one in an object store.
    """
    receipt = stage_facts(stage)
    if not receipt and isinstance(stage, StorePath):
        raise BessemerError(f"{stage}: incomplete, {STAGE_FILE} is missing; build the stage again")
    names = receipt.get("outputs")
    return [stage / name for name in names if name.startswith(f"{folder}/")] if names else entries(stage / folder)


def published_folder(stage: Path) -> AnyPath:
    """Return the folder that has the large files of a stage: `stage` itself, or its folder in `corpus.storage`."""
    stored = stage_facts(stage).get(STORED_AT)
    return stage if stored is None else parse_path(stored)


def is_published(stage: Path) -> bool:
    """Return True if a stage's files in `corpus.storage` exist.

    If the store does not respond, warn and assume that they do.
    """
    folder = published_folder(stage)
    try:
        return folder == stage or stage_is_current(folder, stage_facts(folder).get("inputs", ""))
    except BessemerError as error:
        warn(f"{error}; continuing as if {folder} were complete")
        return True


def each(work: Callable[[AnyPath], Result], paths: Iterable[AnyPath]) -> Iterator[Result]:
    """Yield the result of `work(path)` for each path in order. If any path is in an object store, calls run in parallel."""
    paths = list(paths)
    if not any(isinstance(path, StorePath) for path in paths):
        yield from map(work, paths)
        return
    with ThreadPoolExecutor(REQUESTS) as pool:
        for start in range(0, len(paths), AHEAD):
            yield from pool.map(work, paths[start : start + AHEAD])


def in_parallel(work: Callable[..., object], *arguments: Iterable[Any]) -> None:
    """Call `work` in parallel threads, as map() does with several iterables. An exception of a call is raised here."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(work, *arguments))


def arrow_source(path: AnyPath) -> Any:
    """Return what Arrow functions accept: the path of a local file, or an open file of a store."""
    return path.open("rb") if isinstance(path, StorePath) else path


@contextmanager
def open_parquet(path: AnyPath, command: str) -> Iterator[Any]:
    """Open a Parquet file and verify the checksums of its pages as they are read.

    `command` is the command that writes the file again. Raises DamagedFile if Arrow cannot read the file.
    """
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(arrow_source(path), page_checksum_verification=True) as file:
            yield file
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and (error.errno is not None or not path.exists()):  # a disk error
            raise
        raise DamagedFile(f"{path}: damaged ({first_line(error)}); write it again with `{command}`") from None


def map_array(path: AnyPath, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return a file as a numpy array, memory-mapped if it is local and read into memory otherwise."""
    import numpy as np

    if isinstance(path, StorePath):
        return np.frombuffer(path.read_bytes(), dtype=dtype)
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    # A plain view, because slicing a memmap runs slow Python code
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


class StoredNumbers:
    """An array of numbers in a store whose slices are fetched when they are read; safe for several threads.

    Raises BessemerError if the store fails, or if the file is shorter than `length` numbers.
    """

    def __init__(self, path: StorePath, dtype: npt.DTypeLike, length: int) -> None:
        import numpy as np

        self.path, self.dtype, self.length = path, np.dtype(dtype), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> Any:
        import numpy as np

        interrupt.check()
        start, end, _ = part.indices(self.length)
        size = self.dtype.itemsize
        with store_errors(self.path):
            data = self._file.read_at(max(end - start, 0) * size, start * size)
        if len(data) < (end - start) * size:
            raise BessemerError(f"{self.path}: shorter than {end * size} bytes; write it again with `bessemer tokens`")
        return np.frombuffer(data, self.dtype)

    @cached_property
    def _file(self) -> Any:
        files, key = arrow_location(self.path)
        return files.open_input_file(key)
