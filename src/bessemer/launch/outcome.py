"""What the processes of a training tell each other and the command that started them, in files.

In the run folder, for all processes; the first to tell wins:
.training/outcome.json   how it ended: done, stopped, or failed with a sentence
.training/rank-N.pid     which process it was, for whoever looks

In a folder of the node, made by the command that started its processes ($BESSEMER_NODE):
outcome.json   how it ended, with the summary of a training that was done
said.json      the same, from the one process of all nodes whose node is to say it to the person
N.pid          who to ask to stop
signal         the signal that the command received and passes on as SIGUSR1
N.error        the last unexpected failure of a process, with its traceback
lost.json      of the agent: the local ranks that ended by themselves when the group could not be brought back
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import traceback
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.interrupt import NODE as NODE
from bessemer.run import RunFolder

FAILURES: dict[str, type[BessemerError]] = {"stopped": Stopped, "input": InputError, "failed": BessemerError}


class SaidElsewhere(BessemerError):
    """The training ended with an error that another node says to the person; here only the exit code matters."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def folder(run: RunFolder) -> Path:
    """Where the files of all processes lie while a training goes on."""
    return run.path / ".training"


def begin(run: RunFolder) -> None:
    """An empty folder."""
    shutil.rmtree(folder(run), ignore_errors=True)
    folder(run).mkdir(parents=True)


def end(run: RunFolder) -> None:
    """Nothing is left."""
    shutil.rmtree(folder(run), ignore_errors=True)


def status_of(error: BessemerError) -> str:
    """The name under which an expected error is told."""
    return next(name for name, kind in FAILURES.items() if isinstance(error, kind))


def as_error(found: dict[str, Any]) -> BessemerError:
    """The error that was told."""
    return FAILURES[found["status"]](found["message"])


def tell(place: Path, status: str, **more: Any) -> bool:
    """Say in a folder how the training ended. Returns whether this was the first to say so; only the first counts."""
    path = place / "outcome.json"
    own = path.with_name(f"outcome-{os.getpid()}-{time.monotonic_ns()}")
    own.write_text(json.dumps({"status": status, **more}))
    try:
        os.link(own, path)  # fails where the file exists
        return True
    except FileExistsError:
        return False
    finally:
        own.unlink()


def told(place: Path) -> dict[str, Any] | None:
    """How the training ended, if it has."""
    path = place / "outcome.json"
    with contextlib.suppress(OSError), os.scandir(place):  # opening a folder makes a network file system look again
        pass
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return found


def say(place: Path, status: str, message: str) -> None:
    """Choose this node to say it to the person."""
    (place / "said.json").write_text(json.dumps({"status": status, "message": message}))


def said(place: Path) -> dict[str, Any] | None:
    """What this node is to say to the person."""
    path = place / "said.json"
    return dict(json.loads(path.read_text())) if path.exists() else None


def note_pid(place: Path, local_rank: int) -> None:
    """Say which process this is."""
    (place / f"{local_rank}.pid").write_text(str(os.getpid()))


def note_rank(run: RunFolder, rank: int) -> None:
    """Say which process has a rank."""
    (folder(run) / f"rank-{rank}.pid").write_text(str(os.getpid()))


def pids(place: Path) -> list[int]:
    """The node's processes, as far as they have begun and still are."""
    found = [int(text) for path in sorted(place.glob("*.pid")) if (text := path.read_text())]
    return [pid for pid in found if _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    """Whether a process of this number is one of ours, and not another that got the number after it ended."""
    if not Path("/proc/self").exists():
        return True
    try:
        return b"bessemer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def note_crash(place: Path, rank: int, local_rank: int, error: BaseException) -> None:
    """Keep what happened, for the case that the group cannot be brought back."""
    found = {
        "time": time.time(), "rank": rank, "local_rank": local_rank, "error": _line(error),
        "traceback": traceback.format_exc(),
    }  # fmt: skip
    (place / f"{local_rank}.error").write_text(json.dumps(found))


def crash(place: Path) -> dict[str, Any] | None:
    """The root of the last crash: the first process to fail by itself; losing a neighbour is no root."""
    found = [json.loads(path.read_text()) for path in place.glob("*.error")]
    roots = [one for one in found if not _of_a_neighbour(one["error"])] or found
    return min(roots, key=lambda one: float(one["time"]), default=None)


def note_lost(place: Path, local_ranks: list[int]) -> None:
    """Say which processes ended by themselves."""
    (place / "lost.json").write_text(json.dumps(local_ranks))


def lost(place: Path) -> list[int]:
    """The local ranks that ended by themselves: killed ones, else those whose crash was no neighbour's."""
    path = place / "lost.json"
    if path.exists():
        return list(json.loads(path.read_text()))
    root = crash(place)
    return [] if root is None or _of_a_neighbour(root["error"]) else [root["local_rank"]]


def _of_a_neighbour(message: str) -> bool:
    words = ("connection closed by peer", "connection reset", "broken pipe", "socket", "ncclremoteerror", "timed out")
    return any(word in message.lower() for word in words)


def _line(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:500]
