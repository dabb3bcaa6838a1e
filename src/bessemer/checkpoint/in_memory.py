"""Checkpoints in memory, which survive the death of the processes that train and, with replicas on other nodes, of nodes.

Each rank copies its state into files of memory that the agent of its node holds (node_memory.py), in turn into two sets. A copy
counts when all ranks have theirs whole and the neighbours have their replicas (replication.py): the one before it goes only then.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bessemer.checkpoint.asynchronous import BackgroundWork, raise_first
from bessemer.checkpoint.files import scan
from bessemer.checkpoint.format import Tensors, dump_manifest, load_manifest
from bessemer.checkpoint.node_memory import NodeMemory
from bessemer.checkpoint.protocol import Damage, PreparedSave, plan_save, require_finite
from bessemer.checkpoint.reading import SavedCheckpoint
from bessemer.checkpoint.replication import Transfer, replica_nodes, transfer
from bessemer.checkpoint.staging import Staging
from bessemer.errors import BessemerError
from bessemer.hashing import digest
from bessemer.parallel.control import gather_scatter
from bessemer.parallel.mesh import ProcessMesh
from bessemer.run import checkpoint_name
from bessemer.terminal import say, warn


class MemorySaver(BackgroundWork):
    """Copies the state into the memory of the node. Every process creates one, and calls `save` for the same steps."""

    def __init__(self, memory: NodeMemory, mesh: ProcessMesh, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__(mesh, optimizer)
        self._memory, self._training_mesh = memory, mesh
        self._staging = {tuple(files): Staging(files) for files in memory.sets[0]}
        self.stagings = list(self._staging.values())
        by_rank = mesh.gather((memory.node, {step for step, _ in memory.held()}))
        processes, replicas = Counter(node for node, _ in by_rank), len(memory.sets) - 1
        if replicas and (len(processes) == 1 or len(set(processes.values())) > 1):
            why = "one node is left" if len(processes) == 1 else "the nodes have unequal numbers of processes"
            warn(f"copies in memory are not sent to other nodes (checkpoint.memory_replicas): {why}")
            replicas = 0
        nodes = len(processes)
        self._transfers = [Transfer(one, one, to) for one in range(nodes) for to in replica_nodes(one, nodes, replicas)]
        # Step of the last copy that counts, at first that which the training resumed from.
        self._kept: int | None = max(set.intersection(*(steps for _, steps in by_rank)), default=None)
        self._has_warned = False  # once in a run

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any]) -> None:
        """Begin a copy of the state after `step`, as `AsyncSaver.save`; it counts once all ranks have hashed theirs, and all
        neighbours their replicas.

        Waits for the previous one; where that is still being sent to a neighbour, this one is left out instead. If that one
        failed, its error is raised here, after the new one has begun.
        """
        if self._transfers and self._training_mesh.any(self.is_busy):
            if not self._has_warned:
                warn(
                    f"no copy of step {step} in memory: the one before is still on its way; raise checkpoint.memory_every"
                )
            self._has_warned = True
            return
        failures = [self.join()]
        memory = self._memory
        prepared = plan_save(memory.checkpoints(memory.node), step, tensors, self.mesh, node=memory.node)
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
        raise_first(failures)

    def _publish(self, prepared: PreparedSave, facts: dict[str, Any], seal: Callable[[], dict[str, Any]]) -> None:
        memory, step = self._memory, prepared.step

        def manifests(by_rank: list[dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
            files = {name: fingerprint for one in by_rank for name, (fingerprint, _) in one["files"].items()}
            nodes = [one["node"] for one in by_rank]
            texts = {
                node: dump_manifest(step, files, prepared.contents[node], facts | {"nodes": nodes})
                for node in set(nodes)
            }
            return [
                (texts[of], {n: path for one in by_rank if one["node"] == of for n, (_, path) in one["files"].items()})
                for of in nodes
            ]

        text, links = gather_scatter(self.mesh, seal, manifests)
        kept = self._kept
        try:
            gather_scatter(
                self.mesh, lambda: memory.publish(memory.node, step, text, links), _each
            )  # now all nodes have it
            kept = step if kept is None else kept  # where none counts yet, one without replicas
            if self._transfers:
                transfer(self.mesh, memory, step, self._transfers, lambda path: self.process.request("scan", path))
        except (BessemerError, OSError):  # on every rank; a rank that is lost leaves all that is here to the next start
            gather_scatter(self.mesh, lambda: memory.forget_others(kept), _each)
            raise
        gather_scatter(self.mesh, lambda: memory.forget_others(step), _each)  # makes room for the next
        self._kept = step


class _Look(NamedTuple):
    """What a process sees of the checkpoints of a step in its node's memory. fits: they are of these ranks and accepted; files:
    hashes of their manifests' lists of files; is_whole: this process's part of its node's own; damage: of it, in words."""

    node: int
    fits: bool
    files: set[str]
    is_whole: bool
    damage: str


