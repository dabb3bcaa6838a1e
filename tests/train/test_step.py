"""Steps whose statistics the host reads only every train.log_every steps.

They must train like steps that are read one by one, including faults, bit for bit. Nothing is read in between: checked on torch's
meta device, whose values cannot be read, and in a training.
"""

import contextlib
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bessemer.checkpoint.format import load_manifest
from bessemer.distributed.context import MicroBatchLoss
from bessemer.distributed.mesh import MESH_AXES, ProcessMesh, join
from bessemer.guard.detection import SpikeLimits
from bessemer.guard.heartbeat import Heartbeat
from bessemer.recipe import Parallel, load
from bessemer.run.directory import RunDirectory, checkpoint_name, checkpoint_steps
from bessemer.run.files import read_json_lines
from bessemer.tokens.loader import Batch
from bessemer.train.callback import Callback
from bessemer.train.device import Device, choose
from bessemer.train.loop import train_process
from bessemer.train.precision import PRECISIONS, LossScale
from bessemer.train.run_spec import RunSpec
from bessemer.train.trainer import Trainer
from bessemer.workflow.prepare import prepare
from bessemer.workflow.session import Session
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.train.faulty_runs import EVERY, SMALL, copied, poison, train
from tests.train.small_trainer import batch, trainer_of

# Time and memory differ; the recipe of a checkpoint names the folder.
UNEQUAL = {"time", "seconds", "step_seconds", "tokens_per_second", "mfu", "hfu", "data_wait", "memory_bytes", "peak_flops",
           "planned", "measured", "by_rank", "validation", "saving", "places", "recipe",
           "recipe_toml"}  # fmt: skip
NAN, INFINITE, SPIKE, POISONED = (
    8 * 29,
    8 * 30,
    8 * 49,
    range(8 * 70, 8 * 78),
)  # first samples: steps 30, 31, 50, 71 to 78
FAULTS = {NAN: math.nan, INFINITE: math.inf, SPIKE: 1000.0}


pytestmark = pytest.mark.usefixtures("fixed_step_time")


