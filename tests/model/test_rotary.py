"""Rotary positions under every scaling, against the formulas of `transformers`."""

from typing import Any

import pytest
import torch

from bessemer.model.config import ModelConfig
from bessemer.model.kernels import rotate
from bessemer.model.layers import rotary_cos_sin
from bessemer.model.options import Rope, RotaryScaling
from tests.model.float64 import Float64
from tests.model.samples import BLOCKS, config

transformers = pytest.importorskip("transformers")
HEAD, ORIGINAL, LONG = 32, 64, 160
FACTORS = {"short_factor": [1.0 + n / 8 for n in range(16)], "long_factor": [2.0 + n for n in range(16)]}
SCALINGS: dict[str, tuple[RotaryScaling, dict[str, Any]]] = {
    "linear": (RotaryScaling("linear", 4.0), {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (RotaryScaling("dynamic", 4.0, original_length=ORIGINAL), {"rope_type": "dynamic", "factor": 4.0}),
    "llama3": (
        RotaryScaling("llama3", 8.0, 1.0, 4.0, ORIGINAL),
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "yarn": (RotaryScaling("yarn", 4.0, original_length=ORIGINAL), {"rope_type": "yarn", "factor": 4.0}),
    "yarn, every setting": (
        RotaryScaling(
            "yarn", 4.0, original_length=ORIGINAL, beta_fast=8.0, beta_slow=0.5, truncate=False, mscale=1.0,
            mscale_all_dim=0.5,
        ),
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5, "truncate": False, "mscale": 1.0,
         "mscale_all_dim": 0.5},
    ),
    "yarn, attention factor": (
        RotaryScaling("yarn", 4.0, original_length=ORIGINAL, attention_factor=1.5),
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5},
    ),
    "longrope": (
        RotaryScaling.from_dict({"kind": "longrope", "factor": 4.0, "original_length": ORIGINAL, **FACTORS}),
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
def test_rotations_are_those_of_transformers(name: str, fraction: float, length: int) -> None:
    scaling, settings = SCALINGS[name]
    width = int(HEAD * fraction)
    if scaling.kind == "longrope":
        short, long = (values[: width // 2] for values in (scaling.short_factor, scaling.long_factor))
        scaling = RotaryScaling("longrope", 4.0, original_length=ORIGINAL, short_factor=short, long_factor=long)
    frequencies, amplitude = theirs(settings, fraction, length)
    positions = torch.arange(length)
    cos, sin = rotary_cos_sin(positions, Rope(10_000.0, width, scaling), length, torch.float64)
    angles = positions[:, None].double() * frequencies.double()
    torch.testing.assert_close(cos[:, 0], angles.cos() * amplitude, rtol=0, atol=1e-9)
    torch.testing.assert_close(sin[:, 0], angles.sin() * amplitude, rtol=0, atol=1e-9)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_part_of_a_head_stays_as_it_is(compiled: bool) -> None:
    """Both the CPU's own way and the textbook's (fp32 rotations of an fp64 tensor take that)."""
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
