"""A mirror: published checkpoints, and the files that a resume needs besides, in another folder or an object store.

    MIRROR/RUN/step-00001000/...    as in the run's folder; the manifest comes last and goes first
    MIRROR/RUN/recipe.toml ...      files of the run

The mirror has the checkpoints that the run keeps; only what this run has copied is removed, by mirrored.json. In the store of
the run (`run.store`) each also has of-run.json, so that one which another machine left, from which this one took the run over, is
known as this run's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatch

from bessemer import storage
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
from bessemer.run_store import RunStore
from bessemer.store_folder import UNREACHABLE, BackgroundCopy, StoreFolder, TakenOver
from bessemer.terminal import say, warn

# Files of the run, in the order in which they are copied: a journal may know more rollbacks than the logs, but not fewer.
RUN_FILES = ("recipe.toml", "given.json", "derived.json", "plan.json", "[!j]*.jsonl", "journal.jsonl")
OF_RUN = "of-run.json"
COPIED = "mirrored.json"  # steps that this run has copied, or has been restored from


def mirror_of_fresh(recipe: Recipe, run: RunFolder) -> Mirror | None:
    """The mirror of a run without a checkpoint here; None where it has one, or no mirror.

    Raises InputError where the mirror cannot be listed or written: the run would start at step 0, or have no copies.
    """
    mirror = Mirror.of(recipe, run)
    if mirror is None or published(run.checkpoints):
        return None
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
    if mirror is None or (step := mirror.restore_newest()) is None:
        return None
    say(f"  no checkpoint in {run.checkpoints}: restored that of step {step}, and the run's logs, from {mirror.place}")
    return step, mirror.place


def refetch(recipe: Recipe, run: RunFolder, step: int) -> bool:
    """Fetch a checkpoint that is damaged here from the run's mirror. Returns whether it is whole now."""
    mirror = Mirror.of(recipe, run)
    if mirror is None:
        return False
    try:
        if step not in mirror.steps():
            return False
        mirror.fetch(step)
    except UNREACHABLE as error:
        warn(f"{mirror.place}: step {step} cannot be fetched: {storage.redacted(error)}")
        return False
    warn(f"the checkpoint of step {step} was fetched again from {mirror.place}")
    return True


class Mirror(BackgroundCopy):
    """The mirror of a run. Use from one process."""

    def __init__(self, url: str, name: str, run: RunFolder) -> None:
        """url: checkpoint.mirror, an absolute folder, s3:// or gs://."""
        super().__init__(f"{url.rstrip('/')}/{name}", "this mirror of the checkpoints")
        self._run, self._there = run, StoreFolder(self.place)
        self.first: RunStore | None = None  # updated before it, so that no checkpoint there is newer than the journal

    @classmethod
    def of(cls, recipe: Recipe, run: RunFolder) -> Mirror | None:
        """That of a run, with its store as `first` where they are in one place; None where the recipe names none."""
        if recipe.checkpoint.mirror is None:
            return None
        mirror, store = cls(recipe.checkpoint.mirror, recipe.run.name, run), RunStore.of(recipe, run)
        mirror.first = store if store is not None and store.place == mirror.place else None
        return mirror

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are whole there, ascending. Raises BessemerError where it cannot be reached."""
        return sorted(step for step, files in self._listed().items() if MANIFEST in files)

    def update(self) -> None:
        """Make the mirror have what is published. Raises BessemerError, OSError."""
        if self.first is not None:
            self.first.update()
        there, own, here = self._listed(), self._copied(), published(self._run.checkpoints)
        own |= {step for step in set(there) - own if self._is_of_run(step)}
        if foreign := sorted(set(there) - own):
            place = f"{self.place}/{checkpoint_name(foreign[-1])}"
            raise BessemerError(
                f"it has a checkpoint of step {foreign[-1]} from another training; remove {place}, or name another folder"
            )
        new = [step for step in here if self._differs(step, there)]
        self._note({*own, *new})  # before the first byte, so that what a kill leaves is known as this run's
        if new:
            for pattern in RUN_FILES:
                for path in sorted(self._run.path.glob(pattern)):
                    self._there.put(path, path.name)
        for step in reversed(new):
            folder = self._run.checkpoints / checkpoint_name(step)
            if MANIFEST in there.get(step, {}):  # another one of this step, from before a rollback
                self._remove(step, there[step])
            try:
                if self.first is not None:
                    self.first.require_current()  # this machine may have been suspended since
                    self._there.write(f"{folder.name}/{OF_RUN}", _of_run(self.first))
                for name, of in load_manifest(folder).files.items():
                    if self._there.put(folder / name, f"{folder.name}/{name}") != of["sha256"]:
                        raise BessemerError(f"{folder / name}: damaged: SHA-256 differs from the manifest")
                if self.first is not None:
                    self.first.require_current()
                self._there.put(folder / MANIFEST, f"{folder.name}/{MANIFEST}")
            except TakenOver:
                raise
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
        self._note(
            {*here, *kept, *new}
        )  # newer ones may have taken the place of a new one meanwhile: it is there, and goes later

    def restore_newest(self) -> int | None:
        """Fetch the newest checkpoint that verifies, as `restore`; None where there is none. Raises InputError where none of
        those there is whole."""
        if not (steps := self.steps()):
            return None
        if (step := self.restore(steps, warn)) is None:
            raise InputError(
                f"{self.place}: none of its {len(steps)} checkpoints is whole, and none is in {self._run.checkpoints}; put one "
                "back, or name another folder"
            )
        return step

    def restore(self, steps: list[int], on_damage: Callable[[Damage], None]) -> int | None:
        """Fetch the newest of these checkpoints that verifies, and the run's files that are missing here. Returns its step."""
        for step in sorted(steps, reverse=True):
            try:
                self.fetch(step)
            except UNREACHABLE as error:
                on_damage(Damage(f"{self.place}: step {step}: {storage.redacted(error)}", "it is left out"))
                continue
            names = [name for name, size in self._there.entries().items() if size is not None]
            for name in (name for name in names if any(fnmatch(name, pattern) for pattern in RUN_FILES)):
                if not (self._run.path / name).exists() and (data := self._there.read(name)) is not None:
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
            self._there.get(f"{target.name}/{MANIFEST}", temporary / MANIFEST)
            for name in load_manifest(temporary).files:
                self._there.get(f"{target.name}/{name}", temporary / name)
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
        return self._there.read(f"{folder.name}/{MANIFEST}") != manifest

    def _is_of_run(self, step: int) -> bool:
        """Whether a checkpoint of the run's store is of this run."""
        if self.first is None:
            return False
        data = self._there.read(f"{checkpoint_name(step)}/{OF_RUN}")
        return data == _of_run(self.first)

    def _listed(self) -> dict[int, dict[str, int]]:
        """Size of each file of the checkpoints, by step and name."""
        found: dict[int, dict[str, int]] = {}
        for folder, size in self._there.entries().items():
            if size is None and folder.startswith("step-") and folder[5:].isdigit():
                files = self._there.entries(folder)
                found[int(folder[5:])] = {name: size for name, size in files.items() if size is not None}
        return {step: files for step, files in found.items() if files}

    def _remove(self, step: int, names: dict[str, int]) -> None:
        for name in sorted(names, key=lambda name: name != MANIFEST):
            self._there.remove(f"{checkpoint_name(step)}/{name}")
        storage.remove_folder(f"{self.place}/{checkpoint_name(step)}")


def _of_run(store: RunStore) -> bytes:
    return json.dumps({"run": store.run_id}).encode()