def break_gradients(patch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """Multiply gradients and losses of the batches with these first samples."""
    honest = Trainer._sums

    def broken(self: Trainer, batch: Batch, losses: list[MicroBatchLoss]) -> Any:
        if (factor := factors.get(batch.first)) is not None:
            for gradient in self._gradients():
                gradient.mul_(factor)
            for loss in losses:
                loss.nats_B.mul_(factor)
        return honest(self, batch, losses)

    patch.setattr(Trainer, "_sums", broken)


def what_is_left(folder: Path) -> dict[str, Any]:
    """Return everything a run writes that must be equal: logs, and checkpoints by file hashes and facts."""

    def equal(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key not in UNEQUAL}

    names = ("metrics", "forks", "incidents", "journal")
    found: dict[str, Any] = {name: [equal(row) for row in read_json_lines(folder / f"{name}.jsonl")] for name in names}
    for step in checkpoint_steps(folder / "checkpoints"):
        manifest = load_manifest(folder / "checkpoints" / checkpoint_name(step))
        found[checkpoint_name(step)] = manifest.files, equal(manifest.facts)
    return found


def require_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        pairs = zip(one[name], other[name], strict=False) if isinstance(one[name], list) else [(one[name], other[name])]
        for mine, theirs in pairs:
            assert mine == theirs, name
        assert one[name] == other[name], name


def without_limits(found: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a run that do not depend on train.log_every."""
    for name, value in found.items():
        if name.startswith("step-"):
            value[1]["guard"]["history"].pop("limits")
    return found


@pytest.mark.parametrize(
    "sets",
    long_but(
        [
            ["train.ema=0.9", "tokens.document_mask=true"],
            ["guard.skip_spikes=false", "train.watch_every=5"],
            ["train.micro_batch=2", "train.precision=bf16"],
            ["train.micro_batch=2", "train.precision=fp16"],
        ],
        ["train.ema=0.9", "tokens.document_mask=true"],
    ),
    ids=lambda sets: sets[-1],
)
def test_a_run_with_faults_is_equal_bit_for_bit(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, sets: list[str]
) -> None:
    """Two non-finite updates, a spike, a poisoned range that is rolled back; checkpoints, watched steps, validations."""
    break_gradients(monkeypatch, FAULTS)
    poison(monkeypatch, lambda first: first in POISONED)
    sets = ["train.steps=100", "train.validate_every=25", *sets]
    at_once = without_limits(what_is_left(train(recipe_file, copied(runs, "at-once"), *sets)))
    seldom = without_limits(what_is_left(train(recipe_file, runs, *sets, "train.log_every=7")))
    for name in ("metrics", "forks"):
        rows = [row for row in at_once[name] if row["kind"] != "train" or row["step"] % 7 == 0 or row["step"] == 100]
        assert seldom.pop(name) == rows
        assert at_once.pop(name) != rows
    require_equal(seldom, at_once)
    kinds = {(row["step"], row["what"]) for row in at_once["incidents"]}
    assert {(30, "nonfinite"), (31, "nonfinite")} <= kinds and any(what == "diverged" for _, what in kinds)
    assert ((50, "spike") in kinds) and len(at_once["journal"]) > 1


def stop_at(patch: pytest.MonkeyPatch, first: int) -> None:
    """Send a signal in the step of the batch with this first sample."""
    honest = Trainer._micro_batches

    def interrupted(self: Trainer, batch: Batch) -> Any:
        if batch.first == first:
            signal.raise_signal(signal.SIGTERM)
        return honest(self, batch)

    patch.setattr(Trainer, "_micro_batches", interrupted)


def test_a_stop_between_logged_steps_does_not_change_the_run(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_gradients(monkeypatch, FAULTS)
    sets = ("train.steps=60", "checkpoint.every=25", "train.validate_every=20", "train.log_every=7")
    whole = what_is_left(train(recipe_file, copied(runs, "whole"), *sets))
    for stop in (8 * 31, 8 * 53):
        with monkeypatch.context() as patch:
            stop_at(patch, stop)
            train(recipe_file, runs, *sets, expected=75)
    folder = train(recipe_file, runs, *sets)
    steps = [row["step"] for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "resumed"]
    assert steps == [32, 54], "a process alone stops at once"
    resumed = what_is_left(folder)
    kinds = "train", "validation", "inside"
    for found in (whole, resumed):
        found["metrics"] = [row for row in found["metrics"] if row["kind"] in kinds]
    assert resumed["metrics"] == whole["metrics"] and resumed["incidents"] == whole["incidents"]
    assert resumed[checkpoint_name(60)] == whole[checkpoint_name(60)]


class CountingDevice(Device):
    """Device that counts reads of its tensors."""

    def read(self, values: torch.Tensor) -> torch.Tensor:
        EVENTS.append("read")
        return super().read(values)


EVENTS: list[str] = []


class Waits(TorchDispatchMode):
    """Dispatch mode that records in EVENTS the collectives of a group, and the scalars read from tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group.group_name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            groups = [dist.ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject)
                      and "ProcessGroup" in str(one._type())]  # fmt: skip
            assert groups, func
            EVENTS.extend(["collective"] * (groups[0].group_name == self.group))
        elif func is torch.ops.aten._local_scalar_dense.default and args[0].is_floating_point():
            EVENTS.append("scalar")  # a CPU's loss also reads which targets are valid, a boolean
        return func(*args, **(kwargs or {}))


def waits_by_step(folder: str, layout: Parallel) -> dict[int, list[str]]:
    """Train a run on this process of the group and return by step the waits for the device and for other hosts."""
    mesh, waits = join(layout, torch.device("cpu")), dict[int, list[str]]()
    spec = RunSpec.read(RunDirectory(Path(folder))).with_layout(layout, 0)
    run = linked(Path(folder), "run", mesh)

    def observe(batches: Iterator[Batch]) -> Iterator[Batch]:
        for number, data in enumerate(batches, 1):
            EVENTS.clear()
            yield data
            waits[number] = list(EVENTS)

    device = CountingDevice(**vars(choose(spec.recipe.train)))
    with Heartbeat(None, mesh.rank, run.path / f"stacks-{mesh.rank}.txt", 0) as heartbeat, Waits(mesh.control):
        train_process(spec, run, device, mesh, heartbeat, observe=observe, callbacks=[Callback()])
    return waits


def planned(recipe_file: Path, runs: Path, *sets: str) -> Path:
    """Return the directory of a run whose training has not begun."""
    run = RunDirectory(runs / "small")
    prepare(Session(load(recipe_file, [f"run.dir={runs}", *SMALL, f"checkpoint.every={EVERY}", *sets]), run), 0.0)
    return run.path


@pytest.mark.parametrize(
    "layout",
    long_but([Parallel(**{axis: 2}) for axis in MESH_AXES], Parallel(shard=2)),
    ids=lambda layout: next(axis for axis, size in layout.model_dump().items() if size == 2),
)
def test_two_processes_wait_for_nothing_between_logged_steps(runs: Path, recipe_file: Path, layout: Parallel) -> None:
    sets = (
        "model.layers=2",
        "model.kv_heads=2",
        "train.micro_batch=2",
        "train.watch_every=0",
        "train.log_every=4",
        "checkpoint.every=11",
    )
    folder = planned(recipe_file, runs, *sets, "train.steps=11", "train.validate_every=11", "train.precision=fp32")
    for waits in run_on(2, waits_by_step, str(folder), layout):
        assert set(waits) == set(range(1, 12))
        for step, found in waits.items():
            assert ({"read", "collective"} <= set(found)) if step in (4, 8, 11) else not found, (step, found)


def linked(folder: Path, name: str, mesh: ProcessMesh) -> RunDirectory:
    """Create another run directory with the tokens and the recipe of this one. Collective."""
    run = RunDirectory(folder.with_name(name))
    if mesh.is_main:
        run.path.mkdir()
        for shared in ("tokens", "recipe.toml", "plan.json"):
            os.symlink(folder / shared, run.path / shared)
    mesh.barrier()
    return run


def with_intervals(folder: str, layout: Parallel) -> list[dict[str, Any]]:
    """Train a run of this folder with a layout, read at each step and every seventh, on this process of the group."""
    mesh, left = join(layout, torch.device("cpu")), []
    spec = RunSpec.read(RunDirectory(Path(folder))).with_layout(layout, 0)
    with pytest.MonkeyPatch.context() as patch:
        break_gradients(patch, FAULTS)
        poison(patch, lambda first: first in POISONED)
        for every in (1, 7):
            run = linked(Path(folder), f"run-{every}", mesh)
            changed = replace(spec, recipe=spec.recipe.changed(train={"log_every": every}))
            with Heartbeat(None, mesh.rank, run.path / f"stacks-{mesh.rank}.txt", 0) as heartbeat:
                train_process(changed, run, choose(spec.recipe.train), mesh, heartbeat)
            found = without_limits(what_is_left(run.path))
            left.append({name: value for name, value in found.items() if name not in ("metrics", "forks")})
    return left


LAYOUTS = [(Parallel(**{axis: 2}), 80) for axis in ("replicate", "tensor", "pipeline", "context")]
LAYOUTS += [(Parallel(shard=2), 54)]


@pytest.mark.parametrize(
    ("layout", "steps"),
    long_but(LAYOUTS, LAYOUTS[-1]),
    ids=lambda value: (
        next(axis for axis, size in value.model_dump().items() if size == 2)
        if isinstance(value, Parallel)
        else str(value)
    ),
)
def test_two_processes_are_equal_bit_for_bit(runs: Path, recipe_file: Path, layout: Parallel, steps: int) -> None:
    sets = (
        "model.layers=2",
        "model.kv_heads=2",
        f"train.micro_batch={4 if layout.tensor == 2 else 2}",  # its collectives are the most expensive
        "guard.compare_replicas_every=15",
        "train.ema=0.9",
    )
    folder = planned(recipe_file, runs, *sets, f"train.steps={steps}", "train.precision=fp32")
    for at_once, seldom in run_on(2, with_intervals, str(folder), layout):
        require_equal(seldom, at_once)
        kinds = [row["what"] for row in at_once["incidents"]]
        assert kinds[:3] == ["nonfinite", "nonfinite", "spike"] and ("diverged" in kinds) == (steps > 78)


class Unreadable(TorchDispatchMode):
    """Dispatch mode that raises if tensors of the CPU and of the device meet, except in an asynchronous copy to the device.

    Scalars on the CPU are allowed as arguments of a kernel.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        tensors += [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors}) > 1 and not kwargs.get("non_blocking"):
            raise AssertionError(f"{func} waits for the device")
        return out


def on_meta(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, *sets: str) -> Trainer:
    """Return a trainer whose weights have no values: reading one raises."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # torch has no autocast there
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **more: contextlib.nullcontext())
    monkeypatch.setattr("tests.train.small_trainer.choose", lambda train: Device(
        torch.device("meta"), "meta", PRECISIONS["fp32"], compile=False))  # fmt: skip
    return trainer_of(recipe_file, *sets)


