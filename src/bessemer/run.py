"""The run folder: what lies where, atomic writes, the one-writer lock, and whether a stage is current.

A stage writes into a temporary folder beside its place and is published by one rename; `stage.json` inside it
says what it was made from, so that the next run can tell whether it still holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.errors import BessemerError, InputError
from bessemer.hashing import fingerprints, verify_files
from bessemer.terminal import LOG, log, variable, warn

STAGE_FILE = "stage.json"
MAX_JSON_BYTES = 1 << 28  # the manifest of a checkpoint of thousands of processes has a tenth of that
OUT = "out"  # within the work of a resumable stage, what will be published


class _Place:
    """A path within a run folder, as an attribute of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
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

    def steps(self, run: RunFolder) -> list[int]:
        """Return the steps of the checkpoints that are read, ascending."""
        return [self.step] if self.step is not None else published(run.checkpoints)[-self.average :]


NEWEST = Weights()


@dataclass(frozen=True)
class RunFolder:
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


def write_atomic(path: Path, data: str | bytes, is_durable: bool = True) -> None:
    """Replace a file as a whole: after a crash it holds either the old or the new content. Without `is_durable` a power loss
    may cost both."""
    temporary = path.with_name(f".{path.name}.tmp")
    raw = data.encode() if isinstance(data, str) else data
    try:
        with open(temporary, "wb") as file:
            file.write(raw)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:  # of a full disk
            error.filename = str(path)
        raise
    if is_durable:
        sync_folder(path.parent)


def writable(path: Path, option: str, mark: str) -> Path:
    """The path that a user gave for a result, if it can be written: no folder, in one that exists, and not the place of a file
    that anything else wrote. mark: what is within the first 8 KiB of every file that this program writes there. Raises
    InputError."""
    if path.is_dir():
        raise InputError(f"{option}: {path} is a folder; give a file")
    if not path.parent.is_dir():
        raise InputError(f"{option}: {path.parent}: no such folder to write in; make it first")
    if path.exists():
        with open(path, "rb") as file:
            if mark.encode() not in file.read(8 << 10):
                raise InputError(
                    f"{option}: {path} is there, and is none of Bessemer's files; give another name, or remove it first"
                )
    return path


LATEST = "latest"  # of the checkpoints: a file with the name of the newest, a witness that there was one


def best_validation(run: RunFolder) -> tuple[float, int] | None:
    """Return the lowest held-out loss of a published checkpoint, and its step; None without any."""
    there = set(published(run.checkpoints))
    rows = [row for row in read_steps(run.metrics) if row.get("kind") == "validation" and row["step"] in there]
    return min(((row["loss"], row["step"]) for row in rows if row.get("loss") is not None), default=None)


def chosen_step(run: RunFolder, wanted: int | str, option: str) -> int:
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


