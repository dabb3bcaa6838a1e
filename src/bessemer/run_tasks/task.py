"""The work folder of a corpus build, and tasks whose results survive a kill there.

    run/corpus.work/DIGEST/     DIGEST: of the build's inputs; folders of other digests are removed
      context.json              the recipe's [corpus] and the number of buckets per source
      plan/                     the units of each partition
      partitions/000000/        rows.parquet: the cleaned rows of a partition
      steps/NAME/               a step over all documents, such as duplicates (corpus/global_steps.py)
      published/SOURCE/000000/  an identity bucket of one source: documents, rejects, counts

A folder with a receipt (stage.json) was renamed into place as a whole: it is either complete or absent.

With `corpus.storage` DIGEST is there in place of the run directory (stage_storage.py). In an object store a task writes its
result on its own machine and copies it, the receipt last; what a kill leaves without a receipt is written over.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from bessemer.common import extensions
from bessemer.common.errors import BessemerError, FileChanged, InputError, Stopped, first_line
from bessemer.run.files import STAGE_FILE, sync_folder
from bessemer.run.stage import mark_stage, stage_is_current
from bessemer.storage.filesystem import AnyPath, StorePath
from bessemer.storage.path import copy_folder, is_complete, read_receipt

TEMPORARY = ".tmp"
STOP = threading.Event()  # set when the user stops the build; long work looks at it between documents
ATTEMPTS = 3  # a task fails when its worker has died this often: once may be the machine's fault, not three times
# What a task may raise, which its driver raises again
FAILURES: dict[str, Any] = {
    kind.__name__: kind for kind in (FileChanged, InputError, Stopped, BessemerError, MemoryError, OSError)
}

# A range as a field of a task
Range = Annotated[range, PlainValidator(lambda ends: range(*ends)), PlainSerializer(lambda of: [of.start, of.stop])]


def check_stop() -> None:
    """Raise Stopped when the user stops the build; long work calls it now and then."""
    if STOP.is_set():
        raise Stopped("stopped")


def require(holds: bool, problem: str) -> None:
    """Raise BessemerError for counts that do not add up, which is a fault of this program."""
    if not holds:
        raise BessemerError(f"corpus: {problem}; nothing was written; please report this")


@contextmanager
def expected_errors(what: str) -> Iterator[None]:
    """Raise BessemerError, with the first line, in place of exceptions that only a fault of this program raises."""
    try:
        yield
    except (OSError, BessemerError, MemoryError):
        raise
    except Exception as error:
        raise BessemerError(f"{what} failed: {type(error).__name__}: {first_line(error)}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def to_plain(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as values of JSON, with the name of its class."""
    kind: Any = type(value)
    fields: dict[str, Any] = _adapter(kind).dump_python(value, mode="json", by_alias=True)
    is_own = extensions.is_own(kind)
    return {"class": f"{kind.__module__}:{kind.__name__}" if is_own else extensions.reference_to(kind), **fields}


def from_plain(content: dict[str, Any], base: Any) -> Any:
    """Return the dataclass that `to_plain` described.

    Its class is one of this package, or of a file that this process trusts. Raises ValueError for one that is no subclass of
    `base`, and for fields that do not fit it.
    """
    fields, code = dict(content), None
    module, _, name = str(fields.pop("class", "")).partition(":")
    if module.endswith(".py"):
        code = extensions.run_file(module)
    elif module.startswith(f"{extensions.BUILT_IN}.") and not module.endswith("__main__"):
        code = importlib.import_module(module)
    kind: Any = getattr(code, name, None)
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise ValueError(f"{module}:{name} is no {base.__name__} of this program")
    return _adapter(kind).validate_python(fields, strict=False)  # JSON has lists for tuples


