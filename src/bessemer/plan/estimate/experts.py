"""Mixtures of experts in a step: a block's matmuls, the exchange of tokens, and the experts that a device holds.

Expert parallelism as Megatron-Core folds it (Liu et al. 2025, "MoE Parallel Folding"): the experts of a layer are divided over
`expert` ranks, which are neighbours within tensor x context x shard of a pipeline stage; each expert is whole on its rank, and a
tensor rank dispatches its own tokens of the sequence. The ranks that hold copies of the same experts divide their optimizer
state."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd

from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import ClusterSpec, Layout, Physics
from bessemer.plan.mixture_of_experts import MixtureConfig, by_kind


@dataclass(frozen=True)
class BlockMatmul:
    """Matmuls of (rows x inner) by (inner x columns), `batches` of them, on `share` of the layers; is_grouped: a matrix of its
    own for each."""

    rows: int
    inner: int
    columns: int
    batches: int = 1
    share: float = 1.0
    is_grouped: bool = False


def block_matmuls(
    model: ModelConfig, tensor: int, tokens: int, split: int, expert: int, imbalance: float
) -> list[BlockMatmul]:
    """A block's matmuls on one device, forward. split: over how many tensor ranks tokens are divided between them; imbalance:
    tokens of the fullest rank's experts, over the mean."""
    mlp, width, gates = max(model.mlp_width // tensor, 1), model.width, 2 if model.gated else 1
    found = _attention(model, tensor, tokens, split)
    if dense := 1 - (model.mixture_share if isinstance(model, MixtureConfig) else 0.0):
        found += [BlockMatmul(tokens, width, mlp * gates, share=dense), BlockMatmul(tokens, mlp, width, share=dense)]
    if not isinstance(model, MixtureConfig):
        return found
    share, local, each = model.mixture_share, model.num_experts // expert, model.expert_width
    # A rank is sent as many as it sends, on average; each expert's are padded to a multiple of 8.
    rows = 8 * ceil(tokens / split * model.active_experts * imbalance / local / 8)
    found += [
        BlockMatmul(tokens // split, width, model.num_experts, share=share),
        BlockMatmul(rows, width, each * gates, local, share, is_grouped=True),
        BlockMatmul(rows, each, width, local, share, is_grouped=True),
    ]
    if shared := model.shared_width // tensor:
        found.append(BlockMatmul(tokens, width, shared * gates, share=share))
        found.append(BlockMatmul(tokens, shared, width, share=share))
    return found


def heads_of_rank(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Query heads and key/value heads of a tensor rank."""
    return max(model.heads // tensor, 1), max(model.kv_heads // tensor, 1)


def _attention(model: ModelConfig, tensor: int, tokens: int, split: int) -> list[BlockMatmul]:
    """Projections; those to latents are on every tensor rank, of its own tokens."""
    width, (heads, kv_heads) = model.width, heads_of_rank(model, tensor)
    if not isinstance(model, MixtureConfig) or model.latent is None:
        wide = heads * model.head_dim
        return [BlockMatmul(tokens, width, wide + 2 * kv_heads * model.head_dim), BlockMatmul(tokens, wide, width)]
    latent, own = model.latent, tokens // split
    found = [BlockMatmul(own, width, latent.kv_rank + latent.rotated)]
    if latent.query_rank:
        found.append(BlockMatmul(own, width, latent.query_rank))
    return [
        *found,
        BlockMatmul(tokens, latent.query_rank or width, heads * model.head_dim),
        BlockMatmul(tokens, latent.kv_rank, heads * (latent.plain + latent.value)),
        BlockMatmul(tokens, heads * latent.value, width),
    ]


def hidden_widths(model: ModelConfig, tensor: int, split: int) -> tuple[float, float, float]:
    """Of a token on one device: what attention's projections give, hidden units that its activation makes, and elements that
    dispatch and its return copy, averaged over the layers."""
    heads, kv_heads = heads_of_rank(model, tensor)
    if not isinstance(model, MixtureConfig):
        return (heads + 2 * kv_heads) * model.head_dim, max(model.mlp_width // tensor, 1), 0.0
    value = model.latent.value if model.latent else model.head_dim
    routed = model.active_experts / split
    hidden = (1 - model.mixture_share) * model.mlp_width / tensor
    hidden += model.mixture_share * (model.shared_width / tensor + routed * model.expert_width)
    projected = heads * model.head_dim + kv_heads * (model.head_dim + value)
    return projected, hidden, model.mixture_share * routed * model.width


# Of the tokens' copies: written in the experts' order and read back, before the exchange and after it.
COPIES_MOVED = 4.0


@lru_cache(maxsize=16_384)
def exchange(
    model: ModelConfig, tokens: float, expert: int, width: int, cluster: ClusterSpec, framework: Framework, how: Physics
) -> float:
    """Seconds of a block's dispatch of tokens to experts, or of their return, averaged over the layers.

    tokens: that a device sends; width: bytes of an element. A copy of a token for each expert (NCCL's all-to-all), or one for
    each node, whose devices pass it on (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2): the slower of the links in a node and out
    of it."""
    if expert == 1 or not isinstance(model, MixtureConfig):
        return 0.0
    local = gcd(expert, cluster.near)
    nodes = expert / local
    copies = tokens * width * model.width * model.active_experts
    outside = copies * (1 - 1 / nodes)
    if framework.dispatch == "node":
        met = min(model.node_limit or nodes, nodes * (1 - (1 - 1 / nodes) ** model.active_experts), nodes)
        outside = tokens * width * model.width * met * (1 - 1 / nodes)
    inside = copies * (1 - 1 / local) * (1.0 if framework.dispatch == "node" else 1 / nodes)
    seconds = inside / (cluster.intra_rate(local) * how.intra)
    if nodes > 1:
        seconds = max(seconds, outside / (cluster.inter_bandwidth * how.inter)) + how.far
    return model.mixture_share * (seconds + how.call + how.near)


def ranks(layout: Layout) -> int:
    """Ranks that hold copies of the same experts, and divide their optimizer state."""
    return max(layout.world // layout.pipeline // layout.expert, 1)


def held(model: ModelConfig, blocks: int, is_first: bool, expert: int) -> float:
    """Parameters of routed experts on a device of a pipeline rank with so many blocks; is_first: which has the first."""
    by_layer = (kind.expert_parameters / kind.layers * count for kind, count in by_kind(model, blocks, is_first))
    return sum(by_layer) / expert


def refuse(model: ModelConfig, layout: Layout, framework: Framework) -> str | None:
    """Why experts cannot be placed so; None: they can."""
    if not isinstance(model, MixtureConfig):
        return None if layout.expert == 1 else f"expert = {layout.expert}, but the model has no experts"
    if framework.fully_sharded:
        return f"framework {framework.name}: mixtures of experts are planned of programs with whole weights, as megatron-core"
    if layout.zero > 1:
        return "zero: mixtures of experts are planned with 0 or 1"
    if model.num_experts % layout.expert:
        return f"expert = {layout.expert} does not divide {model.num_experts} experts"
    if layout.world // layout.pipeline % layout.expert:
        return f"expert = {layout.expert} does not divide tensor x context x shard = {layout.world // layout.pipeline}"
    return None
