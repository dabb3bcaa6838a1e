"""Small models for tests."""

import torch

from bessemer.model.config import ModelConfig
from bessemer.model.initialisation import build
from bessemer.model.transformer import Transformer


def config(**changes: object) -> ModelConfig:
    values: dict[str, object] = dict(
        vocabulary=97, layers=2, width=32, heads=4, kv_heads=2, head_dim=16, mlp_width=48, sequence_length=24
    )
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def stirred(wanted: ModelConfig, seed: int = 0) -> Transformer:
    """A model whose every weight matters: the initial one has zeros in its output projections."""
    model = build(wanted, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
