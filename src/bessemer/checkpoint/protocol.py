"""The checkpoint protocol: after a kill at any time, the last good checkpoint is complete and can be found.

step-00001000/
  model.safetensors, optimizer.safetensors, ...   tensors, if one process writes the part
  model-00001-of-00008.safetensors, ...           tensors, if several do: each writes its shards, replicas share the work
  manifest.json                                   written last: hashes, shards and facts (see format.py)
latest                                            the name of the newest verified checkpoint

A resume reads the newest folder that verifies; `latest` only proves that a checkpoint existed.

A save requires a finite state and free disk space of 1.2 times its size. It writes and syncs the files in step-N.tmp/, then the
manifest. It then reads everything back to verify it, and publishes the checkpoint by a rename and a sync of the folder. After
that it updates `latest`, and only then removes older checkpoints. With several processes, rank 0 prepares, publishes and
removes, and all processes write and verify. A failure of one process raises on all.
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

LocalTensors = dict[str, dict[str, Tensor]]  # part -> name -> this process's shard


@dataclass(frozen=True)
class PreparedSave:
    """A save whose folder exists and whose files are assigned to the processes.

    Attributes:
        folder: The run's checkpoint folder.
        step: The step of the checkpoint.
        plan: What this process writes.
        own: The local tensors to write, not copied.
        contents: The contents of the whole checkpoint, on rank 0 only.
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
    """Write and publish a checkpoint of `step`. All processes must call it.

    Args:
        folder: The run's checkpoint folder.
        step: The step after which the state is saved.
        tensors: Tensors, or DTensors of any layout, by part and name. A name on several processes is one tensor, so tensors
            that differ between processes need different names.
        facts: JSON values besides tensors, for the manifest; those of rank 0 are written.
        keep: The checkpoints to keep, or how many of the newest.
        mesh: The processes that save together.

    Raises:
        BessemerError: The state is not finite, the disk is too full, or the files do not verify. It is raised on every process;
            earlier checkpoints stay.
    """
    return publish(prepare(folder, step, tensors, mesh), facts, keep, mesh)


def prepare(folder: Path, step: int, tensors: Tensors, mesh: ProcessMesh = SINGLE_PROCESS) -> PreparedSave:
    """Assign the shards to the processes and create the temporary folder. Raises as `save`, on every process."""
    shards, contents = local_shards(tensors), Contents()

    def decide(by_rank: list[dict[Key, ShardMetadata]]) -> list[SavePlan]:
        plans, whole = global_plan(by_rank)
        contents.update(whole)
        restore_replaced(folder)
        for leftover in folder.glob("step-*.tmp"):  # left by a kill; removed first to free its space
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
    """Write a prepared save and publish it. Raises as `save`, on every process.

    Args:
        prepared: The result of `prepare`.
        facts: As for `save`.
        keep: As for `save`.
        mesh: As for `save`.
        ready: Waits until `prepared.own` has its values; None if it has them already.
    """
    target, temporary = prepared.target, prepared.temporary

    def write() -> dict[str, Any]:
        if ready is not None:
            ready()
        if not temporary.is_dir():
            raise BessemerError(f"{temporary}: not visible to rank {mesh.rank}; use a file system that all share")
        files = {}
        for part, (file, _) in prepared.plan.items():
            result = save_file(_sources(prepared.own[part]), temporary / file)
            if result.nonfinite is not None:
                raise BessemerError(f"checkpoint: {part} tensor {result.nonfinite} has non-finite values")
            files[file] = result.fingerprint
        return files

    def write_manifest(by_rank: list[dict[str, Any]]) -> list[None]:
        files = {name: fingerprint for written in by_rank for name, fingerprint in written.items()}
        if missing := [name for name in files if not (temporary / name).is_file()]:
            raise BessemerError(f"{temporary / missing[0]}: not visible to rank 0; use a file system that all share")
        write_atomic(temporary / MANIFEST, dump_manifest(prepared.step, files, prepared.contents, facts))
        return [None] * len(by_rank)

    def move() -> None:
        publish_folder(temporary, target)  # a resumed run may save a step twice, with the same bits
        write_atomic(prepared.folder / LATEST, target.name)
        try:
            _retain(prepared.folder, prepared.step, keep)
        except OSError as error:  # the new checkpoint is published, so this is only a warning
            warn(f"removing an old checkpoint failed: {error}; the next save tries again")

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
    """A message about a damaged checkpoint: the cause and the action taken."""

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
    """Return the newest checkpoint that verifies, whichever one the file `latest` names. All processes must call it.

    Args:
        folder: The run's checkpoint folder.
        on_damage: Called for each checkpoint that is damaged or missing.
        mesh: The processes that read together.
        refetch: As for `iterate_verified`.

    Returns:
        The checkpoint; None if the run never published one.

    Raises:
        InputError: No checkpoint verifies, or `latest` names one but all are missing.
    """

    def list_published() -> tuple[list[int], str | None]:
        restore_replaced(folder)
        pointer = folder / LATEST
        return checkpoint_steps(folder), pointer.read_text(errors="replace").strip() if pointer.is_file() else None

    steps, named = on_rank_zero(mesh, list_published)
    if named is not None and named not in map(checkpoint_name, steps):
        if not steps:
            what = f"`{LATEST}` names {named}, but there are no checkpoints"
            raise InputError(f"{folder}: {what}; restore them, or start over with --restart")
        cause = f"{folder}: `{LATEST}` names {named or 'nothing'}, which is missing"
        on_damage(Damage(cause, "continuing from the newest checkpoint"))
    consequence, causes = "falling back to the next older checkpoint", list[str]()

    def report(damage: Damage) -> None:
        causes.append(damage.cause)
        on_damage(damage)

    newest_verified = next(iterate_verified(folder, reversed(steps), report, consequence, mesh, refetch), None)
    if steps and newest_verified is None:
        what = f"all of its {len(steps)} checkpoints are damaged ({causes[0]})"
        raise InputError(f"{folder}: {what}; restore one from a backup, or start over with --restart")
    return newest_verified


