"""Saving beside the training, in a process: the same checkpoint, errors that surface, and a copy that nothing changes."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import torch as library

from bessemer.checkpoint import AsyncSaver, asynchronous, files, format, latest, protocol, save, staging
from bessemer.errors import BessemerError
from bessemer.parallel.mesh import join
from bessemer.recipe import Parallel
from bessemer.run import published
from tests.parallel.processes import run_on


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


def writer_of(saver: AsyncSaver) -> int:
    """The process id of its writer, which is started where it does not run."""
    saver.process.start()
    assert saver.process._process is not None
    return saver.process._process.pid


def fill_disk(saver: AsyncSaver, size: int) -> None:
    """Let the writer's files have so many bytes and no more, as on a disk that is full."""
    resource.prlimit(writer_of(saver), resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_what_changes_after_the_copy_is_not_saved(tmp_path: Path) -> None:
    tensors, facts = state(1.0), {"guard": [1, 2]}
    with AsyncSaver(tmp_path, keep=1) as saver:
        os.kill(writer_of(saver), signal.SIGSTOP)
        saver.save(10, tensors, facts)
        assert published(tmp_path) == []  # it returned before anything was written
        for named in tensors.values():
            for tensor in named.values():
                tensor.fill_(99.0)
        facts["guard"].append(3)
        os.kill(writer_of(saver), signal.SIGCONT)
    found = latest(tmp_path)
    assert found is not None and found.facts == {"guard": [1, 2]}
    for part, named in state(1.0).items():
        assert all(torch.equal(found.tensors(part)[name], value) for name, value in named.items())


def test_an_update_waits_for_the_copy_and_the_step_before_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, begun = staging._copy, threading.Event()

    def slow(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        assert begun.wait(20)
        time.sleep(0.1)
        copy(copies)

    monkeypatch.setattr(staging, "_copy", slow)
    weight = torch.nn.Parameter(torch.ones(1000))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with AsyncSaver(tmp_path, keep=1, optimizer=optimizer) as saver:
        saver.save(10, {"model": {"a": weight.detach()}}, {})
        weight.grad = torch.ones(1000)
        begun.set()
        optimizer.step()
    assert float(weight.detach().sum()) == 0.0
    found = latest(tmp_path)
    assert found is not None and float(found.tensors("model")["a"].sum()) == 1000.0
    optimizer.step()  # nothing is left on it


@pytest.mark.fault(8)
def test_a_failure_surfaces_at_the_next_save_which_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = AsyncSaver(tmp_path, keep=2)
    saver.save(10, state(10.0), {})
    saver.finish()
    fill_disk(saver, 1000)
    saver.save(20, state(20.0), {})
    assert saver._thread is not None
    saver._thread.join()
    assert published(tmp_path) == [10] and (tmp_path / "latest").read_text() == "step-00000010"
    fill_disk(saver, 1 << 30)
    with pytest.raises(BessemerError, match="the checkpoint of step 20 failed: .*File too large"):
        saver.save(30, state(30.0), {})
    saver.finish()
    assert published(tmp_path) == [10, 30]
    bad = state(40.0)
    bad["model"]["a"][3, 3] = float("nan")
    saver.save(40, bad, {})
    with pytest.raises(BessemerError, match="the checkpoint of step 40 failed: .*model tensor a .*not finite"):
        saver.finish()
    saver.finish()  # told once
    monkeypatch.setattr(protocol, "SPACE_FACTOR", 1e12)
    with pytest.raises(BessemerError, match="B free"):  # this one is known at once
        saver.save(50, state(50.0), {})
    assert published(tmp_path) == [10, 30]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.fault(8)
def test_a_writer_that_dies_fails_that_save_alone(tmp_path: Path) -> None:
    with AsyncSaver(tmp_path, keep=3) as saver:
        saver.save(10, state(10.0), {})
        saver.finish()
        died = writer_of(saver)
        os.kill(died, signal.SIGSTOP)
        saver.save(20, state(20.0), {})
        os.kill(died, signal.SIGKILL)
        with pytest.raises(BessemerError, match="step 20 failed: the process that writes checkpoints ended with -9"):
            saver.finish()
        assert published(tmp_path) == [10] and (tmp_path / "latest").read_text() == "step-00000010"
        saver.save(30, state(30.0), {})
        assert writer_of(saver) != died
        os.kill(writer_of(saver), signal.SIGTERM)  # as a scheduler sends it to every process of a job
    assert published(tmp_path) == [10, 30]
    assert not list(tmp_path.glob("*.tmp"))


def with_a_writer_that_does_not_start_on_one_rank(folder: Path) -> list[str]:
    mesh = join(Parallel(replicate=2), torch.device("cpu"))
    popen, said = subprocess.Popen, list[str]()

    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with AsyncSaver(folder, keep=3, mesh=mesh) as saver:
        for step in (10, 20):
            asynchronous.subprocess.Popen = refused if (step, mesh.rank) == (10, 1) else popen  # type: ignore
            named = {f"{part}{mesh.rank}": one for part, one in state(float(step))["model"].items()}
            saver.save(step, {"model": named}, {})
            said.append(str(saver.join()))
    return said


def test_a_writer_that_does_not_start_on_one_rank_fails_that_save_on_all(tmp_path: Path) -> None:
    for failed, worked in run_on(2, with_a_writer_that_does_not_start_on_one_rank, tmp_path):
        assert "step 10 failed: rank 1: the process that writes checkpoints cannot be started" in failed
        assert worked == "None"
    assert published(tmp_path) == [20]


def test_the_writer_ends_with_its_process(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
import torch
from bessemer.checkpoint import AsyncSaver
saver = AsyncSaver(Path(sys.argv[1]), 2)
saver.save(10, {"model": {"a": torch.ones(3)}}, {})
print(saver.process._process.pid, flush=True)
saver.finish()
os.kill(saver.process._process.pid, 19)  # stopped: it cannot see that its input ends
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    writer = Path("/proc") / done.stdout.strip()
    deadline = time.monotonic() + 20
    while writer.exists() and "Z" not in (writer / "stat").read_text().rpartition(")")[2].split()[0]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_memory_for_a_copy_it_saves_in_the_foreground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = AsyncSaver(tmp_path, keep=2)
    monkeypatch.setattr(staging, "available_memory", lambda: 1000)
    saver.save(10, state(10.0), {})
    assert published(tmp_path) == [10]
    assert not saver._staging._files
    bad = state(20.0)
    bad["model"]["a"][3, 3] = float("nan")
    with pytest.raises(BessemerError, match="step 20 failed"):
        saver.save(20, bad, {})
    monkeypatch.setattr(staging, "available_memory", lambda: 10**9)
    saver.save(30, state(30.0), {})
    held = {part: file._bytes.data_ptr() for part, file in saver._staging._files.items()}
    assert held.keys() == {"model", "optimizer"}
    monkeypatch.setattr(staging, "available_memory", lambda: 1000)  # what it holds already, it need not find free
    saver.save(40, state(40.0), {})
    assert {part: file._bytes.data_ptr() for part, file in saver._staging._files.items()} == held
    saver.finish()
    assert latest(tmp_path).step == 40  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.fault(2)
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, is_thorough: bool, record_property: Callable[[str, object], None]
) -> None:
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
    kills = 100 if is_thorough else 5
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        found = latest(tmp_path)
        assert found is not None and found.step >= 20
        assert found.tensors("model")["a"].unique().tolist() == [float(found.step)]
    record_property("obtained", f"{kills} kills in the background")


def beside_collectives(folder: Path) -> list[str]:
    """The training's own collectives go on while checkpoints are written; what fails on one is told to both."""
    mesh = join(Parallel(replicate=2), torch.device("cpu"))
    weight, told = torch.zeros(300, 300), []
    with AsyncSaver(folder, keep=3, mesh=mesh) as saver:
        for step in range(1, 61):
            weight += 1.0
            dist.all_reduce(weight)
            weight /= 2.0
            if step % 10 == 0:
                if step == 40:
                    saver.finish()
                if mesh.rank == 1:
                    fill_disk(saver, 1000 if step == 40 else 1 << 30)
                try:
                    saver.save(step, {"model": {f"w{n}": weight + n for n in range(6)}}, {})
                except BessemerError as error:
                    told.append(f"{step}: {error}")
                if step == 40:  # while the disk is full
                    while float(reduced(saver.is_busy)):
                        time.sleep(0.05)
    return told


def reduced(alive: bool) -> torch.Tensor:
    flag = torch.tensor(float(alive))
    dist.all_reduce(flag)
    return flag


def test_files_are_those_of_the_library(tmp_path: Path) -> None:
    """Byte for byte, for all types and odd names; and so are the images in memory."""
    dtypes = [getattr(torch, name.removeprefix("torch.")) for name in files.DTYPES if name != "torch.complex64"]
    named = {f'{number % 3}/é"\\{dtype}': torch.arange(number).to(dtype) for number, dtype in enumerate(dtypes, 1)}
    named |= {"empty": torch.zeros(0, 3), "one": torch.tensor(2.0), "turned": torch.arange(6.0).view(2, 3).T}
    library.save_file({name: tensor.contiguous() for name, tensor in named.items()}, tmp_path / "theirs")
    theirs = (tmp_path / "theirs").read_bytes()
    written = files.save_file(protocol._sources(named), tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == theirs
    image = staging.Staging()
    path = image.copy({"model": named})()["model"]
    assert Path(path).read_bytes() == theirs
    assert files.copy_file(path, tmp_path / "copy") == files.scan(tmp_path / "theirs") == written
    assert written == (len(theirs), hashlib.sha256(theirs).hexdigest(), None)
    image.close()


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_a_value_that_is_not_finite_is_found_in_any_block(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    kind = getattr(torch, dtype)
    largest = torch.finfo(kind).max
    for number, value in enumerate((largest, -largest, float("nan"), float("-inf"))):
        tensor = torch.zeros(100)
        tensor = tensor.to(torch.float64)
        tensor[77] = value
        path = tmp_path / str(number)
        library.save_file({"a": torch.ones(100), "b": tensor.to(kind)}, path)
        is_finite = not bool(
            tensor.to(kind).to(torch.float64).isnan().any() or tensor.to(kind).to(torch.float64).isinf().any()
        )
        found = files.scan(path)
        assert found.nonfinite == (None if is_finite else "b")
        assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        if number < 2:
            assert is_finite
        if dtype != "float8_e4m3fn" and number == 3:
            assert not is_finite


def test_the_training_goes_on_beside_it(tmp_path: Path) -> None:
    first, second = run_on(2, beside_collectives, tmp_path)
    assert first == second
    (said,) = first
    assert said.startswith("50: the checkpoint of step 40 failed: rank 1: ") and "File too large" in said
    assert published(tmp_path) == [30, 50, 60]
    for step in (30, 50, 60):
        found = protocol.verify(tmp_path / f"step-{step:08d}")
        values = found.tensors("model")
        assert [values[f"w{n}"].unique().tolist() for n in range(6)] == [[float(step + n)] for n in range(6)]
        assert len(list(found.folder.glob("model-*.safetensors"))) == 2
