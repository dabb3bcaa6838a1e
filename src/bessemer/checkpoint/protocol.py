"""The checkpoint protocol: after a kill at any time, the last good checkpoint is complete and found.

    step-00001000/
      model.safetensors, optimizer.safetensors, ...   tensors; with several processes each writes its shards, and replicas
      model-00001-of-00008.safetensors, ...           divide the writing among them
      manifest.json                                   last: hashes, shards and facts (see format.py)
    latest                                            the name of the newest verified checkpoint. A resume reads the newest
                                                      folder that verifies; this only witnesses that there was one

Saving: the state must be finite and the disk must have 1.2 times its size free; files go into step-N.tmp/, each synced; the
manifest last; then everything is reread and verified; only then is it published by a rename and a sync of the folder, then
`latest` moves, and only then are older checkpoints removed. With several processes, rank 0 prepares, publishes and removes, all
write and verify; a failure of one raises on all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bessemer.checkpoint.files import DTYPES, ArraySource, save_file, scan
from bessemer.checkpoint.format import (
    MANIFEST,
    Contents,
    Key,
    SavedCheckpoint,
    SavePlan,
    ShardMetadata,
    Tensors,
    dump_manifest,
    global_plan,
    load_manifest,
    local_shards,
    require_dtypes,
)
from bessemer.checkpoint.retention import Retention
from bessemer.common.console import size, warn
from bessemer.common.environment import num_cores
from bessemer.common.errors import BessemerError, InputError
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh, gather_scatter, on_rank_zero
from bessemer.run.directory import LATEST, RunDirectory, Weights, checkpoint_name, checkpoint_steps, temporary_folder
from bessemer.run.files import write_atomic
from bessemer.run.stage import publish_folder, restore_replaced

SPACE_FACTOR = 1.2

LocalTensors = dict[str, dict[str, Tensor]]  # part -> name -> local tensor


@dataclass(frozen=True)
class PreparedSave:
    """A save that has begun: its folder exists, and each process knows what it writes.

    own: the local tensors to write, not copied; contents: of the checkpoint, on rank 0 only.
    """

    folder: Path
    step: int
    plan: SavePlan
    own: LocalTensors
    contents: Contents

    @property
    def target(self) -> Path:
        return self.folder / checkpoint_name(self.step)

    @property
    def temporary(self) -> Path:
        return temporary_folder(self.folder, self.step)


def save(
    folder: Path, step: int, tensors: Tensors, facts: dict[str, Any], keep: Retention | int,
    mesh: ProcessMesh = SINGLE_PROCESS,
) -> SavedCheckpoint:  # fmt: skip
    """Write and publish a checkpoint of `step`; collective.

    tensors: part -> name -> tensor, or DTensor of any layout; a name on several processes is one tensor, so what differs
    between them needs different names. facts: plain values for the manifest, those of rank 0; keep: the checkpoints that
    remain, or how many of the newest. Raises BessemerError on every process when the state is not finite, the disk is too
    full, or the files do not verify; earlier checkpoints stay in any case.
    """
    return publish(prepare(folder, step, tensors, mesh), facts, keep, mesh)


def prepare(folder: Path, step: int, tensors: Tensors, mesh: ProcessMesh = SINGLE_PROCESS) -> PreparedSave:
    """Agree on which rank writes what, and create the temporary folder. Raises as `save`, on every process."""
    shards, contents = local_shards(tensors), Contents()

    def decide(by_rank: list[dict[Key, ShardMetadata]]) -> list[SavePlan]:
        plans, whole = global_plan(by_rank)
        contents.update(whole)
        restore_replaced(folder)
        for leftover in folder.glob("step-*.tmp"):  # of a kill; removed first, so that its space is free
            shutil.rmtree(leftover, ignore_errors=True)
        keys = (
            (rank, (part, name))
            for rank, plan in enumerate(plans)
            for part, (_, names) in plan.items()
            for name in names
        )
        _require_space(folder, sum(by_rank[rank][key].nbytes for rank, key in keys))
        temporary_folder(folder, step).mkdir(parents=True)
        return plans

    plan = gather_scatter(mesh, lambda: {key: metadata for key, (metadata, _) in shards.items()}, decide)
    own = {part: {name: shards[part, name][1] for name in names} for part, (_, names) in plan.items()}
    return PreparedSave(folder, step, plan, own, contents)


def publish(
    prepared: PreparedSave, facts: dict[str, Any], keep: Retention | int, mesh: ProcessMesh = SINGLE_PROCESS,
    ready: Callable[[], object] | None = None,
) -> SavedCheckpoint:  # fmt: skip
    """Write what was prepared, and publish it. Raises as `save`, on every process.

    ready: waits until `prepared.own` has its values.
    """
    target, temporary = prepared.target, prepared.temporary

    def write() -> dict[str, Any]:
        if ready is not None:
            ready()
        if not temporary.is_dir():
            raise BessemerError(f"{temporary}: not here, though rank 0 made it; is the folder shared by all processes?")
        files = {}
        for part, (file, _) in prepared.plan.items():
            found = save_file(_sources(prepared.own[part]), temporary / file)
            if found.nonfinite is not None:
                raise BessemerError(f"checkpoint: {part} tensor {found.nonfinite} has a value that is not finite")
            files[file] = found.fingerprint
        return files

    def write_manifest(by_rank: list[dict[str, Any]]) -> list[None]:
        files = {name: fingerprint for written in by_rank for name, fingerprint in written.items()}
        if missing := [name for name in files if not (temporary / name).is_file()]:
            raise BessemerError(f"{temporary}: {missing[0]} is missing; is the folder shared by all processes?")
        write_atomic(temporary / MANIFEST, dump_manifest(prepared.step, files, prepared.contents, facts))
        return [None] * len(by_rank)

    def move() -> None:
        publish_folder(temporary, target)  # a resumed run saves a step again; the two are equal bit for bit
        write_atomic(prepared.folder / LATEST, target.name)
        try:
            _retain(prepared.folder, prepared.step, keep)
        except OSError as error:  # the new one is published all the same
            warn(f"an older checkpoint could not be removed: {error}; the next save tries again")

    try:
        gather_scatter(mesh, write, write_manifest)
        checkpoint = verify(temporary, mesh)
        on_rank_zero(mesh, move)
    except BaseException:
        if mesh.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return replace(checkpoint, folder=target)


class Damage(str):
    """What is damaged and what is done about it, as one message."""

    cause: str
    action: str

    def __new__(cls, cause: object, action: str) -> Self:
        message = super().__new__(cls, f"{cause}; {action}")
        message.cause, message.action = str(cause), action
        return message


def latest(
    folder: Path, on_damage: Callable[[Damage], None] = lambda damage: None, mesh: ProcessMesh = SINGLE_PROCESS,
    refetch: Callable[[int], bool] | None = None,
) -> SavedCheckpoint | None:  # fmt: skip
    """Return the newest checkpoint that verifies, whatever the file `latest` names; None when there is none at all. Collective.

    on_damage: called for each checkpoint that is damaged or missing; refetch: as for `iterate_verified`. Raises
    InputError when checkpoints exist but none verifies, and when `latest` names one but all are gone.
    """

    def list_published() -> tuple[list[int], str | None]:
        restore_replaced(folder)
        pointer = folder / LATEST
        return checkpoint_steps(folder), pointer.read_text(errors="replace").strip() if pointer.is_file() else None

    steps, named = on_rank_zero(mesh, list_published)
    if named is not None and named not in map(checkpoint_name, steps):
        if not steps:
            what = f"`{LATEST}` names {named}, but no checkpoint folder is there"
            raise InputError(f"{folder}: {what}; put them back, or start over with --restart")
        cause = f"{folder}: `{LATEST}` names {named or 'nothing'}, which is not there"
        on_damage(Damage(cause, "going on from the newest checkpoint that is"))
    consequence, causes = "falling back to the next older checkpoint", list[str]()

    def report(damage: Damage) -> None:
        causes.append(damage.cause)
        on_damage(damage)

    newest_verified = next(iterate_verified(folder, reversed(steps), report, consequence, mesh, refetch), None)
    if steps and newest_verified is None:
        what = f"none of its {len(steps)} checkpoints is whole ({causes[0]})"
        raise InputError(f"{folder}: {what}; restore one from a backup, or start over with --restart")
    return newest_verified


def has_all_files(folder: Path, step: int) -> bool:
    """Whether the checkpoint of `step` has its manifest and all files in full length; none is read."""
    checkpoint = folder / checkpoint_name(step)
    try:
        files = load_manifest(checkpoint).files
        return all((checkpoint / name).stat().st_size == facts["bytes"] for name, facts in files.items())
    except (BessemerError, OSError):
        return False


def repair_latest(folder: Path, step: int, on_damage: Callable[[Damage], None]) -> None:
    """Write `latest` again where it does not name the newest checkpoint, that of `step`, and call on_damage."""
    pointer = folder / LATEST
    if not pointer.is_file() or pointer.read_text(errors="replace").strip() != checkpoint_name(step):
        cause = f"{pointer}: did not name {checkpoint_name(step)}, the newest checkpoint"
        on_damage(Damage(cause, "written again"))
        write_atomic(pointer, checkpoint_name(step))


def find_newest(folder: Path, count: int, on_damage: Callable[[Damage], None]) -> list[SavedCheckpoint]:
    """Return the `count` newest checkpoints that verify, newest first. Raises InputError when there are fewer."""
    in_order = iterate_verified(folder, reversed(checkpoint_steps(folder)), on_damage, "it is left out of the average")
    checkpoints = list(islice(in_order, count))
    if len(checkpoints) < count:
        has = f"{folder} has {len(checkpoints)} whole ones"
        raise InputError(f"{count} checkpoints are wanted, {has}; ask for fewer, or keep more with checkpoint.keep")
    return checkpoints


def iterate_verified(
    folder: Path, steps: Iterable[int], on_damage: Callable[[Damage], None], consequence: str,
    mesh: ProcessMesh = SINGLE_PROCESS, refetch: Callable[[int], bool] | None = None,
) -> Iterator[SavedCheckpoint]:  # fmt: skip
    """Yield the checkpoints that verify, in the order of `steps`; each is read when its turn comes. Collective.

    on_damage: called for each that does not verify, with the `consequence` as its action; refetch: fetches a damaged one
    from a mirror, on rank 0, and returns whether that was possible.
    """
    for step in steps:
        for fetch in (refetch, None):
            try:
                checkpoint = verify(folder / checkpoint_name(step), mesh)
            except BessemerError as error:
                if fetch is not None and mesh.any(mesh.is_main and fetch(step)):
                    on_damage(Damage(error, "fetched again from the mirror"))
                    continue
                on_damage(Damage(error, consequence))
            else:
                yield checkpoint
            break


def verify(folder: Path, mesh: ProcessMesh = SINGLE_PROCESS) -> SavedCheckpoint:
    """Read a whole checkpoint and compare it with its manifest, the files divided among the processes; collective.

    Raises BessemerError that names the file, on every process.
    """
    checkpoint: SavedCheckpoint

    def examine() -> str:
        nonlocal checkpoint
        checkpoint = load_manifest(folder)
        names = _files_to_verify(checkpoint.files, mesh)
        share_of_cores = num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        with ThreadPoolExecutor(max(share_of_cores, 1)) as pool:
            list(pool.map(lambda name: _verify_file(folder / name, checkpoint.files[name]), names))
        require_dtypes(folder, checkpoint.contents, names)
        return checkpoint.sha256

    def compare(hashes: list[str]) -> list[None]:
        if len(set(hashes)) > 1:
            raise BessemerError(f"{folder}: not all processes see the same {MANIFEST}; is the folder shared by all?")
        return [None] * len(hashes)

    gather_scatter(mesh, examine, compare)
    return checkpoint


def _verify_file(path: Path, fingerprint: dict[str, Any]) -> None:
    if not path.is_file():
        raise BessemerError(f"{path}: missing")
    try:
        found = scan(path)
    except OSError as error:
        raise BessemerError(f"{path}: cannot be read: {error}") from None
    if found.fingerprint != fingerprint:
        raise BessemerError(f"{path}: damaged: size or SHA-256 differ from the manifest")
    if found.nonfinite is not None:
        raise BessemerError(f"{path}: tensor {found.nonfinite} has a value that is not finite")


def drop_newer(folder: Path, step: int) -> None:
    """Make the checkpoint of `step` the newest and remove later ones."""
    write_atomic(folder / LATEST, checkpoint_name(step))
    for newer in reversed(checkpoint_steps(folder)):
        if newer > step:
            _remove(folder / checkpoint_name(newer))


def _files_to_verify(files: dict[str, dict[str, Any]], mesh: ProcessMesh) -> list[str]:
    """The files that this process verifies: the largest first, each to the rank with the least to read.

    Files of one size, as the ranks of one layout write them, go to the rank after the writer: when that is on another node,
    data that is only in the writer's page cache is noticed.
    """
    world = mesh.world
    load, by_rank = [0] * world, [list[str]() for _ in range(world)]
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = min(range(world), key=lambda rank: (load[rank], (rank - 1) % world))
        load[least] += files[name]["bytes"]
        by_rank[least].append(name)
    return by_rank[mesh.rank]


def _retain(folder: Path, current: int, keep: Retention | int) -> None:
    """Remove the checkpoints that do not stay. One of a step after `current` is not looked at."""
    steps = [step for step in checkpoint_steps(folder) if step <= current]
    kept = Retention.of(keep).kept(steps)
    for step in steps:
        if step not in kept:
            _remove(folder / checkpoint_name(step))


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint, so that a kill leaves it whole or not at all."""
    aside = checkpoint.with_name(f"{checkpoint.name}.removed.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    shutil.rmtree(aside)


def _sources(named: dict[str, Tensor]) -> dict[str, ArraySource]:
    """Tensors as what is written; each is brought to the CPU when its turn comes."""
    return {
        name: ArraySource(DTYPES[str(tensor.dtype)], tuple(tensor.shape), tensor.nbytes, partial(bytes_of, tensor))
        for name, tensor in named.items()
    }


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """A tensor's bytes on the CPU, (nbytes,); not copied where it is there and contiguous."""
    array: NDArray[np.uint8] = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return array


def _require_space(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free, wanted = shutil.disk_usage(folder).free, SPACE_FACTOR * needed
    if free < wanted:
        raise BessemerError(f"checkpoint: {folder} has {size(free)} free, but needs {size(wanted)}; free some space")


def trained_checkpoints(run: RunDirectory, weights: Weights) -> list[SavedCheckpoint]:
    """Return the verified checkpoints of these weights. Raises InputError where there are too few."""
    if weights.average > 1:
        try:
            return find_newest(run.checkpoints, weights.average, on_damage=warn)
        except InputError as error:
            raise InputError(f"--average: {error}") from None
    damages, steps = list[Damage](), checkpoint_steps(run.checkpoints)
    if weights.step is not None:
        if chosen := list(iterate_verified(run.checkpoints, [weights.step], damages.append, "")):
            return chosen
        raise InputError(f"--step {weights.step}: {damages[0].cause}; take another")
    checkpoint = latest(run.checkpoints, on_damage=damages.append)
    if checkpoint is not None and checkpoint.step < steps[-1]:  # scores and logs are of the newest one
        raise InputError(
            f"{damages[0].cause}. The newest whole checkpoint is that of step {checkpoint.step}: take it with --step, or remove "
            f"{run.checkpoints / checkpoint_name(steps[-1])} and train the steps after it again: `bessemer run {run.path}`"
        )
    if checkpoint is None:
        raise InputError(f"{run.path}: no checkpoint; train it (`bessemer train {run.path}`), or put them back")
    return [checkpoint]
