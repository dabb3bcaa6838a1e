"""Steps whose numbers the host reads a step later, as on a GPU. Here on a CPU, where they must train as steps that are read at
once, fault for fault and bit for bit; and on torch's meta device, whose values nothing can read."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bessemer.checkpoint.format import load_manifest
from bessemer.distributed.mesh import join
from bessemer.guard.detection import SpikeLimits
from bessemer.guard.heartbeat import Heartbeat
from bessemer.recipe import Parallel
from bessemer.run.directory import RunDirectory, checkpoint_name, checkpoint_steps
from bessemer.run.files import read_json_lines
from bessemer.tokens.loader import Batch
from bessemer.train import trainer as trainers
from bessemer.train.device import Device, choose
from bessemer.train.loop import StopSignal, train_here
from bessemer.train.precision import PRECISIONS, LossScale
from bessemer.train.run_spec import RunSpec
from bessemer.train.trainer import DeferredStats, Trainer
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.train.faulty_runs import copied, poison, train
from tests.train.small_trainer import batch, trainer_of

# Of time and memory; the recipe of a checkpoint names the folder.
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
    honest = Trainer._accumulate

    def accumulate(self: Trainer, batch: Batch, *more: Any) -> Any:
        losses = honest(self, batch, *more)
        if (factor := factors.get(batch.first)) is not None:
            for gradient in self._gradients():
                gradient.mul_(factor)
            for loss in losses:
                loss.nats_B.mul_(factor)
        return losses

    patch.setattr(Trainer, "_accumulate", accumulate)


def defer(patch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Defer on a CPU. Returns what happens, in order: "enqueue", "read" and "update", each with the first sample of its step."""
    events: list[tuple[str, int]] = []
    enqueue, read, update = Trainer.enqueue, DeferredStats.read, Trainer.update
    steps: dict[int, int] = {}

    def enqueued(self: Trainer, batch: Batch, *scale: Any) -> DeferredStats:
        stats = enqueue(self, batch, *scale)
        steps[id(stats)] = batch.first
        events.append(("enqueue", batch.first))
        return stats

    def was_read(self: DeferredStats, *scale: Any) -> Any:
        events.append(("read", steps[id(self)]))
        return read(self, *scale)

    def updated(self: Trainer, *arguments: Any) -> float:
        events.append(("update", arguments[0]))
        return update(self, *arguments)

    patch.setattr(trainers, "DEFERRING", ("cpu",))
    patch.setattr(Trainer, "enqueue", enqueued)
    patch.setattr(DeferredStats, "read", was_read)
    patch.setattr(Trainer, "update", updated)
    return events


def num_late(events: list[tuple[str, int]]) -> int:
    """Steps that were read after the passes of the next were enqueued, and before its update was."""
    kinds = [kind for kind, _ in events]
    return sum(kinds[at : at + 3] == ["enqueue", "read", "update"] and events[at][1] != events[at + 1][1]
               for at in range(len(events)))  # fmt: skip


def what_is_left(folder: Path) -> dict[str, Any]:
    """All that a run writes and that must be equal: logs, and checkpoints by the hashes of their files and by their facts."""

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


@pytest.mark.parametrize(
    "sets",
    long_but(
        [
            ["train.ema=0.9", "tokens.document_mask=true"],
            ["guard.skip_spikes=false", "train.watch_every=7"],
            ["train.micro_batch=2", "train.precision=bf16", "train.log_every=3"],
        ],
        ["train.ema=0.9", "tokens.document_mask=true"],
    ),
    ids=lambda sets: sets[0].split(".")[-1],
)
def test_a_run_with_faults_is_the_same_bit_for_bit(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, sets: list[str]
) -> None:
    """Two updates that are not finite, a spike, a poisoned range that is rolled back; checkpoints, watched steps, validations."""
    break_gradients(monkeypatch, FAULTS)
    poison(monkeypatch, lambda first: first in POISONED)
    sets = ["train.steps=100", "train.validate_every=25", *sets]
    at_once = what_is_left(train(recipe_file, copied(runs, "at-once"), *sets))
    events = defer(monkeypatch)
    require_equal(what_is_left(train(recipe_file, runs, *sets)), at_once)
    assert num_late(events) > 80
    kinds = {(row["step"], row["what"]) for row in at_once["incidents"]}
    assert {(30, "nonfinite"), (31, "nonfinite")} <= kinds and any(what == "diverged" for _, what in kinds)
    assert ((50, "spike") in kinds) and len(at_once["journal"]) > 1


