"""The run directory: paths of its files, and its checkpoints."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bessemer.common.console import log_to
from bessemer.common.errors import InputError
from bessemer.run import lock
from bessemer.run.files import read_json_lines
from bessemer.run.stage import restore_replaced


class _RunPath:
    """A path within a run directory, as an attribute of it."""

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
        return [self.step] if self.step is not None else checkpoint_steps(run.checkpoints)[-self.average :]


NEWEST = Weights()


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    recipe = _RunPath("recipe.toml")  # with every derived value filled in
    basis = _RunPath("basis.json")  # what was measured of text and machine, from which left-out values follow
    environment = _RunPath("environment.json")  # versions, device, git state
    source = _RunPath("source")  # an imported model's own files, without its weights
    corpus = _RunPath("corpus")  # clean documents (Parquet), rejected/, statistics.json
    tokens = _RunPath("tokens")  # token shards, tokenizer.json, manifest.json
    plan = _RunPath("plan.json")  # what the run was predicted to take
    checkpoints = _RunPath("checkpoints")  # step-00001000/, latest
    metrics = _RunPath("metrics.jsonl")  # a line a step
    incidents = _RunPath("incidents.jsonl")  # what went wrong and what was done
    journal = _RunPath("journal.jsonl")  # rollbacks and skipped steps
    forks = _RunPath("forks.jsonl")  # lines of metrics.jsonl that were rolled back
    times = _RunPath("time.jsonl")  # where the wall time went
    tensorboard = _RunPath("tensorboard")  # the metrics as event files
    mixture = _RunPath("mixture.json")  # shares asked, planned and drawn; written after the last step
    profile = _RunPath("profile")  # with --profile: trace.json.gz and operators.txt, of a few steps
    evaluation = _RunPath("evaluation.json")  # held-out loss, bits per byte, the 5-gram beside it, samples
    export = _RunPath("export")  # the model in the Hugging Face layout
    report = _RunPath("report.html")
    log = _RunPath("log.txt")  # what the commands that wrote this run said
    lock_file = _RunPath(".lock")
    status = _RunPath(".training")  # reports of the processes of a training (launch/status_files.py)

    def evaluation_of(self, weights: Weights) -> Path:
        """Return the file of the scores of these weights."""
        return self.evaluation.with_stem(self.evaluation.stem + weights.suffix)

    def command(self, name: str) -> str:
        """Return the command line of `bessemer NAME` for this run."""
        return f"bessemer {name} {shlex.quote(str(self.path)) if self.recipe.exists() else 'RECIPE'}"

    @property
    def was_saved(self) -> bool:
        """Return True if a checkpoint was ever published here, even if none is left."""
        has_witness = (self.checkpoints / LATEST).exists() or self.mixture.exists()
        return has_witness or any(row.get("saved", 0) > 0 for row in read_json_lines(self.times)[-1:])

    @property
    def has_begun(self) -> bool:
        """Return True if the directory has more than what a rejected command leaves."""
        leavings = {self.lock_file.name, self.log.name}
        return self.path.is_dir() and not {entry.name for entry in self.path.iterdir()} <= leavings

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run directory as its only writer. Raises BessemerError, with the holder, where another process has it."""
        is_new = not self.path.exists()
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock.hold(self.lock_file))
            except OSError as error:
                raise InputError(f"{self.path}: cannot be written ({error.strerror}); set run.dir=PATH") from None
            stack.callback(self._remove_if_unused, is_new)
            restore_replaced(self.checkpoints)
            with log_to(self.log):
                yield

    def is_locked(self) -> bool:
        """Return True if a process of this machine writes the run."""
        return lock.is_held(self.lock_file)

    def was_locked_locally(self) -> bool:
        """Return True if the last process that wrote the run was one of this machine."""
        return lock.was_held_locally(self.lock_file)

    def _remove_if_unused(self, is_new: bool) -> None:
        """Remove a new directory that holds nothing but lock and log, so that a rejected command leaves no trace."""
        if is_new and not self.has_begun:
            shutil.rmtree(self.path, ignore_errors=True)


LATEST = "latest"  # of the checkpoints: a file with the name of the newest, a witness that there was one


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def temporary_folder(folder: Path, step: int) -> Path:
    """Return the folder in which a checkpoint is written before it is published. The next save removes what is left there."""
    return folder / f"{checkpoint_name(step)}.tmp"


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the published checkpoints in a folder, ascending."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(name[1]) for name in names if name)
