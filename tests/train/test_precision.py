import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bessemer.common.errors import InputError
from bessemer.train import precision as precisions
from bessemer.train.engine import MicroBatch
from bessemer.train.precision import PRECISIONS, LossScale, available, chosen, next_scale
from tests.train.small_trainer import batch, stats_of, trainer_of

CPU = torch.device("cpu")


BITS = {"fp64": 52, "fp32": 23, "tf32": 10, "bf16": 7, "fp16": 10, "fp8": 3, "fp8-rowwise": 3}  # after the leading one


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", PRECISIONS)
def test_a_matmul_keeps_the_bits_of_its_precision(name: str, kind: str) -> None:
    """Row p of the left operand has 1 + 2^-p, which b bits represent only for p <= b, and multiplies the identity. 1.75 in each
    row makes the scale of fp8 a power of two, since its largest value is 1.75 x 2^8."""
    device, precision = torch.device(kind), PRECISIONS[name]
    if (kind == "cuda" and not torch.cuda.is_available()) or name not in available(device):
        pytest.skip("not on this device")
    torch.set_float32_matmul_precision("medium")  # as another library might
    precisions.apply_flags(precision)
    size = 512 if kind == "cuda" else 64  # so large that tensor cores are used
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
            with pytest.raises(InputError, match=f"train.precision: GPU cannot compute in {name}; use fp32, fp16"):
                chosen(name, cuda, "GPU")


def test_a_cpu_has_all_but_tf32() -> None:
    assert chosen("auto", CPU, "a CPU").name == "fp32"
    assert set(available(CPU)) == PRECISIONS.keys() - {"tf32"}
    with pytest.raises(InputError, match=r"train\.precision"):
        chosen("tf32", CPU, "a CPU")


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8", "fp8-rowwise"])
def test_gradients_are_those_of_fp32_within_the_rounding(recipe_file: Path, name: str) -> None:
    """Weights and gradients stay fp32; the direction of the gradient is that of fp32."""
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
        nats_BS, narrow_BS = (trainer.engine.score(MicroBatch.of(batch()))[0] for trainer in (exact, narrow))
    difference = (narrow_BS - nats_BS).abs().max()
    assert narrow_BS.dtype == torch.float32 and 1e-4 < difference < 0.2, difference


def test_the_scale_halves_doubles_and_stops_at_one() -> None:
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


def test_an_overflow_gives_the_step_up_and_is_no_incident(recipe_file: Path) -> None:
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
