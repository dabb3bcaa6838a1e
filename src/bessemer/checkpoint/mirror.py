"""A mirror of a run's published checkpoints, and of the files that a resume needs, in an object store or another folder.

MIRROR/RUN/mirror.json          the id of the training that writes the mirror, also in checkpoints/ of its run directory
MIRROR/RUN/recipe.toml ...      files of the run
MIRROR/RUN/step-00001000/...    a checkpoint; its manifest is written last and removed first
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from threading import Thread

from bessemer.checkpoint.format import MANIFEST, load_manifest
from bessemer.checkpoint.protocol import verify
from bessemer.common.console import say, warn
from bessemer.common.errors import BessemerError, InputError
from bessemer.common.hashing import file_sha256
from bessemer.recipe import Recipe
from bessemer.run.directory import LATEST, RunDirectory, checkpoint_name, checkpoint_steps, temporary_folder
from bessemer.run.files import write_atomic
from bessemer.run.stage import publish_folder
from bessemer.storage.filesystem import AccessError, AnyPath, parse_path, redact, require_writable
from bessemer.storage.path import copy, entries, remove_tree, write_file

# Files of the run in the order of copying. The journal is last: it may have more rollbacks than the logs, but not fewer.
RUN_FILES = ("recipe.toml", "plan.json", "[!j]*.jsonl", "journal.jsonl")
OWNER = "mirror.json"
FINISH_SECONDS = 600.0  # how long the end of a run waits for the copy in the background


def new_run_mirror(recipe: Recipe, run: RunDirectory) -> Mirror | None:
    """Return the mirror of a run, after checking access to it; None if the recipe has no mirror or the run a local checkpoint.

    A new run must reach its mirror, because otherwise it would start at step 0 despite mirrored checkpoints, or have no copies.

    Raises:
        InputError: The mirror may not be listed or written.
        BessemerError: The mirror does not answer.
    """
    mirror = Mirror.from_recipe(recipe, run)
    if mirror is None or checkpoint_steps(run.checkpoints):
        return None
    try:
        mirror.steps()
    except (AccessError, OSError) as error:
        raise InputError(f"checkpoint.mirror: {redact(error)}. Set it to a folder that can be written") from None
    require_writable("checkpoint.mirror", mirror.folder)
    return mirror


def restore_missing(recipe: Recipe, run: RunDirectory) -> tuple[int, AnyPath] | None:
    """Download the newest checkpoint and the run's files from the mirror, if the run has no local checkpoint.

    Returns:
        The step and the mirror's folder; None if nothing was restored.

    Raises:
        InputError: The mirror cannot be reached, or none of its checkpoints verifies. The run would otherwise start at step 0.
    """
    mirror = new_run_mirror(recipe, run)
    if mirror is None or (step := mirror.restore_newest()) is None:
        return None
    say(f"  {run.checkpoints} has no checkpoint: restored step {step} and the run's logs from {mirror.folder}")
    return step, mirror.folder


def refetch(recipe: Recipe, run: RunDirectory, step: int) -> bool:
    """Replace a damaged local checkpoint by the copy in the run's mirror. Returns True if it verifies now."""
    mirror = Mirror.from_recipe(recipe, run)
    if mirror is None:
        return False
    try:
        mirror.require_own()
        mirror.fetch(step)
    except (BessemerError, OSError) as error:
        warn(f"{mirror.folder}: downloading step {step} failed: {redact(error)}")
        return False
    return True


