"""Files and folders of an object store as paths, for work that lies there in place of a disk."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PosixPath
from stat import S_IFDIR, S_IFREG
from typing import TYPE_CHECKING, Any, TypeVar

from bessemer import interrupt
from bessemer.errors import BessemerError, DamagedFile
from bessemer.run import STAGE_FILE, link, stage_facts, stage_is_current, write_atomic
from bessemer.storage import (
    COPIED_BYTES,
    answering,
    asked,
    failure,
    is_remote,
    open_filesystem,
    open_remote,
    put_file,
)
from bessemer.terminal import warn

if TYPE_CHECKING:  # commands that only look at files start without numpy
    import numpy.typing as npt

PIECE_BYTES = 128 << 10  # fetched at a time of files of which small parts are read
STORED_AT = "store"  # in the receipt of a stage: the folder in `corpus.storage` of its large files
_AGAIN = "write the tokens again with `bessemer tokens`"
REQUESTS, AHEAD = 16, 256  # to a store at one time; files whose content waits in memory

Result = TypeVar("Result")


class StorePath(PosixPath):
    """A file or folder of an object store, with the methods of `Path` that the work of a corpus takes: a file appears as a whole,
    and there are no folders but those of files.

    What takes the name of a local file raises, so that nothing is read or written at a place of that name on this machine.
    Errors: FileNotFoundError; BessemerError where the store fails.
    """

    __slots__ = ()

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise BessemerError(f"{self}: an object of a store is no local file; please report this")

    def absolute(self) -> StorePath:
        """The same: URLs are."""
        return self

    def _there(self) -> tuple[Any, str]:
        return open_filesystem(str(self))

    def _ask(self, request: Callable[[Any, str], Result]) -> Result:
        """The answer to a request, of Arrow's file system and its path there; errors as of `answering`."""
        files, inner = self._there()
        with answering(str(self)):
            return asked(str(self), lambda: request(files, inner))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        from pyarrow import fs

        info = self._ask(lambda files, inner: files.get_file_info(inner))
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(2, "No such file in the store", str(self))
        mode = S_IFREG if info.is_file else S_IFDIR
        return os.stat_result((mode, 0, 0, 1, 0, 0, info.size or 0, 0, 0, 0))

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        """Whether there is such a file, or one below it."""
        try:
            self.stat()
        except FileNotFoundError:
            return False
        return True

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Open for reading bytes."""
        if mode != "rb":
            raise BessemerError(f"{self}: an object of a store is written as a whole; please report this")
        file = open_remote(str(self), *self._there(), PIECE_BYTES)
        size = file.seek(0, 2)
        file.seek(0)
        return file if size > PIECE_BYTES else io.BytesIO(file.read())

    def read_bytes(self) -> bytes:
        def read(files: Any, inner: str) -> bytes:
            with files.open_input_stream(inner) as stream:
                return bytes(stream.read())

        return self._ask(read)

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:  # type: ignore[override]
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def write_bytes(self, data: Any) -> int:
        def write(files: Any, inner: str) -> None:
            with files.open_output_stream(inner) as stream:
                stream.write(data)

        self._ask(write)
        return len(data)

    def iterdir(self) -> Iterator[StorePath]:  # type: ignore[override]
        """What is in a folder; nothing where there is none."""
        from pyarrow import fs

        infos = self._ask(lambda files, inner: files.get_file_info(fs.FileSelector(inner, allow_not_found=True)))
        yield from sorted(self / info.base_name for info in infos)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._ask(lambda files, inner: files.delete_file(inner))
        except FileNotFoundError:
            if not missing_ok:
                raise


def path_of(place: str) -> Path:
    """The path of a URL of a store, or of a local folder."""
    return StorePath(place) if is_remote(place) else Path(place).expanduser()


def entries(folder: Path) -> list[Path]:
    """What is in a folder, here or in a store; nothing where there is none."""
    return sorted(folder.iterdir()) if isinstance(folder, StorePath) or folder.is_dir() else []


def write_file(path: Path, data: str | bytes) -> None:
    """Replace a file as a whole, here or in a store."""
    if isinstance(path, StorePath):
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)


def put_hashed(source: Path, target: Path) -> str:
    """Copy a local file by its content, here or to a store. Returns the SHA-256 of what was copied."""

    def put() -> str:
        hashed = hashlib.sha256()
        put_file(source, str(target), hashed.update)
        return hashed.hexdigest()

    if isinstance(target, StorePath):
        with answering(str(target)):
            return asked(str(target), put)
    target.parent.mkdir(parents=True, exist_ok=True)
    return put()


def put_folder(source: Path, folder: StorePath, last: str) -> None:
    """Copy all files of a local folder to a store, some at one time; the file named `last` after the others, so that where it is
    all are."""

    paths = sorted(path for path in source.rglob("*") if path.is_file() and path != source / last)
    for some in (paths, [source / last]):
        copy_files([(path, folder / path.relative_to(source)) for path in some])


def copy_files(copies: Sequence[tuple[Path, Path]]) -> None:
    """Copy files of disks and stores, each to its path, some at one time: within a disk by a link, within a store by the store
    itself, and to a disk durably. What is there is replaced; of a store the size that arrived is compared."""
    if copies:
        in_parallel(_copy, *zip(*copies, strict=True))


def _copy(source: Path, target: Path) -> None:
    if isinstance(target, StorePath):
        with answering(str(target)):
            if not isinstance(source, StorePath):
                asked(str(target), lambda: put_file(source, str(target)))
            elif source.parts[0] == target.parts[0]:
                asked(str(target), lambda: _copy_within(source, target))
            else:
                with tempfile.TemporaryDirectory(prefix="bessemer-") as scratch:
                    get_file(source, copy := Path(scratch) / source.name)
                    asked(str(target), lambda: put_file(copy, str(target)))
        return
    target.unlink(missing_ok=True)
    if not isinstance(source, StorePath):
        link(source, target)
        return
    get_file(source, target)


def _copy_within(source: StorePath, target: StorePath) -> None:
    """Copy an object by its store, which takes no bytes through this machine."""
    (files, inner), (_, place) = open_filesystem(str(source)), open_filesystem(str(target))
    files.copy_file(inner, place)
    if (arrived := target.stat().st_size) != (size := source.stat().st_size):
        raise BessemerError(f"{target}: {arrived} bytes arrived of {size}")


def sizes(folder: Path) -> dict[str, int]:
    """The size of each file below a folder, here or in a store, by its path there."""
    from pyarrow import fs

    files, inner = open_filesystem(str(folder))
    below = fs.FileSelector(inner, allow_not_found=True, recursive=True)
    with answering(str(folder)):
        found = asked(str(folder), lambda: files.get_file_info(below))
    rows = {str(info.path).removeprefix(f"{inner}/"): int(info.size) for info in found if info.is_file}
    return dict(sorted(rows.items()))


def stage_outputs(stage: Path) -> dict[str, int]:
    """The size of each file that a folder with a receipt consists of, here or in a store, by its path there; whatever else lies
    there is no part of it. Empty for a local folder without a receipt; BessemerError for one of a store."""
    if not isinstance(stage, StorePath):
        return dict(stage_facts(stage).get("outputs", {}))
    try:
        return dict(json.loads((stage / STAGE_FILE).read_bytes())["outputs"])
    except FileNotFoundError:
        raise BessemerError(f"{stage}: its {STAGE_FILE} is gone, so it is not complete; build it again") from None


def stage_files(stage: Path, folder: str) -> list[Path]:
    """The files of a stage in one of its folders, sorted (`stage_outputs`); of a local one without a receipt: all there."""
    outputs = stage_outputs(stage)
    if not outputs:
        return sorted((stage / folder).iterdir())
    return sorted(stage / name for name in outputs if name.startswith(f"{folder}/"))


def published_folder(stage: Path) -> Path:
    """Where the large files of a stage are: in its folder of the run, or in `corpus.storage`."""
    stored = stage_facts(stage).get(STORED_AT)
    return stage if stored is None else path_of(stored)


def is_published(stage: Path) -> bool:
    """Whether what a stage has in `corpus.storage` is there. A store that does not answer is taken to have it, with a warning."""
    folder = published_folder(stage)
    try:
        if isinstance(folder, StorePath):
            return (folder / STAGE_FILE).exists()
        return folder == stage or stage_is_current(folder, stage_facts(folder).get("inputs", ""))
    except BessemerError as error:
        warn(f"{error}; going on as if {folder} were there")
        return True


def get_file(path: Path, target: Path) -> None:
    """Copy a file of a store, or of a local folder, to a local one, durably."""
    with path.open("rb") as stream, open(target, "wb") as file:
        shutil.copyfileobj(stream, file, COPIED_BYTES)
        file.flush()
        os.fsync(file.fileno())


def get_folder(source: Path, target: Path) -> None:
    """Copy a folder of a store, or a local one, into a local folder that may be there."""
    if not isinstance(source, StorePath):
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    for name in sizes(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        get_file(source / name, target / name)


def remove_tree(folder: Path) -> None:
    """Remove a folder, local or of a store, where there is one; what cannot be removed of a local one stays."""
    if not isinstance(folder, StorePath):
        shutil.rmtree(folder, ignore_errors=True)
        return
    files, inner = open_filesystem(str(folder))
    with answering(str(folder)):
        try:
            asked(str(folder), lambda: files.delete_dir(inner))
        except FileNotFoundError:
            return


def each(work: Callable[[Path], Result], paths: Iterable[Path]) -> Iterator[Result]:
    """The results for files in their order; of a store some at one time, since each waits for it."""
    paths = list(paths)
    if not any(isinstance(path, StorePath) for path in paths):
        yield from map(work, paths)
        return
    with ThreadPoolExecutor(REQUESTS) as pool:
        for start in range(0, len(paths), AHEAD):
            yield from pool.map(work, paths[start : start + AHEAD])


def opened(path: Path) -> Any:
    """What a library takes in place of the name of a file: the name, or of a file of a store the open file."""
    return path.open("rb") if isinstance(path, StorePath) else path


@contextmanager
def open_parquet(path: Path, command: str) -> Iterator[Any]:
    """Open a Parquet file, here or in a store, whose pages are compared with their checksums when they are read.

    command: writes the file again. Raises DamagedFile for what Arrow cannot read.
    """
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(opened(path), page_checksum_verification=True) as file:
            yield file
    except (ArrowException, OSError) as error:
        is_of_disk = isinstance(error, OSError) and (error.errno is not None or not path.is_file())
        if is_of_disk:
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DamagedFile(f"{path}: damaged ({first}); write it again with `{command}`") from None


def mapped(path: Path, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A file as an array of numpy: mapped into memory, of a store read into it."""
    import numpy as np

    if isinstance(path, StorePath):
        return np.frombuffer(path.read_bytes(), dtype=dtype)
    if not path.stat().st_size:  # which cannot be mapped
        return np.zeros(0, dtype)
    # A plain view: a memmap goes through Python for every slice.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