@dataclass(frozen=True)
class Task(ABC):
    """Work whose result is a folder with a receipt: idempotent, in any order, process and machine. `str` names it.

    The fields are values of JSON, paths, tables of the recipe, or dataclasses of such.
    """

    work: AnyPath

    stage: ClassVar[str] = "corpus"  # of the run, which errors name
    is_durable: ClassVar[bool] = True  # the result is synced to disk; else a power loss may cost it

    @property
    @abstractmethod
    def folder(self) -> AnyPath:
        """Where the result lies."""

    @property
    @abstractmethod
    def inputs(self) -> str:
        """What the result depends on besides the inputs of the build."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Amount of work, for the progress bar."""

    @property
    def progress(self) -> Path | None:
        """The file that says which document is read (time_limit.py), of a task in which one may take so long that only the
        end of the process stops it."""
        return None

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the result into a temporary folder; returns the facts for the receipt."""

    def run(self) -> dict[str, Any]:
        """Do the task unless it is done; its receipt. Raises BessemerError in place of an exception that is a fault of this
        program."""
        import pyarrow as pa

        with expected_errors(f"{self.stage}: {self}"):
            recorded = build_once(self.folder, self.inputs, self.make, self.is_durable)
        pa.default_memory_pool().release_unused()
        return recorded

    def receipt(self) -> dict[str, Any] | None:
        """The receipt of the finished task; None when it has to be done."""
        return read_receipt(self.folder) if is_complete(self.folder, self.inputs) else None

    def to_json(self) -> str:
        """Return the task as one line of JSON."""
        return json.dumps(to_plain(self))

    @staticmethod
    def from_json(line: str | bytes, origin: object = "a task's JSON") -> Task:
        """Return the task that `to_json` wrote. Raises BessemerError, which names `origin`, for anything else."""
        try:
            return cast("Task", from_plain(json.loads(line), Task))
        except Exception as error:
            raise BessemerError(f"{origin}: no task of this version of Bessemer: {first_line(error)}") from None


def answer(line: str | bytes, origin: object = "a task's JSON") -> str:
    """Do the task of a line of JSON; returns what it raises as JSON, for `failure_of`. origin: of the line, for an error."""
    try:
        Task.from_json(line, origin).run()
    except (OSError, BessemerError, MemoryError) as error:
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in FAILURES)
        of_system = isinstance(error, OSError) and (error.errno, error.strerror or str(error), str(error.filename))
        return json.dumps([kind, *(of_system or [str(error)])])
    return "null"


def failure_of(answered: str | bytes) -> Exception | None:
    """Return the exception that `answer` describes; None for a task that is done. Raises ValueError for what is no answer."""
    if (failure := json.loads(answered)) is None:
        return None
    try:
        return cast("Exception", FAILURES[failure[0]](*failure[1:]))
    except (TypeError, LookupError):
        raise ValueError("no answer of a worker") from None


def gave_up(task: Task, why: str, remedy: str = "") -> BessemerError:
    """The error for a task whose worker died too often; why: how it ended the last time."""
    remedy = remedy or f"out of memory? Then lower {task.stage}.workers"
    ended = f"{task.stage}: {task}: its worker ended {ATTEMPTS} times ({why})"
    return BessemerError(f"{ended}; {remedy}; the same command resumes here")


def require_receipt(task: Task, done: dict[str, Any] | None) -> dict[str, Any]:
    """The receipt of a finished task. Raises BessemerError for one that is not there."""
    if done is None:
        raise BessemerError(f"{task.stage}: {task} is done but not in {task.work}; do all workers see this path?")
    return done


def build_once(
    folder: AnyPath, inputs: str, make: Callable[[Path], dict[str, Any]], is_durable: bool = True
) -> dict[str, Any]:
    """The receipt of `folder`, which `make` fills first unless it is finished: a temporary folder that is then renamed.

    The receipt holds what `make` returns, and all file sizes. When two processes write the same folder, the first to
    rename wins.
    """
    if is_complete(folder, inputs):
        return read_receipt(folder)
    above, is_durable = (None, False) if isinstance(folder, StorePath) else (folder.parent, is_durable)
    if above is not None:
        above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(TEMPORARY, ".", above, ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / folder.name
        made.mkdir()
        facts = make(made)
        for path in made.rglob("*") if is_durable else ():
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        mark_stage(made, inputs, is_durable, **facts)
        recorded = read_receipt(made)
        if isinstance(folder, StorePath):
            _upload(made, folder)
        else:
            _rename(made, folder, inputs)
    if above is not None and is_durable:
        sync_folder(above)
    return recorded


def _rename(made: Path, folder: Path, inputs: str) -> None:
    """Put a finished folder into its place, unless another process did so."""
    if folder.exists() and not stage_is_current(folder, inputs):
        shutil.rmtree(folder)
    try:
        os.rename(made, folder)
    except OSError:
        if not stage_is_current(folder, inputs):
            raise


def _upload(made: Path, folder: StorePath) -> None:
    """Copy a finished folder into a store, its receipt last."""
    mark = (made / STAGE_FILE).rename(made.with_name(STAGE_FILE))
    (folder / STAGE_FILE).unlink(missing_ok=True)  # of other inputs
    copy_folder(made, folder)
    (folder / STAGE_FILE).write_bytes(mark.read_bytes())
