"""The run directory: paths of its files, its checkpoints, and the lock of the one process that writes it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bessemer.common.console import LOG, log, variable
from bessemer.common.errors import BessemerError, InputError
from bessemer.run.files import (
    read_steps,
)
from bessemer.run.stage import restore_replaced


class _Place:
    """A path within a run folder, as an attribute of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class Weights:
    """The weights of a run that a command uses: of the newest checkpoint, of `step`, or the mean of the `average` newest."""

    average: int = 1
    step: int | None = None

    @property
    def name(self) -> str:
        """The option of a command for them, without its dashes; empty for those of the newest checkpoint."""
        return f"step {self.step}" if self.step is not None else f"average {self.average}" * (self.average > 1)

    @property
    def suffix(self) -> str:
        """The end of the names of files about them."""
        return f"-{self.name.replace(' ', '-')}" * bool(self.name)

    def steps(self, run: RunDirectory) -> list[int]:
        """Return the steps of the checkpoints that are read, ascending."""
        return [self.step] if self.step is not None else published(run.checkpoints)[-self.average :]


NEWEST = Weights()


@dataclass(frozen=True)
class RunDirectory:
    """Where the parts of one run lie."""

    path: Path

    recipe = _Place("recipe.toml")  # with every derived value filled in
    derived = _Place("derived.json")  # what was derived, and from what
    environment = _Place("environment.json")  # versions, device, git state
    source = _Place("source")  # an imported model's own files, without its weights
    corpus = _Place("corpus")  # clean documents (Parquet), rejected/, statistics.json
    tokens = _Place("tokens")  # token shards, tokenizer.json, manifest.json
    plan = _Place("plan.json")  # what the run was predicted to take
    checkpoints = _Place("checkpoints")  # step-00001000/, latest
    metrics = _Place("metrics.jsonl")  # a line a step
    incidents = _Place("incidents.jsonl")  # what went wrong and what was done
    journal = _Place("journal.jsonl")  # rollbacks and skipped steps
    forks = _Place("forks.jsonl")  # lines of metrics.jsonl that were rolled back
    times = _Place("time.jsonl")  # where the wall time went
    tensorboard = _Place("tensorboard")  # the metrics as event files
    mixture = _Place("mixture.json")  # shares asked, planned and drawn; written after the last step
    profile = _Place("profile")  # with --profile: trace.json.gz and operators.txt, of a few steps
    evaluation = _Place("evaluation.json")  # held-out loss, bits per byte, the 5-gram beside it, samples
    export = _Place("export")  # the model in the Hugging Face layout
    report = _Place("report.html")
    log = _Place("log.txt")  # what the commands that wrote this run said

    def evaluation_of(self, weights: Weights) -> Path:
        """Return the file of the scores of these weights."""
        return self.evaluation.with_stem(self.evaluation.stem + weights.suffix)

    def command(self, name: str) -> str:
        """Return the command line of `bessemer NAME` for this run."""
        return f"bessemer {name} {shlex.quote(str(self.path)) if self.recipe.exists() else 'RECIPE'}"

    @property
    def was_saved(self) -> bool:
        """Whether a checkpoint was published here once, even where none is left."""
        return (self.checkpoints / LATEST).exists()

    @property
    def has_begun(self) -> bool:
        """Whether the folder has more than what a command that was refused leaves."""
        refused = {".lock", self.log.name}
        return self.path.is_dir() and not {entry.name for entry in self.path.iterdir()} <= refused

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the run folder for one writer; a second one is refused. The lock dies with its process."""
        lock, is_new = self.path / ".lock", not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(
                f"{self.path}: the run folder cannot be written ({error.strerror}); choose another with --set run.dir=PATH"
            ) from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.read(handle, 256).decode(errors="replace").rpartition(" on ")[0].strip()
                raise BessemerError(
                    f"{self.path}: another process{f' ({holder})' if holder else ''} is writing this run; "
                    "wait for it, stop it, or choose another name with --set run.name=NAME"
                ) from None
            os.ftruncate(handle, 0)
            job = f", Slurm job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
            os.write(handle, f"pid {os.getpid()} of {socket.gethostname()}{job} on {_machine()}".encode())
            restore_replaced(self.checkpoints)
            with _logging_to(self.log):
                yield
        finally:
            if is_new and not self.has_begun:
                shutil.rmtree(self.path, ignore_errors=True)  # a refusal leaves no trace
            os.close(handle)

    def was_written_here(self) -> bool:
        """Whether the last process that held the folder was one of this machine."""
        try:
            holder = (self.path / ".lock").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return holder.endswith(f" on {_machine()}")

    def is_being_written(self) -> bool:
        """Whether a process of this machine holds the folder by `writing`. Takes no lock: that would refuse a run that starts."""
        try:
            found = os.stat(self.path / ".lock")
            locks = Path("/proc/locks").read_text()
        except OSError:
            return False
        place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        return any("FLOCK" in line and place in line.split() for line in locks.splitlines())


def _machine() -> str:
    """Identifies this machine without its name."""
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=8).hexdigest()


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Copy what is said to a log, and the error that ends it."""
    with variable(LOG, str(path.absolute())):
        try:
            yield
        except BaseException as error:
            log("stopped" if isinstance(error, KeyboardInterrupt) else str(error) or type(error).__name__)
            raise


LATEST = "latest"  # of the checkpoints: a file with the name of the newest, a witness that there was one


def best_validation(run: RunDirectory) -> tuple[float, int] | None:
    """Return the lowest held-out loss of a published checkpoint, and its step; None without any."""
    there = set(published(run.checkpoints))
    rows = [row for row in read_steps(run.metrics) if row.get("kind") == "validation" and row["step"] in there]
    return min(((row["loss"], row["step"]) for row in rows if row.get("loss") is not None), default=None)


def chosen_step(run: RunDirectory, wanted: int | str, option: str) -> int:
    """Return the step of a published checkpoint, wanted by its number or as "best". Raises InputError that names the option."""
    there, best = published(run.checkpoints), best_validation(run)
    if wanted == "best" and best is not None:
        return best[1]
    if str(wanted).isdecimal() and int(wanted) in there:
        return int(wanted)
    what = "validated checkpoint" if wanted == "best" else "such checkpoint"
    raise InputError(
        f"{option} {wanted}: {run.path} has no {what}; there are those of steps {', '.join(map(str, there))}"
    )


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint of a step is written before it is published; what is left of one there is removed by the next save."""
    return folder / f"{checkpoint_name(step)}.tmp"


def published(folder: Path) -> list[int]:
    """Steps of the published checkpoints in a folder of them, ascending."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(name[1]) for name in names if name)