@pytest.mark.parametrize(
    "sets",
    [
        ("train.ema=0.9",),
        ("train.recompute=full", "model.family=gpt2", "train.z_loss=1e-4"),
        ("train.optimizer.kind=muon",),
        ("train.optimizer.state=8bit",),
    ],
    ids=lambda sets: sets[0].split(".")[-1],
)
def test_a_step_reads_nothing(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]) -> None:
    trainer, scale = on_meta(recipe_file, monkeypatch, *sets), None
    with Unreadable():
        for step in range(2):
            stats = trainer.forward_backward(batch(), scale)
            trainer.update(step, stats.grad_norm, 1.0, stats.skip_flag(SpikeLimits(3.0, 1.0, 20)))
            scale = stats.scale
    with pytest.raises(RuntimeError):
        float(stats.loss)


def test_an_update_is_skipped_if_loss_and_norm_exceed_their_limits(recipe_file: Path) -> None:
    trainer = trainer_of(recipe_file)
    found = trainer.forward_backward(batch())
    [stats] = trainer.read([found])
    limits = {
        None: 0.0,
        SpikeLimits(0.0, 0.0, 20): 1.0,
        SpikeLimits(stats.loss, 0.0, 20): 0.0,
        SpikeLimits(0.0, stats.grad_norm, 20): 0.0,
        SpikeLimits(np.nextafter(stats.loss, 0), np.nextafter(stats.grad_norm, 0), 20): 1.0,
    }
    for one, expected in limits.items():
        assert float(found.skip_flag(one)) == expected, one


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "sets", [(), ("train.ema=0.9",), ("tokens.document_mask=true",), ("train.micro_batch=2", "train.precision=fp16")]
)
def test_a_step_does_not_wait_for_the_gpu(bare_recipe: Path, sets: tuple[str, ...]) -> None:
    trainer = trainer_of(bare_recipe, "train.device=cuda", *sets)
    scale, found = None, []
    for step in range(2):  # compiles and allocates once
        trainer.update(step, trainer.forward_backward(batch(), scale).grad_norm)
    scale = LossScale().to_tensor(trainer.device.torch_device)
    for step in range(2, 5):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            stats = trainer.forward_backward(batch(), scale)
            trainer.update(step, stats.grad_norm, 1.0, stats.skip_flag(SpikeLimits(100.0, 100.0, 20)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scale, found = stats.scale, [*found, stats]
    assert all(math.isfinite(stats.loss) for stats in trainer.read(found))
