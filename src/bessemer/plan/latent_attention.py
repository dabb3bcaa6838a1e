"""Configs of models with latent attention, for plans only: Bessemer trains standard attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bessemer.model.config import ModelConfig
from bessemer.model.sublayers import Parameter, Sublayer
from bessemer.plan.estimate.frameworks import hash_once


@dataclass(frozen=True)
class LatentAttention:
    """Attention from low-rank latents (DeepSeek-AI 2024, DeepSeek-V2, section 2.1).

    Attributes:
        query_rank: Width of the queries' latent; 0: queries are projected from the hidden state.
        kv_rank: Width of the latent of keys and values.
        plain: Dimensions of a head's query and key without rotation.
        rotated: Dimensions of a head's query and key with rotation; all heads share those of the key.
        value: Dimensions of a head's value.
    """

    query_rank: int
    kv_rank: int
    plain: int
    rotated: int
    value: int


@dataclass(frozen=True)
class PlannedConfig(ModelConfig):
    """A transformer with options that only plans know.

    Attributes:
        latent: Attention from latents, with `head_dim` = plain + rotated; None: standard attention.
        node_limit: Nodes that a token's experts may be on; 0: all.
    """

    latent: LatentAttention | None = None
    node_limit: int = 0

    __hash__ = hash_once

    @property
    def attention_width(self) -> float:
        return self.head_dim if self.latent is None else (self.head_dim + self.latent.value) / 2

    def _attention(self) -> Sublayer:
        """Describe attention with the parameters of latent attention; FLOPs and memory are those of standard attention."""
        standard, latent, width, heads = super()._attention(), self.latent, self.width, self.heads
        if latent is None:
            return standard
        shapes = {
            "down": (latent.query_rank + latent.kv_rank + latent.rotated, width),
            "queries": (heads * self.head_dim, latent.query_rank or width),
            "keys_values": (heads * (latent.plain + latent.value), latent.kv_rank),
            "out.weight": (width, heads * latent.value),
            "norms": (latent.query_rank + latent.kv_rank,),
        }
        parameters = (
            Parameter(f"attention.{name}", shape, 0 if len(shape) > 1 else None) for name, shape in shapes.items()
        )
        return replace(standard, parameters=tuple(parameters))


def latent_of(model: ModelConfig) -> LatentAttention | None:
    """Return the latent attention of a model, or None if its attention is standard."""
    return model.latent if isinstance(model, PlannedConfig) else None
