import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.checkpoint import files, latest, protocol, save, verify
from bessemer.checkpoint.format import Tensors
from bessemer.checkpoint.protocol import has_all_files, repair_latest
from bessemer.checkpoint.retention import Retention
from bessemer.common.errors import BessemerError
from bessemer.run.directory import RunDirectory, checkpoint_steps
from tests.kills import kill_at


def tensors(value: float = 1.0) -> Tensors:
    return {
        "model": {"a": torch.full((40, 10), value), "b": torch.arange(7)},
        "optimizer": {"a/exp_avg": torch.full((40, 10), value * 2)},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 20, 30):
        save(tmp_path / "checkpoints", step, tensors(float(step)), {"samples": step * 8}, keep=5)
    return tmp_path / "checkpoints"


def test_retention_keeps_the_newest_by_number(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000, 100_000_001):
        save(tmp_path, step, tensors(), {}, keep=2)
    assert checkpoint_steps(tmp_path) == [100_000_000, 100_000_001]


def test_a_save_succeeds_even_if_an_older_checkpoint_cannot_be_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as during:
        during.setattr(protocol, "_remove", is_busy)
        save(folder, 40, tensors(40.0), {}, keep=1)
    found = latest(folder)
    assert found is not None and found.step == 40
    assert "old checkpoint" in capsys.readouterr().err
    save(folder, 50, tensors(50.0), {}, keep=1)
    assert checkpoint_steps(folder) == [50]