def has_all_files(folder: Path, step: int) -> bool:
    """Return True if the checkpoint of `step` has a manifest and files of the recorded sizes. The files are not read."""
    checkpoint = folder / checkpoint_name(step)
    try:
        files = load_manifest(checkpoint).files
        return all((checkpoint / name).stat().st_size == facts["bytes"] for name, facts in files.items())
    except (BessemerError, OSError):
        return False


def repair_latest(folder: Path, step: int, on_damage: Callable[[Damage], None]) -> None:
    """Rewrite `latest` if it does not name the newest checkpoint.

    Args:
        folder: The run's checkpoint folder.
        step: The step of the newest checkpoint.
        on_damage: Called if `latest` was wrong.
    """
    pointer = folder / LATEST
    if not pointer.is_file() or pointer.read_text(errors="replace").strip() != checkpoint_name(step):
        cause = f"{pointer}: did not name {checkpoint_name(step)}, the newest checkpoint"
        on_damage(Damage(cause, "rewritten"))
        write_atomic(pointer, checkpoint_name(step))


def find_newest(folder: Path, count: int, on_damage: Callable[[Damage], None]) -> list[SavedCheckpoint]:
    """Return the `count` newest checkpoints that verify, newest first. Raises InputError if there are fewer."""
    in_order = iterate_verified(folder, reversed(checkpoint_steps(folder)), on_damage, "excluded from the average")
    checkpoints = list(islice(in_order, count))
    if len(checkpoints) < count:
        has = f"{folder} has {len(checkpoints)} undamaged checkpoints"
        raise InputError(f"--average {count}: {has}; average fewer, or keep more with checkpoint.keep")
    return checkpoints


def iterate_verified(
    folder: Path, steps: Iterable[int], on_damage: Callable[[Damage], None], consequence: str,
    mesh: ProcessMesh = SINGLE_PROCESS, refetch: Callable[[int], bool] | None = None,
) -> Iterator[SavedCheckpoint]:  # fmt: skip
    """Yield the checkpoints that verify, in the order of `steps`, reading each on demand. All processes must call it.

    Args:
        folder: The run's checkpoint folder.
        steps: The steps of the checkpoints.
        on_damage: Called for each checkpoint that does not verify.
        consequence: The action that `on_damage` reports.
        mesh: The processes that read together.
        refetch: Downloads a damaged checkpoint from a mirror, on rank 0, and returns True if it succeeded.
    """
    for step in steps:
        for fetch in (refetch, None):
            try:
                checkpoint = verify(folder / checkpoint_name(step), mesh)
            except BessemerError as error:
                if fetch is not None and mesh.any(mesh.is_main and fetch(step)):
                    on_damage(Damage(error, "replaced by the copy in the mirror"))
                    continue
                on_damage(Damage(error, consequence))
            else:
                yield checkpoint
            break


