import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bessemer.cli import run_command
from bessemer.common.errors import InputError
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.recipe import Parallel, Recipe, Train, load
from bessemer.run.files import read_json_lines
from bessemer.train import device as devices
from bessemer.train import measure, precision
from bessemer.train import precision as precisions
from bessemer.train.device import Device, choose
from bessemer.train.engine import MicroBatch, concurrent_micro_batches
from bessemer.train.precision import PRECISIONS, LossScale, available, chosen, next_scale
from tests.train.faulty_runs import copied, train
from tests.train.small_trainer import batch, stats_of, trainer_of

CPU = torch.device("cpu")


BITS = {"fp64": 52, "fp32": 23, "tf32": 10, "bf16": 7, "fp16": 10, "fp8": 3, "fp8-rowwise": 3}  # after the leading one


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_matmul_keeps_the_bits_of_its_precision(name: str, kind: str) -> None:
    """Row p of the left operand has 1 + 2^-p, which b bits represent only for p <= b, and multiplies the identity. 1.75 in each
    row makes the scale of fp8 a power of two, since its largest value is 1.75 x 2^8.
    """
    device, precision = torch.device(kind), PRECISIONS[name]
    if (kind == "cuda" and not torch.cuda.is_available()) or name not in available(device):
        pytest.skip("not on this device")
    torch.set_float32_matmul_precision("medium")  # as another library might
    precisions.apply_flags(precision)
    size = 512 if kind == "cuda" else 64  # large enough for tensor cores
    x, powers = torch.zeros(size, size, dtype=precision.weights), torch.arange(1, 53 if name == "fp64" else 24)
    x[powers, powers] = 1.0 + torch.exp2(-powers.to(x.dtype))
    x[:, 0] = 1.75
    identity = torch.eye(size, device=device, dtype=x.dtype)
    identity[0, 0] = 1.75
    with torch.no_grad(), precisions.autocast(precision, device):
        output = precisions.linear_of(precision, device)(x.to(device), identity, None)
    kept = int((output.to(x.dtype).cpu()[powers, powers] == x[powers, powers]).sum())
    assert (kept, output.dtype) == (BITS[name], precision.dtype)
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.parametrize(
    ("capability", "has"),
    [
        ((7, 0), {"fp32", "fp16", "fp64"}),
        ((8, 0), {"fp32", "fp16", "fp64", "tf32", "bf16"}),
        ((8, 9), set(PRECISIONS)),
        ((9, 0), set(PRECISIONS)),
    ],
)
def test_precisions_follow_from_the_device_capability(
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
            with pytest.raises(InputError, match=f"train.precision: .* {name}; .* fp32, fp16"):
                chosen(name, cuda, "GPU")


def test_a_cpu_supports_all_precisions_except_tf32() -> None:
    assert chosen("auto", CPU, "a CPU").name == "fp32"
    assert set(available(CPU)) == PRECISIONS.keys() - {"tf32"}
    with pytest.raises(InputError, match=r"train\.precision"):
        chosen("tf32", CPU, "a CPU")


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "fp8-rowwise"])
def test_gradients_equal_those_of_fp32_within_rounding(recipe_file: Path, name: str) -> None:
    """Weights and gradients stay fp32; the gradient's direction equals that of fp32."""
    full, narrow = trainer_of(recipe_file), trainer_of(recipe_file, f"train.precision={name}")
    loss, other = stats_of(full, batch()), stats_of(narrow, batch())
    assert other.loss == pytest.approx(loss.loss, rel=5e-3)
    assert other.grad_norm == pytest.approx(loss.grad_norm, rel=0.05)
    least = 1.0 - 8.0 * 4.0 ** -min(BITS[name], 7) if "fp8" not in name else 0.98
    for (key, p), q in zip(full.model.named_parameters(), narrow.model.parameters(), strict=True):
        assert q.dtype == q.grad.dtype == torch.float32, key
        assert float(F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0)) > min(least, 0.999), key
        assert not torch.equal(p.grad, q.grad), key


def test_held_out_text_is_scored_in_the_precision_of_training(recipe_file: Path) -> None:
    exact, narrow = (trainer_of(recipe_file, f"train.precision={name}") for name in ("fp32", "bf16"))
    with torch.no_grad():
        nats_BS, narrow_BS = (trainer.engine.score(MicroBatch.from_batch(batch()))[0] for trainer in (exact, narrow))
    difference = (narrow_BS - nats_BS).abs().max()
    assert narrow_BS.dtype == torch.float32 and 1e-4 < difference < 0.2, difference


