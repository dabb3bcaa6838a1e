"""Every attention implementation compared with softmax over an explicit mask, in float64, forward and backward."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.model.attention import attention
from bessemer.model.attention_scope import AttentionScope, AttentionSpec, Documents
from bessemer.model.config import ModelConfig
from bessemer.model.kernels import rotate
from bessemer.model.layers import rotary_cos_sin
from bessemer.model.options import Rope
from bessemer.recipe.model import RopeScaling
from bessemer.train.attention_logits import largest_logits
from tests.model.float64 import Float64
from tests.model.samples import BLOCKS, LargestTensor, config

LENGTH = 300  # longer than a chunk of the soft-capped implementation


def plain(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, soft_cap: float) -> Tensor:
    """Return attention by the formula of the papers."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    return torch.exp(scores).mul(allowed).div(torch.exp(scores).mul(allowed).sum(-1, keepdim=True)) @ v


def mask(causal: bool, window: int, length: int) -> Tensor:
    """Return the mask, token by token."""
    rows = []
    for query in range(length):
        if causal:
            seen = [key <= query and (window == 0 or key > query - window) for key in range(length)]
        else:
            seen = [window == 0 or abs(query - key) <= window // 2 for key in range(length)]
        rows.append(seen)
    return torch.tensor(rows)


def inputs(length: int = LENGTH, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, heads, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]


@pytest.mark.parametrize(
    ("causal", "window", "soft_cap", "packed"),
    list(itertools.product([True, False], [0, 10, 170], [0.0, 2.0], [True, False])),
)
def test_attention_equals_the_formula(causal: bool, window: int, soft_cap: float, packed: bool) -> None:
    q, k, v = inputs()
    documents, allowed = None, mask(causal, window, LENGTH)[None]
    if packed:
        tokens = torch.ones(2, LENGTH, dtype=torch.long)
        tokens[0, [3, 250]] = 0
        tokens[1, 149] = 0
        documents = Documents.from_tokens(tokens, end_of_text=0)
        number = documents.document_BT
        allowed = allowed & (number[:, :, None] == number[:, None, :])
    found = attention(
        q, k, v, AttentionScope.build(AttentionSpec(causal, window, soft_cap), documents, LENGTH, q.device)
    )
    wanted = plain(q, k, v, allowed[:, None], soft_cap)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    weight = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = (torch.autograd.grad((x * weight).sum(), (q, k, v)) for x in (found, wanted))
    for left, right in zip(*gradients, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-11)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "soft_cap"), [(0, 0.0), (64, 0.0), (0, 2.0), (64, 2.0)])
def test_no_tensor_is_as_large_as_the_score_matrix(causal: bool, window: int, soft_cap: float) -> None:
    """Check the forward and the backward pass; the inputs have 1/64 of the elements of a T x T matrix."""
    length = 2048
    q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    with LargestTensor() as largest:
        attention(
            q, k, v, AttentionScope.build(AttentionSpec(causal, window, soft_cap), None, length, q.device)
        ).sum().backward()
    assert largest.elements <= length * length // 8


SPECS = [AttentionSpec(), AttentionSpec(causal=False), AttentionSpec(window=20), AttentionSpec(causal=False, window=30),
         AttentionSpec(scale=0.7)]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("packed", [False, True])
def test_largest_logits_equal_those_of_the_full_matrix(spec: AttentionSpec, packed: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 100, 8, generator=draw), torch.randn(2, 2, 100, 8, generator=draw)
    tokens = torch.randint(0, 9, (2, 100), generator=draw)
    documents = Documents.from_tokens(tokens, 0) if packed else None
    scores = q.double() @ k.double().repeat_interleave(2, dim=1).transpose(2, 3) * (spec.scale or 8**-0.5)
    allowed = mask(spec.causal, spec.window, 100).expand(2, 100, 100)
    if documents is not None:
        allowed = allowed & (documents.document_BT[:, :, None] == documents.document_BT[:, None, :])
    wanted = scores.masked_fill(~allowed[:, None], -torch.inf).amax((0, 2, 3))
    found = largest_logits(q, k, AttentionScope.build(spec, documents, 100, torch.device("cpu")))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


