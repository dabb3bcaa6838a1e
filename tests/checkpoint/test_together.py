"""Saves by several processes: a failure on one fails on all, and a kill anywhere leaves an intact checkpoint."""

import gc
import os
import shutil
import signal
import traceback
import weakref
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from bessemer.checkpoint import SavedCheckpoint, files, latest, protocol, save
from bessemer.checkpoint.files import Scan
from bessemer.common.errors import BessemerError
from bessemer.distributed.mesh import ProcessMesh, gather_scatter, join, leave
from bessemer.recipe import Parallel
from bessemer.run.directory import checkpoint_steps
from tests.distributed.processes import run_on
from tests.kills import kill_at
from tests.ports import free_port

PAIR = Parallel(replicate=2)


def state(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of replicas, whose writing the two processes share."""
    tensors = {f"w{number}": torch.full((40, 10), float(step + number)) for number in range(4)}
    return {
        "model": tensors,
        "optimizer": {"w0/exp_avg": torch.full((40, 10), float(step)), "w0/step": torch.tensor(1.0)},
    }


def is_of(checkpoint: SavedCheckpoint) -> bool:
    found = {part: checkpoint.tensors(part) for part in ("model", "optimizer")}
    wanted = state(checkpoint.step)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[part][name], value) for part, named in wanted.items() for name, value in named.items()
    )


def full(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def bug(*arguments: object, **options: object) -> None:
    raise ValueError("no such thing")


def wrong(*arguments: Any) -> Scan:
    return files.save_file(*arguments)._replace(sha256="another")


def fail_in_turn(folder: Path) -> list[tuple[str, str, str]]:
    """Fail on each process in turn, and return the error and the place of the failure."""
    mesh = join(PAIR, torch.device("cpu"))
    save(folder, 10, state(10), {}, keep=3, mesh=mesh)
    told = []

    def attempt(what: str, tensors: Any = None) -> None:
        try:
            save(folder, 20, tensors or state(20), {}, keep=1, mesh=mesh)
            told.append((what, "", ""))
        except (BessemerError, RuntimeError) as error:
            told.append((what, type(error).__name__, str(error)))
        mesh.barrier()
        assert checkpoint_steps(folder) == [10], what
        assert not list(folder.glob("*.tmp")), what
        mesh.barrier()

    for rank, target, name, function in (
        (0, protocol, "save_file", full), (1, protocol, "save_file", full), (1, os, "fsync", full),
        (0, protocol, "write_atomic", full), (0, os, "rename", full), (1, protocol, "save_file", bug),
        (0, protocol, "_require_space", bug), (1, protocol, "scan", full),
    ):  # fmt: skip
        if mesh.rank == rank:
            with patch.object(target, name, function):
                attempt(f"{name} on {rank}")
        else:
            attempt(f"{name} on {rank}")
    with patch.object(protocol, "save_file", wrong) if mesh.rank == 1 else nullcontext():
        attempt("fingerprint of 1, found by 0")
    for rank in (0, 1):
        tensors = state(20)
        if mesh.rank == rank:
            for value in tensors["model"].values():  # whichever of the two writes
                value[3, 3] = float("nan")
        attempt(f"nan on {rank}", tensors)
    tensors = state(20)
    if mesh.rank == 1:
        tensors["model"]["w2"] = torch.zeros(40, 11)
    attempt("another shape on 1", tensors)
    save(folder, 20, state(20), {}, keep=1, mesh=mesh)
    assert checkpoint_steps(folder) == [20]
    assert leaves_nothing(mesh)
    return told


class Probe:
    """Object whose deletion can be observed."""


def leaves_nothing(mesh: ProcessMesh) -> bool:
    """Check that an error does not keep the group alive in a reference cycle, which may abort the interpreter at exit."""

    def fail(probe: Probe) -> None:
        raise ValueError("no such thing")

    gc.disable()
    probe = Probe()
    seen = weakref.ref(probe)
    with suppress(RuntimeError):
        gather_scatter(mesh, lambda held=probe: fail(held), lambda given: given)
    del probe
    return seen() is None


def test_a_failure_on_one_process_fails_all_with_one_error(tmp_path: Path) -> None:
    first, second = run_on(2, fail_in_turn, tmp_path)
    assert first == second
    assert len(first) == 12
    for what, kind, error in first:
        assert kind == ("RuntimeError" if what in ("save_file on 1", "_require_space on 0") and "ValueError" in error else "BessemerError")  # fmt: skip
        rank = 0 if what.startswith("another shape") else int(what[-1])  # the first process compares the shapes
        assert error.startswith(f"rank {rank}: "), (what, error)
    errors = {what: error for what, _, error in first}
    assert "No space left on device" in errors["write_atomic on 0"]
    assert "ValueError: no such thing" in errors["_require_space on 0"]
    assert "non-finite" in errors["nan on 1"]
    assert "-00002-of-00002.safetensors: damaged" in errors["fingerprint of 1, found by 0"]
    assert "[40, 10] on rank 0" in errors["another shape on 1"] and "[40, 11]" in errors["another shape on 1"]
    found = latest(tmp_path)
    assert found is not None and is_of(found)


def apart(folder: Path) -> str:
    mesh = join(PAIR, torch.device("cpu"))
    try:
        save(folder / str(mesh.rank), 10, state(10), {}, keep=3, mesh=mesh)
    except BessemerError as error:
        return str(error)
    return ""


def test_a_folder_that_is_not_shared_is_reported(tmp_path: Path) -> None:
    for said in run_on(2, apart, tmp_path):
        assert said.startswith("rank 1: ") and "file system" in said


def two_saves(folder: Path, mesh: ProcessMesh) -> None:
    for step in (30, 40):
        save(folder, step, state(step), {}, keep=2, mesh=mesh)


def killed_at(folder: Path, victim: int, operation: int) -> list[int]:
    """Save twice on two processes, one of which dies before a file-system operation; return their exit codes."""
    port, children = free_port(), []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 3
            try:
                os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
                mesh = join(PAIR, torch.device("cpu"))
                if rank == victim:
                    named = ("rename", "replace", "fsync", "open", "unlink", "rmdir", "mkdir")
                    others = (shutil, "rmtree"), (protocol, "save_file"), (protocol, "scan")
                    kill_at(operation, "before", [*((os, name) for name in named), *others])
                two_saves(folder, mesh)
                leave()
                code = 0
            except RuntimeError:  # the other process died
                code = 4
            except Exception:  # a fork can report nothing but its traceback
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def kill_in_turn(folder: Path) -> dict[int, int]:
    """Return the number of operations each victim died before. This process has no group; its children form one per try."""
    for step in (10, 20):
        save(folder / "good", step, state(step), {}, keep=2)
    died = {}
    for victim, stride in ((0, 3), (1, 2)):
        died[victim] = 0
        for operation in range(1, 200, stride):
            place = folder / "copy"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(folder / "good", place)
            codes = killed_at(place, victim, operation)
            found = latest(place)
            assert found is not None and found.step in (20, 30, 40) and is_of(found), (victim, operation)
            if codes == [0, 0]:
                assert checkpoint_steps(place) == [30, 40]
                break
            assert codes[victim] == -signal.SIGKILL, (codes, victim, operation)
            assert codes[1 - victim] in (0, 4), (codes, victim, operation)
            died[victim] += 1
    return died


@pytest.mark.long
@pytest.mark.fault(3)
def test_a_kill_of_any_process_at_any_file_operation_leaves_an_intact_checkpoint(tmp_path: Path) -> None:
    (died,) = run_on(1, kill_in_turn, tmp_path, timeout=300)
    assert died[0] >= 8 and died[1] >= 3, died
