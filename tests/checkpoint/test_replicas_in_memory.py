"""Copies in memory on neighbour nodes: a node that was replaced gets its own back, whole, or none."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.checkpoint import node_memory
from bessemer.checkpoint.in_memory import MemorySaver, newest_in_memory, replica_nodes
from bessemer.checkpoint.node_memory import NodeMemory, hold
from bessemer.errors import BessemerError
from bessemer.interrupt import NODE
from bessemer.parallel.mesh import ProcessMesh, join
from bessemer.recipe import Parallel
from tests.parallel.processes import run_on

Found = tuple[int, bool, list[str]]  # step, whether it is whole, what was said


class Nodes:
    """Nodes that this process holds the memory of, as their agents do, by name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def start(self, name: str, processes: int = 1, replicas: int = 1) -> None:
        """Start a node, with an empty memory."""
        (self._folder / name).mkdir()
        self._stack.enter_context(hold(self._folder / name, processes, replicas))

    def files(self, name: str, origin: int, step: int) -> list[Path]:
        """Of a checkpoint that a node holds."""
        return sorted((self._folder / name / "memory" / str(origin) / f"step-{step:08d}").glob("*.safetensors"))

    def run(self, function: Any, names: str, *arguments: Any, processes: int = 1) -> list[Any]:
        """Call a function on the processes of the named nodes, which have their numbers in this order."""
        return run_on(len(names) * processes, on_node, self._folder, names, processes, function, *arguments)


def on_node(folder: Path, names: str, processes: int, function: Any, *arguments: Any) -> Any:
    node, local = divmod(int(os.environ["RANK"]), processes)
    os.environ |= {NODE: str(folder / names[node]), "GROUP_RANK": str(node), "LOCAL_RANK": str(local)}
    mesh = join(Parallel(replicate=int(os.environ["WORLD_SIZE"])), torch.device("cpu"))
    held = NodeMemory.here(mesh)
    assert held is not None
    return function(mesh, held, *arguments)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as stack:
        yield Nodes(tmp_path, stack)


