"""Sequences split over 2 and 4 processes, compared with one process that has whole sequences."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bessemer.common.errors import InputError
from bessemer.distributed import context
from bessemer.distributed.collectives import RankGroup
from bessemer.distributed.context import LocalDocuments, SequenceShard
from bessemer.distributed.mesh import ProcessMesh, join
from bessemer.distributed.validity import require_context
from bessemer.model.attention import attention
from bessemer.model.attention_scope import AttentionScope, AttentionSpec, Documents
from bessemer.recipe import Parallel
from bessemer.train import recompute
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.model.samples import ALL_BIASES, BLOCKS, config, stirred

LENGTH, BATCH = 48, 3  # chunks of 12 tokens on 2 processes, of 6 on 4

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "one key/value head, qk norm over all, tied": dict(kv_heads=1, qk_norm="full", tie_embeddings=True),
    "window within a chunk": dict(window=5, global_every=2),
    "window over chunks": dict(window=17, window_rope_theta=1_000.0, global_every=2),
    "soft cap": dict(attention_soft_cap=2.0, logit_soft_cap=5.0),
    "soft cap and window": dict(attention_soft_cap=2.0, window=9),
    "learned positions": dict(positions="learned", norm="layer", **ALL_BIASES, activation="gelu", gated=False),
    "encoder, learned positions": dict(causal=False, positions="learned", norm="layer", norm_position="residual", **ALL_BIASES),
    **BLOCKS,
    "encoder, window": dict(causal=False, window=10, global_every=2),
    "encoder, soft cap": dict(causal=False, attention_soft_cap=2.0),
}  # fmt: skip


FEW = ("llama", "window within a chunk", "window over chunks", "soft cap and window", "encoder, learned positions")


def starts(batch: int = BATCH, length: int = LENGTH) -> Tensor:
    """Return document starts: rows of one document, of some that begin and end at chunk edges and of one token each, and of
    ragged ones.
    """
    begins = torch.zeros(batch, length, dtype=torch.bool)
    begins[:, 0] = True
    begins[1, [1, 6, 7, 8, 12, 24, 36, length - 1]] = True
    begins[2, [5, 31]] = True
    return begins


def batches() -> dict[str, Documents | None]:
    one_each = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    one_each[:, 0] = True
    return {"no mask": None, "ragged": Documents.from_starts(starts()), "one each": Documents.from_starts(one_each)}


def results(model: Any, inputs: Tensor, targets: Tensor, documents: Documents | None, valid: int) -> tuple[Tensor, ...]:
    """Return logits, loss and the gradients of all weights."""
    logits = model.logits(inputs, documents)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-1) / valid
    model.zero_grad()
    loss.backward()
    return logits.detach(), loss.detach(), *(parameter.grad for parameter in model.parameters())


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).detach().abs().max() / wanted.abs().max().clamp_min(1e-2))


def measured(ways: int) -> dict[str, Any]:
    """Measure everything that needs processes in one group, since starting processes takes longest."""
    mesh = join(Parallel(context=ways), torch.device("cpu"))
    few = {name: MODELS[name] for name in FEW}
    return {
        "fp64": deviations(mesh, torch.float64, MODELS if ways == 2 else few),
        "fp32": deviations(mesh, torch.float32, few),
        "long": long_ones(mesh, 1_040),
        "gathered": gathered(mesh),
    }


@pytest.fixture(scope="module", params=long_but([2, 4], 2))
def by_rank(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_on(request.param, measured, request.param, timeout=300.0)


def deviations(
    mesh: ProcessMesh, dtype: torch.dtype, models: dict[str, dict[str, Any]]
) -> dict[str, tuple[float, float, float]]:
    """Return by model and batch the largest deviations of logits, loss and gradients from one process."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randint(0, 97, (BATCH, LENGTH), generator=draw)
    targets = torch.randint(-1, 97, (BATCH, LENGTH), generator=draw)
    valid = int((targets >= 0).sum())
    found = {}
    for name, changes in models.items():
        model = stirred(config(sequence_length=LENGTH, **changes)).to(dtype)
        split = copy.deepcopy(model)
        context.apply_cp(split, mesh)
        if name == "llama":
            recompute.apply_recompute(split, "full", 1)
        for kind, documents in batches().items():
            if kind == "one each" and name != "llama":
                continue
            wanted = results(model, inputs, targets, documents, valid)
            mine = context.local_batch(mesh, inputs, targets, documents)
            logits, *sums = results(split, mine.inputs_BL, mine.targets_BL, mine.documents, valid)
            for value in sums:
                dist.all_reduce(value, group=mesh.group("context"))
            found[f"{name}, {kind}"] = (
                relative(context.gather_sequences(mesh, logits), wanted[0]),
                relative(sums[0], wanted[1]),
                max(relative(left, right) for left, right in zip(sums[1:], wanted[2:], strict=True)),
            )
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [("fp64", 1e-12), ("fp32", 5e-6)])
def test_context_parallelism_equals_one_process(by_rank: list[dict[str, Any]], dtype: str, tolerance: float) -> None:
    for measured in by_rank:
        assert len(measured[dtype]) == 2 * len(MODELS if dtype == "fp64" and len(by_rank) == 2 else FEW) + 1
        assert not {name: values for name, values in measured[dtype].items() if not max(values) <= tolerance}