def test_a_stop_between_checkpoints_and_a_resume_change_nothing(
    runs: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_gradients(monkeypatch, FAULTS)
    sets = ("train.steps=60", "checkpoint.every=25", "train.validate_every=20")
    whole = what_is_left(train(recipe_file, copied(runs, "whole"), *sets))
    events = defer(monkeypatch)
    for stop in (8 * 31, 8 * 53):  # the first sample of the last step that is enqueued
        with monkeypatch.context() as patch:
            patch.setattr(StopSignal, "received", lambda self, at=stop: "SIGTERM" if events[-1][1] >= at else None)
            train(recipe_file, runs, *sets, expected=75)
    folder = train(recipe_file, runs, *sets)
    steps = {row["step"] for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "resumed"}
    assert len(steps) == 2 and not steps & {20, 25, 40, 50}
    resumed = what_is_left(folder)
    kinds = "train", "validation", "inside"
    for found in (whole, resumed):
        found["metrics"] = [row for row in found["metrics"] if row["kind"] in kinds]
    assert resumed["metrics"] == whole["metrics"] and resumed["incidents"] == whole["incidents"]
    assert resumed[checkpoint_name(60)] == whole[checkpoint_name(60)]


def rounded_root(patch: pytest.MonkeyPatch) -> None:
    """The root of a float64 scalar as a GPU and Python have it, rounded correctly: MKL's is not."""
    honest = torch.Tensor.sqrt

    def sqrt(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, math.sqrt(x)) if x.dtype == torch.float64 and not x.dim() else honest(x)

    patch.setattr(torch.Tensor, "sqrt", sqrt)


def both_ways(folder: str, layout: Parallel) -> list[dict[str, Any]]:
    """Train a run of this folder with a layout at once and deferred, on this process of the group."""
    mesh, left = join(layout, torch.device("cpu")), []
    spec = RunSpec.read(RunDirectory(Path(folder))).with_layout(layout, 0)
    with pytest.MonkeyPatch.context() as patch:
        rounded_root(patch)
        break_gradients(patch, FAULTS)
        poison(patch, lambda first: first in POISONED)
        for number in range(2):
            run, events = RunDirectory(Path(folder).with_name(f"run-{number}")), list[tuple[str, int]]()
            if mesh.is_main:
                run.path.mkdir()
                for name in ("tokens", "recipe.toml", "plan.json"):
                    os.symlink(Path(folder) / name, run.path / name)
            mesh.barrier()
            if number:
                events = defer(patch)
            with Heartbeat(None, mesh.rank, run.path / f"stacks-{mesh.rank}.txt", 0) as heartbeat:
                train_here(spec, run, choose(spec.recipe.train), mesh, heartbeat)
            left.append({**what_is_left(run.path), "num_late": num_late(events)})
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
def test_two_processes_are_the_same_bit_for_bit(runs: Path, recipe_file: Path, layout: Parallel, steps: int) -> None:
    sets = (
        "model.layers=2",
        "model.kv_heads=2",
        f"train.micro_batch={4 if layout.tensor == 2 else 2}",  # its collectives are the costliest
        "guard.compare_replicas_every=15",
        "train.ema=0.9",
    )
    folder = train(recipe_file, runs, *sets, f"train.steps={steps}", "train.precision=fp32")
    for at_once, deferred in run_on(2, both_ways, str(folder), layout):
        assert at_once.pop("num_late") == 0 and deferred.pop("num_late") > 0.7 * steps
        require_equal(deferred, at_once)
        kinds = [row["what"] for row in at_once["incidents"]]
        assert kinds[:3] == ["nonfinite", "nonfinite", "spike"] and ("diverged" in kinds) == (steps > 78)


class Unreadable(TorchDispatchMode):
    """Raises where tensors of the CPU and of the device meet, but in a copy to the device that the host does not wait for. Scalars
    of the CPU are arguments of a kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.dim()]
        tensors += [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if len({x.device.type for x in tensors}) > 1 and not kwargs.get("non_blocking"):
            raise AssertionError(f"{func} waits for the device")
        return out


def on_meta(recipe_file: Path, monkeypatch: pytest.MonkeyPatch, *sets: str) -> Trainer:
    """A trainer whose weights have no values: whatever reads one raises."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)  # torch has no autocast there
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **more: contextlib.nullcontext())
    monkeypatch.setattr(trainers, "DEFERRING", ("meta",))
    monkeypatch.setattr("tests.train.small_trainer.choose", lambda train: Device(
        torch.device("meta"), "meta", PRECISIONS["fp32"], compile=False))  # fmt: skip
    return trainer_of(recipe_file, *sets)