def state(step: int, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Replicas, and random numbers of each rank's own."""
    model = {f"w{number}": torch.full((400, 10), float(step + number)) for number in range(4)}
    return {"model": model, "rng": {f"cpu-{rank}": torch.full((5,), step + rank, dtype=torch.uint8)}}


def copies(mesh: ProcessMesh, held: NodeMemory, steps: list[int]) -> None:
    with MemorySaver(held, mesh) as saver:
        for step in steps:
            saver.finish()
            saver.save(step, state(step, mesh.rank), {"samples": step})


def read(mesh: ProcessMesh, held: NodeMemory) -> Found:
    said: list[str] = []
    found = newest_in_memory(held, lambda one: one.facts["samples"] == one.step, mesh, said.append)
    if found is None:
        return 0, False, said
    wanted = state(found.step, mesh.rank)
    with found.opened() as files:
        whole = (torch.equal(files.whole(part, name), one) for part in wanted for name, one in wanted[part].items())
        return found.step, all(whole), said


def damage(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(-5, os.SEEK_END)
        opened.write(b"x")


@pytest.mark.parametrize("names", ["ac", "ca"])
def test_a_replaced_node_gets_its_copy_back(nodes: Nodes, names: str) -> None:
    """Twice: the other node keeps the replica. The first and the second node are lost; `c` replaces each."""
    for name in "abcd":
        nodes.start(name)
    before = names.replace("c", "b")
    nodes.run(copies, before, [3, 6])
    assert all(nodes.files(name, origin, 6) and not nodes.files(name, origin, 3) for name in "ab" for origin in (0, 1))
    assert nodes.run(read, names) == [(6, True, [])] * 2
    assert nodes.run(read, names.replace("c", "d")) == [(6, True, [])] * 2
    nodes.run(copies, names.replace("c", "d"), [9, 12])
    assert nodes.run(read, before) == [(12, True, [])] * 2, "a node with an older copy gets the newer one"


def test_without_replicas_and_without_both_nodes_there_is_none(nodes: Nodes) -> None:
    for name in "abcd":
        nodes.start(name, replicas=0)
    nodes.run(copies, "ab", [3])
    assert nodes.run(read, "ac") == [(0, False, [])] * 2
    for name in "efgh":
        nodes.start(name)
    nodes.run(copies, "ef", [3])
    assert nodes.run(read, "gh") == [(0, False, [])] * 2


def test_all_processes_of_a_node_take_part(nodes: Nodes) -> None:
    for name in "abc":
        nodes.start(name, processes=2)
    nodes.run(copies, "ab", [3, 6], processes=2)
    assert nodes.run(read, "ac", processes=2) == [(6, True, [])] * 4
    nodes.run(copies, "ac", [9], processes=2)
    assert nodes.run(read, "ac", processes=2) == [(9, True, [])] * 4


def test_nodes_that_change_their_numbers_find_their_copies(nodes: Nodes) -> None:
    """Torch numbers nodes by their names: one that replaces another may move all of them."""
    for name in "abcd":
        nodes.start(name)
    nodes.run(copies, "abc", [3, 6])
    assert nodes.run(read, "dac") == [(6, True, [])] * 3
    nodes.run(copies, "dac", [9])
    assert nodes.run(read, "dac") == [(9, True, [])] * 3


def test_a_damaged_copy_is_fetched_and_a_damaged_replica_is_not_used(nodes: Nodes) -> None:
    for name in "abc":
        nodes.start(name)
    nodes.run(copies, "ab", [3])
    damage(nodes.files("b", 1, 3)[0])
    for step, is_whole, said in nodes.run(read, "ab"):
        assert (step, is_whole) == (3, True)
        assert len(said) == 1 and "damaged" in said[0] and said[0].endswith("; it is fetched again")
    damage(nodes.files("a", 1, 3)[0])
    for step, _, said in nodes.run(read, "ac"):
        assert step == 0
        assert len(said) == 1 and "came damaged from node 0: its SHA-256 is not the manifest's" in said[0]


def fails_on_the_way(mesh: ProcessMesh, held: NodeMemory, lacks_memory: bool) -> str:
    """A copy that all have, one that cannot be replicated. Returns why."""
    saver = MemorySaver(held, mesh)
    saver.save(3, state(3, mesh.rank), {"samples": 3})
    saver.finish()
    request, rooms = saver.process.request, iter([1 << 40, 1000])
    if mesh.rank == 1 and lacks_memory:
        node_memory.available_memory = lambda: next(rooms)  # type: ignore[attr-defined]

    def dies(kind: str, *paths: Any) -> Any:
        if mesh.rank == 1 and not lacks_memory and any(str(paths[0]) in files for files in held.sets[1]):
            saver.process.end()
            raise BessemerError("the process that writes checkpoints ended with -9")
        return request(kind, *paths)

    saver.process.request = dies  # type: ignore[method-assign]
    saver.save(6, state(6, mesh.rank) | {"optimizer": {"x": torch.ones(100_000)}}, {"samples": 6})
    return str(saver.join())


@pytest.mark.parametrize("lacks_memory", [False, True])
def test_a_copy_counts_only_when_its_replica_is_whole(nodes: Nodes, lacks_memory: bool) -> None:
    for name in "abc":
        nodes.start(name)
    why = "lower memory_replicas" if lacks_memory else "the process that writes checkpoints ended with -9"
    first, second = nodes.run(fails_on_the_way, "ab", lacks_memory)
    assert first == second and "the copy of step 6 in memory failed: rank 1: " in first and why in first
    assert nodes.run(read, "ac") == [(3, True, [])] * 2


def busy(mesh: ProcessMesh, held: NodeMemory) -> tuple[float, bool]:
    """Seconds of two saves of which the first cannot be completed; whether it was still being done."""
    saver = MemorySaver(held, mesh)
    saver.save(3, state(3, mesh.rank), {"samples": 3})
    saver.finish()
    assert saver.process._process is not None
    if mesh.rank == 1:
        os.kill(saver.process._process.pid, signal.SIGSTOP)
    began = time.monotonic()
    for step in (6, 9):
        saver.save(step, state(step, mesh.rank), {"samples": step})
    took, was_busy = time.monotonic() - began, saver.is_busy
    mesh.barrier()
    os.kill(saver.process._process.pid, signal.SIGCONT)
    saver.finish()
    return took, was_busy


def test_the_step_does_not_wait_for_the_sending(nodes: Nodes) -> None:
    for name in "abc":
        nodes.start(name)
    for took, was_busy in nodes.run(busy, "ab"):
        assert was_busy and took < 60
    assert nodes.run(read, "ac") == [(6, True, [])] * 2, "the one after it was left out"


def test_a_node_alone_sends_nothing(nodes: Nodes) -> None:
    nodes.start("a")
    nodes.run(copies, "a", [3])
    assert nodes.run(read, "a") == [(3, True, [])]


@pytest.mark.parametrize(("count", "replicas"), [(2, 1), (4, 1), (5, 1), (6, 2), (8, 2), (3, 5), (1, 1)])
def test_replicas_are_spread_evenly_over_groups(count: int, replicas: int) -> None:
    placed = {node: replica_nodes(node, count, replicas) for node in range(count)}
    sent = min(replicas, count - 1)
    assert all(len(set(others)) == sent and node not in others for node, others in placed.items())
    assert Counter(other for others in placed.values() for other in others) == {n: sent for n in range(count) if sent}
    fatal = [lost for lost in combinations(range(count), 1 + sent) if any({n, *placed[n]} == set(lost) for n in lost)]
    if count % (1 + sent) == 0:
        assert len(fatal) == count // (1 + sent), "as few as can be"
