"""Small models for tests."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.check import ImportCheck, check_read
from bessemer.model.huggingface.weights import read_model
from bessemer.model.transformer import Transformer, build_model
from bessemer.recipe.model import RopeScaling

ALL_BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def config(**changes: object) -> ModelConfig:
    values: dict[str, object] = dict(
        vocabulary=97, layers=2, width=32, heads=4, kv_heads=2, head_dim=16, mlp_width=48, sequence_length=24
    )
    return ModelConfig.from_dict({**values, **changes})


def stirred(wanted: ModelConfig, seed: int = 0) -> Transformer:
    """Return a model in which every weight matters: the initial output projections are zero."""
    model = build_model(wanted, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


# Options of all families combined, in blocks of unusual sizes, for code that must handle all of them.
LONGROPE = RopeScaling(kind="longrope", factor=3.0, original_length=16, short_factor=(1.0, 1.5), long_factor=(1.0, 4.0))
BLOCKS: dict[str, dict[str, Any]] = {
    "norms at both ends, local and global rotary positions": dict(
        norm_position="both", zero_centred_norm=True, scale_embedding=True, activation="gelu_tanh", query_scalar=7,
        window=9, global_every=2, global_last=True, rope_scaling=RopeScaling(kind="dynamic", factor=4.0, original_length=20),
        window_rope_theta=100.0, tie_embeddings=True,
    ),
    "a layer without rotary positions, others with half of them, some biases": dict(
        unrotated_layers=(0,), rotary_fraction=0.5, qkv_bias=True, rope_scaling=LONGROPE, head_dim=8,
    ),
    "biases of the MLP alone, a window in one layer": dict(
        mlp_bias=True, activation="relu2", global_layers=(0,), window=5, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_length=12),
    ),
}  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def read_checked(folder: Path, wanted: ModelConfig | None = None) -> tuple[Transformer, ImportCheck]:
    model = read_model(folder, wanted)
    return model, check_read(folder, model)


class LargestTensor(TorchDispatchMode):
    """Dispatch mode that records the elements of the largest tensor of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple) else (result,):
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.numel())
        return result
