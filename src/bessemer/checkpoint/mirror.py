"""A mirror: published checkpoints, and the files that a resume needs besides, in another folder or an object store.

    MIRROR/RUN/step-00001000/...    as in the run's folder; the manifest comes last and goes first
    MIRROR/RUN/recipe.toml ...      files of the run

The mirror has the checkpoints that the run keeps; only what this run has copied is removed, by mirrored.json.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock, Thread

from bessemer import storage
from bessemer.checkpoint.files import BLOCK_BYTES
from bessemer.checkpoint.format import MANIFEST, load_manifest
from bessemer.checkpoint.protocol import Damage, verify
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Recipe
from bessemer.run import (
    LATEST,
    RunFolder,
    checkpoint_name,
    publish_folder,
    published,
    read_json,
    temporary_folder,
    write_atomic,
    write_json,
)
from bessemer.terminal import say, warn

# Files of the run, in the order in which they are copied: a journal may know more rollbacks than the logs, but not fewer.
RUN_FILES = ("recipe.toml", "given.json", "derived.json", "plan.json", "[!j]*.jsonl", "journal.jsonl")
COPIED = "mirrored.json"  # steps that this run has copied, or has been restored from
FINISH_SECONDS = 600.0  # that the end of a run waits for copies


def mirror_of_fresh(recipe: Recipe, run: RunFolder) -> Mirror | None:
    """The mirror of a run without a checkpoint here; None where it has one, or no mirror.

    Raises InputError where the mirror cannot be listed or written: the run would start at step 0, or have no copies.
    """
    if recipe.checkpoint.mirror is None or published(run.checkpoints):
        return None
    mirror = Mirror(recipe.checkpoint.mirror, recipe.run.name, run)
    try:
        mirror.steps()
        storage.require_writable(mirror.place)
    except (BessemerError, OSError) as error:
        raise InputError(
            f"checkpoint.mirror: {storage.redacted(error)}; the run has no checkpoint here, and whether it has one there is not "
            "known, or none could be copied there. Give a place that can be written, or leave the key out"
        ) from None
    return mirror


def restore_missing(recipe: Recipe, run: RunFolder) -> tuple[int, str] | None:
    """Where a run has no checkpoint here, fetch the newest of its mirror, with the run's files. Returns its step and the mirror.

    Raises InputError where the mirror cannot be reached, or none of its checkpoints is whole: the run would start at step 0.
    """
    mirror = mirror_of_fresh(recipe, run)
    if mirror is None or not (steps := mirror.steps()):
        return None
    step = mirror.restore(steps, warn)
    if step is None:
        raise InputError(
            f"{mirror.place}: none of its {len(steps)} checkpoints is whole, and none is in {run.checkpoints}; put one back, "
            "or name another folder"
        )
    say(f"  no checkpoint in {run.checkpoints}: restored that of step {step}, and the run's logs, from {mirror.place}")
    return step, mirror.place


UNREACHABLE = (BessemerError, OSError, ValueError)  # of a store; ValueError: pyarrow's ArrowInvalid


def refetch(recipe: Recipe, run: RunFolder, step: int) -> bool:
    """Fetch a checkpoint that is damaged here from the run's mirror. Returns whether it is whole now."""
    if recipe.checkpoint.mirror is None:
        return False
    mirror = Mirror(recipe.checkpoint.mirror, recipe.run.name, run)
    try:
        if step not in mirror.steps():
            return False
        mirror.fetch(step)
    except UNREACHABLE as error:
        warn(f"{mirror.place}: step {step} cannot be fetched: {storage.redacted(error)}")
        return False
    warn(f"the checkpoint of step {step} was fetched again from {mirror.place}")
    return True


