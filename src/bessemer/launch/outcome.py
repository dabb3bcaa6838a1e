"""What the processes of a training tell the one that started them, in files of the run folder.

.training/outcome.json   how it ended: done with a summary, stopped, or failed with a sentence; the first to write it wins
.training/rank-N.pid     who to ask to stop
.training/rank-N.error   the last unexpected failure of a process, with its traceback
"""

from __future__ import annotations

import json
import os
import shutil
import time
import traceback
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.run import RunFolder

FAILURES: dict[str, type[BessemerError]] = {"stopped": Stopped, "input": InputError, "failed": BessemerError}


def folder(run: RunFolder) -> Path:
    """Where the files lie while a training goes on."""
    return run.path / ".training"


def begin(run: RunFolder) -> None:
    """An empty folder."""
    shutil.rmtree(folder(run), ignore_errors=True)
    folder(run).mkdir(parents=True)


def end(run: RunFolder) -> None:
    """Nothing is left."""
    shutil.rmtree(folder(run), ignore_errors=True)


def tell(run: RunFolder, status: str, **more: Any) -> None:
    """Say how the training ended, unless another has said so already."""
    path = folder(run) / "outcome.json"
    own = path.with_name(f"outcome-{os.getpid()}")
    own.write_text(json.dumps({"status": status, **more}))
    try:
        os.link(own, path)  # fails where the file exists
    except FileExistsError:
        pass
    finally:
        own.unlink()


def tell_failure(run: RunFolder, error: BessemerError) -> None:
    """Say that the training ended with an expected error."""
    status = next(name for name, kind in FAILURES.items() if isinstance(error, kind))
    tell(run, status, message=str(error))


def told(run: RunFolder) -> dict[str, Any] | None:
    """How the training ended, if it has."""
    path = folder(run) / "outcome.json"
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def note_pid(run: RunFolder, rank: int) -> None:
    """Say which process this is."""
    (folder(run) / f"rank-{rank}.pid").write_text(str(os.getpid()))


def pids(run: RunFolder) -> list[int]:
    """The training's processes, as far as they have begun."""
    return [int(text) for path in sorted(folder(run).glob("rank-*.pid")) if (text := path.read_text())]


def note_crash(run: RunFolder, rank: int, error: BaseException) -> None:
    """Keep what happened, for the case that the group cannot be brought back."""
    found = {"time": time.time(), "rank": rank, "error": _line(error), "traceback": traceback.format_exc()}
    (folder(run) / f"rank-{rank}.error").write_text(json.dumps(found))


def crash(run: RunFolder) -> dict[str, Any] | None:
    """The root of the last crash: the first process to fail by itself; losing a neighbour is no root."""
    found = [json.loads(path.read_text()) for path in folder(run).glob("rank-*.error")]
    roots = [one for one in found if not _of_a_neighbour(one["error"])] or found
    return min(roots, key=lambda one: float(one["time"]), default=None)


def _of_a_neighbour(message: str) -> bool:
    words = ("connection closed by peer", "connection reset", "broken pipe", "socket", "ncclremoteerror", "timed out")
    return any(word in message.lower() for word in words)


def _line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:500]
