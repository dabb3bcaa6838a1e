"""Tasks whose results survive a kill, and the work folder of a corpus build that contains them.

    run/corpus.work/DIGEST/     DIGEST is that of the build's inputs; folders of other digests are removed
      context.json              the recipe's [corpus] and the number of buckets per source
      plan/                     the units of each partition
      partitions/000000/        rows.parquet: the cleaned rows of a partition
      steps/NAME/               a step over all documents, such as duplicates (corpus/global_steps.py)
      published/SOURCE/000000/  an identity bucket of one source: documents, rejects, counts

A folder with a receipt (stage.json) was renamed into place as a whole, so it is either complete or absent.

With `corpus.storage`, DIGEST is there instead of in the run directory (stage_storage.py). In an object store a task
writes its result on its own machine and copies it, the receipt last; what a kill leaves without a receipt is
overwritten.
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
from typing import Any, ClassVar, cast

from pydantic import TypeAdapter

from bessemer.common import extensions
from bessemer.common.errors import BessemerError, FileChanged, InputError, Stopped, first_line
from bessemer.run.files import STAGE_FILE, stage_facts, sync_folder
from bessemer.run.stage import mark_stage, stage_is_current
from bessemer.storage.filesystem import AnyPath, StorePath
from bessemer.storage.path import copy_folder

TEMPORARY = ".tmp"
DONE = "null"  # answer of a worker whose task succeeded
STOP = threading.Event()  # set when the user stops the build; long work checks it between documents
ATTEMPTS = 3  # a task fails when its worker has died this often, since one death may be the machine's fault
# Exceptions that a task may raise and that its driver raises again.
FAILURES: dict[str, Any] = {
    kind.__name__: kind for kind in (FileChanged, InputError, Stopped, BessemerError, MemoryError, OSError)
}

_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


def check_stop() -> None:
    """Raise Stopped if the user has stopped the build; a long task calls this regularly."""
    if STOP.is_set():
        raise Stopped("stopped")


@contextmanager
def expected_errors(what: str) -> Iterator[None]:
    """Turn an unexpected exception in the block, which is a bug, into a BessemerError that begins with `what`.

    OSError, BessemerError and MemoryError pass through.
    """
    try:
        yield
    except (OSError, BessemerError, MemoryError):
        raise
    except Exception as error:
        raise BessemerError(f"{what} failed: {type(error).__name__}: {first_line(error)}") from error


def to_plain(value: Any) -> dict[str, Any]:
    """Convert a dataclass to a dict of JSON values: its fields, and under "class" its class as "MODULE:NAME"."""
    kind: Any = type(value)
    fields: dict[str, Any] = _adapter(kind).dump_python(value, mode="json", by_alias=True)
    is_own = extensions.is_own(kind)
    return {"class": f"{kind.__module__}:{kind.__name__}" if is_own else extensions.reference_to(kind), **fields}


def from_plain(content: dict[str, Any], base: Any) -> Any:
    """Return the dataclass that `to_plain` converted to `content`.

    Its class must be in this package, or in a file that this process trusts. Raises ValueError if it is not a subclass
    of `base`, or if the fields do not fit it.
    """
    fields, code = dict(content), None
    module, _, name = str(fields.pop("class", "")).partition(":")
    if module.endswith(".py"):
        code = extensions.run_file(module)
    elif module.startswith(f"{extensions.BUILT_IN}.") and not module.endswith("__main__"):
        code = importlib.import_module(module)
    kind: Any = getattr(code, name, None)
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise ValueError(f"{module}:{name} is not a {base.__name__} of this program")
    return _adapter(kind).validate_python(fields, strict=False)  # JSON has lists for tuples


@dataclass(frozen=True)
class Task(ABC):
    """Base of the tasks of a build. The result of a task is a folder with a receipt, which marks it as complete.

    A task is idempotent, and tasks may run in any order, process and machine. `str(task)` names it in errors. The fields of
    a subclass are JSON values, paths, tables of the recipe, or dataclasses of these.

    Attributes:
        work: The work folder of the build, in which the result is written.
        inputs: Digest or name of what the result depends on besides the inputs of the build.
        size: Amount of work, in a unit of the subclass, for the progress bar.
        stage: Stage of the run, for errors.
    """

    work: AnyPath
    inputs: str
    size: int

    stage: ClassVar[str] = "corpus"

    @property
    @abstractmethod
    def folder(self) -> AnyPath:
        """Folder of the result."""

    @property
    def progress(self) -> Path | None:
        """File that records which document is being read (time_limit.py), if the task has a time limit per document.

        Only ending the process stops a document that takes too long.
        """
        return None

    @abstractmethod
    def make(self, folder: Path) -> dict[str, Any]:
        """Write the files of the result into `folder`, a temporary one, and return JSON values to add to the receipt."""

    def run(self) -> dict[str, Any]:
        """Run the task unless it is done, and return its receipt.

        An exception that only a bug of this program raises becomes a BessemerError.
        """
        import pyarrow as pa

        with expected_errors(f"{self.stage}: {self}"):
            recorded = build_once(self.folder, self.inputs, self.make)
        pa.default_memory_pool().release_unused()
        return recorded

    def receipt(self) -> dict[str, Any] | None:
        """Return the receipt of the finished task; None if it must still run."""
        return stage_facts(self.folder) if stage_is_current(self.folder, self.inputs) else None

    def to_json(self) -> str:
        """Return the task as one line of JSON."""
        return json.dumps(to_plain(self))

    @staticmethod
    def from_json(line: str | bytes, origin: object = "a task's JSON") -> Task:
        """Return the task that `to_json` wrote. Raises BessemerError, which names `origin`, for anything else."""
        try:
            return cast("Task", from_plain(json.loads(line), Task))
        except Exception as error:
            raise BessemerError(f"{origin}: not a task of this version of Bessemer: {first_line(error)}") from None


def answer(line: str | bytes, origin: object = "a task's JSON") -> str:
    """Run a task, given as a line of `Task.to_json`, and return its exception (or null) as a line of JSON for `raise_error`.

    `origin` names the line in errors.
    """
    try:
        Task.from_json(line, origin).run()
    except (OSError, BessemerError, MemoryError) as error:
        kind = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in FAILURES)
        return json.dumps([kind, *error.__reduce__()[1]], default=str)
    return DONE


def raise_error(answered: str | bytes) -> None:
    """Raise the exception that `answer` describes, if any. Raises ValueError for anything that `answer` did not write."""
    if (failure := json.loads(answered)) is not None:
        try:
            error = FAILURES[failure[0]](*failure[1:])
        except (TypeError, LookupError):
            raise ValueError("not the answer of a worker") from None
        raise error


def worker_error(task: Task, reason: str, remedy: str = "") -> BessemerError:
    """Return the error for a task whose workers died. `reason` tells how the last one ended, `remedy` what the user can do."""
    remedy = remedy or f"if memory ran out, lower {task.stage}.workers"
    return BessemerError(f"{task.stage}: {task}: its worker died ({reason}); {remedy}; rerun the command to resume")


def require_receipt(task: Task, done: dict[str, Any] | None) -> dict[str, Any]:
    """Return `done`, the receipt of a finished task. Raises BessemerError if it is None."""
    if done is None:
        problem = f"{task.stage}: {task}: done by a worker, but its result is not visible in {task.work}"
        raise BessemerError(f"{problem}; use a folder that all machines share")
    return done


def build_once(folder: AnyPath, inputs: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Return the receipt of `folder`; first have `make` write its files, unless it is already complete for these `inputs`.

    `make` fills a temporary folder, which is then renamed. The receipt has `inputs`, the values that `make` returns, and all
    file sizes. If two processes write the same folder, the first to rename it wins.
    """
    if stage_is_current(folder, inputs):
        return stage_facts(folder)
    above = None if isinstance(folder, StorePath) else folder.parent
    if above is not None:
        above.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(TEMPORARY, ".", above, ignore_cleanup_errors=True) as temporary:
        result = Path(temporary) / folder.name
        result.mkdir()
        facts = make(result)
        for path in filter(Path.is_file, result.rglob("*")):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        mark_stage(result, inputs, **facts)
        recorded = stage_facts(result)
        if isinstance(folder, StorePath):
            _upload(result, folder)
        else:
            _rename(result, folder, inputs)
    if above is not None:
        sync_folder(above)
    return recorded


def _rename(result: Path, folder: Path, inputs: str) -> None:
    """Rename the finished folder `result` to `folder`, unless another process has already written it for `inputs`."""
    if folder.exists() and not stage_is_current(folder, inputs):
        shutil.rmtree(folder)
    try:
        os.rename(result, folder)
    except OSError:
        if not stage_is_current(folder, inputs):
            raise


def _upload(result: Path, folder: StorePath) -> None:
    """Copy a finished folder into a store, its receipt last."""
    mark = (result / STAGE_FILE).rename(result.with_name(STAGE_FILE))
    (folder / STAGE_FILE).unlink(missing_ok=True)  # may belong to other inputs
    copy_folder(result, folder)
    (folder / STAGE_FILE).write_bytes(mark.read_bytes())