class Mirror:
    """The mirror of a run. Use from one process."""

    def __init__(self, url: str, name: str, run: RunFolder) -> None:
        """url: checkpoint.mirror, an absolute folder, s3:// or gs://."""
        self.place, self._run = f"{url.rstrip('/')}/{name}", run
        self._thread: Thread | None = None
        self._lock, self._has_more = Lock(), False

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are whole there, ascending. Raises BessemerError where it cannot be reached."""
        return sorted(step for step, files in self._listed().items() if MANIFEST in files)

    def follow(self, on_failure: Callable[[str], None]) -> None:
        """Copy what is published and remove what no longer is, in a thread. on_failure: called with a message."""

        def work() -> None:
            while True:
                with self._lock:
                    if not self._has_more:
                        self._thread = None  # within the lock: who calls `follow` from now on starts another one
                        return
                    self._has_more = False
                try:
                    self.update()
                except UNREACHABLE as error:
                    on_failure(
                        f"{self.place}: this mirror of the checkpoints is not up to date: {storage.redacted(error)}"
                    )

        with self._lock:
            self._has_more = True
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=work, name="mirror", daemon=True)
                self._thread.start()

    def finish(self) -> bool:
        """Wait for the copies, for some minutes. Returns whether they are done."""
        thread = self._thread
        if thread is not None:
            thread.join(FINISH_SECONDS)
        return thread is None or not thread.is_alive()

    def update(self) -> None:
        """Make the mirror have what is published. Raises BessemerError, OSError."""
        there, own, here = self._listed(), self._copied(), published(self._run.checkpoints)
        if foreign := sorted(set(there) - own):
            raise BessemerError(f"it has a checkpoint of step {foreign[-1]} from another training; name another folder")
        new = [step for step in here if self._differs(step, there)]
        self._note({*own, *new})  # before the first byte, so that what a kill leaves is known as this run's
        if new:
            for pattern in RUN_FILES:
                for path in sorted(self._run.path.glob(pattern)):
                    self._put(path, path.name)
        for step in reversed(new):
            folder = self._run.checkpoints / checkpoint_name(step)
            if MANIFEST in there.get(step, {}):  # another one of this step, from before a rollback
                self._remove(step, there[step])
            try:
                for name, of in load_manifest(folder).files.items():
                    if self._put(folder / name, f"{folder.name}/{name}") != of["sha256"]:
                        raise BessemerError(f"{folder / name}: damaged: SHA-256 differs from the manifest")
                self._put(folder / MANIFEST, f"{folder.name}/{MANIFEST}")
            except (BessemerError, FileNotFoundError):
                if folder.exists():  # else newer ones have taken its place meanwhile
                    raise
        here = published(self._run.checkpoints)
        # What is older than all here goes as new ones come, two for each: after a restore there is nothing else to roll back to,
        # and yet the mirror comes down to what the run keeps.
        older = sorted(step for step in there if here and step < here[0])
        kept = set(older[2 * len(new) :])
        for step in sorted(set(there) - set(here) - kept):
            self._remove(step, there[step])
        self._note({*here, *kept})

    def restore(self, steps: list[int], on_damage: Callable[[Damage], None]) -> int | None:
        """Fetch the newest of these checkpoints that verifies, and the run's files that are missing here. Returns its step."""
        for step in sorted(steps, reverse=True):
            try:
                self.fetch(step)
            except UNREACHABLE as error:
                on_damage(Damage(f"{self.place}: step {step}: {storage.redacted(error)}", "it is left out"))
                continue
            for name in self._run_files():
                if not (self._run.path / name).exists() and (data := self._get(name)) is not None:
                    write_atomic(self._run.path / name, data)
            write_atomic(self._run.checkpoints / LATEST, checkpoint_name(step))
            self._note({*steps})
            return step
        return None

    def fetch(self, step: int) -> None:
        """Fetch a checkpoint in place of the one that is here, verified. Raises BessemerError, OSError."""
        target = self._run.checkpoints / checkpoint_name(step)
        temporary = temporary_folder(self._run.checkpoints, step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            self._get(f"{target.name}/{MANIFEST}", temporary / MANIFEST)
            for name in load_manifest(temporary).files:
                self._get(f"{target.name}/{name}", temporary / name)
            verify(temporary)
            publish_folder(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _copied(self) -> set[int]:
        path = self._run.checkpoints / COPIED
        return set(read_json(path)) if path.exists() else set()

    def _note(self, steps: set[int]) -> None:
        if steps != self._copied():
            write_json(self._run.checkpoints / COPIED, sorted(steps))

    def _differs(self, step: int, there: dict[int, dict[str, int]]) -> bool:
        """Whether the mirror has no such checkpoint, or another one of the step, as after a rollback."""
        if MANIFEST not in there.get(step, {}):
            return True
        folder = self._run.checkpoints / checkpoint_name(step)
        try:
            manifest = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            if folder.exists():
                raise
            return False  # newer ones have taken its place meanwhile
        return self._get(f"{folder.name}/{MANIFEST}") != manifest

    def _files(self) -> list[tuple[str, str, int]]:
        """Folder, name and size of each file."""
        from pyarrow import fs

        files, path = storage.open_filesystem(self.place)
        try:
            infos = files.get_file_info(fs.FileSelector(path, recursive=True, allow_not_found=True))
        except (OSError, ValueError) as error:
            raise BessemerError(f"{self.place}: cannot be listed: {storage.redacted(error)}") from None
        paths = ((str(info.path).split("/"), info.size) for info in infos if info.type == fs.FileType.File)
        return [(path[-2], path[-1], size) for path, size in paths]

    def _listed(self) -> dict[int, dict[str, int]]:
        """Size of each file of the checkpoints, by step and name."""
        found: dict[int, dict[str, int]] = {}
        for folder, name, size in self._files():
            if folder.startswith("step-") and folder[5:].isdigit():
                found.setdefault(int(folder[5:]), {})[name] = size
        return found

    def _run_files(self) -> list[str]:
        """Names of the run's files there."""
        home = self.place.rpartition("/")[2]
        return [
            name for folder, name, _ in self._files()
            if folder == home and any(fnmatch(name, pattern) for pattern in RUN_FILES)
        ]  # fmt: skip

    def _put(self, source: Path, name: str) -> str:
        """Copy a file there, and check its size. Returns the SHA-256 of what was copied."""
        digest = hashlib.sha256()
        storage.make_folder(f"{self.place}/{name}".rpartition("/")[0])
        storage.put_file(source, f"{self.place}/{name}", digest.update)
        return digest.hexdigest()

    def _get(self, name: str, target: Path | None = None) -> bytes | None:
        """Copy a file from there; without a target its content, None where it is not there."""
        files, path = storage.open_filesystem(self.place)
        try:
            stream = files.open_input_stream(f"{path}/{name}")
        except FileNotFoundError:
            if target is None:
                return None
            raise
        with stream:
            if target is None:
                return bytes(stream.read())
            with open(target, "wb") as file:
                while block := stream.read(BLOCK_BYTES):
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
        return None

    def _remove(self, step: int, names: dict[str, int]) -> None:
        files, path = storage.open_filesystem(self.place)
        for name in sorted(names, key=lambda name: name != MANIFEST):
            files.delete_file(f"{path}/{checkpoint_name(step)}/{name}")
        storage.remove_folder(f"{self.place}/{checkpoint_name(step)}")
