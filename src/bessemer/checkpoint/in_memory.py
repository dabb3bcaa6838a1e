"""Checkpoints in memory, which survive the death of the processes that train and, with replicas on other nodes, of nodes.

Each rank copies its state into files of memory that the agent of its node holds (node_memory.py), in turn into two sets. A copy
counts when all ranks have theirs whole and the neighbours have their replicas: the one before it goes only then.

Replicas follow Wang et al. 2023, "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints" (SOSP): each
node keeps its own copy and sends it to others, from which a node that was replaced gets its own back. Files go from memory to
memory, over a gloo group on the CPU.
"""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.checkpoint.asynchronous import BackgroundWork, raise_first
from bessemer.checkpoint.files import Scan, scan
from bessemer.checkpoint.format import MANIFEST, SavedCheckpoint, Tensors, dump_manifest, load_manifest
from bessemer.checkpoint.node_memory import NodeMemory, Staging, has_memory, held_bytes
from bessemer.checkpoint.protocol import Damage, PreparedSave, plan_save, require_finite
from bessemer.errors import BessemerError
from bessemer.hashing import digest
from bessemer.parallel.mesh import ProcessMesh, gather_scatter, on_every_rank
from bessemer.run import checkpoint_name, read_json
from bessemer.terminal import say, warn

MESSAGE_BYTES = 256 << 20  # of a file, at the most


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
            on_every_rank(self.mesh, lambda: memory.publish(memory.node, step, text, links))  # now all nodes have it
            kept = step if kept is None else kept  # where none counts yet, one without replicas
            if self._transfers:
                transfer(self.mesh, memory, step, self._transfers, lambda path: self.process.request("scan", path))
        except (BessemerError, OSError):  # on every rank; a rank that is lost leaves all that is here to the next start
            on_every_rank(self.mesh, lambda: memory.forget_others(kept))
            raise
        on_every_rank(self.mesh, lambda: memory.forget_others(step))  # makes room for the next
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
                on_every_rank(mesh, partial(memory.forget_others, step))  # makes room
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


def _no_memory() -> dict[str, str]:
    raise BessemerError("the node has not enough free memory for it; checkpoint.memory_every = 0 makes no such copies")


class Transfer(NamedTuple):
    """A checkpoint that one node sends to another. origin: the node whose ranks it belongs to."""

    origin: int
    source: int
    target: int


class Offer(NamedTuple):
    """What a process sends of a checkpoint. manifest: its text, from the node's first process; files: name -> bytes, sha256."""

    manifest: str
    files: dict[str, dict[str, Any]]


Links = dict[Transfer, dict[str, str]]  # of each file that has arrived, name -> path


def replica_nodes(node: int, nodes: int, replicas: int) -> list[int]:
    """The nodes that a node sends its copies to: the others of its group of 1 + replicas, so that the fewest combinations of
    lost nodes lose a copy. The last group, which is larger where these do not divide the nodes, is a ring (the paper's mixed
    placement)."""
    size = 1 + replicas
    first = min(node // size, max(nodes // size, 1) - 1) * size
    width = size if first + 2 * size <= nodes else nodes - first
    return [first + (node - first + shift) % width for shift in range(1, min(size, width))]


def transfer(
    mesh: ProcessMesh, memory: NodeMemory, step: int, transfers: Sequence[Transfer], read: Callable[[Path], Scan]
) -> None:
    """Send checkpoints of a step from node to node, and publish each where it has arrived whole; collective.

    The processes of a node divide its files, and each sends to the process of its own local rank. read: hashes a file. Raises
    BessemerError on every process where a node lacks memory, or what arrived has not the manifest's SHA-256.
    """
    outgoing = [one for one in transfers if one.source == memory.node]
    incoming = [one for one in transfers if one.target == memory.node]
    arranged = gather_scatter(
        mesh,
        lambda: (memory.node, memory.local, {one: _offer(memory, step, one) for one in outgoing}),
        lambda by_rank: _arrange(transfers, by_rank),
    )
    links: Links = {}
    images: list[tuple[Callable[..., Any], Tensor, int]] = []  # isend or irecv, a whole file, the other rank

    def open_files() -> None:
        for one in outgoing:
            for path in memory.local_files(_place(memory, step, one)):
                images.append((dist.isend, _mapped(path), arranged[one][0]))
        for number, one in enumerate(incoming, start=1):
            peer, offered = arranged[one]
            free = memory.free_set(0 if one.origin == memory.node else number)  # its own: it has lost them
            links[one] = dict(zip(offered.files, free, strict=False))
            sizes = [of["bytes"] for of in offered.files.values()]
            if not has_memory(sum(sizes) - sum(map(held_bytes, links[one].values()))):
                raise BessemerError("the node has not enough free memory for copies of others; lower memory_replicas")
            for size, target in zip(sizes, links[one].values(), strict=True):
                os.truncate(target, size)
                images.append((dist.irecv, _mapped(Path(target)), peer))

    on_every_rank(mesh, open_files)
    works = [
        act(part, peer, group=mesh.control) for act, image, peer in images for part in torch.split(image, MESSAGE_BYTES)
    ]
    for work in works:
        work.wait()

    def verify() -> tuple[int, Links]:
        for one, paths in links.items():
            for name, path in paths.items():
                if read(Path(path)).fingerprint != arranged[one][1].files[name]:
                    raise BessemerError(
                        f"{name} came damaged from node {one.source}: its SHA-256 is not the manifest's"
                    )
        return memory.node, links

    whole = gather_scatter(mesh, verify, _links_by_node)

    def publish() -> None:
        for one, paths in whole.items():
            memory.publish(one.origin, step, arranged[one][1].manifest, paths)

    on_every_rank(mesh, publish)


def _place(memory: NodeMemory, step: int, one: Transfer) -> Path:
    return memory.checkpoints(one.origin) / checkpoint_name(step)


def _offer(memory: NodeMemory, step: int, one: Transfer) -> Offer:
    folder = _place(memory, step, one)
    files = read_json(folder / MANIFEST)["files"]
    text = "" if memory.local else (folder / MANIFEST).read_text()
    return Offer(text, {path.name: files[path.name] for path in memory.local_files(folder)})


def _arrange(
    transfers: Sequence[Transfer], by_rank: list[tuple[int, int, dict[Transfer, Offer]]]
) -> list[dict[Transfer, tuple[int, Offer]]]:
    """For each rank, the rank at the other end of each of its transfers, and what that one's source offers."""
    rank_of = {(node, local): rank for rank, (node, local, _) in enumerate(by_rank)}
    return [
        {
            one: (
                rank_of[one.target if node == one.source else one.source, local],
                by_rank[rank_of[one.source, local]][2][one],
            )
            for one in transfers
            if node in (one.source, one.target)
        }
        for node, local, _ in by_rank
    ]


def _links_by_node(by_rank: list[tuple[int, Links]]) -> list[Links]:
    """For each rank, what the processes of its node have received."""
    nodes: dict[int, Links] = {}
    for node, links in by_rank:
        for one, paths in links.items():
            nodes.setdefault(node, {}).setdefault(one, {}).update(paths)
    return [nodes.get(node, {}) for node, _ in by_rank]


def _mapped(path: Path) -> Tensor:
    """The bytes of a file of memory."""
    return torch.from_file(str(path), shared=True, size=os.stat(path).st_size, dtype=torch.uint8)
