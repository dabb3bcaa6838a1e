"""Configs of mixtures of experts and latent attention, for plans only: Bessemer trains dense models.

A block is the mean over the layers if these differ; the first layers of DeepSeek's models have a dense MLP. The
parameters of a block exclude its routed experts (`expert_parameters`), which expert parallelism places separately.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from bessemer.model.config import ModelConfig


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
class MixtureConfig(ModelConfig):
    """A transformer in which a router sends each token to some of many MLPs.

    Attributes:
        num_experts: Routed experts of a layer.
        active_experts: Routed experts that process a token.
        expert_width: Hidden units of a routed expert.
        shared_width: Hidden units of all shared experts together.
        dense_layers: Leading layers that have one MLP of `mlp_width` instead.
        router_bias: True if the router has a bias per expert for load balance.
        node_limit: Nodes that a token's experts may be on; 0: all.
        latent: Attention from latents, with `head_dim` = plain + rotated; None: standard attention.
    """

    num_experts: int = 1
    active_experts: int = 1
    expert_width: int = 0
    shared_width: int = 0
    dense_layers: int = 0
    router_bias: bool = False
    node_limit: int = 0
    latent: LatentAttention | None = None

    @property
    def mixture_share(self) -> float:
        """Share of the layers that have experts."""
        return 1 - self.dense_layers / self.layers

    @property
    def one_expert(self) -> int:
        """Parameters of one routed expert."""
        return (3 if self.gated else 2) * self.width * self.expert_width

    @property
    def expert_parameters(self) -> int:
        return (self.layers - self.dense_layers) * self.num_experts * self.one_expert

    @property
    def active_parameters(self) -> int:
        unused = (self.layers - self.dense_layers) * (self.num_experts - self.active_experts) * self.one_expert
        return self.parameters - unused

    @property
    def attention_width(self) -> float:
        return self.head_dim if self.latent is None else (self.head_dim + self.latent.value) / 2

    @property
    def attention_parameters(self) -> int:
        """Parameters of one block's attention matrices."""
        latent = self.latent
        if latent is None:
            return self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        queries = self.heads * self.head_dim
        down = self.width * (latent.query_rank + latent.kv_rank + latent.rotated)
        up = latent.kv_rank * self.heads * (latent.plain + latent.value)
        up += (latent.query_rank or self.width) * queries
        return down + up + self.heads * latent.value * self.width

    @property
    def _matrices(self) -> int:
        """Matrix parameters of all blocks, without routed experts."""
        mixed, gates = self.layers - self.dense_layers, 3 if self.gated else 2
        dense = self.dense_layers * gates * self.width * self.mlp_width
        shared = mixed * self.width * (gates * self.shared_width + self.num_experts)
        return self.layers * self.attention_parameters + dense + shared

    @property
    def _vectors(self) -> int:
        """Parameters of the norms and biases of all blocks."""
        one = self.norms_each * self.norm_parameters
        if self.latent is not None:
            one += self.latent.query_rank + self.latent.kv_rank
        else:
            full = (self.heads + self.kv_heads) * self.head_dim
            one += {"none": 0, "head": 2 * self.head_dim, "full": full}[self.qk_norm]
        return self.layers * one + (self.layers - self.dense_layers) * self.router_bias * self.num_experts

    @cached_property
    def block_matrix_parameters(self) -> int:
        return round(self._matrices / self.layers)

    @cached_property
    def block_parameters(self) -> int:
        return round((self._matrices + self._vectors) / self.layers)

    @property
    def block_active_parameters(self) -> int:
        active = (self.layers - self.dense_layers) * self.active_experts * self.one_expert
        return round((self._matrices + active) / self.layers)

    @cached_property
    def parameters(self) -> int:
        blocks = self._matrices + self._vectors + self.expert_parameters
        return self.embedding_parameters + blocks + self.norm_parameters


@lru_cache(maxsize=256)
def kinds(model: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    """Return a model of only the dense layers and one of only the mixture layers; equal if layers do not differ."""
    if not isinstance(model, MixtureConfig) or not model.dense_layers:
        return model, model
    return model.with_changes(dense_layers=model.layers), model.with_changes(dense_layers=0)


def by_kind(model: ModelConfig, blocks: int, is_first: bool) -> tuple[tuple[ModelConfig, int], ...]:
    """Return the blocks of a pipeline rank as (model, count) by kind of layer; the first rank has the dense layers."""
    dense, mixed = kinds(model)
    first = min(model.dense_layers, blocks) if isinstance(model, MixtureConfig) and is_first else 0
    return tuple((kind, count) for kind, count in ((dense, first), (mixed, blocks - first)) if count)
