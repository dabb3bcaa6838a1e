import pytest
import torch

from bessemer.model import attention, attention_cpu
from bessemer.model.attention_cpu import block_causal_attention


def drawn(batch: int, heads: int, groups: int, length: int, width: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, n, length, width, generator=generator, dtype=torch.float64) for n in (heads, groups, groups)
    ]


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("shape", [(2, 6, 6, 130, 16), (2, 6, 2, 200, 8), (1, 4, 1, 64, 32), (3, 2, 2, 1, 4)])
def test_outputs_and_gradients_are_those_of_float64(shape: tuple[int, ...]) -> None:
    exact = [x.requires_grad_() for x in drawn(*shape)]
    narrow = [x.detach().float().requires_grad_() for x in exact]
    wanted, found = by_hand(*exact), block_causal_attention(*narrow)
    upstream = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    wanted.backward(upstream.double())
    found.backward(upstream)
    for x, y in [(found, wanted), *((a.grad, b.grad) for a, b in zip(narrow, exact, strict=True))]:
        assert x.shape == y.shape
        # torch's softmax takes an exponential of 20 bits in fp32, in its fused kernel as here.
        torch.testing.assert_close(x, y.float(), rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("groups", [3, 1])
def test_float64_is_exact(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cpu, "BLOCK", 4)
    leaves = [x.requires_grad_() for x in drawn(2, 3, groups, 10, 4)]
    torch.testing.assert_close(block_causal_attention(*leaves), by_hand(*leaves), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(block_causal_attention, leaves)


def test_views_of_one_product_are_as_good_as_copies() -> None:
    joined = torch.randn(2, 100, 4, 3, 8, generator=torch.Generator().manual_seed(0))
    views = [joined[..., n, :].transpose(1, 2) for n in range(3)]
    assert torch.equal(block_causal_attention(*views), block_causal_attention(*(x.contiguous() for x in views)))


def test_it_is_taken_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.float() for x in drawn(1, 2, 2, 256, 8))
    assert attention_cpu.fits(q, k)
    short = [x[:, :, :100] for x in (q, k, v)]
    assert not attention_cpu.fits(short[0], short[1])
    assert not attention_cpu.fits(q.bfloat16(), k.bfloat16())
    scope = attention.Scope.of(attention.Sight(), None, 256, q.device)
    found = attention.attention(q, k, v, scope)
    monkeypatch.setattr(attention_cpu, "fits", lambda q, k: False)
    torch.testing.assert_close(found, attention.attention(q, k, v, scope), rtol=1e-4, atol=1e-5)


def test_no_scores_of_the_whole_sequence_are_held() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes() // out.element_size())
            return out

    leaves = [x.float().requires_grad_() for x in drawn(1, 2, 2, 1024, 8)]
    with Watch():
        block_causal_attention(*leaves).sum().backward()
        with torch.no_grad():
            attention_cpu._forward(*leaves)  # whose inside the operator hides
    assert largest <= 2 * attention_cpu.BLOCK * 1024
