from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bessemer.defaults.derived_keys import resolve
from bessemer.layout.flops import recomputed_flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.recipe import load
from bessemer.train import profile
from bessemer.train.profile import StepProfiler, by_category, category, plain_steps, window
from tests.train.test_trainer import batch, trainer_of


@dataclass
class Event:
    """What the table reads of a profiler's event."""

    name: str
    cpu_parent: Event | None = None
    self_cpu_time_total: float = 0.0
    self_device_time_total: float = 0.0
    device_type: Any = torch.autograd.DeviceType.CPU
    is_async: bool = False


@pytest.mark.parametrize(
    ("way", "wanted"),
    [
        (["aten::linear", "aten::addmm"], "matmuls"),
        (["autograd::engine::evaluate_function: MmBackward0", "MmBackward0", "aten::mm"], "matmuls"),
        (["MmBackward0", "aten::t", "aten::transpose"], "other"),
        (["aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"], "attention"),
        (["_ChunkedCrossEntropy", "aten::matmul", "aten::mm"], "loss"),
        (["_ChunkedCrossEntropyBackward", "aten::mul"], "loss"),
        (["Optimizer.step#AdamW.step", "aten::_fused_adamw_"], "optimizer"),
        (["aten::silu"], "norms and elementwise"),
        (["aten::_fused_rms_norm"], "norms and elementwise"),
        (["aten::to", "aten::_to_copy", "aten::copy_"], "norms and elementwise"),
        (["Torch-Compiled Region: 1/0", "triton_red_fused_mul_3"], "norms and elementwise"),
        (["triton_tem_fused_flex_attention_backward_2"], "attention"),
        (["aten::_scaled_mm"], "matmuls"),
        ([profile.DATA_WAIT, "aten::copy_"], "data wait"),
    ],
)
def test_operators_fall_into_their_categories(way: list[str], wanted: str) -> None:
    event = None
    for name in way:
        event = Event(name, event)
    assert category(event) == wanted


def test_own_times_are_added_up_and_kernels_go_with_their_operator() -> None:
    loss = Event("_ChunkedCrossEntropy", None, 10, 1)
    events = [loss, Event("aten::mm", loss, 5, 100), Event("aten::mm", None, 7, 200), Event(profile.DATA_WAIT, None, 40, 0),
              Event("sm90_gemm", None, 0, 300, torch.autograd.DeviceType.CUDA)]  # fmt: skip
    assert by_category(events, cuda=False) == pytest.approx({"loss": 15e-6, "matmuls": 7e-6, "data wait": 40e-6})
    assert by_category(events, cuda=True) == pytest.approx({"loss": 101e-6, "matmuls": 200e-6, "data wait": 40e-6})


@pytest.mark.parametrize(
    ("start", "steps", "busy", "wanted"),
    [
        (0, 1000, (100,), range(10, 13)),
        (500, 1000, (100, 0), range(510, 513)),
        (0, 1000, (11,), range(8, 11)),
        (0, 24, (2,), range(9, 10)),
        (0, 6, (), range(3, 6)),
        (0, 2, (), range(1, 2)),
        (0, 1, (), range(1, 2)),
        (7, 10, (1,), range(8, 9)),
    ],
)
def test_the_window_lies_where_nothing_else_happens(
    start: int, steps: int, busy: tuple[int, ...], wanted: range
) -> None:
    assert window(start, steps, plain_steps(steps, busy)) == wanted


def test_a_profile_adds_up_and_leaves_a_trace(recipe_file: Path, tmp_path: Path) -> None:
    trainer = trainer_of(recipe_file)
    quiet = plain_steps(20, (4,))
    looks = StepProfiler(trainer.device, 0, range(5, 8), quiet, tmp_path / "profile" / "trace.json.gz")
    passed = 0
    for data in looks(iter([batch() for _ in range(9)])):
        trainer.update(0, trainer.forward_backward(data).grad_norm)
        passed += 1
    assert (passed, len(looks.profiled), len(looks.plain)) == (9, 3, 4)  # 1, 2, 3 and 9; 4 and 8 are busy
    assert set(looks.seconds) == set(profile.CATEGORIES) - {"communication"} and looks.communication is None
    assert sum(looks.seconds.values()) == pytest.approx(sum(looks.profiled) / 3, rel=1e-6)
    assert all(
        looks.seconds[name] > 0 for name in ("matmuls", "attention", "loss", "optimizer", "norms and elementwise")
    )
    events = json.loads(gzip.decompress(looks.trace.read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("Optimizer.step#GroupOptimizer.step") == 3
    # Forward and twice backward: per block four products, over two micro-batches, 2 blocks, 3 steps; and the loss's.
    products = names.count("aten::mm") + names.count("mkldnn::_linear_pointwise")
    assert products >= 3 * 4 * 2 * 2 * 3
    recipe = resolve(load(recipe_file, ["train.recompute=full"]), 400)
    config = model_config(recipe, 400)
    again = recomputed_flops_per_token(recipe.train.recompute, config, 2)
    result = profile.write(looks, recipe.train, {"peak_flops": 1e10, "flops_per_token": 1e5}, config, 2)
    assert json.loads((tmp_path / "profile" / "profile.json").read_text()) == result
    assert result["mfu"] == pytest.approx(1e5 * 256 / result["step_seconds"] / 1e10)
    assert again > 0
    assert result["hfu"] == pytest.approx((1 + again / 1e5) * result["mfu"])
    shown = profile.show(result)
    assert "matmuls" in shown and f"{again:.3g} recomputed" in shown and "steps 5 to 7" in shown


def test_a_run_that_stops_under_the_profiler_leaves_it_off(recipe_file: Path, tmp_path: Path) -> None:
    trainer = trainer_of(recipe_file)
    looks = StepProfiler(trainer.device, 0, range(1, 4), plain_steps(20, ()), tmp_path / "trace.json.gz")
    passing = looks(iter([batch()] * 5))
    next(passing)
    passing.close()
    assert not torch.autograd._profiler_enabled()
    assert looks.seconds == {}


@pytest.mark.long
def test_the_command_profiles_and_changes_nothing(
    runs: Path, recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    from bessemer.cli import run_command
    from tests.test_cli import trained

    shutil.copytree(runs, tmp_path / "plain")
    assert run_command(["train", str(recipe_file), "--set", f"run.dir={tmp_path / 'plain'}"]) == 0
    capsys.readouterr()
    assert run_command(["train", str(recipe_file), "--set", f"run.dir={runs}", "--profile"]) == 0
    assert "Where the time of a step goes (steps 9 to 11" in capsys.readouterr().out
    assert (runs / "small" / "profile" / "trace.json.gz").exists()
    assert trained(runs / "small") == trained(tmp_path / "plain" / "small")
    assert run_command(["train", str(recipe_file), "--set", f"run.dir={runs}", "--profile"]) == 2
    assert "no step to profile" in capsys.readouterr().err