def verify(folder: Path, mesh: ProcessMesh = SINGLE_PROCESS) -> SavedCheckpoint:
    """Read a whole checkpoint and compare it with its manifest. All processes must call it; they divide the files.

    Raises:
        BessemerError: A file is missing or damaged, or has a value that is not finite. The message names it, on every process.
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
            raise BessemerError(f"{folder}: processes see different {MANIFEST} files; use a file system that all share")
        return [None] * len(hashes)

    gather_scatter(mesh, examine, compare)
    return checkpoint


def _verify_file(path: Path, fingerprint: dict[str, Any]) -> None:
    if not path.is_file():
        raise BessemerError(f"{path}: the file is missing")
    try:
        result = scan(path)
    except OSError as error:
        raise BessemerError(f"{path}: cannot be read: {error}") from None
    if result.fingerprint != fingerprint:
        raise BessemerError(f"{path}: damaged: size or SHA-256 differs from the manifest")
    if result.nonfinite is not None:
        raise BessemerError(f"{path}: tensor {result.nonfinite} has non-finite values")


def drop_newer(folder: Path, step: int) -> None:
    """Make the checkpoint of `step` the newest: remove later ones."""
    write_atomic(folder / LATEST, checkpoint_name(step))
    for newer in reversed(checkpoint_steps(folder)):
        if newer > step:
            _remove(folder / checkpoint_name(newer))


def _files_to_verify(files: dict[str, dict[str, Any]], mesh: ProcessMesh) -> list[str]:
    """Return the files that this process verifies: largest first, each assigned to the rank with the least to read.

    Files of equal size, as the ranks of one layout write them, go to the rank after the writer. If that rank is on another
    node, it detects data that is only in the writer's page cache.
    """
    world = mesh.world
    load, by_rank = [0] * world, [list[str]() for _ in range(world)]
    for name in sorted(files, key=lambda name: (-files[name]["bytes"], name)):
        least = min(range(world), key=lambda rank: (load[rank], (rank - 1) % world))
        load[least] += files[name]["bytes"]
        by_rank[least].append(name)
    return by_rank[mesh.rank]


def _retain(folder: Path, current: int, keep: Retention | int) -> None:
    """Remove the checkpoints that `keep` does not select among those up to step `current`; later ones stay."""
    steps = [step for step in checkpoint_steps(folder) if step <= current]
    selected = Retention.from_value(keep).select(steps)
    for step in steps:
        if step not in selected:
            _remove(folder / checkpoint_name(step))


def _remove(checkpoint: Path) -> None:
    """Remove a checkpoint such that a kill leaves it complete or removes it entirely."""
    aside = checkpoint.with_name(f"{checkpoint.name}.removed.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(checkpoint, aside)
    shutil.rmtree(aside)


def _sources(named: dict[str, Tensor]) -> dict[str, ArraySource]:
    """Return each tensor as an ArraySource for `save_file`, which moves it to the CPU when it is written."""
    return {
        name: ArraySource(DTYPES[str(tensor.dtype)], tuple(tensor.shape), tensor.nbytes, partial(bytes_of, tensor))
        for name, tensor in named.items()
    }


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a tensor's bytes on the CPU, of shape (nbytes,). A contiguous CPU tensor is not copied."""
    array: NDArray[np.uint8] = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return array


def _require_space(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free, wanted = shutil.disk_usage(folder).free, SPACE_FACTOR * needed
    if free < wanted:
        raise BessemerError(f"{folder}: a checkpoint needs {size(wanted)}, only {size(free)} are free; free some space")


def trained_checkpoints(run: RunDirectory, weights: Weights) -> list[SavedCheckpoint]:
    """Return the verified checkpoints that hold the requested weights.

    Args:
        run: The run directory.
        weights: The requested step, and how many checkpoints to average.

    Raises:
        InputError: There are too few checkpoints, or the newest one is damaged.
    """
    if weights.average > 1:
        return find_newest(run.checkpoints, weights.average, on_damage=warn)
    damages, steps = list[Damage](), checkpoint_steps(run.checkpoints)
    if weights.step is not None:
        if chosen := list(iterate_verified(run.checkpoints, [weights.step], damages.append, "")):
            return chosen
        raise InputError(f"--step {weights.step}: {damages[0].cause}; choose another step")
    checkpoint = latest(run.checkpoints, on_damage=damages.append)
    if checkpoint is not None and checkpoint.step < steps[-1]:  # scores and logs belong to the newest checkpoint
        raise InputError(
            f"{damages[0].cause}. Use the newest undamaged checkpoint with --step {checkpoint.step}, or remove "
            f"{run.checkpoints / checkpoint_name(steps[-1])} and repeat the later steps with `bessemer run {run.path}`"
        )
    if checkpoint is None:
        raise InputError(f"{run.path}: has no checkpoint; train it with `bessemer train {run.path}`, or restore one")
    return [checkpoint]