def newest_in_memory(
    memory: NodeMemory,
    accepts: Callable[[SavedCheckpoint], bool],
    mesh: ProcessMesh,
    on_damage: Callable[[Damage], None],
) -> SavedCheckpoint | None:
    """The newest checkpoint that every node has whole in its memory, or gets back from another node, and every process accepts;
    None where there is none. The others are forgotten. Collective. on_damage: called for one that is damaged."""
    newest, has_fetched = None, False
    by_rank = mesh.gather((memory.node, memory.held()))
    nodes, held = [node for node, _ in by_rank], dict(by_rank)
    for step in sorted({step for of_node in held.values() for step, _ in of_node}, reverse=True):
        look = partial(_look, memory, step, nodes, accepts)
        try:
            transfers, damage = gather_scatter(mesh, look, partial(_fetches, held, step))
            if damage:
                action = "this copy in memory is left out" if transfers is None else "it is fetched again"
                on_damage(Damage(damage, action))
            if transfers is None:
                continue
            if transfers:
                pairs = ", ".join(f"node {one.target} from node {one.source}" for one in transfers)
                say(f"  fetching the copy of step {step} in memory: {pairs}")
                gather_scatter(mesh, partial(memory.forget_others, step), _each)  # makes room
                transfer(mesh, memory, step, transfers, scan)
                has_fetched = any(one.target == memory.node for one in transfers)
            newest = _opened(memory.checkpoints(memory.node) / checkpoint_name(step))[0]
            break
        except (BessemerError, OSError) as error:
            on_damage(Damage(error, "this copy in memory is left out"))
    memory.forget_others(None if newest is None else newest.step, has_fetched)
    mesh.barrier()
    return newest


def _look(memory: NodeMemory, step: int, nodes: list[int], accepts: Callable[[SavedCheckpoint], bool]) -> _Look:
    fits, files, is_whole, damage = True, set(), False, ""
    for origin in (origin for at, origin in memory.held() if at == step):
        checkpoint, fingerprints = _opened(memory.checkpoints(origin) / checkpoint_name(step))
        files.add(digest(fingerprints))
        fits = fits and checkpoint.facts["nodes"] == nodes and accepts(checkpoint)
        if fits and origin == memory.node:
            own = memory.local_files(checkpoint.folder)
            damaged = [path for path in own if scan(path).fingerprint != fingerprints[path.name]]
            is_whole = not damaged
            damage = "" if is_whole else f"{damaged[0]}: damaged: size or SHA-256 differ from the manifest"
    return _Look(memory.node, fits, files, is_whole, damage)


def _fetches(
    held: dict[int, set[tuple[int, int]]], step: int, looks: list[_Look]
) -> list[tuple[list[Transfer] | None, str]]:
    """For each rank, the transfers by which all nodes get their own checkpoints of a step, None where that cannot be or one does
    not accept it; and what is damaged. held: step and origin, by node."""
    damage = next((look.damage for look in looks if look.damage), "")
    lacking = sorted({look.node for look in looks if not look.is_whole})
    holders = {node: [other for other in held if other != node and (step, node) in held[other]] for node in lacking}
    if not all(look.fits for look in looks) or len(set[str]().union(*(look.files for look in looks))) != 1:
        return [(None, damage)] * len(looks)
    if not all(holders.values()):
        return [(None, damage)] * len(looks)
    return [([Transfer(node, others[0], node) for node, others in holders.items()], damage)] * len(looks)


def _opened(folder: Path) -> tuple[SavedCheckpoint, dict[str, Any]]:
    """A checkpoint whose files are not verified, and their sizes and hashes."""
    manifest = load_manifest(folder)
    return SavedCheckpoint(folder, manifest.step, manifest.facts, manifest.contents), manifest.files


def _each(by_rank: list[None]) -> list[None]:
    return by_rank


def _no_memory() -> dict[str, str]:
    raise BessemerError("the node has not enough free memory for it; checkpoint.memory_every = 0 makes no such copies")
