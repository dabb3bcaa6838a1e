import sys
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel
from bessemer.train import precision
from bessemer.train.precision import PRECISIONS

SCALINGS = {"tensorwise": "fp8", "rowwise": "fp8-rowwise"}
FORMATS = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}  # significand, exponent, largest


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """float64 values rounded to the nearest value of an 8-bit format, ties to even, by the format's definition."""
    bits, least, largest = FORMATS[dtype]
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x), 1e-300))), least)
    step = np.exp2(exponent - bits)
    return np.clip(np.round(x / step) * step, -largest, largest)


def by_hand(a: torch.Tensor, b: torch.Tensor, types: tuple[torch.dtype, torch.dtype], scaling: str) -> np.ndarray:
    """a @ b.T in float64 with both operands rounded to fp8."""
    sides = []
    for tensor, dtype in zip((a, b), types, strict=True):
        x = tensor.double().numpy()
        largest = FORMATS[dtype][2]
        scale = np.abs(x).max() / largest if scaling == "tensorwise" else np.abs(x).max(axis=1, keepdims=True) / largest
        scale = scale if scaling == "tensorwise" else np.exp2(np.ceil(np.log2(scale)))
        sides.append(rounded(x / scale, dtype) * scale)
    return sides[0] @ sides[1].T


def close(found: torch.Tensor, wanted: np.ndarray, share: float = 5e-3) -> None:
    """Within bf16's rounding of the result, and far closer than fp8's own rounding (6%) would let it be by chance."""
    assert np.abs(found.double().numpy() - wanted).max() <= share * np.abs(wanted).max()


def linear(scaling: str, device: str = "cpu") -> Any:
    return precision.linear_of(PRECISIONS[SCALINGS[scaling]], torch.device(device))


@pytest.mark.parametrize("scaling", SCALINGS)
def test_product_and_gradients_are_those_of_rounded_operands(scaling: str) -> None:
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
    wanted = by_hand(x_NI, w, (e4m3, e4m3), scaling)
    error = np.abs(y.detach().flatten(0, 1).double().numpy() - wanted)
    assert (error <= 2.0**-8 * np.abs(wanted) + 1e-5).all(), "rounded to bf16 once, at the end"
    close(x.grad.flatten(0, 1), by_hand(gradient_NO, w.T, (back, e4m3), scaling))
    close(weight.grad, by_hand(gradient_NO.T, x_NI.T, (back, e4m3), scaling))
    exact = (x_NI.double() @ w.double().T).numpy()
    off = np.abs(y.detach().flatten(0, 1).double().numpy() - exact).max() / np.abs(exact).max()
    assert 0.005 < off < 0.1, "it really is rounded to 3 bits"
    x, w = x.detach().float(), weight.detach()
    assert torch.equal(linear(scaling)(x, w, bias), torch.nn.functional.linear(x, w, bias)), "outside of autocast"


@pytest.mark.parametrize("scaling", SCALINGS)
def test_zeros_give_zeros_and_values_that_are_not_finite_stay_so(scaling: str) -> None:
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
        with pytest.raises(InputError, match=rf"{key}: .*pip install 'bessemer\[lowbit\]'"):
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
def test_dimensions_that_do_not_fit_are_named(changes: dict[str, int], micro: int, said: str) -> None:
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
def test_a_gpu_gives_the_product_of_rounded_operands(scaling: str) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 128, generator=draw).bfloat16(), torch.randn(48, 128, generator=draw)
    there, w = x.cuda().requires_grad_(), weight.cuda().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = linear(scaling, "cuda")(there, w, None)
    y.backward(torch.ones_like(y))
    e4m3 = torch.float8_e4m3fn
    close(y.detach().cpu(), by_hand(x, weight, (e4m3, e4m3), scaling), 1e-2)
    close(w.grad.cpu(), by_hand(torch.ones(48, 64), x.T, (e4m3, e4m3), scaling), 1e-2)