def test_the_loss_scale_halves_doubles_and_stops_at_one() -> None:
    def after(scale: LossScale, norm: float, loss: float = 3.0) -> tuple[LossScale, bool]:
        numbers = (torch.tensor(one, dtype=torch.float64) for one in (loss, norm))
        found, overflow = next_scale(scale.to_tensor(CPU), *numbers)
        return LossScale(*found.tolist()), bool(overflow)

    scale = LossScale()
    assert scale.value == 65536.0
    for _ in range(1999):
        scale, overflow = after(scale, 1.0)
        assert not overflow
    assert scale == LossScale(65536.0, 1999)
    assert after(scale, 1.0) == (LossScale(131072.0, 0), False)
    assert after(scale, math.inf) == (LossScale(32768.0, 0, 1), True)
    assert after(scale, math.nan, math.nan) == (scale, False), "a loss that is not finite is not the scale's doing"
    for _ in range(16):
        scale, overflow = after(scale, math.nan)
        assert overflow
    assert (scale.value, scale.skipped) == (1.0, 16)
    assert after(scale, math.nan) == (LossScale(1.0, 0, 17), False), "no smaller scale helps"


def test_an_overflow_skips_the_step_and_is_no_incident(recipe_file: Path) -> None:
    from bessemer.guard.detection import GuardReference
    from bessemer.guard.policy import GuardState, Verdict, judge
    from bessemer.recipe import Guard

    trainer = trainer_of(recipe_file, "train.precision=fp16")
    found = stats_of(trainer, batch(), LossScale(2.0**40, 5, 2))
    assert found.overflow and found.scale == LossScale(2.0**39, 0, 3)
    guard, scale = GuardState(1, 4), GuardReference(6.0, 1.0)
    judged = judge(Guard(), guard, 1, found.loss, found.grad_norm, scale, overflow=found.overflow)
    assert (judged.verdict, judged.state) == (Verdict.RESCALE, guard)
    with torch.no_grad():
        trainer.model.head.weight[0, 0] = torch.inf
    broken = stats_of(trainer, batch(), LossScale(4.0))
    assert not broken.overflow and broken.scale == LossScale(4.0), "a loss that is not finite is not the scale's doing"
    judged = judge(Guard(), guard, 1, broken.loss, broken.grad_norm, scale, overflow=broken.overflow)
    assert judged.verdict is Verdict.SKIP


CHOICES = [("auto", True, False), ("on", True, True), ("off", False, False)]


@pytest.mark.parametrize(("value", "on_cpu", "on_cuda"), CHOICES)
def test_auto_is_deterministic_on_a_cpu_and_fast_on_cuda(
    value: Literal["auto", "on", "off"], on_cpu: bool, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(Train(device="cpu", deterministic=value)).deterministic == on_cpu
    for name, answer in (
        ("is_available", True),
        ("device_count", 1),
        ("set_device", None),
        ("get_device_name", "GPU"),
        ("get_device_capability", (9, 0)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, answer=answer: answer)
    assert choose(Train(device="cuda", precision="fp32", deterministic=value)).deterministic == on_cuda


def test_a_training_sets_the_kernels(runs: Path, recipe_file: Path) -> None:
    for value, mode in (("off", 0), ("on", 1)):
        train(recipe_file, copied(runs, value), "train.steps=1", "checkpoint.every=1", f"train.deterministic={value}")
        assert torch.get_deterministic_debug_mode() == mode


SCALINGS = {"tensorwise": "fp8", "rowwise": "fp8-rowwise"}
FORMATS = {
    torch.float8_e4m3fn: (3, -6, 448.0),
    torch.float8_e5m2: (2, -14, 57344.0),
}  # significand, exponent, largest value


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round float64 values to the nearest value of an 8-bit format, ties to even, by the format's definition."""
    bits, least, largest = FORMATS[dtype]
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-300))), least)
    step = np.exp2(exponent - bits)
    return np.clip(np.round(x / step) * step, -largest, largest)


def reference_product(
    a: torch.Tensor, b: torch.Tensor, types: tuple[torch.dtype, torch.dtype], scaling: str
) -> np.ndarray:
    """Return a @ b.T in float64 with both operands rounded to fp8."""
    sides = []
    for tensor, dtype in zip((a, b), types, strict=True):
        x = tensor.double().numpy()
        largest = FORMATS[dtype][2]
        scale = np.abs(x).max() / largest if scaling == "tensorwise" else np.abs(x).max(axis=1, keepdims=True) / largest
        scale = scale if scaling == "tensorwise" else np.exp2(np.ceil(np.log2(scale)))
        sides.append(rounded(x / scale, dtype) * scale)
    return sides[0] @ sides[1].T