transformers = pytest.importorskip("transformers")
HEAD, ORIGINAL, LONG = 32, 64, 160
FACTORS = {"short_factor": [1.0 + n / 8 for n in range(16)], "long_factor": [2.0 + n for n in range(16)]}
SCALINGS: dict[str, tuple[RopeScaling, dict[str, Any]]] = {
    "linear": (RopeScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (RopeScaling(kind="dynamic", factor=4.0, original_length=ORIGINAL), {"rope_type": "dynamic", "factor": 4.0}),
    "llama3": (
        RopeScaling(kind="llama3", factor=8.0, original_length=ORIGINAL),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": (RopeScaling(kind="yarn", factor=4.0, original_length=ORIGINAL), {"rope_type": "yarn", "factor": 4.0}),
    "yarn, every setting": (
        RopeScaling(
            kind="yarn", factor=4.0, original_length=ORIGINAL, beta_fast=8.0, beta_slow=0.5, truncate=False, mscale=1.0,
            mscale_all_dim=0.5,
        ),
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.0,
         "mscale_all_dim": 0.5},
    ),
    "yarn, attention factor": (
        RopeScaling(kind="yarn", factor=4.0, original_length=ORIGINAL, attention_factor=1.5),
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    ),
    "longrope": (
        RopeScaling.model_validate({"kind": "longrope", "factor": 4.0, "original_length": ORIGINAL, **FACTORS}),
        {"rope_type": "longrope", "factor": 4.0, **FACTORS},
    ),
}  # fmt: skip


def theirs(settings: dict[str, Any], fraction: float, length: int) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = dict(
        settings, rope_theta=10_000.0, partial_rotary_factor=fraction, original_max_position_embeddings=ORIGINAL
    )
    for key in FACTORS:
        if key in given:
            given[key] = given[key][: int(HEAD * fraction) // 2]
    whole = ORIGINAL if given["rope_type"] == "dynamic" else 4 * ORIGINAL
    made = transformers.LlamaConfig(
        hidden_size=2 * HEAD, num_attention_heads=2, head_dim=HEAD, max_position_embeddings=whole, rope_parameters=given
    )
    with Float64():
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[given["rope_type"]](made, torch.device("cpu"), seq_len=length)
    return frequencies, amplitude


@pytest.mark.parametrize("length", [48, ORIGINAL, LONG])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", list(SCALINGS))
def test_rotations_equal_those_of_transformers(name: str, fraction: float, length: int) -> None:
    scaling, settings = SCALINGS[name]
    width = int(HEAD * fraction)
    if scaling.kind == "longrope":
        short, long = (values[: width // 2] for values in (scaling.short_factor, scaling.long_factor))
        scaling = RopeScaling(
            kind="longrope", factor=4.0, original_length=ORIGINAL, short_factor=short, long_factor=long
        )
    frequencies, amplitude = theirs(settings, fraction, length)
    positions = torch.arange(length)
    cos, sin = rotary_cos_sin(positions, Rope(10_000.0, width, scaling), length, torch.float64)
    angles = positions[:, None].double() * frequencies.double()
    torch.testing.assert_close(cos[:, 0], angles.cos() * amplitude, rtol=0, atol=1e-9)
    torch.testing.assert_close(sin[:, 0], angles.sin() * amplitude, rtol=0, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
def test_partial_rotation_leaves_the_rest_of_a_head_unchanged(compiled: bool) -> None:
    """Both the CPU's implementation and the textbook one, which fp32 rotations of an fp64 tensor use."""
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64, requires_grad=True)
    rotation = rotary_cos_sin(torch.arange(5), Rope(100.0, 8), 5, torch.float32 if compiled else torch.float64)
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    torch.testing.assert_close(turned[..., :8], rotate(x[..., :8].detach(), rotation))
    weight = torch.randn_like(turned)
    (turned * weight).sum().backward()
    assert x.grad is not None and torch.equal(x.grad[..., 8:], weight[..., 8:])
    back = rotate(weight[..., :8], (rotation[0], -rotation[1]))
    torch.testing.assert_close(x.grad[..., :8], back)


@pytest.mark.parametrize("options", BLOCKS.values(), ids=BLOCKS)
def test_a_configuration_survives_json(options: dict[str, Any]) -> None:
    import json

    made = config(**options)
    assert ModelConfig.from_dict(json.loads(json.dumps(made.to_dict()))) == made