class StoredNumbers:
    """A file of a store as an array of numbers, whose slices are fetched as they are read; safe to read from several threads.

    A store that does not answer is asked again for minutes (`asked`). Raises BessemerError after that, and for a file that is
    not there or is shorter than `length` numbers.
    """

    def __init__(self, path: StorePath, dtype: npt.DTypeLike, length: int) -> None:
        import numpy as np

        self.path, self.dtype, self.length = path, np.dtype(dtype), length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice | int) -> Any:
        if not isinstance(part, slice):
            number = part + self.length if part < 0 else part
            return self[number : number + 1][0]
        import numpy as np

        start, end, _ = part.indices(self.length)
        size = self.dtype.itemsize
        return np.frombuffer(self._fetch(start * size, max(end - start, 0) * size), self.dtype)

    @cached_property
    def _file(self) -> Any:
        files, inner = open_filesystem(str(self.path))
        return files.open_input_file(inner)

    def _fetch(self, start: int, num_bytes: int) -> bytes:
        interrupt.check()
        try:
            data = asked(str(self.path), lambda: bytes(self._file.read_at(num_bytes, start)), is_patient=True)
        except FileNotFoundError:
            raise BessemerError(f"{self.path}: no such file in the store; {_AGAIN}") from None
        except OSError as error:
            raise failure(str(self.path), error) from None
        if len(data) != num_bytes:
            raise BessemerError(f"{self.path}: ends before byte {start + num_bytes}; {_AGAIN}")
        return data


def in_parallel(work: Callable[..., object], *arguments: Iterable[Any]) -> None:
    """Call `work` for each of the arguments, some at one time; raises what one raises."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(work, *arguments))