@pytest.mark.fault(5)
def test_any_flipped_bit_is_detected(
    folder: Path, is_thorough: bool, record_property: Callable[[str, object], None]
) -> None:
    draw, flips = random.Random(0), 0
    files = sorted((folder / "step-00000030").iterdir())
    assert {path.name for path in files} >= {"manifest.json", "model.safetensors", "optimizer.safetensors"}
    for path in files:
        data = bytearray(path.read_bytes())
        for _ in range(-(-1000 // len(files)) if is_thorough else 60):
            flips += 1
            place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
            data[place] ^= bit
            path.write_bytes(data)
            with pytest.raises(BessemerError):
                verify(folder / "step-00000030")
            data[place] ^= bit
        path.write_bytes(data)
    record_property("obtained", f"{flips:,} of {flips:,} rejected")


def with_dtype(checkpoint: Path, dtype: object) -> None:
    """Change a tensor's type in a manifest and sign it again."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"]["model"]["a"][0] = dtype
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "dtype",
    ["torch.load", "torch.int8", "torch.bfloat16", "torch.float64", "float32", "torch", "", 7, ["torch.float32"]],
)
def test_a_checkpoint_whose_manifest_has_another_type_is_skipped(folder: Path, dtype: object) -> None:
    with_dtype(folder / "step-00000030", "torch.float32")
    assert latest(folder).step == 30  # type: ignore[union-attr]
    with_dtype(folder / "step-00000030", dtype)
    said: list[Any] = []
    found = latest(folder, said.append)
    assert found is not None and found.step == 20 and len(said) == 1 and "step-00000030" in said[0].cause
    with pytest.raises(BessemerError, match="step-00000030"):
        verify(folder / "step-00000030")
    for step in (10, 20):
        with_dtype(folder / f"step-{step:08d}", dtype)
    with pytest.raises(BessemerError) as caught:
        latest(folder)
    assert said[0].cause in str(caught.value), "why the newest is not whole"


@pytest.mark.fault(6)
def test_without_an_intact_checkpoint_a_resume_is_an_error(folder: Path) -> None:
    for step in (10, 20, 30):
        (folder / f"step-{step:08d}" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(BessemerError, match="3 checkpoints .*step-00000030"):
        latest(folder)
    assert latest(folder.parent / "nothing") is None


def test_a_corrupted_latest_pointer_is_rewritten(folder: Path) -> None:
    (folder / "latest").write_bytes(b"\xff\xfe\x80")
    said: list[str] = []
    assert has_all_files(folder, 30)
    repair_latest(folder, 30, said.append)
    assert "latest" in said[0] and (folder / "latest").read_text() == "step-00000030"
    repair_latest(folder, 30, said.append)
    assert len(said) == 1
    (folder / "latest").write_bytes(b"\xff\xfe\x80")
    assert latest(folder).step == 30  # type: ignore[union-attr]


@pytest.mark.fault(6)
def test_missing_checkpoints_are_reported(folder: Path) -> None:
    said: list[str] = []
    shutil.rmtree(folder / "step-00000030")
    assert latest(folder, said.append).step == 20  # type: ignore[union-attr]
    assert "`latest` names step-00000030" in said[0]
    for step in (10, 20):
        shutil.rmtree(folder / f"step-{step:08d}")
    with pytest.raises(BessemerError, match="`latest` names step-00000030"):
        latest(folder)


@pytest.mark.fault(15)
def test_non_finite_values_are_not_saved(folder: Path) -> None:
    for bad in (float("nan"), float("inf")):
        state = tensors()
        state["optimizer"]["a/exp_avg"][3, 3] = bad
        with pytest.raises(BessemerError, match="optimizer tensor a/exp_avg "):
            save(folder, 40, state, {}, keep=1)
    assert checkpoint_steps(folder) == [10, 20, 30]
    assert not list(folder.glob("*.tmp"))


@pytest.mark.fault(16)
def test_a_checkpoint_with_valid_hashes_and_nan_weights_is_skipped(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tensors()
    state["model"]["a"][0, 0] = float("nan")
    with monkeypatch.context() as patched:
        patched.setattr(files, "_is_finite", lambda dtype, block: True)
        save(folder, 40, state, {}, keep=5)
    assert latest(folder, on_damage=lambda line: None).step == 30  # type: ignore[union-attr]


@pytest.mark.fault(7)
def test_too_little_space_is_reported_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(BessemerError, match=str(folder)):
        save(folder, 40, {"model": {"a": torch.zeros(1).expand(1 << 50)}}, {}, keep=1)
    assert checkpoint_steps(folder) == [10, 20, 30] and not list(folder.glob("*.tmp"))


@pytest.mark.fault(7)
def test_a_failed_write_keeps_the_old_checkpoints(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    for module, name in ((protocol, "save_file"), (protocol, "write_atomic"), (os, "fsync")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, full)
            with pytest.raises(OSError, match="No space"):
                save(folder, 40, tensors(), {}, keep=1)
        assert checkpoint_steps(folder) == [10, 20, 30]
        assert not list(folder.glob("*.tmp"))
        assert latest(folder).step == 30  # type: ignore[union-attr]


def in_fork(work: Callable[[], object]) -> int:
    """Run a function in a fork that may be killed, and return its exit code, negative for a signal."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_save(folder: Path, step: int, function: str, of: str) -> None:
    """Save a step with keep=1 in a process that is killed before `os.FUNCTION` is called with a path or file named `of`."""
    honest = getattr(os, function)

    def deadly(*arguments: Any, **options: Any) -> Any:
        names = [os.readlink(f"/proc/self/fd/{one}") if isinstance(one, int) else str(one) for one in arguments]
        if any(name.endswith(of) for name in names):
            os.kill(os.getpid(), signal.SIGKILL)
        return honest(*arguments, **options)

    def work() -> None:
        setattr(os, function, deadly)
        save(folder, step, tensors(float(step)), {"samples": 1}, keep=1)

    assert in_fork(work) == -signal.SIGKILL


@pytest.mark.fault(3)
def test_a_kill_while_a_step_is_saved_again_keeps_its_checkpoint(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    save(run.checkpoints, 40, tensors(40.0), {"samples": 320}, keep=1)
    killed_save(run.checkpoints, 40, "rename", "/step-00000040.tmp")
    assert checkpoint_steps(run.checkpoints) == [], "the old one is aside, the new one not yet in its place"
    found = latest(run.checkpoints)
    assert found is not None and (found.step, found.facts) == (40, {"samples": 320})
    killed_save(run.checkpoints, 40, "rename", "/step-00000040.tmp")
    with run.lock():
        assert checkpoint_steps(run.checkpoints) == [40]
    killed_save(run.checkpoints, 40, "rename", "/step-00000040.tmp")
    with pytest.raises(BessemerError, match=str(run.checkpoints)):
        save(run.checkpoints, 50, {"model": {"a": torch.zeros(1).expand(1 << 50)}}, {}, keep=1)
    assert checkpoint_steps(run.checkpoints) == [40]


@pytest.mark.fault(7)
def test_leftovers_of_a_killed_save_do_not_count_as_used_space(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def used() -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    needed = sum(tensor.nbytes for part in tensors().values() for tensor in part.values())
    usage, room = shutil.disk_usage(folder), used() + int(1.3 * needed)
    killed_save(folder, 35, "fsync", "optimizer.safetensors")
    assert used() > room - 1.2 * needed
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=room - used()))
    save(folder, 40, tensors(40.0), {"samples": 320}, keep=5)
    assert latest(folder).step == 40  # type: ignore[union-attr]


@pytest.mark.long
@pytest.mark.fault(3)
def test_a_kill_at_any_file_operation_leaves_an_intact_checkpoint(folder: Path) -> None:
    """Die before each file-system operation in turn; the checkpoint found afterwards verifies."""
    operations = (
        (os, "rename"), (os, "replace"), (os, "fsync"), (os, "open"), (shutil, "rmtree"), (os, "unlink"), (os, "rmdir"),
    )  # fmt: skip
    place, done = folder.parent / "copy", folder.parent / "done"

    def work(operation: int) -> None:
        calls = kill_at(operation, "before", operations)
        for step in (40, 40, 50):
            save(place, step, tensors(40.0), {"samples": 1}, keep=1)
        done.write_text(str(next(calls) - 1))

    for operation in range(1, 400):
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        code = in_fork(partial(work, operation))
        found = latest(place)
        assert found is not None
        assert found.step in (30, 40, 50)
        for step in checkpoint_steps(place):
            verify(place / f"step-{step:08d}")
        if code == 0:
            assert int(done.read_text()) < operation
            assert found.step == 50
            break
        assert code == -signal.SIGKILL
    assert operation > 60


@pytest.mark.parametrize("way", ["foreground", pytest.param("background", marks=pytest.mark.long)])
@pytest.mark.fault(2)
def test_a_kill_at_any_time_leaves_an_intact_checkpoint(
    folder: Path, way: str, is_thorough: bool, record_property: Callable[[str, object], None]
) -> None:
    code = """
import sys
from pathlib import Path
import torch
from bessemer.checkpoint import AsyncSaver, save
folder, saver = Path(sys.argv[1]), AsyncSaver(Path(sys.argv[1]), 2)
print("ready", flush=True)
for step in range(40, 400000, 10):
    tensors = {"model": {"a": torch.full((300, 300), float(step))}}
    if sys.argv[2] == "background": saver.save(step, tensors, {"samples": step})
    else: save(folder, step, tensors, {"samples": step}, keep=2)
"""
    draw = random.Random(0)
    kills = 100 if is_thorough else 5
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", code, str(folder), way], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.2))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        found = latest(folder)
        assert found is not None and found.tensors("model")["a"].unique().tolist() == [float(found.step)]
    record_property("obtained", f"{kills} kills in the {way}")


def test_checkpoints_of_every_retention_rule_are_kept() -> None:
    steps = list(range(10, 110, 10))
    assert Retention(2).select(steps) == {90, 100}
    assert Retention(1, decay_start=55, healthy_until=39).select(steps) == {30, 50, 100}
    assert Retention(1, best=40).select(steps) == {40, 100} and Retention(1, best=45).select(steps) == {100}
    assert Retention(1, distance=30).select(steps) == {30, 60, 70, 90, 100}


@pytest.mark.parametrize("newest", [1, 2, 3])
def test_a_checkpoint_old_enough_for_a_rollback_is_always_kept(newest: int) -> None:
    for every, distance in itertools.product((1, 7, 10, 64, 250, 700, 1000), (8, 100, 256)):
        retention, there = Retention(newest, distance=distance), list[int]()
        for step in range(every, 40 * every, every):
            there = sorted(retention.select([*there, step]))
            if step - distance >= every:  # there was such a checkpoint
                assert any(one <= step - distance for one in there), (every, distance, step, there)
