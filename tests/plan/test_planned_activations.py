"""Activations of a block beside what autograd keeps of one that is written out here, and beside the published formulas."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.config import ModelConfig
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.memory_parts import Split, activation_bytes_without_recompute, kept
from tests.model.samples import ALL_BIASES

TOKENS, LENGTH, WIDTH, HEADS = 96, 48, 64, 4
SWIGLU_WITHOUT_BIASES = {"gated": True, "activation": "silu", **dict.fromkeys(ALL_BIASES, False)}
UNFUSED = Framework("unfused", attention="unfused", dropout=True)


def model(**changes: object) -> ModelConfig:
    values: dict[str, object] = dict(
        vocabulary=512, layers=2, width=WIDTH, heads=HEADS, kv_heads=HEADS, head_dim=WIDTH // HEADS, mlp_width=4 * WIDTH,
        sequence_length=LENGTH, qk_norm="none", activation="gelu", gated=False, norm="layer", **ALL_BIASES,
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


class Dropout(torch.autograd.Function):
    """With a mask of one byte, as on a GPU; torch's keeps fp32 on a CPU."""

    @staticmethod
    def forward(context: Any, x: Tensor, share: float) -> Tensor:
        mask = torch.rand_like(x) >= share
        context.save_for_backward(mask)
        return x * mask / (1 - share)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * context.saved_tensors[0], None


class WrittenOut(nn.Module):
    """A block whose scores are written out: LayerNorm, attention, dropout, and an MLP, gated or not."""

    def __init__(self, config: ModelConfig, dropout: float) -> None:
        super().__init__()
        h, d = config.width, config.head_dim
        self.config, self.dropout = config, dropout
        self.norms = nn.ModuleList([nn.LayerNorm(h), nn.LayerNorm(h)])
        self.q, self.kv = nn.Linear(h, config.heads * d), nn.Linear(h, 2 * config.kv_heads * d)
        self.out = nn.Linear(config.heads * d, h)
        self.up, self.down = nn.Linear(h, config.mlp_width), nn.Linear(config.mlp_width, h)
        self.gate = nn.Linear(h, config.mlp_width) if config.gated else None
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1))

    def drop(self, x: Tensor) -> Tensor:
        return Dropout.apply(x, self.dropout) if self.dropout else x

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        read = self.norms[0](x)
        q = self.q(read).view(-1, LENGTH, c.heads, c.head_dim).transpose(1, 2)
        k, v = self.kv(read).view(-1, LENGTH, 2, c.kv_heads, c.head_dim).permute(2, 0, 3, 1, 4)
        assert c.kv_heads == c.heads, "bmm would copy repeated heads"
        scores = (q @ k.transpose(2, 3) * c.head_dim**-0.5).masked_fill(self.mask, -torch.inf)
        mixed = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(-1, LENGTH, c.heads * c.head_dim)))
        read = self.norms[1](x)
        hidden = F.gelu(self.up(read)) if self.gate is None else F.silu(self.gate(read)) * self.up(read)
        return x + self.drop(self.down(hidden))


def kept_by_autograd(block: nn.Module) -> int:
    """Bytes that autograd keeps, each storage once, without weights and what is not of the size of the tokens."""
    ours = {each.untyped_storage().data_ptr() for each in (*block.parameters(), *block.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours and tensor.numel() > TOKENS:  # a norm's mean and scale are TOKENS numbers
            storages[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(TOKENS // LENGTH, LENGTH, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("gated", [False, True])
def test_a_block_keeps_what_autograd_keeps(dropout: float, gated: bool) -> None:
    config = model(gated=gated, activation="silu" if gated else "gelu")
    framework = Framework("written out", attention="unfused", dropout=dropout > 0, unfused_gate=True)
    torch.manual_seed(0)
    # torch copies queries, keys and values that do not lie in order, once each; their products' results are not kept then
    expected = TOKENS * sum(activation_bytes_without_recompute(config, framework, Split(), 4).values())
    assert kept_by_autograd(WrittenOut(config, dropout)) == expected


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_korthikanti_table_2(tensor: int) -> None:
    """The published bytes of a layer for s b h = 1 token x h, 16 bits (Korthikanti et al. 2022, table 2)."""
    s, h, a, t = 2048, 6144, 64, tensor
    config = model(width=h, heads=a, kv_heads=a, head_dim=h // a, mlp_width=4 * h, sequence_length=s)
    published = {
        ("none", False): 10 + 24 / t + 5 * a * s / (h * t),
        ("none", True): (34 + 5 * a * s / h) / t,
        ("selective", False): 10 + 24 / t,
        ("selective", True): 34 / t,
        ("full", False): 2,
    }
    for (mode, sequence), factor in published.items():
        found = kept(config, UNFUSED, Split(t, sequence), 2, mode)  # type: ignore[arg-type]
        assert sum(found.values()) == pytest.approx(h * factor, rel=1e-12), (mode, sequence)


def test_fewer_key_heads_and_fused_attention_keep_less() -> None:
    """By hand: 8 of 64 heads for keys and values, no scores but one fp32 sum a head, SwiGLU in one kernel."""
    h, f, a, d = 8192, 28672, 64, 128
    config = model(
        width=h, heads=a, kv_heads=8, head_dim=d, mlp_width=f, sequence_length=4096, **SWIGLU_WITHOUT_BIASES, norm="rms"
    )
    found = activation_bytes_without_recompute(config, frameworks.find("megatron-core-sync"), Split(), 2)
    attention = h + (h + 2 * 1024) + h  # read, queries with keys and values, output
    assert sum(found.values()) == 2 * (2 * h + attention + h + 3 * f) + 4 * a


def test_torchtitan_keeps_every_second_product() -> None:
    """Of q, k, v, o, gate, up, down: q, v, gate and down (its policy counts from 1 and keeps the odd), and the attention's
    output. A compiler drops the last, which nothing reads."""
    h, f, kv = 4096, 14336, 1024
    sizes = {"width": h, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_width": f, "sequence_length": 8192}
    config = model(**sizes, **SWIGLU_WITHOUT_BIASES, norm="rms")
    eager = 2 * (h + h + kv + h + f + h) + 4 * 32
    for name, expected in (("torchtitan-eager", eager), ("torchtitan", eager - 2 * h)):
        assert sum(kept(config, frameworks.find(name), Split(), 2, "selective").values()) == expected


def test_gathered_inputs_are_kept_whole_where_a_program_does() -> None:
    config = model()
    divided = activation_bytes_without_recompute(config, Framework("x"), Split(4), 2)
    for share in (0.5, 1.0):
        whole = activation_bytes_without_recompute(config, Framework("x", gathered=share), Split(4), 2)
        assert sum(whole.values()) - sum(divided.values()) == share * 2 * 2 * WIDTH * (1 - 1 / 4)
