"""Checkpoints in the memory of a node: they outlive the processes, and count only where every rank has its own whole."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bessemer.checkpoint import SavedCheckpoint, node_memory
from bessemer.checkpoint.format import PARTS
from bessemer.checkpoint.in_memory import MemorySaver, newest_in_memory
from bessemer.checkpoint.node_memory import NodeMemory, hold
from bessemer.errors import BessemerError
from bessemer.interrupt import NODE
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh, join
from bessemer.recipe import Parallel
from tests.parallel.processes import run_on


def state(step: int, rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Replicas, and random numbers of each rank's own."""
    model = {f"w{number}": torch.full((40, 10), float(step + number)) for number in range(4)}
    return {"model": model, "rng": {f"cpu-{rank}": torch.full((5,), step + rank, dtype=torch.uint8)}}


def is_whole(found: SavedCheckpoint, rank: int) -> bool:
    wanted = state(found.step, rank)
    with found.opened() as files:
        return all(torch.equal(files.whole(part, name), one) for part in wanted for name, one in wanted[part].items())


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A node whose memory this process holds, as an agent does."""
    monkeypatch.setenv(NODE, str(tmp_path))
    with hold(tmp_path, 2):
        yield tmp_path


def in_group() -> tuple[ProcessMesh, NodeMemory]:
    mesh = join(Parallel(replicate=2), torch.device("cpu"))
    held = NodeMemory.here(mesh)
    assert held is not None
    return mesh, held


def copies(steps: list[int]) -> None:
    mesh, held = in_group()
    with MemorySaver(held, mesh) as saver:
        for step in steps:
            tensors = state(step, mesh.rank)
            saver.save(step, tensors, {"samples": step})
            for named in tensors.values():
                for tensor in named.values():
                    tensor.fill_(99)


def read(refuses: int = -1) -> tuple[int, bool, list[str]]:
    """Step of the newest, whether it is whole, what was said. refuses: a rank that does not accept it."""
    mesh, held = in_group()
    said: list[str] = []
    found = newest_in_memory(
        held, lambda one: mesh.rank != refuses and one.facts["samples"] == one.step, mesh, said.append
    )
    return (0, False, said) if found is None else (found.step, is_whole(found, mesh.rank), said)


def sizes(node: Path) -> list[int]:
    paths = json.loads((node / "memory" / "files.json").read_text())
    return [os.stat(path).st_size for nodes in paths for sets in nodes for files in sets for path in files]


def test_the_newest_outlives_the_processes(node: Path) -> None:
    run_on(2, copies, [3, 6, 9])
    assert run_on(2, read) == [(9, True, [])] * 2
    assert [path.name for path in (node / "memory").glob("*/step-*")] == ["step-00000009"]
    run_on(2, copies, [12])  # over the one before the newest
    assert run_on(2, read) == [(12, True, [])] * 2
    run_on(2, copies, [4])  # after a rollback
    assert run_on(2, read) == [(4, True, [])] * 2
    assert run_on(2, read, 1) == [(0, False, [])] * 2, "one rank refuses it"
    assert run_on(2, read) == [(0, False, [])] * 2, "it is forgotten"


def test_the_memory_is_freed_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NODE, str(tmp_path))
    assert NodeMemory.here(SINGLE_PROCESS) is None
    with hold(tmp_path, 2):
        run_on(2, copies, [3])
        assert sum(sizes(tmp_path)) > 4 * 40 * 10 * 4
        before = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) == before - 2 * node_memory.SETS * len(node_memory.PARTS)


def test_a_damaged_one_is_left_out(node: Path) -> None:
    run_on(2, copies, [3])
    link = next((node / "memory" / "0" / "step-00000003").glob("model-*2-of*"))
    with open(link, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"x")
    for found in run_on(2, read):
        assert found[0] == 0 and "damaged" in found[2][0]


def dies_while_it_copies() -> None:
    mesh, held = in_group()
    saver = MemorySaver(held, mesh)
    saver.save(3, state(3, mesh.rank), {"samples": 3})
    saver.finish()
    assert saver.process._process is not None
    if mesh.rank == 1:
        os.kill(saver.process._process.pid, signal.SIGSTOP)
    saver.save(6, state(6, mesh.rank), {"samples": 6})
    mesh.barrier()
    if mesh.rank == 1:
        saver.process.end()
    error = saver.join()
    assert isinstance(error, BessemerError) and "rank 1: the process that writes checkpoints ended with -9" in str(
        error
    )
    bad = state(9, mesh.rank)
    bad["model"]["w0"][0] = float("inf")
    saver.save(9, bad, {"samples": 9})
    error = saver.join()
    assert isinstance(error, BessemerError) and "not finite" in str(error)


def test_one_that_is_not_whole_does_not_count(node: Path) -> None:
    run_on(2, dies_while_it_copies)
    assert run_on(2, read) == [(3, True, [])] * 2


def without_memory() -> str:
    mesh, held = in_group()
    saver = MemorySaver(held, mesh)
    if mesh.rank == 1:
        node_memory.available_memory = lambda: 1000  # type: ignore[attr-defined]
    saver.save(3, state(3, mesh.rank), {"samples": 3})
    return str(saver.join())


def test_too_little_memory_on_one_rank_is_told_to_all(node: Path) -> None:
    first, second = run_on(2, without_memory)
    assert first == second and "rank 1: the node has not enough free memory" in first
    assert run_on(2, read) == [(0, False, [])] * 2


def copies_in_held_memory(step: int) -> None:
    node_memory.available_memory = lambda: 1000  # type: ignore[attr-defined]
    copies([step])


def test_files_that_a_worker_has_left_need_no_free_memory(node: Path) -> None:
    run_on(2, copies, [3, 6])
    run_on(2, copies_in_held_memory, 9)
    assert run_on(2, read) == [(9, True, [])] * 2


def test_a_part_that_no_file_is_held_for_is_refused_by_name(node: Path) -> None:
    held = NodeMemory.here(SINGLE_PROCESS)
    assert held is not None
    with MemorySaver(held, SINGLE_PROCESS) as saver:
        every = {part: {"a": torch.ones(3)} for part in (*PARTS, "scheduler")}
        with pytest.raises(BessemerError, match="part scheduler is not one of model, optimizer, ema, rng"):
            saver.save(3, every, {})
        saver.save(6, {part: every[part] for part in PARTS}, {"samples": 6})
    assert held.held() == {(6, 0)}


def test_a_copy_that_fails_leaves_the_one_before_it(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = NodeMemory.here(SINGLE_PROCESS)
    assert held is not None

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fails() -> None:
        with MemorySaver(held, SINGLE_PROCESS) as saver, monkeypatch.context() as during:
            during.setattr(NodeMemory, "publish", is_full)
            saver.save(30, state(30, 0), {"samples": 30})
            assert isinstance(saver.join(), BessemerError)

    with MemorySaver(held, SINGLE_PROCESS) as saver:
        saver.save(10, state(10, 0), {"samples": 10})
        saver.finish()
        with monkeypatch.context() as during:
            during.setattr(NodeMemory, "publish", is_full)
            saver.save(20, state(20, 0), {"samples": 20})
            assert isinstance(saver.join(), BessemerError)
        assert held.held() == {(10, 0)}
    fails()  # of a training that was started again
    assert held.held() == {(10, 0)}


def on_two_nodes(folder: Path, step: int, swapped: bool) -> tuple[int, bool, list[str]] | None:
    """Save a step, or with step 0 read, as the only process of a node."""
    rank = int(os.environ["RANK"])
    place = 1 - rank if swapped else rank
    os.environ |= {NODE: str(folder / str(place)), "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}
    if step:
        return copies([step])
    return read()


def test_each_node_keeps_what_its_ranks_hold(tmp_path: Path) -> None:
    for name in ("0", "1"):
        (tmp_path / name).mkdir()
    with hold(tmp_path / "0", 1), hold(tmp_path / "1", 1):
        run_on(2, on_two_nodes, tmp_path, 3, False)
        for name, other in (("0", "2"), ("1", "1")):
            files = {path.name for path in (tmp_path / name / "memory" / name / "step-00000003").iterdir()}
            assert len(files) == 3 and not any(f"-0000{other}-of" in file for file in files), (
                "the manifest, model and rng"
            )
        assert run_on(2, on_two_nodes, tmp_path, 0, False) == [(3, True, [])] * 2
        run_on(2, on_two_nodes, tmp_path, 6, False)
        found = run_on(2, on_two_nodes, tmp_path, 0, True)
        assert found == [(6, True, [])] * 2, "nodes that have changed their numbers get their own back from each other"
