"""Mixtures of experts in a step: matmuls of a block, exchange of tokens, and the experts on a device.

Expert parallelism follows Megatron-Core (Liu et al. 2025, "MoE Parallel Folding"), as that of Bessemer and torchtitan
does. The experts of a layer are divided over `expert` ranks, which are neighbours within a pipeline stage. Each expert
is complete on its rank, and a tensor rank dispatches its own tokens of the sequence. Ranks with copies of the same
experts shard their state as `zero` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd

from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import ClusterSpec, Layout, Physics
from bessemer.plan.latent_attention import PlannedConfig, latent_of


def mixture_share(model: ModelConfig) -> float:
    """Return the share of the layers that have experts."""
    return model.mixture_layers / model.layers


@lru_cache(maxsize=256)
def kinds(model: ModelConfig) -> tuple[ModelConfig, ModelConfig]:
    """Return a model of only the dense layers and one of only the mixture layers; equal if layers do not differ."""
    if not model.experts or not model.dense_layers:
        return model, model
    return model.with_changes(dense_layers=model.layers), model.with_changes(dense_layers=0)


@lru_cache(maxsize=256)
def unrouted_parameters(model: ModelConfig) -> int:
    """Return the number of matrix elements of one block outside of routed experts, averaged over the blocks."""
    return model.per_block(lambda parameter: parameter.is_matrix and not parameter.is_routed)


@lru_cache(maxsize=4096)
def by_kind(model: ModelConfig, blocks: int, is_first: bool) -> tuple[tuple[ModelConfig, int], ...]:
    """Return the blocks of a pipeline rank as (model, count) by kind of layer; the first rank has the dense layers."""
    dense, mixed = kinds(model)
    first = min(model.dense_layers, blocks) if is_first else 0
    return tuple((kind, count) for kind, count in ((dense, first), (mixed, blocks - first)) if count)


@dataclass(frozen=True)
class BlockMatmul:
    """A batch of equal matmuls (rows x inner) by (inner x columns) in a block.

    Attributes:
        rows: Rows of the left operand.
        inner: Inner dimension.
        columns: Columns of the right operand.
        batches: Number of matmuls.
        share: Share of the layers that have them.
        is_grouped: True if each has a separate right operand.
    """

    rows: int
    inner: int
    columns: int
    batches: int = 1
    share: float = 1.0
    is_grouped: bool = False


def block_matmuls(
    model: ModelConfig, tensor: int, tokens: int, split: int, expert: int, imbalance: float
) -> list[BlockMatmul]:
    """Return the matmuls of a block's forward pass on one device.

    Args:
        model: Model config.
        tensor: Tensor ranks.
        tokens: Tokens of a micro-batch on a device.
        split: Tensor ranks over which tokens are divided between matmuls.
        expert: Expert ranks.
        imbalance: Tokens of the fullest rank's experts over the mean.
    """
    mlp, width, gates = max(model.mlp_width // tensor, 1), model.width, 2 if model.gated else 1
    matmuls = _attention(model, tensor, tokens, split)
    share = mixture_share(model)
    if dense := 1 - share:
        matmuls += [BlockMatmul(tokens, width, mlp * gates, share=dense), BlockMatmul(tokens, mlp, width, share=dense)]
    if not model.experts:
        return matmuls
    local, each = model.experts // expert, model.expert_width
    # On average, a rank receives as many tokens as it sends. Those of each expert are padded to a multiple of 8.
    rows = 8 * ceil(tokens / split * model.experts_per_token * imbalance / local / 8)
    matmuls += [
        BlockMatmul(tokens // split, width, model.experts, share=share),
        BlockMatmul(rows, width, each * gates, local, share, is_grouped=True),
        BlockMatmul(rows, each, width, local, share, is_grouped=True),
    ]
    if shared := model.shared_experts * each // tensor:
        matmuls.append(BlockMatmul(tokens, width, shared * gates, share=share))
        matmuls.append(BlockMatmul(tokens, shared, width, share=share))
    return matmuls


def heads_of_rank(model: ModelConfig, tensor: int) -> tuple[int, int]:
    """Return the query heads and key/value heads of a tensor rank."""
    return max(model.heads // tensor, 1), max(model.kv_heads // tensor, 1)


def _attention(model: ModelConfig, tensor: int, tokens: int, split: int) -> list[BlockMatmul]:
    """Return attention's projections. Projections to latents run on every tensor rank, for its own tokens."""
    width, (heads, kv_heads) = model.width, heads_of_rank(model, tensor)
    if (latent := latent_of(model)) is None:
        wide = heads * model.head_dim
        return [BlockMatmul(tokens, width, wide + 2 * kv_heads * model.head_dim), BlockMatmul(tokens, wide, width)]
    own = tokens // split
    matmuls = [BlockMatmul(own, width, latent.kv_rank + latent.rotated)]
    if latent.query_rank:
        matmuls.append(BlockMatmul(own, width, latent.query_rank))
    return [
        *matmuls,
        BlockMatmul(tokens, latent.query_rank or width, heads * model.head_dim),
        BlockMatmul(tokens, latent.kv_rank, heads * (latent.plain + latent.value)),
        BlockMatmul(tokens, heads * latent.value, width),
    ]


