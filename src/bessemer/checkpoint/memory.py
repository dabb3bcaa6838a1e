"""Checkpoints in memory, which the agent of a node holds: they survive the death of the processes that train, not of the node.

The agent makes files of memory (`hold`), two sets for each of its processes, which write into them in turn. In a folder of the
node a checkpoint is a manifest and links to these files, so that it is verified and read as one on a disk; each node keeps what
its own ranks hold. It counts when all ranks have theirs whole: the one before it goes only then.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bessemer.checkpoint.asynchronous import BackgroundWork
from bessemer.checkpoint.files import scan
from bessemer.checkpoint.format import MANIFEST, Tensors, dump_manifest, load_manifest
from bessemer.checkpoint.protocol import PreparedSave, agree, exchange, require_finite
from bessemer.checkpoint.reading import SavedCheckpoint
from bessemer.checkpoint.staging import HAS_MEMORY_FILES, Staging
from bessemer.errors import BessemerError
from bessemer.interrupt import NODE
from bessemer.parallel.mesh import ProcessMesh
from bessemer.recipe import digest
from bessemer.run import checkpoint_name, published

FOLDER, HELD = "memory", "files.json"  # in the node's folder; its file that names the files of memory
SETS, PARTS = 2, 8  # sets of files of a process; files of a set, one for each part of a checkpoint


@contextmanager
def hold(node: Path, processes: int) -> Iterator[None]:
    """Hold files of memory for the processes of a node while the block runs; they take no memory before they are written."""
    if not HAS_MEMORY_FILES:
        yield
        return
    handles = [[[os.memfd_create("bessemer") for _ in range(PARTS)] for _ in range(SETS)] for _ in range(processes)]
    paths = [[[f"/proc/{os.getpid()}/fd/{one}" for one in files] for files in sets] for sets in handles]
    (node / FOLDER).mkdir()
    (node / FOLDER / HELD).write_text(json.dumps(paths))
    try:
        yield
    finally:
        for handle in (one for sets in handles for files in sets for one in files):
            os.close(handle)


@dataclass(frozen=True)
class NodeMemory:
    """The memory that the agent of this process's node holds. folder: of its checkpoints; sets: this process's files; local:
    rank on the node; node: number of the node."""

    folder: Path
    sets: list[list[str]]
    local: int
    node: int

    @classmethod
    def here(cls) -> NodeMemory | None:
        """That of this process; None where no agent of ours has started it, or the system has no files of memory."""
        folder = Path(os.environ[NODE]) / FOLDER if NODE in os.environ else None
        if folder is None or not (folder / HELD).exists():
            return None
        local, node = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("GROUP_RANK", "0"))
        return cls(folder, json.loads((folder / HELD).read_text())[local], local, node)

    def free_set(self) -> list[str]:
        """The files of this process that no checkpoint consists of."""
        used = {os.readlink(link) for link in self.folder.glob("step-*/*") if link.is_symlink()}
        return next(files for files in self.sets if used.isdisjoint(files))

    def keep(self, kept: int | None = None) -> None:
        """Forget all checkpoints but that of one step; of the processes of a node, the first does so."""
        for step in published(self.folder) if self.local == 0 else ():
            if step != kept:
                shutil.rmtree(self.folder / checkpoint_name(step))


class MemorySaver(BackgroundWork):
    """Copies the state into the memory of the node. Every process creates one, and calls `save` for the same steps."""

    def __init__(self, memory: NodeMemory, mesh: ProcessMesh, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__(mesh, optimizer)
        self._memory = memory
        self._staging = {tuple(files): Staging(files) for files in memory.sets}

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
        """Begin a copy of the state after `step`, as `AsyncSaver.save`; it counts once all ranks have hashed theirs.

        Waits for the previous one. If that one failed, its error is raised here, after the new one has begun.
        """
        failure = self.join()
        memory = self._memory
        prepared = agree(memory.folder, step, tensors, self.mesh, node=memory.node)
        staging = self._staging[tuple(memory.free_set())]
        ready = staging.copy(prepared.own) if staging.fits(prepared.own) else _no_memory
        if self._hook is None:
            staging.wait()
        plan, facts = prepared.plan, copy.deepcopy(facts)

        def seal() -> dict[str, Any]:
            paths = ready()
            found = {part: require_finite(part, self.process.request("scan", paths[part])) for part in plan}
            return {
                "node": memory.node,
                "files": {file: (found[part].fingerprint, paths[part]) for part, (file, _) in plan.items()},
            }

        self.begin(f"the copy of step {step} in memory", lambda: self._publish(prepared, facts, seal))
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def wait_copied(self) -> None:
        for staging in self._staging.values():
            staging.wait()

    def _publish(self, prepared: PreparedSave, facts: dict[str, Any], seal: Callable[[], dict[str, Any]]) -> None:
        memory = self._memory
        target, staged = prepared.target, prepared.staged

        def manifests(by_rank: list[dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
            files = {name: fingerprint for one in by_rank for name, (fingerprint, _) in one["files"].items()}
            return [
                (
                    dump_manifest(prepared.step, files, prepared.contents[of["node"]], facts | {"node": of["node"]}),
                    {n: path for one in by_rank if one["node"] == of["node"] for n, (_, path) in one["files"].items()},
                )
                for of in by_rank
            ]

        text, links = exchange(self.mesh, seal, manifests)

        def publish() -> None:
            if memory.local:
                return
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
            (staged / MANIFEST).write_text(text)
            for name, path in links.items():
                (staged / name).symlink_to(path)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(staged, target)

        try:
            exchange(self.mesh, publish, lambda by_rank: by_rank)  # from here on all nodes have it
            exchange(self.mesh, lambda: memory.keep(prepared.step), lambda by_rank: by_rank)  # makes room for the next
        except BaseException:
            memory.keep()
            raise


def newest_in_memory(
    memory: NodeMemory, accepts: Callable[[SavedCheckpoint], bool], mesh: ProcessMesh, on_damage: Callable[[str], None]
) -> SavedCheckpoint | None:
    """The newest checkpoint that every process has whole in the memory of its node, and accepts; None where there is none.
    The others are forgotten. Collective. on_damage: called with a message for one that is damaged."""
    newest: SavedCheckpoint | None = None
    steps = set.intersection(*map(set, mesh.gather(published(memory.folder))))
    for step in sorted(steps, reverse=True):
        found: list[SavedCheckpoint] = []

        def examine(step: int = step, found: list[SavedCheckpoint] = found) -> tuple[bool, str]:
            manifest, own = (
                load_manifest(memory.folder / checkpoint_name(step)),
                {path for paths in memory.sets for path in paths},
            )
            checkpoint = SavedCheckpoint(memory.folder / checkpoint_name(step), step, manifest.facts, manifest.contents)
            for name, fingerprint in manifest.files.items():
                path = checkpoint.folder / name
                is_own = os.path.islink(path) and os.readlink(path) in own
                if is_own and scan(path).fingerprint != fingerprint:
                    raise BessemerError(f"{path}: damaged: size or SHA-256 differ from the manifest")
            found.append(checkpoint)
            return manifest.facts["node"] == memory.node and accepts(checkpoint), digest(manifest.files)

        def compare(by_rank: list[tuple[bool, str]]) -> list[bool]:
            return [all(is_fit for is_fit, _ in by_rank) and len({of for _, of in by_rank}) == 1] * len(by_rank)

        try:
            if exchange(mesh, examine, compare):
                newest = found[0]
                break
        except (BessemerError, OSError) as error:
            on_damage(f"{error}; this copy in memory is left out")
    memory.keep(None if newest is None else newest.step)
    mesh.barrier()
    return newest


def _no_memory() -> dict[str, str]:
    raise BessemerError("the node has not enough free memory for it; checkpoint.memory_every = 0 makes no such copies")
