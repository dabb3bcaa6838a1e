"""The checkpoint protocol: after a kill at any instant, the last good checkpoint is whole and found.

    step-00001000/
      model.safetensors, optimizer.safetensors, ...   tensors; nothing is pickled. Of several processes, each writes what
      model-00001-of-00008.safetensors, ...           it holds, and of what several hold, its share
      manifest.json                                   written last: per file size and SHA-256, per tensor dtype, shape
                                                      and pieces, and the facts a resume needs
    latest                                            the name of the newest verified checkpoint

Saving: the state must be finite and the disk must hold 1.2 times its size; files go into step-N.tmp/, each synced;
the manifest last; then all is reread and verified; only then is it published by a rename and a sync of the folder,
then `latest` moves, and only then are older checkpoints removed. Loading verifies every byte before anything is
used, and falls back to the next older checkpoint; when some exist and none is whole it refuses, rather than start
from nothing.

Of several processes, the first prepares, publishes and removes, all write and verify; what fails on one fails on all.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bessemer.checkpoint import manifest
from bessemer.checkpoint.manifest import MANIFEST
from bessemer.checkpoint.pieces import Contents, Duty, Tensors, assign, held_by, table_of
from bessemer.checkpoint.reading import Checkpoint
from bessemer.checkpoint.together import exchange
from bessemer.errors import BessemerError
from bessemer.parallel.team import ALONE, Team
from bessemer.run import sync_folder, write_atomic

__all__ = ["MANIFEST", "Checkpoint", "Tensors", "latest", "prepare", "publish", "published", "save", "verify"]

LATEST = "latest"
SPACE_FACTOR = 1.2

Shares = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Prepared:
    """A save that has begun: its folder is there, and each process knows what it writes.

    mine: part -> name -> local tensor, not copied; contents: known to the first process.
    """

    folder: Path
    step: int
    duty: Duty
    mine: Shares
    contents: Contents

    @property
    def target(self) -> Path:
        """Where it will be published."""
        return self.folder / f"step-{self.step:08d}"

    @property
    def staged(self) -> Path:
        """Where it is written."""
        return self.folder / f"{self.target.name}.tmp"


def save(
    folder: Path,
    step: int,
    tensors: Tensors,
    facts: dict[str, Any],
    keep: int,
    team: Team = ALONE,
    branch: int | None = None,
) -> Checkpoint:
    """Write and publish a checkpoint of `step`; every process of the team calls it.

    tensors: part -> name -> tensor, or DTensor of any layout; a name that several processes give is one tensor, so what
    differs between them needs names of its own. facts: plain values for the manifest, those of the first process;
    keep: verified checkpoints that remain; branch: beside them, the newest one at or before this step.
    Raises BessemerError when the state is not finite, the disk is too full, or what was written does not verify, on
    every process; whatever happens, the checkpoints that were there before stay.
    """
    return publish(prepare(folder, step, tensors, team), facts, keep, team, branch=branch)


def prepare(folder: Path, step: int, tensors: Tensors, team: Team = ALONE) -> Prepared:
    """Agree on who writes what, and make the folder that it goes to. Raises as `save`, on every process."""
    held = held_by(tensors)
    known: Contents = {}

    def decide(tables: list[Any]) -> list[Duty]:
        duties, contents = assign(tables)
        known.update(contents)
        needed = sum(
            tables[rank][part, name].nbytes
            for rank, duty in enumerate(duties)
            for part, (_, names) in duty.items()
            for name in names
        )
        _require_space(folder, needed)
        staged = Prepared(folder, step, {}, {}, {}).staged
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        return duties

    duty = exchange(team, lambda: table_of(held), decide)
    mine = {part: {name: held[part][name].data for name in names} for part, (_, names) in duty.items()}
    return Prepared(folder, step, duty, mine, known)


def publish(
    prepared: Prepared,
    facts: dict[str, Any],
    keep: int,
    team: Team = ALONE,
    values: Callable[[], Shares] | None = None,
    branch: int | None = None,
) -> Checkpoint:
    """Write what was prepared, and publish it. Raises as `save`, on every process.

    values: what to write in place of `prepared.mine`: a copy of it.
    """
    target, staged = prepared.target, prepared.staged

    def write() -> dict[str, Any]:
        shares = prepared.mine if values is None else values()
        _require_finite(shares)
        if not staged.is_dir():
            raise BessemerError(
                f"{staged}: the first process made it, but it is not there; is the folder shared by all?"
            )
        files = {}
        for part, (file, _) in prepared.duty.items():
            _write(shares[part], staged / file)
            files[file] = _fingerprint(staged / file)
        return files

    def describe(written: list[dict[str, Any]]) -> list[None]:
        files = {name: found for of_rank in written for name, found in of_rank.items()}
        if missing := [name for name in files if not (staged / name).is_file()]:
            raise BessemerError(f"{staged}: {missing[0]} was written elsewhere; is the folder shared by all processes?")
        write_atomic(staged / MANIFEST, manifest.written(prepared.step, files, prepared.contents, facts))
        sync_folder(staged)
        return [None] * len(written)

    def show(ready: list[None]) -> list[None]:
        if target.exists():  # a resumed run saves a step again; the two are equal bit for bit
            shutil.rmtree(target)
        os.rename(staged, target)
        sync_folder(prepared.folder)
        write_atomic(prepared.folder / LATEST, target.name)
        _retain(prepared.folder, prepared.step, keep, branch)
        return ready

    try:
        exchange(team, write, describe)
        checkpoint = verify(staged, team)
        exchange(team, lambda: None, show)
    except BaseException:
        if team.is_first:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    return replace(checkpoint, folder=target)


def latest(folder: Path, on_damage: Any = None, team: Team = ALONE) -> Checkpoint | None:
    """The newest checkpoint that verifies; None when there is none at all. Every process of the team calls it.

    on_damage: called with a sentence for each checkpoint that is passed over or missing. Raises BessemerError when
    checkpoints exist but none is whole, and when `latest` names one but all are gone.
    """

    def listed(ready: list[None]) -> list[tuple[list[int], str | None]]:
        return [(published(folder), _named(folder))] * len(ready)

    steps, named = exchange(team, lambda: None, listed)
    if named is not None and named not in {f"step-{step:08d}" for step in steps}:
        if not steps:
            raise BessemerError(
                f"{folder}: `{LATEST}` names {named}, but no checkpoint folder is there; put them back, or start over with "
                "--restart (what is left of the old training is set aside, not removed)"
            )
        if on_damage is not None:
            on_damage(
                f"{folder}: `{LATEST}` names {named}, which is gone; falling back to the newest checkpoint that is there"
            )
    for step in reversed(steps):
        try:
            return verify(folder / f"step-{step:08d}", team)
        except BessemerError as error:
            if on_damage is not None:
                on_damage(f"{error}; falling back to the next older checkpoint")
    if steps:
        raise BessemerError(
            f"{folder}: none of its {len(steps)} checkpoints is whole; restore one from a backup, or start over under "
            "another name with --set run.name=NAME"
        )
    return None


def verify(folder: Path, team: Team = ALONE) -> Checkpoint:
    """Read a checkpoint whole and compare it with its manifest; the processes of the team share the reading.

    Raises BessemerError that names the file, on every process.
    """
    read: list[manifest.Manifest] = []

    def examine() -> str:
        read.append(manifest.read(folder))
        for name in _share(read[0].files, team):
            path = folder / name
            if not path.is_file():
                raise BessemerError(f"{path}: missing")
            try:
                if _fingerprint(path) != read[0].files[name]:
                    raise BessemerError(f"{path}: damaged: size or SHA-256 differ from the manifest")
                _require_finite_file(path)
            except (OSError, SafetensorError) as error:
                raise BessemerError(f"{path}: cannot be read: {error}") from None
        return read[0].sha256

    def compare(seen: list[str]) -> list[None]:
        if len(set(seen)) > 1:
            raise BessemerError(f"{folder}: not all processes see the same {MANIFEST}; is the folder shared by all?")
        return [None] * len(seen)

    exchange(team, examine, compare)
    return Checkpoint(folder, read[0].step, read[0].facts, read[0].contents)


def published(folder: Path) -> list[int]:
    """Steps of the published checkpoints, ascending; by number, since names sort wrongly past their padding."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def _named(folder: Path) -> str | None:
    """The checkpoint that `latest` names; None where there is no such file."""
    path = folder / LATEST
    return path.read_text().strip() if path.is_file() else None


