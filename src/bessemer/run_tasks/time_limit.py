"""Time limit per document: a process whose document takes too long ends, and the next attempt skips that document.

Parsers in native code neither check for signals nor let other threads run, so a timer of faulthandler ends the process.
A file records the number of the document being read, so that the next process knows it.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import TypeVar

Item = TypeVar("Item")
_is_left_out = False  # about the document being read


def is_left_out() -> bool:
    """Return True if the document that `limited` is reading took too long in an earlier attempt and must be skipped."""
    return _is_left_out


def slow_documents(path: Path | None) -> set[int]:
    """Return the indices of the documents that took too long in earlier attempts, from a task's progress file."""
    if path is None or not path.exists():
        return set()
    known, last, timer = path.read_text(errors="replace").split("\n", 2)
    return {*map(int, known.split()), *([int(last)] if timer else [])}


def limited(items: Iterator[Item], path: Path, seconds: float) -> Iterator[Item]:
    """Yield documents, and exit the process if one takes more than `seconds` to read.

    The progress file at `path` records which document was being read. In the next attempt, `is_left_out` returns True while
    that document is read, so that the reader in `items` skips all slow work on it.
    """
    global _is_left_out
    slow, next_start, number = slow_documents(path), 0.0, 0
    with path.open("wb", buffering=0) as file:
        header_bytes = file.write(f"{' '.join(map(str, slow))}\n".encode())
        try:
            while True:
                os.pwrite(file.fileno(), b"%20d\n" % number, header_bytes)
                if monotonic() > next_start:  # starting the timer takes longer than reading a short document
                    file.seek(header_bytes + 21)
                    faulthandler.dump_traceback_later(1.1 * seconds, exit=True, file=file)
                    next_start = monotonic() + 0.1 * seconds
                _is_left_out = number in slow
                if (item := next(items, None)) is None:
                    return
                yield item
                number += 1
        finally:
            faulthandler.cancel_dump_traceback_later()
            _is_left_out = False
