from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bessemer.errors import BessemerError, InputError
from bessemer.train import precision as precisions
from bessemer.train.engine import MicroBatch
from bessemer.train.precision import PRECISIONS, LossScale, available, chosen, probe, surviving_bits
from bessemer.train.trainer import Trainer
from tests.train.test_fp8 import NEEDS_ROWWISE
from tests.train.test_trainer import batch, trainer_of

CPU = torch.device("cpu")


def in_precision(trainer: Trainer, name: str) -> Trainer:
    """The same step in a precision that a recipe may not ask a CPU for, but that torch emulates there."""
    trainer.device = trainer.engine.root.device = replace(trainer.device, precision=PRECISIONS[name])  # type: ignore[attr-defined]
    trainer.model.use_linear(precisions.linear_of(PRECISIONS[name]))
    return trainer


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=NEEDS_ROWWISE) if name == "fp8-rowwise" else name
        for name in PRECISIONS
        if name != "tf32"
    ],
)
def test_the_probe_finds_the_bits_of_each_type(name: str) -> None:
    assert probe(PRECISIONS[name], CPU).endswith("fp64" if name == "fp64" else "fp32")
    with precisions.autocast(PRECISIONS[name], CPU):
        bits, dtype = surviving_bits(precisions.linear_of(PRECISIONS[name]), CPU, PRECISIONS[name].weights)
    assert (bits, dtype) == (PRECISIONS[name].significand, PRECISIONS[name].dtype)


def test_the_probe_refuses_what_is_not_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        precisions, "linear_of", lambda precision: lambda x, w, b: F.linear(x.bfloat16(), w.bfloat16()).float()
    )
    with pytest.raises(BessemerError, match="fp32 was asked for, but .* keeps 7 bits"):
        probe(PRECISIONS["fp32"], CPU)
    monkeypatch.setattr(precisions, "linear_of", lambda precision: F.linear)
    with pytest.raises(BessemerError, match="fp8 was asked for, but .* keeps 7 bits"):
        probe(PRECISIONS["fp8"], CPU)


def test_flags_are_set_and_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_float32_matmul_precision("high")  # as another library might
    probe(PRECISIONS["bf16"], CPU)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    monkeypatch.setattr(precisions, "apply_flags", lambda precision: torch.set_float32_matmul_precision("high"))
    with pytest.raises(BessemerError, match="TF32 on"):
        probe(PRECISIONS["bf16"], CPU)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("capability", "has"),
    [
        ((7, 0), {"fp32", "fp16", "fp64"}),
        ((8, 0), {"fp32", "fp16", "fp64", "tf32", "bf16"}),
        ((8, 9), set(PRECISIONS)),
        ((9, 0), set(PRECISIONS)),
    ],
)
def test_a_device_gives_what_its_capability_allows(
    capability: tuple[int, int], has: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda place: capability)
    cuda = torch.device("cuda")
    assert set(available(cuda)) == has
    assert chosen("auto", cuda, "GPU").name == ("bf16" if "bf16" in has else "fp32")
    for name in PRECISIONS:
        if name in has:
            assert chosen(name, cuda, "GPU") == PRECISIONS[name]
        else:
            with pytest.raises(InputError, match=f"train.precision: GPU cannot compute in {name}; it has fp32, fp16"):
                chosen(name, cuda, "GPU")


@pytest.mark.parametrize("name", ["tf32", "fp8", pytest.param("fp8-rowwise", marks=NEEDS_ROWWISE)])
def test_a_cpu_refuses_what_it_lacks(name: str) -> None:
    assert chosen("auto", CPU, "a CPU").name == "fp32"
    with pytest.raises(InputError, match=f"a CPU cannot compute in {name}; it has fp32, bf16, fp16, fp64, or use auto"):
        chosen(name, CPU, "a CPU")


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", pytest.param("fp8-rowwise", marks=NEEDS_ROWWISE)])
def test_gradients_are_those_of_fp32_within_the_rounding(recipe_file: Path, name: str) -> None:
    """Weights and gradients stay fp32; the direction of the gradient is that of fp32."""
    full, narrow = trainer_of(recipe_file), in_precision(trainer_of(recipe_file), name)
    loss, other = full.forward_backward(batch()), narrow.forward_backward(batch())
    assert other.loss == pytest.approx(loss.loss, rel=5e-3)
    assert other.grad_norm == pytest.approx(loss.grad_norm, rel=0.05)
    least = 1.0 - 8.0 * 4.0 ** -min(PRECISIONS[name].significand, 7) if "fp8" not in name else 0.98
    for (key, p), q in zip(full.model.named_parameters(), narrow.model.parameters(), strict=True):
        assert q.dtype == q.grad.dtype == torch.float32, key
        assert float(F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0)) > min(least, 0.999), key
        assert not torch.equal(p.grad, q.grad), key


