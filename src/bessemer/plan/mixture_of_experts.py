"""Parameters of mixtures of experts and of latent attention, for plans alone: Bessemer trains dense models.

A block is the mean over the layers where these differ (the first layers of DeepSeek's models have a dense MLP). Parameters of a
block are those without its routed experts, which expert parallelism places for themselves: `expert_parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from bessemer.model.config import ModelConfig


@dataclass(frozen=True)
class LatentAttention:
    """Attention from low-rank latents (DeepSeek-AI 2024, DeepSeek-V2, section 2.1). query_rank: 0: queries straight from the
    stream; kv_rank: of keys and values; plain, rotated: dimensions of a head's query and key without and with rotation, the
    latter shared by the heads' keys; value: of a head's value."""

    query_rank: int
    kv_rank: int
    plain: int
    rotated: int
    value: int


@dataclass(frozen=True)
class MixtureConfig(ModelConfig):
    """A transformer in whose blocks a router sends each token to some of many MLPs.

    num_experts: of a layer; active_experts: that a token meets; expert_width, shared_width: hidden units of one, and of those
    that every token meets, together; dense_layers: the first ones, which have one MLP of mlp_width instead; router_bias: a number
    an expert for balance; node_limit: nodes that a token's experts may lie on (0: all); latent: attention from latents, whose
    queries and keys are head_dim = plain + rotated wide."""

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
        """Parameters of a routed expert."""
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
        """Matrices of one block's attention."""
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
        """Of all blocks, without routed experts."""
        mixed, gates = self.layers - self.dense_layers, 3 if self.gated else 2
        dense = self.dense_layers * gates * self.width * self.mlp_width
        shared = mixed * self.width * (gates * self.shared_width + self.num_experts)
        return self.layers * self.attention_parameters + dense + shared

    @property
    def _vectors(self) -> int:
        """Norms and biases of all blocks."""
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
    """The model of its first, dense layers alone, and that of the layers with experts alone; the same where all are alike."""
    if not isinstance(model, MixtureConfig) or not model.dense_layers:
        return model, model
    return model.with_changes(dense_layers=model.layers), model.with_changes(dense_layers=0)


def by_kind(model: ModelConfig, blocks: int, is_first: bool) -> tuple[tuple[ModelConfig, int], ...]:
    """Blocks of a pipeline rank by kind: models as of `kinds`, with their numbers; the first rank has the dense layers."""
    dense, mixed = kinds(model)
    first = min(model.dense_layers, blocks) if isinstance(model, MixtureConfig) and is_first else 0
    return tuple((kind, count) for kind, count in ((dense, first), (mixed, blocks - first)) if count)
