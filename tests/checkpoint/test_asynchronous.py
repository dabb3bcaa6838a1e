"""Background saves: equal to foreground saves, with errors that surface and a copy that later steps do not change."""

import errno
import hashlib
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import torch as library

from bessemer.checkpoint import AsyncSaver, async_save, files, format, latest, protocol, save
from bessemer.common.errors import BessemerError
from bessemer.distributed.mesh import join
from bessemer.recipe import Parallel
from bessemer.run.directory import checkpoint_steps
from tests.distributed.processes import run_on


def state(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {"a": torch.full((40, 10), value), "b": torch.full((3,), value, dtype=torch.bfloat16).t()},
        "optimizer": {"a/exp_avg": torch.full((10, 40), value).T, "a/step": torch.tensor(value)},
    }


def test_a_background_save_equals_a_foreground_save(tmp_path: Path) -> None:
    with AsyncSaver(tmp_path / "beside", keep=2) as saver:
        for step in (10, 20, 30):
            saver.save(step, state(float(step)), {"samples": step})
    for step in (20, 30):
        save(tmp_path / "before", step, state(float(step)), {"samples": step}, keep=2)
        beside, before = (format.load_manifest(tmp_path / name / f"step-{step:08d}") for name in ("beside", "before"))
        assert beside.sha256 == before.sha256
    assert checkpoint_steps(tmp_path / "beside") == [20, 30]
    assert (tmp_path / "beside" / "latest").read_text() == "step-00000030"


def fill_disk(is_full: bool) -> None:
    """Return a function that makes writes fail, as on a full disk, or succeed again."""

    def fail(*_: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    protocol.save_file = fail if is_full else files.save_file  # type: ignore[assignment]


def test_changes_after_the_copy_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, facts, may_write = state(1.0), {"guard": [1, 2]}, threading.Event()
    monkeypatch.setattr(
        protocol, "save_file", lambda *given: files.save_file(*given) if may_write.wait(20) else pytest.fail("no event")
    )
    with AsyncSaver(tmp_path, keep=1) as saver:
        saver.save(10, tensors, facts)
        assert checkpoint_steps(tmp_path) == []  # save returned before anything was written
        for named in tensors.values():
            for tensor in named.values():
                tensor.fill_(99.0)
        facts["guard"].append(3)
        may_write.set()
    found = latest(tmp_path)
    assert found is not None and found.facts == {"guard": [1, 2]}
    for part, named in state(1.0).items():
        assert all(torch.equal(found.tensors(part)[name], value) for name, value in named.items())


def test_an_update_waits_for_the_copy_and_the_step_before_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, begun = async_save._copy, threading.Event()

    def slow(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        assert begun.wait(20)
        time.sleep(0.1)
        copy(copies)

    monkeypatch.setattr(async_save, "_copy", slow)
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
    optimizer.step()  # no error is pending


@pytest.mark.fault(8)
def test_a_failure_surfaces_at_the_next_save_which_still_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncSaver(tmp_path, keep=2)
    saver.save(10, state(10.0), {})
    saver.finish()
    monkeypatch.setattr(protocol, "save_file", files.save_file)  # restored after the test
    fill_disk(True)
    saver.save(20, state(20.0), {})
    assert saver._thread is not None
    saver._thread.join()
    assert checkpoint_steps(tmp_path) == [10] and (tmp_path / "latest").read_text() == "step-00000010"
    fill_disk(False)
    with pytest.raises(BessemerError, match="step 20 .*File too large"):
        saver.save(30, state(30.0), {})
    saver.finish()
    assert checkpoint_steps(tmp_path) == [10, 30]
    bad = state(40.0)
    bad["model"]["a"][3, 3] = float("nan")
    saver.save(40, bad, {})
    with pytest.raises(BessemerError, match="step 40 .*model tensor a "):
        saver.finish()
    saver.finish()  # reported once
    with pytest.raises(BessemerError, match=str(tmp_path)):  # this one is known at once
        saver.save(50, {"model": {"a": torch.zeros(1).expand(1 << 50)}}, {})
    assert checkpoint_steps(tmp_path) == [10, 30]
    assert not list(tmp_path.glob("*.tmp"))


def test_without_memory_for_a_copy_the_save_is_in_the_foreground(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = AsyncSaver(tmp_path, keep=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**12))  # two processes of this node need this much
    saver.save(10, state(10.0), {})
    assert checkpoint_steps(tmp_path) == [10] and saver._thread is None
    bad = state(20.0)
    bad["model"]["a"][3, 3] = float("nan")
    with pytest.raises(BessemerError, match="step 20 "):
        saver.save(20, bad, {})
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    saver.save(30, state(30.0), {})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**12))  # memory it already holds does not have to be free
    saver.save(40, state(40.0), {})
    assert saver._thread is not None
    saver.finish()
    assert latest(tmp_path).step == 40  # type: ignore[union-attr]