@pytest.mark.parametrize(
    "sets",
    [
        ("train.ema=0.9",),
        ("train.recompute=full", "model.family=gpt2", "train.z_loss=1e-4", "train.label_smoothing=0.1"),
    ],
)
def test_a_step_reads_nothing_before_its_update_is_enqueued(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...]
) -> None:
    trainer, copied_to_host = on_meta(recipe_file, monkeypatch, *sets), []
    monkeypatch.setattr(trainers, "HostCopy", lambda values: copied_to_host.append(values))
    assert trainer.defers
    with Unreadable():
        for step in range(2):
            stats = trainer.enqueue(batch())
            trainer.update(step, stats.grad_norm, 1.0, stats.skip_flag(SpikeLimits(3.0, 1.0, 20)))
    assert [len(values) for values in copied_to_host] == [2 + 8] * 2
    with pytest.raises(RuntimeError):
        float(stats.loss)


@pytest.mark.parametrize(
    ("sets", "defers"),
    [
        ((), True),
        (("train.optimizer.kind=muon",), True),
        (("train.precision=fp16",), False),
        (("train.optimizer.state=8bit",), True),
    ],
)
def test_what_the_host_decides_is_not_deferred(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch, sets: tuple[str, ...], defers: bool
) -> None:
    assert not trainer_of(recipe_file, *sets).defers, "on a CPU nothing is"
    monkeypatch.setattr(trainers, "DEFERRING", ("cpu",))
    assert trainer_of(recipe_file, *sets).defers == defers


def test_numbers_are_those_of_a_step_that_is_read_at_once(recipe_file: Path) -> None:
    one, other = trainer_of(recipe_file), trainer_of(recipe_file)
    data, limits = batch(), SpikeLimits(0.0, 0.0, 20)
    expected, stats = one.forward_backward(data), other.enqueue(data)
    assert stats.read() == expected
    scale = LossScale(8.0, 3, 1)  # of a run that began in fp16
    assert other.enqueue(data).read(scale) == one.forward_backward(data, scale) == replace(expected, scale=scale)
    assert (float(stats.skip_flag(None)), float(stats.skip_flag(limits))) == (0.0, 1.0)
    beyond_one = SpikeLimits(expected.loss, 0.0, 20), SpikeLimits(0.0, expected.grad_norm, 20)
    assert [float(stats.skip_flag(one)) for one in beyond_one] == [0.0, 0.0], "a spike exceeds both limits"
    below = SpikeLimits(np.nextafter(expected.loss, 0), np.nextafter(expected.grad_norm, 0), 20)
    assert float(stats.skip_flag(below)) == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "sets",
    [
        (),
        ("train.ema=0.9",),
        ("tokens.document_mask=true",),
    ],
)
def test_a_gpu_is_not_waited_for(bare_recipe: Path, sets: tuple[str, ...]) -> None:
    trainer = trainer_of(bare_recipe, "train.device=cuda", *sets)
    assert trainer.defers
    for step in range(2):  # what is compiled and allocated once
        trainer.update(step, trainer.forward_backward(batch()).grad_norm)
    stats = None
    for step in range(2, 5):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            stats = trainer.enqueue(batch())
            trainer.update(step, stats.grad_norm, 1.0, stats.skip_flag(SpikeLimits(100.0, 100.0, 20)))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert stats is not None and math.isfinite(stats.read().loss)
