"""Files that are copied whole between this machine and a folder of an object store, or of another disk."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, TypeVar

from bessemer import storage
from bessemer.errors import BessemerError
from bessemer.run import write_atomic

FINISH_SECONDS = 600.0  # that the end of a run waits for copies in the background
UNREACHABLE = (BessemerError, OSError, ValueError)  # of a store; ValueError: pyarrow's ArrowInvalid

Result = TypeVar("Result")


class TakenOver(BessemerError):
    """Another machine writes what is copied, or has gone on from it: this one copies it no more."""


class BackgroundCopy(ABC):
    """A copy that a thread brings up to date. Use from one process."""

    is_taken_over = False
    _failed_with: type[Exception] | None = None  # since it was up to date

    def __init__(self, place: str, what: str) -> None:
        self.place, self.what = place, what
        self._thread: Thread | None = None
        self._lock, self._has_more = Lock(), False

    @abstractmethod
    def update(self) -> None:
        """Copy what has changed. Raises BessemerError, OSError."""

    def follow(self, on_failure: Callable[[str], None]) -> None:
        """Bring the copy up to date, in a thread. on_failure: called with a message, once for each outage."""

        def work() -> None:
            while True:
                with self._lock:
                    if not self._has_more:
                        self._thread = None  # within the lock: who calls `follow` from now on starts another one
                        return
                    self._has_more = False
                try:
                    self.update()
                    self._failed_with = None
                except KeyboardInterrupt:  # a stop while it waited for the store: the end of the command copies
                    pass
                except UNREACHABLE as error:
                    self.is_taken_over |= isinstance(error, TakenOver)
                    if type(error) is not self._failed_with:
                        self._failed_with = type(error)
                        on_failure(f"{self.place}: {self.what} is not up to date: {storage.redacted(error)}")

        if self.is_taken_over:  # which was said once
            return
        with self._lock:
            self._has_more = True
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=work, name="copy", daemon=True)
                self._thread.start()

    def finish(self) -> bool:
        """Wait for the thread, for some minutes. Returns whether it is done."""
        thread = self._thread
        if thread is not None:
            thread.join(FINISH_SECONDS)
        return thread is None or not thread.is_alive()


class StoreFolder:
    """A folder of an object store, or of a disk. Errors of a store are those of `storage.answering`."""

    def __init__(self, place: str) -> None:
        self.place = place

    def _ask(self, name: str, request: Callable[[Any, str], Result]) -> Result:
        path = f"{self.place}/{name}".rstrip("/")
        files, inner = storage.open_filesystem(path)
        if not storage.is_remote(path):
            return request(files, inner)
        with storage.answering(path):
            return storage.asked(path, lambda: request(files, inner))

    def entries(self, folder: str = "", is_recursive: bool = False) -> dict[str, int | None]:
        """Sizes of the files in a folder by their paths in it; folders, unless it is recursive, have None."""
        from pyarrow import fs

        def listed(files: Any, inner: str) -> dict[str, int | None]:
            infos = files.get_file_info(fs.FileSelector(inner, recursive=is_recursive, allow_not_found=True))
            start = len(inner) + 1
            return {info.path[start:]: info.size if info.is_file else None for info in infos
                    if info.is_file or not is_recursive}  # fmt: skip

        return self._ask(folder, listed)

    def put(self, source: Path, name: str, max_bytes: int | None = None) -> str:
        """Copy a file there, and compare the size that arrived. Returns the SHA-256 of what was copied."""
        storage.make_folder(f"{self.place}/{name}".rpartition("/")[0])

        def put(files: Any, inner: str) -> str:
            hashed = hashlib.sha256()
            storage.put_file(source, f"{self.place}/{name}", hashed.update, max_bytes)
            return hashed.hexdigest()

        return self._ask(name, put)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file as a whole."""
        if not storage.is_remote(self.place):
            target = Path(self.place).expanduser() / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, data)
            return

        def write(files: Any, inner: str) -> None:
            with files.open_output_stream(inner) as stream:
                stream.write(data)

        self._ask(name, write)

    def read(self, name: str) -> bytes | None:
        """The content of a file; None where there is none."""
        try:
            return self._ask(name, lambda files, inner: bytes(files.open_input_stream(inner).read()))
        except FileNotFoundError:
            return None

    def get(self, name: str, target: Path) -> None:
        """Copy a file from there, durably."""

        def get(files: Any, inner: str) -> None:
            with files.open_input_stream(inner) as stream, open(target, "wb") as file:
                while block := stream.read(storage.COPIED_BYTES):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())

        self._ask(name, get)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._ask(name, lambda files, inner: files.delete_file(inner))
