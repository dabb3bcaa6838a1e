"""A run in an object store, or in a folder of another disk (`run.store`): all of its files but checkpoints, which the mirror
copies, and what corpus and tokens have published there.

    STORE/RUN/run.json                     name, size and SHA-256 of each file of one copy; written last
    STORE/RUN/files/NAME.0123456789abcdef  a file of the run; after its name the beginning of its SHA-256
    STORE/RUN/owner.json                   who writes the run: host, process, when it last said so

A file that has changed is another object, so that a copy that is cut short leaves the one before it whole. RUN/.store.json has
what this folder knows of its copy: a folder goes on with a copy that it has written, or was fetched from, and with no other.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep, time
from typing import Any

from bessemer import interrupt, storage
from bessemer.errors import BessemerError, InputError, Stopped
from bessemer.hashing import digest, file_sha256
from bessemer.recipe import Recipe
from bessemer.run import STORE_LOCK, STORE_RECORD, RunFolder, read_json_again, write_json
from bessemer.store_folder import UNREACHABLE, BackgroundCopy, StoreFolder, TakenOver
from bessemer.store_path import in_parallel
from bessemer.terminal import duration, say, warn

RUN, FILES, OWNER = "run.json", "files", "owner.json"  # in the store
RENEW_SECONDS, LEASE_SECONDS = 30.0, 180.0  # between two signs of life of an owner; without one for so long it is gone
_ADVICE = (
    "two machines on one run would overwrite each other; wait for it, stop it, or give this run a name of its own with --set "
    "run.name=NAME"
)
SETTLE_TRIES = 5  # times that files which were replaced while they were copied are copied again
# Files that alone make no copy worth another: where nothing else has changed, nothing was trained, made or scored
MADE_AGAIN = {"report.html", "log.txt"}  # or read by no command: a copy is fetched without them
NO_RESULTS = {"log.txt", "stages.json", "incidents.jsonl", "report.html"}
UNCOPIED = ("checkpoints", "corpus.work", "tokens.work")  # of a run folder; names that begin with a dot are temporary


class RunStore(BackgroundCopy):
    """The copy of a run folder in a store."""

    def __init__(self, url: str, name: str, run: RunFolder) -> None:
        """url: run.store, an absolute folder, s3:// or gs://."""
        super().__init__(f"{url.rstrip('/')}/{name}", "this copy of the run")
        self._run, self._there = run, StoreFolder(self.place)
        self._has_published = False  # from now on all changes are worth a copy: those of a command that made something

    @classmethod
    def of(cls, recipe: Recipe, run: RunFolder) -> RunStore | None:
        """That of a run; None where its recipe names none."""
        return None if recipe.run.store is None else cls(recipe.run.store, recipe.run.name, run)

    # --- What is there ------------------------------------------------------------------------------------------------

    def copy(self) -> dict[str, Any] | None:
        """run.json, with its own SHA-256 as "sha256"; None where there is no copy. Raises InputError for a damaged one."""
        data = self._there.read(RUN)
        if data is None:
            return None
        try:
            found = json.loads(data)
            if not isinstance(found, dict) or found.pop("checksum") != digest(found):
                raise ValueError
            if any(".." in Path(name).parts for name in found["files"]):
                raise ValueError
        except (ValueError, KeyError):
            raise InputError(
                f"{self.place}/{RUN}: damaged, so the copy of the run is not known to be whole; on the machine that has the run "
                "folder remove that object, and the same command writes the copy again"
            ) from None
        return {**found, "sha256": hashlib.sha256(data).hexdigest()}

    def fetch(self, copy: dict[str, Any], is_final: bool = False) -> int:
        """Copy the files of a copy into the run folder, each verified, and note that it is this folder's. What is there already
        is kept. is_final: no newer copy takes the place of this one. Returns the bytes of all. Raises BessemerError for a file
        that is not there as it was written."""

        def fetch(item: tuple[str, list[Any]]) -> None:
            name, (size, sha256) = item
            target = self._run.path / name
            if target.is_file() and target.stat().st_size == size and file_sha256(target) == sha256:
                return
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._there.get(_object(name, sha256), target)
                is_whole = file_sha256(target) == sha256
            except FileNotFoundError:
                is_whole = False
            if not is_whole:
                why = f"{self.place}/{_object(name, sha256)}: missing or damaged"
                if is_final and name in MADE_AGAIN:
                    warn(f"{why}; it is left out")
                    target.unlink(missing_ok=True)
                    return
                raise BessemerError(
                    f"{why}, so this copy of the run is not whole; the machine that has the run folder copies the file again at "
                    f"its next command, once that object is removed. Where it is lost, remove {self.place}/{RUN}: `bessemer run "
                    "RECIPE` builds again what is missing and goes on from the newest checkpoint"
                )

        in_parallel(fetch, copy["files"].items())
        known = {
            name: [*_stat(self._run.path / name), sha256]
            for name, (_, sha256) in copy["files"].items()
            if name not in MADE_AGAIN or (self._run.path / name).exists()
        }
        self._write({**self._fresh(), "run": copy["run"], "copies": [copy["sha256"]], "files": known})
        return sum(size for size, _ in copy["files"].values())

    def require_same(self, copy: dict[str, Any] | None) -> None:
        """Raise InputError where a copy was written by another run, or by another folder of this one."""
        if copy is None or self.knows(copy):
            return
        by = f"written by {copy['host']}, {duration(max(time() - copy['time'], 0.0))} ago"
        if not self.is_older_than(copy):
            raise InputError(
                f"{self.place}: has another run of this name than {self._run.path} ({by}). Give this run a name of its own with "
                "--set run.name=NAME, or name another store; to have the run that is there, move the folder away"
            )
        raise InputError(
            f"{self.place}: the run has gone on elsewhere ({by}), and {self._run.path} is older. `bessemer train RECIPE` "
            "sets the folder aside and fetches the run as it is now"
        )

    def require_owner(self) -> None:
        """Raise BessemerError where another machine, or another folder of this one, is writing the run."""
        if (owner := self._other_owner()) is not None:
            raise TakenOver(f"{self.place}: {_named(owner)} is writing this run: {_ADVICE}")

    def require_current(self) -> None:
        """Raise TakenOver where another machine is writing the run, or has gone on with it."""
        self.require_owner()
        if self.is_older_than(self.copy()):
            raise TakenOver(f"{self.place}: another machine has gone on with this run")

    @property
    def run_id(self) -> str:
        """What all folders of one run, on any machine, have in common."""
        return str(self._record()["run"])

    def knows(self, copy: dict[str, Any] | None) -> bool:
        """Whether this folder has written a copy, or was fetched from it."""
        return copy is not None and copy["sha256"] in self._record()["copies"]

    def is_older_than(self, copy: dict[str, Any] | None) -> bool:
        """Whether a copy is of this run and not of this folder: another one has gone on with it."""
        return copy is not None and copy["run"] == self._record()["run"] and not self.knows(copy)

    # --- Copying ------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Make the store have the run's files as they are now."""
        with locked(self._run.path / STORE_LOCK):
            self.require_current()
            there, record = self.copy(), self._record()
            self.require_same(there)
            for _ in range(SETTLE_TRIES):
                files, before = run_files(self._run.path), record["files"]
                if files.keys() <= {self._run.log.name}:  # of a command that was refused
                    return
                known = self._copied({name: path for name, path in files.items() if name not in NO_RESULTS}, before)
                is_known = there is not None and not self._has_published and self.knows(there)
                if there is not None and is_known and self._made_nothing(known, there["files"]):
                    self._write({**record, "files": {**before, **known}})
                    return
                record["files"] = known = self._copied(files, {**before, **known})
                if all(_is_settled(path, known[name]) for name, path in files.items() if name in known):
                    break
            else:
                raise BessemerError("files of the run are replaced faster than they are copied")
            self._publish(record, there)

    def _made_nothing(self, known: dict[str, list[Any]], there: dict[str, list[Any]]) -> bool:
        """Whether a copy that is whole has all of these files, but for NO_RESULTS ones."""
        names = self._there.entries(FILES, is_recursive=True)
        logs = [_object(name, row[1]) for name, row in there.items() if name in NO_RESULTS]
        rows = {name: row for name, row in there.items() if name not in NO_RESULTS}
        return rows == {name: [row[0], row[3]] for name, row in known.items()} and all(
            log.partition("/")[2] in names for log in logs
        )

    def _copied(self, files: dict[str, Path], known: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Copy the files that the store lacks. Returns size, time, inode and SHA-256 of each."""
        there, done = self._there.entries(FILES, is_recursive=True), dict[str, list[Any]]()

        def put(name: str, path: Path) -> None:
            with suppress(FileNotFoundError):  # replaced meanwhile, or removed
                stat = _stat(path)
                sha256 = known[name][3] if known.get(name, [])[:3] == stat else _sha256(path, stat[0])
                where = _object(name, sha256)
                if there.get(where.partition("/")[2]) != stat[0] and self._there.put(path, where, stat[0]) != sha256:
                    self._there.remove(where)
                    raise BessemerError(f"{path}: changed while it was copied")
                done[name] = [*stat, sha256]

        journal = self._run.journal.name
        in_parallel(put, *zip(*((name, path) for name, path in files.items() if name != journal), strict=True))
        if journal in files:  # it may know more rollbacks than the logs, but not fewer
            put(journal, files[journal])
        return dict(sorted(done.items()))

    def _publish(self, record: dict[str, Any], there: dict[str, Any] | None) -> None:
        """Write run.json, where it is another, and remove what it no longer names."""
        files = {name: [row[0], row[3]] for name, row in record["files"].items()}
        if there is None or there["files"] != files:
            facts = {"run": record["run"], "host": socket.gethostname(), "time": time(), "files": files}
            data = json.dumps({**facts, "checksum": digest(facts)}, indent=1).encode()
            copy = hashlib.sha256(data).hexdigest()
            # Before it is there, so that a kill leaves it known.
            self._write({**record, "copies": [*record["copies"], copy]})
            self.require_current()  # this machine may have been suspended since
            self._there.write(RUN, data)
            self._has_published = True
            record["copies"] = [copy]
            named = {_object(name, row[1]) for name, row in files.items()}
            for name in self._there.entries(FILES, is_recursive=True):
                if f"{FILES}/{name}" not in named:
                    self._there.remove(f"{FILES}/{name}")
        self._write(record)

    # --- The owner ----------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within it this folder is the run's only writer; at the end the copy is brought up to date. Raises as `require_free` and
        `require_writable`."""
        self.require_free()
        self.require_writable()
        self.require_same(self.copy())
        self._write(self._record())  # with the number by which the folder is known as the owner
        stop = Event()
        self._sign()
        thread = Thread(target=self._renew, args=(stop,), name="owner", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as ended_by:
            try:
                if self._record()["copies"] or not isinstance(ended_by, InputError):  # what is refused begins no copy
                    self._finish()
            except UNREACHABLE as error:
                warn(f"run.store: {self.place} is not up to date: {storage.redacted(error)}")
                if isinstance(ended_by, Stopped) and isinstance(error, TakenOver):
                    raise Stopped(f"{str(ended_by).partition(';')[0]}; {self._taken_over()}") from None
            raise
        else:
            try:
                with storage.patient():
                    self._finish()
            except TakenOver:
                raise BessemerError(f"run.store: {self._taken_over()}") from None
            except UNREACHABLE as error:
                why = storage.redacted(error)
                raise BessemerError(
                    f"run.store: {self.place} is not up to date: {why}; the same command brings it up to date"
                ) from None
        finally:
            stop.set()
            thread.join(RENEW_SECONDS)  # it may wait for the store
            with suppress(*UNREACHABLE):
                if (owner := self._owner()) and owner["folder"] == self._record()["folder"]:
                    self._there.remove(OWNER)

    def _taken_over(self) -> str:
        return (
            f"another machine has taken this run over: what was made here since then is in {self._run.path} alone, which the "
            f"same command by its recipe sets aside to go on from {self.place}"
        )

    def _finish(self) -> None:
        self.finish()
        self.update()

    def require_writable(self) -> None:
        """Raise InputError where no file can be written there; as `require_same` where the folder has something."""
        with storage.patient(), storage.requiring_answer("run.store"):
            with storage.answering(self.place):
                storage.asked(self.place, lambda: storage.require_writable(self.place))
            if self._run.has_begun:  # else the run is fetched before anything is written
                self.require_same(self.copy())

    def require_free(self) -> None:
        """Wait for a sign of life of another owner, which may be gone. Raises BessemerError where there is one."""
        with storage.patient(), storage.requiring_answer("run.store"):
            first = self._other_owner()
        if first is None:
            return
        say(
            f"  {self.place}: {_named(first)} wrote this run; waiting up to {duration(LEASE_SECONDS)} for a sign of life"
        )
        until = monotonic() + LEASE_SECONDS
        while (owner := self._other_owner()) is not None and monotonic() < until:
            if owner["time"] != first["time"]:
                self.require_owner()
            interrupt.check()
            sleep(min(1.0, LEASE_SECONDS / 20))

    def _owner(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._there.read(OWNER) or b"{}")
        except ValueError:
            return None
        is_whole = isinstance(found, dict) and {"folder", "host", "process", "time", "boot"} <= found.keys()
        return found if is_whole else None

    def _other_owner(self) -> dict[str, Any] | None:
        """The owner, where it is another folder, on this machine or elsewhere, and has not been gone for long."""
        owner = self._owner()
        if owner is None or owner["folder"] == self._record()["folder"] or time() - owner["time"] > LEASE_SECONDS:
            return None
        is_here = (owner["host"], owner["boot"]) == (socket.gethostname(), _boot())
        return None if is_here and not _is_running(owner["process"]) else owner

    def _sign(self) -> None:
        folder, here = self._record()["folder"], {"host": socket.gethostname(), "boot": _boot(), "process": os.getpid()}
        self._there.write(OWNER, json.dumps({"folder": folder, **here, "time": time()}).encode())

    def _renew(self, stop: Event) -> None:
        while not stop.wait(RENEW_SECONDS):
            with suppress(KeyboardInterrupt, *UNREACHABLE):  # the next time it may answer
                if (other := self._other_owner()) is not None:
                    warn(
                        f"{self.place}: {_named(other)} writes this run now, so it is no longer copied from here; {_ADVICE}"
                    )
                    return
                self._sign()

    # --- What this folder knows ---------------------------------------------------------------------------------------

    def _record(self) -> dict[str, Any]:
        """As it was written; a fresh one where there is none, or one of another place."""
        path = self._run.path / STORE_RECORD
        found = read_json_again(path)
        if found is not None and found.get("place") == self.place and self._fresh().keys() <= found.keys():
            return dict(found)
        return self._fresh()

    def _fresh(self) -> dict[str, Any]:
        names = {"folder": secrets.token_hex(8), "run": secrets.token_hex(8)}
        return {"place": self.place, **names, "copies": [], "files": {}}

    def _write(self, record: dict[str, Any]) -> None:
        write_json(self._run.path / STORE_RECORD, record)


def run_files(folder: Path) -> dict[str, Path]:
    """The files of a run folder that are copied, by their paths in it."""
    found = dict[str, Path]()
    for place, folders, files in os.walk(folder):
        inner = Path(place).relative_to(folder)
        folders[:] = [name for name in folders if not name.startswith(".") and str(inner / name) not in UNCOPIED]
        found |= {str(inner / name): Path(place) / name for name in files if not name.startswith(".")}
    return dict(sorted(found.items()))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this machine; it ends with its process."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['process']} of {owner['host']} (last heard of {duration(max(time() - owner['time'], 0.0))} ago)"


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        pass
    return True


def _boot() -> str:
    """The id of this start of this machine: only there the number of a process has a meaning."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _object(name: str, sha256: str) -> str:
    return f"{FILES}/{name}.{sha256[:16]}"


def _stat(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ino]


def _is_settled(path: Path, copied: Iterable[Any]) -> bool:
    """Whether a file is still the one that was copied; a log may have grown."""
    size, _, inode, _ = copied
    try:
        now = _stat(path)
    except FileNotFoundError:
        return False
    return bool(now[2] == inode and now[0] >= size)


def _sha256(path: Path, num_bytes: int) -> str:
    """SHA-256 of the beginning of a file, which may grow meanwhile."""
    hashed, left = hashlib.sha256(), num_bytes
    with open(path, "rb") as file:
        while block := file.read(min(storage.COPIED_BYTES, left)):
            hashed.update(block)
            left -= len(block)
    return hashed.hexdigest()