class Mirror:
    """The mirror of a run. Only one process may use it."""

    def __init__(self, url: str, name: str, run: RunDirectory, keep: int = 1) -> None:
        """Locate the mirror of a run, without access to it.

        Args:
            url: The value of checkpoint.mirror: an absolute folder, s3:// or gs://.
            name: The name of the run.
            run: The run directory.
            keep: The least number of checkpoints that `update` leaves in the mirror, even if the run has fewer, as after a
                restore of only the newest.
        """
        self.folder = parse_path(url) / name
        self._run, self._keep = run, keep
        self._thread: Thread | None = None

    @classmethod
    def from_recipe(cls, recipe: Recipe, run: RunDirectory) -> Mirror | None:
        """Return the mirror of a run; None if its recipe names none."""
        url, keep = recipe.checkpoint.mirror, recipe.checkpoint.keep
        return None if url is None else cls(url, recipe.run.name, run, keep)

    def steps(self) -> list[int]:
        """Return the steps of the mirror's complete checkpoints, ascending.

        Raises BessemerError if the mirror cannot be reached.
        """
        return sorted(step for step, folder in self._listed().items() if (folder / MANIFEST).exists())

    def follow(self, on_failure: Callable[[str], None]) -> None:
        """Update the mirror in a thread, after earlier updates have ended.

        Args:
            on_failure: Called with the message of an update that fails.
        """
        before = self._thread

        def work() -> None:
            if before is not None:
                before.join()
            try:
                self.update()
            except (BessemerError, OSError) as error:
                on_failure(f"{self.folder}: updating the mirror failed: {redact(error)}")

        self._thread = Thread(target=work, name="mirror", daemon=True)
        self._thread.start()

    def finish(self) -> bool:
        """Wait up to FINISH_SECONDS for the running updates. Returns True if they are done."""
        if self._thread is None:
            return True
        self._thread.join(FINISH_SECONDS)
        return not self._thread.is_alive()

    def update(self) -> None:
        """Upload published checkpoints, and remove those that the run no longer has. Raises BessemerError, OSError."""
        mirrored, local = self._listed(), checkpoint_steps(self._run.checkpoints)
        if not local:
            return
        if mirrored:
            self.require_own()
        else:
            self._own(_content(self._run.checkpoints / OWNER))
        new = [step for step in local if self._differs(step, mirrored.get(step))]
        for path in (path for pattern in RUN_FILES if new for path in sorted(self._run.path.glob(pattern))):
            copy(path, self.folder / path.name)
        for step in reversed(new):
            folder = self._run.checkpoints / checkpoint_name(step)
            try:
                self._upload(folder)
            except (BessemerError, FileNotFoundError):
                if folder.exists():  # otherwise retention has removed it during the upload
                    raise
        older = sorted(step for step in mirrored if step < local[0])
        for step in mirrored.keys() - {*[*older, *local][-max(self._keep, len(local)) :]}:
            (mirrored[step] / MANIFEST).unlink(missing_ok=True)
            remove_tree(mirrored[step])

    def restore_newest(self) -> int | None:
        """Download the newest checkpoint that verifies, and the run's files that are missing locally.

        Returns:
            The step of the checkpoint; None if the mirror has no checkpoint.

        Raises:
            InputError: No checkpoint verifies, or the mirror is of another training than the run directory.
        """
        if not (steps := self.steps()):
            return None
        if (self._run.checkpoints / OWNER).exists():
            self.require_own()
        for step in reversed(steps):
            try:
                self.fetch(step)
            except (BessemerError, OSError) as error:
                warn(f"{self.folder}: step {step}: {redact(error)}; trying the next older checkpoint")
                continue
            for path in entries(self.folder):
                is_of_run = any(fnmatch(path.name, pattern) for pattern in RUN_FILES)
                if is_of_run and not (self._run.path / path.name).exists():
                    write_atomic(self._run.path / path.name, path.read_bytes())
            write_atomic(self._run.checkpoints / LATEST, checkpoint_name(step))
            self._own(_content(self.folder / OWNER))
            return step
        raise InputError(
            f"{self.folder}: all of its {len(steps)} checkpoints are damaged; restore one, or change checkpoint.mirror"
        )

    def fetch(self, step: int) -> None:
        """Download a checkpoint, verify it, and replace the local one. Raises BessemerError, OSError."""
        target = self._run.checkpoints / checkpoint_name(step)
        temporary = temporary_folder(self._run.checkpoints, step)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            copy(self.folder / target.name / MANIFEST, temporary / MANIFEST)
            for name in load_manifest(temporary).files:
                copy(self.folder / target.name / name, temporary / name)
            verify(temporary)
            publish_folder(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def require_own(self) -> None:
        """Raise InputError if the mirror has checkpoints of another training."""
        owner = _content(self.folder / OWNER)
        if owner is None or owner != _content(self._run.checkpoints / OWNER):
            raise InputError(f"{self.folder}: it belongs to another training; remove it, or change checkpoint.mirror")

    def _own(self, owner: bytes | None) -> None:
        """Record the training that writes the mirror, in the mirror and in the run directory; None creates a new id."""
        owner = owner or json.dumps({"training": secrets.token_hex(8)}).encode()
        for folder in (self._run.checkpoints, self.folder):
            write_file(folder / OWNER, owner)

    def _upload(self, folder: Path) -> None:
        target = self.folder / folder.name
        # The mirror may hold another checkpoint of this step, from before a rollback.
        (target / MANIFEST).unlink(missing_ok=True)
        for name, facts in load_manifest(folder).files.items():
            if file_sha256(folder / name) != facts["sha256"]:
                raise BessemerError(f"{folder / name}: damaged: SHA-256 differs from the manifest")
            copy(folder / name, target / name)
        copy(folder / MANIFEST, target / MANIFEST)

    def _differs(self, step: int, mirrored: AnyPath | None) -> bool:
        """Return True if the mirror lacks the checkpoint or has another one of the step, as after a rollback."""
        mine = _content(self._run.checkpoints / checkpoint_name(step) / MANIFEST)
        return mine is not None and (mirrored is None or mine != _content(mirrored / MANIFEST))

    def _listed(self) -> dict[int, AnyPath]:
        """Return the mirror's checkpoint folders by step, complete or not."""
        names = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in entries(self.folder))
        return {int(match[1]): path for match, path in names if match}


def _content(path: AnyPath) -> bytes | None:
    """Return the bytes of a file; None if it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
