"""Checkpoints in memory on neighbour nodes, from which a node that was replaced gets its own back.

After Wang et al. 2023, "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints" (SOSP): each node
keeps its own copy and sends it to others. Files go from memory to memory, over a gloo group on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.checkpoint.files import Scan
from bessemer.checkpoint.format import MANIFEST
from bessemer.checkpoint.node_memory import NodeMemory
from bessemer.checkpoint.staging import has_memory, held_bytes
from bessemer.errors import BessemerError
from bessemer.parallel.control import gather_scatter
from bessemer.parallel.mesh import ProcessMesh
from bessemer.run import checkpoint_name, read_json

MESSAGE_BYTES = 256 << 20  # of a file, at the most


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

    gather_scatter(mesh, open_files, lambda by_rank: by_rank)
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

    gather_scatter(mesh, publish, lambda by_rank: by_rank)


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
