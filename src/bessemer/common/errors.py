"""Exceptions that end a command, and removal of credentials from messages.

Each message is one line that says what failed, where, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Credentials in a URL, which a path shows with one slash; a password may contain slashes
CREDENTIALS = re.compile(r"(?:(?<=://)|(?<=:/)(?!/))(?:[^\s/@:]*:(?!\d{1,5}/)\S*|[^\s/@]+)@")
SIGNED = re.compile(r"://\S*[?&][\w-]*(?:key|sig|token|credential|secret|password)[\w-]*=", re.IGNORECASE)  # signed URL
_OF_A_HOST = re.compile(r"(?<![\w.+@/:-])[\w.+-]+:[^\s/@]+@(?=[\w\[])")  # user:password@host
_SIGNATURE = re.compile(r"(://[^\s?'\"]{1,2000}\?)[^\s'\"]{0,4000}=[^\s'\"]{0,4000}")  # query of a signed URL


def redact(text: str) -> str:
    """Return a text without the credentials in its URLs and addresses."""
    return _SIGNATURE.sub(r"\1***", _OF_A_HOST.sub("***@", CREDENTIALS.sub("***@", text)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class BessemerError(Exception):
    """A failure of a command; exit code 1. Credentials in the message are removed."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))


class InputError(BessemerError):
    """An error in the user's input, such as recipe, arguments or sources; exit code 2."""

    exit_code = 2


@contextmanager
def require_import(message: str, kind: type[BessemerError] = InputError) -> Iterator[None]:
    """Turn an ImportError in the block into an error of class `kind` with a message that names the package to install."""
    try:
        yield
    except ImportError:
        raise kind(message) from None


class FileChanged(InputError):
    """An error for a source file that changed after it was listed. The corpus is then rebuilt once from the current files."""


class DamagedFile(InputError):
    """An error for a missing or damaged file of a run. The message names the command that writes it again."""


class TooFewIds(InputError):
    """An error for a text that does not support the requested vocabulary; `supported` is the largest that it supports."""

    def __init__(self, message: str, supported: int) -> None:
        super().__init__(message)
        self.supported = supported


class Stopped(BessemerError):
    """A stop on request; the same command resumes.

    Exit code 75 (EX_TEMPFAIL), after which a scheduler may requeue the job.
    """

    exit_code = 75


OF_MEMORY = re.compile(r"out of memory|can't allocate memory")  # in messages of torch
_SMALLER = "lower train.micro_batch, or the model's size"
LOWER = {"corpus": "lower corpus.workers", "plan": _SMALLER, "train": _SMALLER, "evaluate": _SMALLER}


def memory_error(error: BaseException, where: str) -> BessemerError | None:
    """Return the BessemerError to raise if `error` means that memory ran out, in the command or stage `where`; else None."""
    if not isinstance(error, MemoryError) and not OF_MEMORY.search(str(error)):
        return None
    return BessemerError(f"{where}: out of memory; {LOWER.get(where, 'end other programs, or use more memory')}")


class NotText(ValueError):
    """An error for a document without usable text; the message gives the reason."""