def drop_newer(folder: Path, step: int) -> None:
    """Make the checkpoint of `step` the newest: those after it are removed."""
    write_atomic(folder / LATEST, f"step-{step:08d}")
    for newer in reversed(published(folder)):
        if newer > step:
            shutil.rmtree(folder / f"step-{newer:08d}")


def _share(files: dict[str, dict[str, Any]], team: Team) -> list[str]:
    """The files that this process verifies: the largest first, each to whom has least.

    Files of one size, as the processes of one layout write them, go to the neighbour of the one that wrote them: where
    the neighbour is on another node, what only the writer's node has in its cache is noticed.
    """
    world = team.world
    load, shares = [0] * world, [list[str]() for _ in range(world)]
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = min(range(world), key=lambda rank: (load[rank], (rank - 1) % world))
        load[least] += files[name]["bytes"]
        shares[least].append(name)
    return shares[team.rank]


def _retain(folder: Path, newest: int, keep: int, branch: int | None) -> None:
    """Remove what is older than the `keep` newest; never the one just verified, nor the newest up to `branch`."""
    steps = [step for step in published(folder) if step <= newest]
    kept = max((step for step in steps if branch is not None and step <= branch), default=None)
    for step in steps[: max(len(steps) - keep, 0)]:
        if step == kept:
            continue
        shutil.rmtree(folder / f"step-{step:08d}")
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _write(named: dict[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in named.items()}, path)
    except SafetensorError as error:  # so it says that the disk is full
        raise BessemerError(f"checkpoint: {path}: {error}") from None
    _sync_file(path)


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _require_finite(tensors: Shares) -> None:
    for part, named in tensors.items():
        for name, tensor in named.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise BessemerError(f"checkpoint: {part} tensor {name} holds a value that is not finite; not saved")


def _require_finite_file(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
    for name in names:  # opened for each, since what was read of a mapped file stays in memory until it is closed
        with safe_open(path, framework="pt") as file:
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise BessemerError(f"{path}: tensor {name} holds a value that is not finite")


def _require_space(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < SPACE_FACTOR * needed:
        raise BessemerError(
            f"checkpoint: {folder} has {free / 1e6:.0f} MB free, but {SPACE_FACTOR * needed / 1e6:.0f} MB are needed; free "
            "some space"
        )