def write_json(path: Path, value: Any, is_durable: bool = True) -> None:
    """Write a value as indented JSON, atomically; `is_durable` as for `write_atomic`."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", is_durable)


def read_json(path: Path, command: str | None = None) -> Any:
    """Read a JSON file of the run folder; a damaged one is an error that names it.

    command: for a file of a stage, which is verified first: the command that writes it again. Raises DamagedFile.
    """
    if command is not None:
        verify_stage(path.parent, command, lambda name: name == path.name)
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is larger than any such file")
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; has the stage that writes it run?") from None
    except OSError as error:
        raise BessemerError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{path}: damaged, not JSON ({str(error) or type(error).__name__}); put it back, or remove it to have it made again"
        ) from None


def read_json_again(path: Path) -> Any:
    """As `read_json`, of a file that is made again where it is damaged: None then, with a warning; and where it is not there."""
    try:
        value = read_json(path) if path.exists() else None
    except InputError as error:
        warn(f"{str(error).partition(';')[0]}: it is made again")
        return None
    if not isinstance(value, dict | None):
        warn(f"{path}: damaged, not a JSON object: it is made again")
        return None
    return value


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a JSON-lines file; a line cut short by a kill, or damaged, is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of a log of steps (metrics.jsonl, forks.jsonl, incidents.jsonl). One without the number of its step is damaged,
    and left out."""
    return [row for row in read_json_lines(path) if type(row.get("step")) is int]


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def link(source: Path, target: Path) -> None:
    """Copy a file or a folder by hard links, so that it outlives `source` and takes no space; by content where that is
    impossible, and logs (.jsonl): a link would see what is written to them in place."""

    def link_file(file: str, place: str) -> None:
        try:
            if not file.endswith(".jsonl"):
                os.link(file, place)
                return
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without hard links
            pass
        shutil.copy2(file, place)

    if source.is_dir():
        shutil.copytree(source, target, copy_function=link_file, dirs_exist_ok=True)
    else:
        link_file(str(source), str(target))


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of `folder` when the block ends well, and vanishes when it does not."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        publish_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish_folder(temporary: Path, folder: Path) -> None:
    """Put a finished folder in the place of `folder`, durably where its files are synced. A kill leaves the old one there, or the
    new one, or the old one under another name, from which `restore_replaced` brings it back."""
    sync_folder(temporary)
    replaced = folder.with_name(f".{folder.name}.old")
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def restore_replaced(checkpoints: Path) -> None:
    """Bring back each checkpoint that a kill within `publish_folder` left under another name, and remove it where a new one has
    taken its place."""
    for replaced in checkpoints.glob(".step-*.old"):
        target = checkpoints / replaced.name[1 : -len(".old")]
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # a reader need not be allowed to, and the writer does it too
                os.rename(replaced, target)


@contextmanager
def resumable(folder: Path, inputs: str) -> Iterator[Path]:
    """As `staging`, for a stage that goes on where it was stopped: a folder with OUT/ in it, which takes the place of `folder`
    when the block ends well, and else stays for the next time with the same inputs. Work on other inputs is removed.
    """
    work = folder.with_name(f".{folder.name}.work")
    record = work / "work.json"
    if (read_json_again(record) or {}).get("inputs") != inputs:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        write_json(record, {"inputs": inputs})
    (work / OUT).mkdir(exist_ok=True)
    yield work
    publish_folder(work / OUT, folder)
    shutil.rmtree(work, ignore_errors=True)


def mark_stage(folder: Path, inputs: str, is_durable: bool = True, known: Any = None, **facts: Any) -> None:
    """Record inside a staged folder what it was made from, and size and SHA-256 of its files; called last, before it is
    published. `is_durable`: as for `write_atomic`; known: as for `fingerprints`."""
    (folder / STAGE_FILE).unlink(missing_ok=True)  # of a stop between this and the rename: no output of the stage
    files = fingerprints(folder, known)
    outputs, hashes = ({name: of[key] for name, of in files.items()} for key in ("bytes", "sha256"))
    write_json(folder / STAGE_FILE, {"inputs": inputs, "outputs": outputs, "sha256": hashes, **facts}, is_durable)


def recorded_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what `mark_stage` recorded of a stage's files. Stages of earlier versions have sizes only."""
    facts = stage_facts(folder)
    hashes = facts["sha256"] if isinstance(facts.get("sha256"), dict) else {}
    return {name: {"bytes": size, "sha256": hashes.get(name)} for name, size in facts.get("outputs", {}).items()}


def verify_stage(folder: Path, command: str, reads: Callable[[str], bool] = bool) -> None:
    """Raise DamagedFile for the first file of a stage that is not as `mark_stage` recorded it.

    command: writes the stage again; reads: which files are read, all by default.
    """
    verify_files(folder, {name: facts for name, facts in recorded_files(folder).items() if reads(name)}, command)


def stage_is_current(folder: Path, inputs: str) -> bool:
    """Whether a stage was made from these inputs and all its files are there in full length."""
    stage = stage_facts(folder)
    return bool(stage.get("inputs") == inputs) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size for name, size in stage["outputs"].items()
    )


def stage_facts(folder: Path) -> dict[str, Any]:
    """What `mark_stage` recorded of a stage; empty where there is nothing, or it is damaged."""
    try:
        facts = read_json(folder / STAGE_FILE)
    except InputError:
        return {}
    return facts if isinstance(facts, dict) and isinstance(facts.get("outputs"), dict) else {}
