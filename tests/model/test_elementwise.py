from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from bessemer.model import kernels as elementwise
from bessemer.model import kernels as product
from bessemer.model.kernels import linear, linear_kernel, rms_norm, rotate, swiglu
from bessemer.model.layers import rotary_cos_sin
from bessemer.model.options import Rope
from tests.model.samples import drawn


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def plain_gate(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def plain_turn(x: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + K/2) by multiplication of complex numbers."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = torch.outer(torch.arange(length).double(), 100.0 ** -(torch.arange(half).double() / half))[:, None]
    turned = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def turn(x: torch.Tensor) -> torch.Tensor:
    return rotate(
        x,
        tuple(
            part.to(x.dtype)
            for part in rotary_cos_sin(torch.arange(x.shape[1]), Rope(100.0, x.shape[-1]), x.shape[1], torch.float32)
        ),
    )  # type: ignore[arg-type]


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, (drawn(3, 5, 48), drawn(48, seed=1))),
    "rms_norm of heads": (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, (drawn(2, 3, 4, 16), drawn(16, seed=1))),
    "swiglu": (swiglu, plain_gate, (drawn(2, 7, 40),)),
    "rotate": (turn, plain_turn, (drawn(2, 6, 3, 8),)),
}


@pytest.mark.parametrize("name", CASES)
def test_fp32_equals_the_formula_to_a_millionth(name: str) -> None:
    ours, plain, values = CASES[name]
    exact = [value.clone().requires_grad_() for value in values]
    narrow = [value.float().requires_grad_() for value in values]
    wanted, found = plain(*exact), ours(*narrow)
    upstream = drawn(*wanted.shape, seed=2)
    wanted.backward(upstream)
    found.backward(upstream.float())
    for x, y in [(found, wanted), *((a.grad, b.grad) for a, b in zip(narrow, exact, strict=True))]:
        tolerance = 2e-6 if name == "rotate" else 1e-6  # its angles are in fp32
        assert float((x.double() - y).norm() / y.norm()) <= tolerance
        assert float((x.double() - y).abs().max() / y.abs().max()) <= tolerance


@pytest.mark.parametrize("name", ["rms_norm", "swiglu"])
def test_float64_is_exact(name: str) -> None:
    ours, plain, values = CASES[name]
    leaves = tuple(
        value[:2, :2].clone().requires_grad_() if value.dim() > 2 else value.clone().requires_grad_()
        for value in values
    )
    torch.testing.assert_close(ours(*leaves), plain(*leaves), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(ours, leaves)


@pytest.mark.parametrize("name", CASES)
def test_both_implementations_are_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions for a GPU or a compiler equal those for the CPU."""
    ours, _, values = CASES[name]
    found = ours(*(value.float() for value in values))
    monkeypatch.setattr(elementwise, "is_eager_cpu", lambda *tensors: False)
    torch.testing.assert_close(ours(*(value.float() for value in values)), found, rtol=1e-6, atol=1e-6)


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Use both libraries, whatever this machine's rule chooses."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(product, "prefers_onednn", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("shape", [(37, 24), (2, 5, 24), (1, 24)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_and_gradients_equal_those_of_float64(either: bool, shape: tuple[int, ...], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(size, generator=generator) for size in (shape, (40, 24), (40,)))
    leaves = [x, weight, *([bias] if biased else [])]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    upstream = torch.randn((*shape[:-1], 40), generator=generator)
    F.linear(*exact).backward(upstream.double())
    for leaf in leaves:
        leaf.requires_grad_()
    found = linear(*leaves)
    found.backward(upstream)
    torch.testing.assert_close(found, F.linear(*exact).float(), rtol=1e-5, atol=1e-5)
    for leaf, wanted in zip(leaves, exact, strict=True):
        torch.testing.assert_close(leaf.grad, wanted.grad.float(), rtol=1e-5, atol=1e-5)
    rows = x.detach().flatten(0, -2)
    torch.testing.assert_close(
        linear_kernel(linear_kernel(rows, weight.detach()), weight.detach().T),
        (rows.double() @ weight.detach().double().T @ weight.detach().double()).float(),
        rtol=1e-4,
        atol=1e-4,
    )
