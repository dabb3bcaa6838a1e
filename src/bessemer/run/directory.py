"""The run directory: paths of its files, its lock and its checkpoints."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bessemer.common.console import log_to
from bessemer.common.errors import InputError
from bessemer.run import lock
from bessemer.run.files import read_json_lines
from bessemer.run.stage import restore_replaced


class _RunPath:
    """A descriptor: as an attribute of RunDirectory, it returns the path `name` within the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class Weights:
    """A choice of a run's weights: the newest checkpoint, that of `step`, or the mean of the `average` newest."""

    average: int = 1
    step: int | None = None

    @property
    def name(self) -> str:
        """The choice as text, such as "step 500" or "average 3"; empty for the newest checkpoint."""
        return f"step {self.step}" if self.step is not None else f"average {self.average}" * (self.average > 1)

    @property
    def suffix(self) -> str:
        """Suffix of the names of files about these weights, such as "-step-500"; empty for the newest checkpoint."""
        return f"-{self.name.replace(' ', '-')}" * bool(self.name)

    def steps(self, run: RunDirectory) -> list[int]:
        """Return the steps of the checkpoints to read, ascending."""
        return [self.step] if self.step is not None else checkpoint_steps(run.checkpoints)[-self.average :]


NEWEST = Weights()


@dataclass(frozen=True)
class RunDirectory:
    """A run directory with the paths of its files."""

    path: Path

    recipe = _RunPath("recipe.toml")  # with every derived value filled in
    basis = _RunPath("basis.json")  # measurements of text and machine, from which unset values are derived
    environment = _RunPath("environment.json")  # versions, device, git state
    source = _RunPath("source")  # an imported model's own files, without its weights
    corpus = _RunPath("corpus")  # clean documents (Parquet), rejected/, statistics.json
    tokens = _RunPath("tokens")  # token shards, tokenizer.json, manifest.json
    plan = _RunPath("plan.json")  # predicted time, memory and cost
    checkpoints = _RunPath("checkpoints")  # step-00001000/, latest
    metrics = _RunPath("metrics.jsonl")  # one line per logged step
    incidents = _RunPath("incidents.jsonl")  # incidents and the responses to them
    journal = _RunPath("journal.jsonl")  # rollbacks and skipped steps
    forks = _RunPath("forks.jsonl")  # lines of metrics.jsonl that were rolled back
    times = _RunPath("time.jsonl")  # how the wall time was spent
    tensorboard = _RunPath("tensorboard")  # the metrics as event files
    mixture = _RunPath("mixture.json")  # requested, planned and drawn shares; written after the last step
    profile = _RunPath("profile")  # with --profile: trace.json.gz and operators.txt of a few steps
    evaluation = _RunPath("evaluation.json")  # held-out loss, bits per byte, baselines, samples
    export = _RunPath("export")  # the model in the Hugging Face layout
    report = _RunPath("report.html")
    log = _RunPath("log.txt")  # output of the commands that wrote this run
    lock_file = _RunPath(".lock")
    status = _RunPath(".training")  # reports of the processes of a training (launch/status_files.py)

    def evaluation_of(self, weights: Weights) -> Path:
        """Return the path of the evaluation file of these weights."""
        return self.evaluation.with_stem(self.evaluation.stem + weights.suffix)

    def command(self, name: str) -> str:
        """Return the command line of the subcommand `name` for this run, such as "bessemer tokens runs/x"."""
        return f"bessemer {name} {shlex.quote(str(self.path)) if self.recipe.exists() else 'RECIPE'}"

    @property
    def was_saved(self) -> bool:
        """True if a checkpoint was ever saved in this run directory, even if none is left."""
        has_witness = (self.checkpoints / LATEST).exists() or self.mixture.exists()
        return has_witness or any(row.get("saved", 0) > 0 for row in read_json_lines(self.times)[-1:])

    @property
    def has_begun(self) -> bool:
        """True if a command has started work here: the directory holds more than the lock file and the log."""
        leavings = {self.lock_file.name, self.log.name}
        return self.path.is_dir() and not {entry.name for entry in self.path.iterdir()} <= leavings

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run directory for writing. Raises BessemerError, with the holder, if another process holds the lock."""
        is_new = not self.path.exists()
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.hold(self.lock_file))
            except OSError as error:
                raise InputError(f"{self.path}: cannot be written ({error.strerror}); choose another run.dir") from None
            stack.callback(self._remove_if_unused, is_new)
            restore_replaced(self.checkpoints)
            with log_to(self.log):
                yield

    def is_locked(self) -> bool:
        """Return True if a process on this machine is writing the run.

        It reads /proc/locks, because taking the lock could block a process that is starting.
        """
        with suppress(OSError):
            file, locks = os.stat(self.lock_file), Path("/proc/locks").read_text()
            inode = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
            return any("FLOCK" in line and inode in line.split() for line in locks.splitlines())
        return False

    def was_locked_locally(self) -> bool:
        """Return True if the last process that locked the run directory was on this machine."""
        with suppress(OSError):
            holder = self.lock_file.read_text(encoding="utf-8", errors="replace")
            return holder.partition(",")[0].endswith(f" of {socket.gethostname()}")
        return False

    def _remove_if_unused(self, is_new: bool) -> None:
        """Remove a new directory that holds nothing but lock and log, so that a rejected command leaves no trace."""
        if is_new and not self.has_begun:
            shutil.rmtree(self.path, ignore_errors=True)


LATEST = "latest"  # file with the name of the newest checkpoint, which also shows that there was one


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of `step` is written before it is renamed into place in `folder`.

    If a save is interrupted, the next one removes it.
    """
    return folder / f"{checkpoint_name(step)}.tmp"


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name[1]) for name in names if name)
