import pytest
import torch

from bessemer.train.objective import chunked_cross_entropy


def plain(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, z_loss: float) -> torch.Tensor:
    logits = hidden @ head.T
    valid = targets >= 0
    nats = torch.nn.functional.cross_entropy(logits[valid], targets[valid], reduction="sum")
    return nats + z_loss * logits[valid].logsumexp(1).square().sum()


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("missing", [0, 5])
def test_loss_and_gradients_are_those_of_the_plain_form(chunk: int, z_loss: float, missing: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(40, 16, generator=generator), torch.randn(50, 16, generator=generator)
    targets = torch.randint(0, 50, (40,), generator=generator)
    targets[3 : 3 + missing] = -1
    exact_hidden, exact_head = (x.double().requires_grad_() for x in (hidden, head))
    wanted = plain(exact_hidden, exact_head, targets, z_loss)
    (wanted / 7).backward()
    hidden.requires_grad_()
    head.requires_grad_()
    found = chunked_cross_entropy(hidden, head, targets, chunk=chunk, z_loss=z_loss)
    (found.total / 7).backward()
    assert float(found.total.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    torch.testing.assert_close(hidden.grad, exact_hidden.grad.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.grad, exact_head.grad.float(), rtol=1e-5, atol=1e-6)
    assert (found.nats_N[targets < 0] == 0).all()


def test_no_valid_target_is_zero_and_not_nan() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    head = torch.randn(10, 8, requires_grad=True)
    found = chunked_cross_entropy(hidden, head, torch.full((4,), -1), chunk=2)
    found.total.backward()
    assert float(found.total.detach()) == 0.0
    assert float(hidden.grad.abs().sum()) == float(head.grad.abs().sum()) == 0.0


def test_the_full_logits_are_never_held() -> None:
    """The largest tensor made is a chunk of logits, not all of them."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, head = torch.randn(1024, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    targets = torch.randint(0, 500, (1024,))
    with Watch():
        chunked_cross_entropy(hidden, head, targets, chunk=64).total.backward()
    assert largest <= 64 * 500 < 1024 * 500


def test_huge_logits_stay_finite() -> None:
    hidden = torch.full((2, 4), 1e4, requires_grad=True)
    head = torch.eye(4, requires_grad=True) * 1e3
    found = chunked_cross_entropy(hidden, head, torch.tensor([0, 1]), chunk=2)
    assert torch.isfinite(found.total)


def test_bf16_products_keep_fp32_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(64, 32, generator=generator),
        torch.randn(100, 32, generator=generator, requires_grad=True),
    )
    targets = torch.randint(0, 100, (64,), generator=generator)
    narrow = hidden.bfloat16().requires_grad_()
    found = chunked_cross_entropy(narrow, head, targets, chunk=16)
    found.total.backward()
    wanted = plain(hidden, head.detach(), targets, 0.0)
    assert found.total.dtype == torch.float32
    assert narrow.grad.dtype == torch.bfloat16
    assert head.grad.dtype == torch.float32
    assert float(found.total.detach()) == pytest.approx(float(wanted), rel=1e-2)
