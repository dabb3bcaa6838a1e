"""The fused kernels on a CPU: exact conversions, and values and gradients within rounding."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.model import attention, casts, fused, kernels
from bessemer.model import fused_kernels as loops
from bessemer.model.attention_scope import AttentionScope, AttentionSpec, Documents
from bessemer.model.layers import rotary_cos_sin
from bessemer.model.options import Rope
from bessemer.train import loss as cross_entropy
from tests.model.samples import drawn
from tests.train.small_trainer import batch, gradient, trainer_of

Tensors = tuple[torch.Tensor, ...]
ROUNDING = 2**-8  # the largest relative error of rounding to bf16 once


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.detach().double() - wanted.detach()).norm() / wanted.detach().norm())


def errors(ours: Callable[..., torch.Tensor], exact: Callable[..., torch.Tensor], *values: torch.Tensor) -> list[float]:
    """Return the relative errors of the result and of the gradient of each input."""
    narrow = [value.clone().requires_grad_() for value in values]
    wide = [value.double().requires_grad_() for value in values]
    found, wanted = ours(*narrow), exact(*wide)
    upstream = drawn(*wanted.shape, seed=9).bfloat16()
    found.backward(upstream)
    wanted.backward(upstream.double())
    pairs = [(found, wanted), *((a.grad, b.grad) for a, b in zip(narrow, wide, strict=True))]
    assert all(a is not None and a.dtype == value.dtype for (a, _), value in zip(pairs[1:], values, strict=True))
    return [error(a, b) for a, b in pairs]  # type: ignore[arg-type]


@loops._compiled
def _convert(
    first: int, last: int, bits: loops.Rows, values: loops.Floats, rounded: loops.Rows, powers: loops.Floats
) -> None:
    for j in range(first, last):
        values[j] = loops.widen(bits[j])
        rounded[j] = loops.narrow(powers[j], rounded)
        powers[j] = loops.exp(powers[j])


def test_conversions_and_the_exponential_are_exact() -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    given = np.concatenate(
        [np.linspace(-90, 90, (1 << 16) - 6, dtype=np.float32), np.float32([0, -0.0, 1e-40, np.nan, np.inf, 3e38])]
    )
    values, rounded, powers = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.uint16), given.copy()
    _convert(0, 1 << 16, every, values, rounded, powers)
    as_torch = torch.from_numpy(every.view(np.int16)).view(torch.bfloat16)
    np.testing.assert_array_equal(values.view(np.uint32), as_torch.float().numpy().view(np.uint32))
    wanted = torch.from_numpy(given).bfloat16().view(torch.int16).numpy().view(np.uint16)
    numbers = ~np.isnan(given)
    np.testing.assert_array_equal(rounded[numbers], wanted[numbers])
    assert rounded[~numbers].tolist() == [0x7FC0] and np.isnan(powers[~numbers]).all()
    inside = (given >= -87) & (given <= 88)
    exact = np.exp(given[inside].astype(np.float64))
    assert np.abs(powers[inside] / exact - 1).max() < 2.5e-7


@pytest.mark.parametrize("shape", [(3, 5, 48), (2, 300, 16)])
def test_norms_are_within_rounding(shape: tuple[int, ...]) -> None:
    def exact(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * weight

    x, weight = drawn(*shape).bfloat16(), drawn(shape[-1], seed=1).float()
    found = errors(lambda x, w: kernels.rms_norm(x, w, 1e-5), exact, x, weight)
    assert max(found[:2]) < ROUNDING / 2 and found[2] < 1e-6
    strided = drawn(shape[0], shape[1], 3, shape[-1]).bfloat16()[:, :, 1]
    assert max(errors(lambda x, w: kernels.rms_norm(x, w, 1e-5), exact, strided, weight)) < ROUNDING / 2


def test_gates_are_within_rounding() -> None:
    gate_up = (drawn(3, 70, 48) * 8).bfloat16()
    assert max(errors(kernels.swiglu, lambda x: F.silu(x[..., :24]) * x[..., 24:], gate_up)) < ROUNDING / 2
    assert kernels.swiglu(torch.tensor([[torch.nan, 1.0, -100.0, 2.0]]).bfloat16())[0].isnan().tolist() == [True, False]


def heads(joined: torch.Tensor, *norms: torch.Tensor, rotates: bool, fused: bool) -> torch.Tensor:
    """Return queries, keys and values concatenated; `fused` uses the one kernel."""
    length = joined.shape[1]
    rotation = rotary_cos_sin(torch.arange(length), Rope(100.0, 8), length, joined.dtype) if rotates else None
    if fused:
        split = kernels.split_heads(joined, rotation, norms, 1e-5)
        assert split is not None
        return torch.cat([part.flatten() for part in split])
    q, k, v = joined.split([3, 1, 1], dim=-2)
    parts = [q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)]
    if norms:
        parts[:2] = (kernels.rms_norm(part, norm, 1e-5) for part, norm in zip(parts[:2], norms, strict=True))
    if rotation is not None:
        parts[:2] = (kernels.rotate(part, rotation) for part in parts[:2])
    return torch.cat([part.transpose(1, 2).flatten() for part in parts])


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_split_normalised_and_rotated(rotates: bool, normed: bool) -> None:
    joined = drawn(
        2, 270, 3, 5, 12
    ).bfloat16()  # 3 groups of 3 queries, one key and one value; 8 of 12 dimensions rotate
    norms = [drawn(12, seed=seed).float() for seed in (1, 2)] if normed else []
    fused, separate = (partial(heads, rotates=rotates, fused=fused) for fused in (True, False))
    found = errors(fused, separate, joined, *norms)
    assert max(found) < ROUNDING / 2 if rotates or normed else found == [0.0, 0.0]
    assert max(errors(separate, separate, joined, *norms)) < ROUNDING


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "heads", "groups"), [(16, 2, 2), (70, 4, 2), (256, 3, 1), (300, 2, 2)])
def test_attention_is_within_rounding(causal: bool, length: int, heads: int, groups: int) -> None:
    """Scores with a spread of 3 and more, whose rounding to bf16 alone would give errors of 1.4%."""
    q, k, v = ((drawn(2, number, length, 32, seed=seed) * scale).bfloat16()
               for number, seed, scale in ((heads, 1, 2.0), (groups, 2, 1.5), (groups, 3, 1.0)))  # fmt: skip
    spec = AttentionSpec(causal, scale=0.2)

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2, enable_gqa=True)

    assert length in fused.Bf16Attention.LENGTHS
    assert max(errors(lambda *x: attention._one_document(*x, spec), exact, q, k, v)) < 1.8 * ROUNDING


class Products(TorchDispatchMode):
    """Dispatch mode that records the shapes and strides of batched matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "bmm" in str(func):
            self.seen.add(tuple((tuple(x.shape), x.stride()) for x in args if isinstance(x, torch.Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_every_length_need_few_kernels(causal: bool) -> None:
    """A CPU keeps about a megabyte of machine code for each shape of a bf16 matmul."""
    found = []
    for lengths in ((100,), range(66, 128, 9)):
        with Products() as products:
            for length in lengths:
                starts = torch.zeros(1, 2 * length, dtype=torch.bool)
                starts[0, 0] = starts[0, length] = True
                scope = AttentionScope(AttentionSpec(causal), Documents.from_starts(starts), None)
                q, k, v = (drawn(1, 1, 2 * length, 8, seed=seed).bfloat16().requires_grad_() for seed in range(3))
                attention.attention(q, k, v, scope).sum().backward()
        found.append(products.seen)
    assert found[0] == found[1] != set()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_inside_documents_is_within_rounding(causal: bool) -> None:
    """Include lengths for which a whole sequence would use torch's kernel."""
    starts = torch.zeros(2, 700, dtype=torch.bool)
    starts[:, 0] = starts[0, 5] = starts[0, 22] = starts[1, 610] = True
    scope = AttentionScope(AttentionSpec(causal, scale=0.2), Documents.from_starts(starts), None)
    q, k, v = (drawn(2, number, 700, 32, seed=seed).bfloat16() for number, seed in ((4, 1), (2, 2), (2, 3)))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention.attention(q, k, v, scope)

    assert max(errors(attend, attend, q, k, v)) < 1.8 * ROUNDING


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_the_loss_is_within_rounding(z_loss: float) -> None:
    """Tokens with and without a target, in several chunks."""
    targets = torch.arange(700) % 301 - 1
    hidden, head = drawn(700, 24).bfloat16(), (drawn(300, 24, seed=1) / 5).bfloat16().float()
    found = []
    for one, chunk in ((hidden, 100), (hidden.double(), 4096)):
        wide = torch.promote_types(one.dtype, torch.float32)
        leaves = one.clone().requires_grad_(), head.to(wide, copy=True).requires_grad_()
        loss = cross_entropy.chunked_cross_entropy(*leaves, targets, chunk=chunk, z_loss=z_loss)
        loss.total.backward()
        found.append([loss.total, loss.nats_N, *(leaf.grad for leaf in leaves)])
    assert found[0][1].dtype == torch.float32 and bool((found[0][1][targets < 0] == 0).all())
    total, *rest = (error(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
    assert total < 1e-3 and max(rest) < 1.5 * ROUNDING
    broken = hidden.clone()
    broken[0] = torch.nan
    assert cross_entropy.chunked_cross_entropy(broken, head, targets.clamp(min=0), chunk=100).total.isnan()


def test_a_weight_cast_once_equals_one_cast_each_time() -> None:
    x, weight = drawn(30, 24).bfloat16(), drawn(40, 24, seed=1).float().requires_grad_()

    def result() -> Tensors:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            out = kernels.linear(x, weight)
        return out.detach(), torch.autograd.grad(out.float().square().sum(), weight)[0]

    plain = result()
    for _ in range(2):  # a change between two steps takes effect
        with casts.keep_casts():
            for _ in range(2):
                assert all(torch.equal(a, b) for a, b in zip(plain, result(), strict=True))
        with torch.no_grad():
            weight.mul_(1.5)
        assert not torch.equal(plain[0], result()[0])
        plain = result()


@pytest.mark.parametrize(
    "overrides",
    [("model.tie_embeddings=true",), ("model.tie_embeddings=false", "train.loss_chunk=16"), ("train.recompute=full",)],
)
@pytest.mark.parametrize("two", [False, True])
def test_collected_gradients_equal_those_of_autograd(
    recipe_file: Path, overrides: tuple[str, ...], two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bessemer.train.engine.runs_two_at_a_time", lambda *arguments: two)
    ours, plain = (trainer_of(recipe_file, "train.precision=bf16", "train.micro_batch=2", *overrides) for _ in range(2))
    counts, additions = list[int](), casts.additions

    @contextmanager
    def counted() -> Iterator[casts.Additions]:
        with additions() as found:
            yield found
        counts.append(len(found))

    monkeypatch.setattr(casts, "additions", counted)
    found = ours.forward_backward(batch())
    monkeypatch.setattr(casts, "are_collected", lambda weight: False)
    assert plain.forward_backward(batch()).loss == found.loss
    matrices = sum(p.ndim == 2 for p in ours.model.parameters())
    assert len(counts) == 8 and counts[0] >= matrices and not counts[-1]
    exact, scale = gradient(plain), gradient(plain).abs().max()
    assert float((gradient(ours) - exact).abs().max() / scale) < 1e-6