def long_ones(mesh: ProcessMesh, length: int) -> dict[str, float]:
    """Return the largest deviations of attention; for length 64 with FlexAttention's mask."""
    draw = torch.Generator().manual_seed(4)
    found = {}
    begins = torch.zeros(2, length, dtype=torch.bool)
    begins[:, 0] = True
    begins[1, [3, length // 3, length - 10]] = True
    q, k, v = (
        torch.randn(2, heads, length, 4, generator=draw, dtype=torch.float64, requires_grad=True) for heads in (2, 1, 1)
    )
    weight = torch.randn(q.shape, generator=draw, dtype=torch.float64)
    cut = SequenceShard.from_mesh(mesh, length)
    for documents in (None, Documents.from_starts(begins)):
        local = LocalDocuments.from_shard(cut, documents, 2, torch.device("cpu"))
        for spec in (
            AttentionSpec(),
            AttentionSpec(window=30),
            AttentionSpec(soft_cap=2.0),
            AttentionSpec(causal=False),
            AttentionSpec(False, 40),
        ):
            wanted = attention(q, k, v, AttentionScope.build(spec, documents, length, q.device))
            gradients = torch.autograd.grad((wanted * weight).sum(), (q, k, v))
            mine = [cut.take(x.detach().transpose(1, 2)).transpose(1, 2).requires_grad_() for x in (q, k, v)]
            name = f"{length}, {spec}, {'packed' if documents else 'whole'}"
            if length == 64:  # the kernel is for CUDA; its CPU reference has no backward pass
                with torch.no_grad():
                    scope = AttentionScope(spec, local, local.block_mask(spec))
                    out = context.attend(*(x.detach() for x in mine), scope, group=RankGroup.from_mesh(mesh, "context"))
                found["flex " + name] = relative(out, at(cut, wanted))
                continue
            out = context.attend(
                *mine, AttentionScope.build(spec, local, 0, q.device), group=RankGroup.from_mesh(mesh, "context")
            )
            found[name] = relative(out, at(cut, wanted))
            own = torch.autograd.grad((out * at(cut, weight)).sum(), mine)
            for left, right in zip(own, gradients, strict=True):
                found[name] = max(found[name], relative(left, at(cut, right)))
    return found


def at(cut: SequenceShard, x_BHTK: Tensor) -> Tensor:
    return cut.take(x_BHTK.transpose(1, 2)).transpose(1, 2)


def test_chunks_longer_than_attention_computes_at_a_time(by_rank: list[dict[str, Any]]) -> None:
    for measured in by_rank:
        assert len(measured["long"]) == 10
        assert not {name: value for name, value in measured["long"].items() if not value <= 1e-11}


def flexed(ways: int) -> dict[str, float]:
    return long_ones(join(Parallel(context=ways), torch.device("cpu")), 64)


@pytest.mark.long
def test_the_mask_for_cuda_equals_the_formula() -> None:
    for measured in run_on(2, flexed, 2):
        assert len(measured) == 10
        assert not {name: value for name, value in measured.items() if not value <= 1e-11}


def gathered(mesh: ProcessMesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    # The other types of keys and values: small whole numbers add up exactly in each.
    for dtype in (torch.bfloat16, torch.float16):
        k = torch.arange(8.0).view(1, 1, 8, 1).expand(2, 2, 8, 4)
        cut = SequenceShard.from_mesh(mesh, 8)
        own = at(cut, k).to(dtype).requires_grad_()
        keys, values = context.gather_keys_values(own, own, RankGroup.from_mesh(mesh, "context"))
        assert keys.dtype == dtype and torch.equal(keys, k.to(dtype)) and torch.equal(values, keys)
        (keys * (1 + mesh.rank)).sum().backward()
        assert own.grad is not None
        found[str(dtype)] = own.grad.unique().tolist()
    return found


def test_gradients_add_up_in_narrow_types(by_rank: list[dict[str, Any]]) -> None:
    for measured in by_rank:
        for name in ("torch.bfloat16", "torch.float16"):
            assert measured["gathered"][name] == [len(by_rank) * (len(by_rank) + 1) / 2]


@pytest.mark.parametrize("ways", [1, 2, 3, 4, 8])
def test_the_split_is_a_balanced_partition(ways: int) -> None:
    length = 48 * ways
    places = [SequenceShard(ways, place, length).positions() for place in range(ways)]
    assert torch.equal(torch.cat(places).sort().values, torch.arange(length))
    pairs = {int((position + 1).sum()) for position in places}  # each query attends to itself and to earlier tokens
    assert pairs == {length * (length + 1) // 2 // ways}
    x = torch.arange(2 * length).view(2, length)
    for place, position in enumerate(places):
        assert torch.equal(SequenceShard(ways, place, length).take(x), x[:, position])


@pytest.mark.parametrize(
    ("ways", "length", "says"),
    [(4, 1_030, "parallel.context = 4 .* 1024 or 1032$"), (4, 5, " 8$"), (2, 3, " 4$")],
)
def test_indivisible_lengths_are_errors(ways: int, length: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        SequenceShard.from_mesh(ProcessMesh(Parallel(context=ways)), length)


def test_models_that_cannot_be_split_are_errors() -> None:
    require_context(config(labels=3), Parallel())
    with pytest.raises(InputError, match=r"parallel\.context: 2 "):
        require_context(config(labels=3), Parallel(context=2))
    with pytest.raises(InputError, match="tokens.sequence_length: 50"):
        require_context(config(sequence_length=50), Parallel(context=2))
