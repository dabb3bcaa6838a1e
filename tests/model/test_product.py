import pytest
import torch
import torch.nn.functional as F

from bessemer.model import kernels as product
from bessemer.model.kernels import linear, linear_kernel


@pytest.fixture(params=[True, False], ids=["oneDNN", "MKL"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both libraries, whatever this machine's rule says."""
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(product, "prefers_onednn", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("shape", [(37, 24), (2, 5, 24), (1, 24)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_and_gradients_are_those_of_float64(either: bool, shape: tuple[int, ...], biased: bool) -> None:
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