def hidden_widths(model: ModelConfig, tensor: int, split: int) -> tuple[float, float, float]:
    """Return the projected width, hidden units and copied elements of a token on one device, averaged over the layers.

    The first is the output of attention's projections, the second the width of the MLP's activation, and the third the
    elements that dispatch and return of experts copy.
    """
    heads, kv_heads = heads_of_rank(model, tensor)
    if not model.experts:
        return (heads + 2 * kv_heads) * model.head_dim, max(model.mlp_width // tensor, 1), 0.0
    latent, share = latent_of(model), mixture_share(model)
    value = latent.value if latent else model.head_dim
    routed = model.experts_per_token / split
    hidden = (1 - share) * model.mlp_width / tensor
    hidden += share * (model.shared_experts * model.expert_width / tensor + routed * model.expert_width)
    projected = heads * model.head_dim + kv_heads * (model.head_dim + value)
    return projected, hidden, share * routed * model.width


# Times that each copy of a token is moved: written in expert order and read back, before and after the exchange.
COPIES_MOVED = 4.0


@lru_cache(maxsize=16_384)
def exchange(
    model: ModelConfig, tokens: float, expert: int, width: int, cluster: ClusterSpec, framework: Framework, how: Physics
) -> float:
    """Return the seconds of a block's dispatch of tokens to experts, or of their return, averaged over the layers.

    The time is that of the slower links, within a node or between nodes. A token is sent once for each expert (NCCL's
    all-to-all), or once for each node, whose devices forward it (DeepSeek-AI 2024, DeepSeek-V3, section 3.2.2).

    Args:
        model: Model config.
        tokens: Tokens that a device sends.
        expert: Expert ranks.
        width: Bytes of an element.
        cluster: Devices and links.
        framework: Profile of the training program.
        how: Efficiencies of the links.
    """
    if expert == 1 or not model.experts:
        return 0.0
    local = gcd(expert, cluster.near)
    nodes = expert / local
    copies = tokens * width * model.width * model.experts_per_token
    outside = copies * (1 - 1 / nodes)
    if framework.dispatch == "node":
        limit = model.node_limit if isinstance(model, PlannedConfig) else 0
        met = min(limit or nodes, nodes * (1 - (1 - 1 / nodes) ** model.experts_per_token), nodes)
        outside = tokens * width * model.width * met * (1 - 1 / nodes)
    inside = copies * (1 - 1 / local) * (1.0 if framework.dispatch == "node" else 1 / nodes)
    seconds = inside / (cluster.intra_rate(local) * how.intra)
    if nodes > 1:
        seconds = max(seconds, outside / (cluster.inter_bandwidth * how.inter)) + how.far
    return mixture_share(model) * (seconds + how.call + how.near)


def are_apart(layout: Layout, framework: Framework) -> bool:
    """Return True if the ranks that shard routed experts are not those that shard the rest of a block.

    FSDP programs shard undivided experts like other weights.
    """
    return layout.expert > 1 or not framework.fully_sharded


@lru_cache(maxsize=4096)
def held(model: ModelConfig, blocks: int, is_first: bool, expert: int) -> float:
    """Return the parameters of routed experts on a device of a pipeline rank with this many blocks.

    `is_first` is true for the rank with the first blocks, which may be dense.
    """
    by_layer = (kind.expert_parameters / kind.layers * count for kind, count in by_kind(model, blocks, is_first))
    return sum(by_layer) / expert