def test_held_out_text_is_scored_in_the_precision_of_training(recipe_file: Path) -> None:
    exact, narrow = (trainer_of(recipe_file, f"train.precision={name}") for name in ("fp32", "bf16"))
    with torch.no_grad():
        nats_BS, narrow_BS = (trainer.engine.score(MicroBatch.of(batch()))[0] for trainer in (exact, narrow))
    difference = (narrow_BS - nats_BS).abs().max()
    assert narrow_BS.dtype == torch.float32 and 1e-4 < difference < 0.2, difference


def test_the_scale_halves_doubles_and_stops_at_one() -> None:
    scale = LossScale()
    assert scale.value == 65536.0
    for _ in range(1999):
        scale = scale.after(True)
    assert scale == LossScale(65536.0, 1999)
    assert scale.after(True) == LossScale(131072.0, 0)
    assert scale.after(False) == LossScale(32768.0, 0, 1)
    for _ in range(16):
        scale = scale.after(False)
    assert (scale.value, scale.can_fall, scale.skipped) == (1.0, False, 16)
    assert scale.after(False).value == 1.0


def test_scaling_keeps_small_gradients_and_changes_none(recipe_file: Path) -> None:
    """Gradients so small that fp16 loses them are there with the scale, and equal fp32's."""
    full = trainer_of(recipe_file)
    full.forward_backward(batch())
    narrow = in_precision(trainer_of(recipe_file), "fp16")
    found = narrow.forward_backward(batch(), LossScale(2.0**10))
    other = narrow.forward_backward(batch(), LossScale(2.0**8))
    assert found.grad_norm == pytest.approx(other.grad_norm, rel=1e-3), "the scale is taken out again"
    assert found.scale == LossScale(2.0**10, 1) and not found.overflow


def test_an_overflow_gives_the_step_up_and_is_no_incident(recipe_file: Path) -> None:
    from bessemer.guard.detection import GuardReference
    from bessemer.guard.policy import GuardState, Verdict, judge
    from bessemer.recipe import Guard

    trainer = in_precision(trainer_of(recipe_file), "fp16")
    found = trainer.forward_backward(batch(), LossScale(2.0**40, 5, 2))
    assert found.overflow and found.scale == LossScale(2.0**39, 0, 3)
    guard, scale = GuardState(1, 4), GuardReference(6.0, 1.0)
    judged = judge(Guard(), guard, 1, found.loss, found.grad_norm, scale, overflow=found.overflow)
    assert (judged.verdict, judged.state) == (Verdict.RESCALE, guard)
    with torch.no_grad():
        trainer.model.head.weight[0, 0] = torch.inf
    broken = trainer.forward_backward(batch(), LossScale(4.0))
    assert not broken.overflow and broken.scale == LossScale(4.0), "a loss that is not finite is not the scale's doing"
    judged = judge(Guard(), guard, 1, broken.loss, broken.grad_norm, scale, overflow=broken.overflow)
    assert judged.verdict is Verdict.SKIP


def test_at_a_scale_of_one_the_guard_takes_over(recipe_file: Path) -> None:
    trainer = in_precision(trainer_of(recipe_file), "fp16")
    whole = trainer.engine.root  # type: ignore[attr-defined]
    original = whole.forward

    def enlarged(*given: torch.Tensor | None) -> Any:
        total, *rest = original(*given)
        return total * torch.tensor(2.0**60), *rest

    whole.forward = enlarged
    found = trainer.forward_backward(batch(), LossScale(1.0))
    assert not found.overflow and found.scale.value == 1.0


@pytest.mark.long
def test_a_killed_training_in_fp16_goes_on_bit_for_bit(runs: Path, recipe_file: Path, tmp_path: Path) -> None:
    """With the loss scale where it was, down to the count of good steps."""
    import shutil
    import signal

    from tests.test_cli import bessemer, start, trained, wait_for_step

    there = tmp_path / "whole"
    shutil.copytree(runs, there)
    fp16 = ["--set", "train.precision=fp16"]
    done = bessemer("train", recipe_file, "--set", f"run.dir={there}", *fp16)
    assert done.returncode == 0, done.stderr
    assert "matmuls in fp16, weights, gradients and optimizer in fp32" in done.stderr
    process = start(recipe_file, runs, *fp16)
    wait_for_step(runs, 11, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert bessemer("train", recipe_file, "--set", f"run.dir={runs}", *fp16).returncode == 0
    assert trained(runs / "small") == trained(there / "small")
    assert scales(runs / "small") == scales(there / "small")
    assert scales(runs / "small")[0] == {"value": 65536.0, "good": 24, "skipped": 0}


def scales(folder: Path) -> list[object]:
    """The loss scale of every step and that of the last checkpoint."""
    import json

    from bessemer.run import read_json_lines

    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text()
    facts = json.loads((latest / "manifest.json").read_text())["facts"]
    rows = [row for row in read_json_lines(folder / "metrics.jsonl") if row["kind"] == "train"]
    return [facts["loss_scale"], [(row["loss_scale"], row["scale_skips"]) for row in rows]]