def close(found: torch.Tensor, wanted: np.ndarray, share: float = 5e-3) -> None:
    """Compare within bf16's rounding of the result, far closer than fp8's own rounding (6%) would allow by chance."""
    assert np.abs(found.double().numpy() - wanted).max() <= share * np.abs(wanted).max()


def linear(scaling: str, device: str = "cpu") -> Any:
    return precision.linear_of(PRECISIONS[SCALINGS[scaling]], torch.device(device))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_product_and_gradients_equal_those_of_rounded_operands(scaling: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 64, generator=draw).bfloat16().requires_grad_()
    weight, bias = (torch.randn(48, 64, generator=draw) * 0.1).requires_grad_(), torch.randn(48, generator=draw)
    gradient = torch.randn(2, 16, 48, generator=draw).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(scaling)(x, weight, None)
        torch.testing.assert_close(linear(scaling)(x, weight, bias), y + bias.bfloat16())
    y.backward(gradient)
    e4m3 = torch.float8_e4m3fn
    back = e4m3 if scaling == "rowwise" else torch.float8_e5m2
    x_NI, gradient_NO, w = x.detach().flatten(0, 1), gradient.flatten(0, 1), weight.detach()
    assert y.dtype == x.grad.dtype == torch.bfloat16 and weight.grad.dtype == torch.float32
    wanted = reference_product(x_NI, w, (e4m3, e4m3), scaling)
    error = np.abs(y.detach().flatten(0, 1).double().numpy() - wanted)
    assert (error <= 2.0**-8 * np.abs(wanted) + 1e-5).all(), "rounded to bf16 once, at the end"
    close(x.grad.flatten(0, 1), reference_product(gradient_NO, w.T, (back, e4m3), scaling))
    close(weight.grad, reference_product(gradient_NO.T, x_NI.T, (back, e4m3), scaling))
    exact = (x_NI.double() @ w.double().T).numpy()
    off = np.abs(y.detach().flatten(0, 1).double().numpy() - exact).max() / np.abs(exact).max()
    assert 0.005 < off < 0.1, "it really is rounded to 3 bits"
    x, w = x.detach().float(), weight.detach()
    assert torch.equal(linear(scaling)(x, w, bias), torch.nn.functional.linear(x, w, bias)), "outside of autocast"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_give_zeros_and_non_finite_values_are_kept(scaling: str) -> None:
    weight = torch.randn(16, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not linear(scaling)(torch.zeros(16, 32), weight, None).any()
        for bad in (float("nan"), float("inf")):
            x = torch.randn(16, 32)
            x[3, 5] = bad
            assert not torch.isfinite(linear(scaling)(x, weight, None)[3]).any()


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    for key in ("train.precision", "train.optimizer.state"):
        with pytest.raises(InputError, match=f"{key}: .*lowbit"):
            precision.require_torchao(key)


@pytest.mark.parametrize(
    ("changes", "micro", "said"),
    [
        ({"width": 72}, 4, "model.width = 72"),
        ({"mlp_width": 100}, 4, "model.mlp_width / parallel.tensor = 100"),
        ({"head_dim": 12}, 4, "model.heads x model.head_dim / parallel.tensor = 24"),
        ({"heads": 4, "kv_heads": 1, "head_dim": 4}, 4, r"2 model.kv_heads\) x model.head_dim / parallel.tensor = 24"),
        ({"sequence_length": 10}, 1, "train.micro_batch x tokens.sequence_length / parallel.context = 10"),
        ({"tensor": 4, "heads": 4, "kv_heads": 4, "mlp_width": 96}, 4, "model.mlp_width / parallel.tensor = 24"),
    ],
)
def test_unsuitable_dimensions_are_named(changes: dict[str, int], micro: int, said: str) -> None:
    values = dict(
        vocabulary=100, layers=1, width=64, heads=2, kv_heads=2, head_dim=32, mlp_width=128, sequence_length=16
    )
    precision.require_fp8(ModelConfig(**values), Parallel(), micro)
    layout = Parallel(tensor=changes.get("tensor", 1))
    changed = {name: value for name, value in changes.items() if name != "tensor"}
    with pytest.raises(InputError, match=said):
        precision.require_fp8(ModelConfig(**{**values, **changed}), layout, micro)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8"
)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_fp8_on_a_gpu_equals_the_product_of_rounded_operands(scaling: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 128, generator=draw).bfloat16(), torch.randn(48, 128, generator=draw)
    there, w = x.cuda().requires_grad_(), weight.cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = linear(scaling, "cuda")(there, w, None)
    y.backward(torch.ones_like(y))
    e4m3 = torch.float8_e4m3fn
    close(y.detach().cpu(), reference_product(x, weight, (e4m3, e4m3), scaling), 1e-2)
    close(w.grad.cpu(), reference_product(torch.ones(48, 64), x.T, (e4m3, e4m3), scaling), 1e-2)


