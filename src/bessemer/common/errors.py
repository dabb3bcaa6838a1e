"""The ways a command ends other than well. Each carries one line for the person: what, where, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# Of a URL, also as a path shows it, with one slash; a password may have slashes
CREDENTIALS = re.compile(r"(?:(?<=://)|(?<=:/)(?!/))(?:[^\s/@:]*:(?!\d{1,5}/)\S*|[^\s/@]+)@")
SIGNED = re.compile(r"://\S*[?&][\w-]*(?:key|sig|token|credential|secret|password)[\w-]*=", re.IGNORECASE)  # a URL
_OF_A_HOST = re.compile(r"(?<![\w.+@/:-])[\w.+-]+:[^\s/@]+@(?=[\w\[])")  # user:password@host
_SIGNATURE = re.compile(r"(://[^\s?'\"]{1,2000}\?)[^\s'\"]{0,4000}=[^\s'\"]{0,4000}")  # of a signed URL


def redact(text: str) -> str:
    """Return a text without the credentials in its URLs and addresses."""
    return _SIGNATURE.sub(r"\1***", _OF_A_HOST.sub("***@", CREDENTIALS.sub("***@", text)))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class BessemerError(Exception):
    """Something failed; the message says what, where and what to do, without credentials. Exit code 1."""

    exit_code = 1

    def __init__(self, message: object = "") -> None:
        super().__init__(redact(str(message)))


class InputError(BessemerError):
    """What the person gave cannot be used: recipe, arguments, sources. Exit code 2."""

    exit_code = 2


@contextmanager
def require_import(message: str, kind: type[BessemerError] = InputError) -> Iterator[None]:
    """Raise an error of this kind, whose message names the package to install, where an import in the block fails."""
    try:
        yield
    except ImportError:
        raise kind(message) from None


class FileChanged(InputError):
    """A file of a source is not the one that was listed. The corpus is then made of the files as they are now, once."""


class DamagedFile(InputError):
    """A file of the run is missing, or is not what was written; the message names the command that writes it again."""


class TooFewIds(InputError):
    """A text of which no vocabulary as large as asked for can be made; supported: the largest that can."""

    def __init__(self, message: str, supported: int) -> None:
        super().__init__(message)
        self.supported = supported


class Stopped(BessemerError):
    """Stopped on request; the same command goes on from here. Exit code 75 (EX_TEMPFAIL: a scheduler may requeue)."""

    exit_code = 75


OF_MEMORY = re.compile(r"out of memory|can't allocate memory")  # as torch says it
LOWER = {"corpus": "lower corpus.workers"} | dict.fromkeys(
    ("plan", "train", "evaluate"), "lower train.micro_batch, or the model's size"
)


def memory_error(error: BaseException, where: str) -> BessemerError | None:
    """Return the error of a stage or a command that ran out of memory; None for an exception of another kind."""
    if not isinstance(error, MemoryError) and not OF_MEMORY.search(str(error)):
        return None
    return BessemerError(f"{where}: out of memory; {LOWER.get(where, 'end other programs, or use more memory')}")


class NotText(ValueError):
    """The document holds no text that could be used; the message says why."""
