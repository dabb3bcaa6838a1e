"""Files in which the processes of a training report to each other and to the command that started them.

In the run folder, for all processes; the first to report wins:
.training/outcome.json   how it ended: done, stopped, or failed with a message
.training/rank-N.pid     its process id
.training/node-lost      created by the node that records this incident, which all others see too

In a folder of the node, created by the command that started its processes ($BESSEMER_NODE):
outcome.json   how it ended, with the summary of a completed training
said.json      the same, on the one node that shows it to the user
N.pid          the process of local rank N, which a stop request is sent to
signal         the signal that the command received and passes on as SIGUSR1
N.heartbeat    what local rank N does, for the watchdog (guard/heartbeat.py); N.stacks its threads' stacks, when asked for
N.error        the last unexpected failure of local rank N, with its traceback
note-N.json    written by the agent, for the watchdog to tell and record: processes or nodes lost, or waited for
waiting        there while the agent waits for the first node, and no process runs
lost.json      written by the agent: local ranks that were killed when the group could not be restarted
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.interrupt import NODE as NODE
from bessemer.run import RunFolder, published, write_json

FAILURES: dict[str, type[BessemerError]] = {"stopped": Stopped, "input": InputError, "failed": BessemerError}
AGENT = "BESSEMER_AGENT"  # environment: the process id of the agent
OUTCOME, SHOWN, LOST, WAITING = "outcome.json", "said.json", "lost.json", "waiting"
# Of exceptions in a process whose neighbour has died.
NEIGHBOUR_ERRORS = (
    "connection closed by peer", "connection reset", "connection was likely closed", "broken pipe", "socket", "ncclremoteerror",
    "timed out",
)  # fmt: skip


class ShownElsewhere(BessemerError):
    """The training ended with an error that another node shows; here only the exit code matters."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("")
        self.exit_code = exit_code


def folder(run: RunFolder) -> Path:
    return run.path / ".training"


def begin(run: RunFolder) -> None:
    end(run)
    folder(run).mkdir(parents=True)


def end(run: RunFolder) -> None:
    shutil.rmtree(folder(run), ignore_errors=True)


def status_of(error: BessemerError) -> str:
    return next(name for name, kind in FAILURES.items() if isinstance(error, kind))


def as_error(report: dict[str, Any]) -> BessemerError:
    """The error of a reported failure."""
    return FAILURES[report["status"]](report["message"])


def report(place: Path, status: str, **more: Any) -> bool:
    """Report how the training ended. Only the first report counts; returns whether this was it."""
    path = place / OUTCOME
    own = path.with_name(f"outcome-{os.getpid()}-{time.monotonic_ns()}")
    own.write_text(json.dumps({"status": status, **more}))
    try:
        os.link(own, path)  # fails where the file exists
        return True
    except FileExistsError:
        return False
    finally:
        own.unlink()


def reported(place: Path) -> dict[str, Any] | None:
    """How the training ended, if it has."""
    with contextlib.suppress(OSError), os.scandir(place):  # opening a folder refreshes a network file system's cache
        pass
    report: dict[str, Any] | None = read(place, OUTCOME)
    return report


def write(place: Path, name: str, value: Any) -> None:
    """Write one of the node's JSON files."""
    (place / name).write_text(json.dumps(value))


def read(place: Path, name: str) -> Any:
    """The content of one of the JSON files; None where it does not exist."""
    try:
        return json.loads((place / name).read_text())
    except FileNotFoundError:
        return None


def note(place: Path, rows: list[dict[str, Any]]) -> None:
    """Leave a note for the watchdog: rows with cause and action, and what else belongs to the record of an incident."""
    if not rows:
        return
    write_json(place / f"note-{len(list(place.glob('note-*.json'))) + 1}.json", rows)


def notes(place: Path, after: int) -> Iterator[list[dict[str, Any]]]:
    while (rows := read(place, f"note-{after + 1}.json")) is not None:
        after += 1
        yield rows


@contextlib.contextmanager
def waiting(place: Path) -> Iterator[None]:
    """Mark that the agent waits and no process runs."""
    (place / WAITING).touch()
    try:
        yield
    finally:
        (place / WAITING).unlink(missing_ok=True)


def claim(run: RunFolder, name: str) -> bool:
    """Whether this node is the first to create a file in the folder of all processes, and so the one that records."""
    try:
        (folder(run) / name).touch(exist_ok=False)
        return True
    except OSError:
        return False


def goes_on(run: RunFolder | None) -> str:
    """From where the same command goes on. run: None where it is not known yet."""
    if run is not None and not published(run.checkpoints):
        return "no step of the training is saved yet; the same command begins it"
    return "the same command goes on from the last checkpoint"


def has_agent() -> bool:
    """Whether the agent that started this process still runs; True in one that no agent started."""
    try:
        os.kill(int(os.environ.get(AGENT, os.getpid())), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def note_pid(place: Path, name: str) -> None:
    """Write this process's id into NAME.pid."""
    (place / f"{name}.pid").write_text(str(os.getpid()))


def pids(place: Path) -> list[int]:
    """The node's processes that have started and still run."""
    numbers = [int(text) for path in sorted(place.glob("*.pid")) if (text := path.read_text())]
    return [pid for pid in numbers if _is_ours(pid)]


def _is_ours(pid: int) -> bool:
    """False where another program got the id of a process that ended."""
    if not Path("/proc/self").exists():
        return True
    try:
        return b"bessemer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def note_crash(place: Path, rank: int, local_rank: int, error: BaseException) -> None:
    """Keep an unexpected failure, in case the group cannot be restarted."""
    crash = {
        "time": time.time(), "rank": rank, "local_rank": local_rank,
        "error": f"{type(error).__name__}: {first_line(error)}"[:500], "traceback": traceback.format_exc(),
    }  # fmt: skip
    write(place, f"{local_rank}.error", crash)


def root_crash(place: Path) -> dict[str, Any] | None:
    """The first crash that was not caused by a neighbour's."""
    crashes = [read(place, path.name) for path in place.glob("*.error")]
    roots = [crash for crash in crashes if not is_from_neighbour(crash)] or crashes
    return min(roots, key=lambda crash: float(crash["time"]), default=None)


def lost_ranks(place: Path) -> list[int]:
    """Local ranks that were killed, else the one that crashed first by itself."""
    killed = read(place, LOST)
    if killed is not None:
        return list(killed)
    root = root_crash(place)
    return [] if root is None or is_from_neighbour(root) else [root["local_rank"]]


def is_from_neighbour(crash: dict[str, Any]) -> bool:
    """Whether a crash followed from the end of another process."""
    return any(words in crash["error"].lower() for words in NEIGHBOUR_ERRORS)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