@pytest.fixture
def recipe(recipe_file: Path) -> Recipe:
    return recipe_defaults.resolve(load(recipe_file), 400)


def test_processor_flags_show_which_precisions_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, expected in (
        ("AuthenticAMD avx512f avx512_bf16", (True, False)),
        ("GenuineIntel avx512f avx512_bf16", (False, False)),
        ("amx_tile amx_bf16 avx512_fp16", (True, True)),
        ("fp asimdhp bf16", (True, True)),
    ):
        monkeypatch.setattr(precision, "cpu_flags", frozenset(flags.split()).copy)
        assert (precision.is_faster("bf16"), precision.is_faster("fp16")) == expected


@dataclasses.dataclass
class ScriptedTrainer:
    """A trainer whose micro-batches take the scripted seconds in turn, and then the last ones."""

    settings: Train
    device: Device
    model: SimpleNamespace
    script: list[float]
    now: float = 0.0
    task: SimpleNamespace = dataclasses.field(default_factory=lambda: SimpleNamespace(synthetic_batch=lambda *_: None))

    def forward_backward(self, batch: None) -> SimpleNamespace:
        self.now += self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return SimpleNamespace(grad_norm=0.0)

    def update(self, step: int, norm: float) -> None: ...


@pytest.mark.parametrize("seconds", [[0.9, 0.2], [0.9, 7200.0]])
def test_a_step_is_timed_as_a_whole(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    """The result is the median of whole steps after a warm-up; for steps of hours a single one."""
    device, config = devices.choose(recipe.train), model_config(recipe, 400)
    assert recipe.train.global_batch_tokens and recipe.train.micro_batch
    num_micro_batches = recipe.train.global_batch_tokens // config.sequence_length // recipe.train.micro_batch
    together = concurrent_micro_batches(recipe.train, config.sequence_length, device.torch_device, False)
    made = ScriptedTrainer(recipe.train, device, SimpleNamespace(config=config), list(seconds))
    monkeypatch.setattr(measure, "_build_trainer", lambda *_: made)
    monkeypatch.setattr(measure, "perf_counter", lambda: made.now)
    step_seconds = measure.step_seconds(recipe, config, device, 60.0)
    assert step_seconds == pytest.approx(seconds[-1] * num_micro_batches / together)


def trained(runs: Path) -> tuple[str, list[float]]:
    rows = read_json_lines(runs / "small" / "metrics.jsonl")
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "train"}
    return load(runs / "small").train.precision, [losses[step] for step in sorted(losses)]


def test_a_run_keeps_the_precision_chosen_at_its_start(
    runs: Path, recipe_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = f"run.dir={runs}", "train.log_every=1", "train.schedule.kind=constant", "train.steps=8"
    sets = [part for key in keys for part in ("--set", key)]
    monkeypatch.setattr(precision, "is_faster", lambda name: True)
    assert run_command(["train", str(recipe_file), *sets]) == 0
    assert "train.precision = bf16" in capsys.readouterr().err
    assert trained(runs)[0] == "bf16"
    monkeypatch.setattr(precision, "is_faster", lambda name: False)  # another machine would choose differently
    assert run_command(["train", str(recipe_file), *sets[:-1], "train.steps=10"]) == 0
    capsys.readouterr()
    name, losses = trained(runs)
    assert name == "bf16" and len(losses) == 10
    # Requested by name and trained again it computes the same; requesting another value is another recipe.
    assert run_command(["train", str(recipe_file), *sets, "--set", "train.precision=fp32"]) == 2
    assert "train.precision" in capsys.readouterr().err
    assert run_command(["train", str(recipe_file), *sets, "--set", "train.precision=bf16", "--restart"]) == 0
    assert "warning: train.precision" in capsys.readouterr().err
    assert trained(runs)[1] == losses[:8]
