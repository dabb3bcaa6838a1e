"""Saving beside the training: the same checkpoint, errors that surface, and a copy that nothing changes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from bessemer.checkpoint import AsyncSaver, asynchronous, format, latest, protocol, save
from bessemer.errors import BessemerError
from bessemer.parallel.mesh import join
from bessemer.recipe import Parallel
from bessemer.run import published
from tests.parallel.processes import run_on

WRITE = protocol.save_file


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"a": torch.full((40, 10), value), "b": torch.full((3,), value, dtype=torch.bfloat16).t()},
        "optimizer": {"a/exp_avg": torch.full((10, 40), value).T, "a/step": torch.tensor(value)},
    }


def test_it_is_what_a_save_in_the_foreground_writes(tmp_path: Path) -> None:
    with AsyncSaver(tmp_path / "beside", keep=2) as saver:
        for step in (10, 20, 30):
            saver.save(step, state(float(step)), {"samples": step})
    for step in (20, 30):
        save(tmp_path / "before", step, state(float(step)), {"samples": step}, keep=2)
        beside, before = (format.load_manifest(tmp_path / name / f"step-{step:08d}") for name in ("beside", "before"))
        assert beside == before
    assert published(tmp_path / "beside") == [20, 30]
    assert (tmp_path / "beside" / "latest").read_text() == "step-00000030"


def test_what_changes_after_the_copy_is_not_saved(tmp_path: Path) -> None:
    go = Event()

    def wait_first(*arguments: Any) -> None:
        assert go.wait(60)
        WRITE(*arguments)

    tensors, facts = state(1.0), {"guard": [1, 2]}
    with patch.object(protocol, "save_file", wait_first), AsyncSaver(tmp_path, keep=1) as saver:
        saver.save(10, tensors, facts)
        assert published(tmp_path) == []  # it returned before anything was written
        for named in tensors.values():
            for tensor in named.values():
                tensor.fill_(99.0)
        facts["guard"].append(3)
        go.set()
    found = latest(tmp_path)
    assert found is not None and found.facts == {"guard": [1, 2]}
    for part, named in state(1.0).items():
        assert all(torch.equal(found.tensors(part)[name], value) for name, value in named.items())


@pytest.mark.fault(8)
def test_a_failure_surfaces_at_the_next_save_which_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    saver = AsyncSaver(tmp_path, keep=2)
    saver.save(10, state(10.0), {})
    saver.finish()
    with monkeypatch.context() as patched:
        patched.setattr(protocol, "save_file", full)
        saver.save(20, state(20.0), {})
        saver._thread.join()  # type: ignore[union-attr]
    with pytest.raises(BessemerError, match="the checkpoint of step 20 failed: .*No space left"):
        saver.save(30, state(30.0), {})
    saver.finish()
    assert published(tmp_path) == [10, 30]
    bad = state(40.0)
    bad["model"]["a"][3, 3] = float("nan")
    saver.save(40, bad, {})
    with pytest.raises(BessemerError, match="the checkpoint of step 40 failed: .*not finite"):
        saver.finish()
    saver.finish()  # told once
    monkeypatch.setattr(protocol, "SPACE_FACTOR", 1e12)
    with pytest.raises(BessemerError, match="MB free"):  # this one is known at once
        saver.save(50, state(50.0), {})
    assert published(tmp_path) == [10, 30]
    assert not list(tmp_path.glob("*.tmp"))


def test_without_memory_for_a_copy_it_saves_in_the_foreground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = AsyncSaver(tmp_path, keep=2)
    monkeypatch.setattr(asynchronous, "available_memory", lambda: 1000)
    saver.save(10, state(10.0), {})
    assert published(tmp_path) == [10]
    assert not saver._buffers
    bad = state(20.0)
    bad["model"]["a"][3, 3] = float("nan")
    with pytest.raises(BessemerError, match="step 20 failed"):
        saver.save(20, bad, {})
    monkeypatch.setattr(asynchronous, "available_memory", lambda: 10**9)
    saver.save(30, state(30.0), {})
    held = {key: buffer.data_ptr() for key, buffer in saver._buffers.items()}
    monkeypatch.setattr(asynchronous, "available_memory", lambda: 1000)  # what it holds already, it need not find free
    saver.save(40, state(40.0), {})
    assert {key: buffer.data_ptr() for key, buffer in saver._buffers.items()} == held
    saver.finish()
    assert latest(tmp_path).step == 40  # type: ignore[union-attr]


def test_no_memory_for_the_copy_itself_is_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    saver = AsyncSaver(tmp_path, keep=2)
    with monkeypatch.context() as patched:
        patched.setattr(asynchronous.torch, "empty", none)
        saver.save(10, state(10.0), {})
    with pytest.raises(BessemerError, match="step 10 failed: no memory for the copy"):
        saver.finish()
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.long
@pytest.mark.fault(2)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10, {"model": {"a": torch.ones(3)}}, {}, keep=2)
    code = """
import sys
from pathlib import Path
import torch
from bessemer.checkpoint import AsyncSaver
saver = AsyncSaver(Path(sys.argv[1]), 2)
weight = torch.zeros(500, 500)
for step in range(20, 400000, 10):
    if step == 40: print("ready", flush=True)
    saver.save(step, {"model": {"a": weight.fill_(float(step))}}, {"samples": step})
"""
    draw = random.Random(0)
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        found = latest(tmp_path)
        assert found is not None and found.step >= 20
        assert found.tensors("model")["a"].unique().tolist() == [float(found.step)]


def beside_collectives(folder: Path) -> list[str]:
    """The training's own collectives go on while checkpoints are written; what fails on one is told to both."""
    mesh = join(Parallel(replicate=2), torch.device("cpu"))
    weight, told = torch.zeros(300, 300), []

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with AsyncSaver(folder, keep=3, mesh=mesh) as saver:
        for step in range(1, 61):
            weight += 1.0
            dist.all_reduce(weight)
            weight /= 2.0
            if step % 10 == 0:
                with patch.object(protocol, "save_file", full if step == 40 and mesh.rank == 1 else WRITE):
                    try:
                        saver.save(step, {"model": {f"w{n}": weight + n for n in range(6)}}, {})
                    except BessemerError as error:
                        told.append(f"{step}: {error}")
                    if step == 40:  # while the patch lasts
                        assert saver._thread is not None
                        while float(reduced(saver._thread.is_alive())):
                            saver._thread.join(0.05)
    return told


def reduced(alive: bool) -> torch.Tensor:
    flag = torch.tensor(float(alive))
    dist.all_reduce(flag)
    return flag


def test_the_training_goes_on_beside_it(tmp_path: Path) -> None:
    first, second = run_on(2, beside_collectives, tmp_path)
    assert first == second
    (said,) = first
    assert said.startswith("50: the checkpoint of step 40 failed: rank 1: ") and "No space left" in said
    assert published(tmp_path) == [30, 50, 60]
    for step in (30, 50, 60):
        found = protocol.verify(tmp_path / f"step-{step:08d}")
        values = found.tensors("model")
        assert [values[f"w{n}"].unique().tolist() for n in range(6)] == [[float(step + n)] for n in range(6)]
        assert len(list(found.folder.glob("model-*.safetensors"))) == 2