def test_a_copy_that_cannot_be_allocated_fails_that_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("too large")

    with AsyncSaver(tmp_path, keep=2) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(async_save.HostCopies, "_allocate", fail)
            saver.save(10, state(10.0), {})
            with pytest.raises(BessemerError, match="step 10 .*memory"):
                saver.finish()
        saver.save(20, state(20.0), {})
    assert checkpoint_steps(tmp_path) == [20]


def save_during_collectives(folder: Path) -> list[str]:
    """Run the training's collectives while checkpoints are written. A failure on one process is reported to both."""
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
                    fill_disk(step == 40)
                try:
                    saver.save(step, {"model": {f"w{n}": weight + n for n in range(6)}}, {})
                except BessemerError as error:
                    told.append(f"{step}: {error}")
                if step == 40:  # while the disk is full
                    while float(reduced(saver._thread is not None and saver._thread.is_alive())):
                        time.sleep(0.05)
    return told


def reduced(alive: bool) -> torch.Tensor:
    flag = torch.tensor(float(alive))
    dist.all_reduce(flag)
    return flag


def test_files_equal_those_of_the_safetensors_library(tmp_path: Path) -> None:
    """Compare files byte for byte for all types and unusual names."""
    dtypes = [getattr(torch, name.removeprefix("torch.")) for name in files.DTYPES if name != "torch.complex64"]
    named = {f'{number % 3}/é"\\{dtype}': torch.arange(number).to(dtype) for number, dtype in enumerate(dtypes, 1)}
    named |= {"empty": torch.zeros(0, 3), "one": torch.tensor(2.0), "turned": torch.arange(6.0).view(2, 3).T}
    library.save_file({name: tensor.contiguous() for name, tensor in named.items()}, tmp_path / "theirs")
    theirs = (tmp_path / "theirs").read_bytes()
    written = files.save_file(protocol._sources(named), tmp_path / "ours")
    assert (tmp_path / "ours").read_bytes() == theirs
    assert files.scan(tmp_path / "theirs") == written
    assert written == (len(theirs), hashlib.sha256(theirs).hexdigest(), None)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_a_value_that_is_not_finite_is_found_in_any_block(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    kind = getattr(torch, dtype)
    largest = torch.finfo(kind).max
    for number, value in enumerate((largest, -largest, float("nan"), float("-inf"))):
        wide = torch.zeros(100, dtype=torch.float64)
        wide[77] = value
        tensor, path = wide.to(kind), tmp_path / str(number)
        library.save_file({"a": torch.ones(100), "b": tensor}, path)
        is_finite = bool(tensor.to(torch.float64).isfinite().all())
        found = files.scan(path)
        assert found.nonfinite == (None if is_finite else "b")
        assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        if number < 2:
            assert is_finite
        if dtype != "float8_e4m3fn" and number == 3:
            assert not is_finite


def test_training_continues_during_a_background_save(tmp_path: Path) -> None:
    first, second = run_on(2, save_during_collectives, tmp_path)
    assert first == second
    (said,) = first
    assert said.startswith("50: ") and "step 40 " in said and "rank 1: " in said and "File too large" in said
    assert checkpoint_steps(tmp_path) == [30, 50, 60]
    for step in (30, 50, 60):
        found = protocol.verify(tmp_path / f"step-{step:08d}")
        values = found.tensors("model")
        assert [values[f"w{n}"].unique().tolist() for n in range(6)] == [[float(step + n)] for n in range(6)]
        assert len(list(found.folder.glob("model-*.safetensors"))) == 2
