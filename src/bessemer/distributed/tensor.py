"""Tensor parallelism with sequence parallelism: every matrix of a block sharded over a group of ranks.

Attention is sharded by key/value heads (with the query heads that share one), the MLP by hidden units, and embedding and
output matrix by token ids (Shoeybi et al. 2019, section 3). Elsewhere each rank has T / t of the tokens (Korthikanti et al.
2022, section 4.2.2). All other parameters are replicated, and each rank's gradient of them is a partial sum. So are routers
and routed experts, which each rank applies to its tokens.

This module does not use `parallelize_module` with torch's styles. Each operation would go through DTensor's dispatch, which
slows small steps. The styles cover linear layers, embeddings and norms, so joined matrices, attention and the loss would
still need custom code.

A sharded module becomes an instance of a generated subclass of its class (`__class__` is replaced). FSDP2, the optimizer
and checkpoints need its parameters to stay DTensors with the same names, while the model's code reads the local shards as
plain tensors. torch.nn.utils.parametrize also replaces the class, but renames the parameters.

Shapes: B sequences, T tokens, L = T / t of them between matmuls on each of t ranks, D width, K width of a head, V
vocabulary.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from bessemer.common.errors import InputError
from bessemer.distributed.collectives import (  # fmt: skip
    RankGroup,
    VocabularyShard,
    all_reduce,
    gather_columns,
    gather_tokens,
    scatter_tokens,
    sum_over,
)
from bessemer.distributed.mesh import ProcessMesh
from bessemer.distributed.validity import require_tensor
from bessemer.model.attention import Attention, LayerKVCache
from bessemer.model.config import ModelConfig
from bessemer.model.feed_forward import FeedForward
from bessemer.model.kernels import upcast
from bessemer.model.layers import RMSNorm
from bessemer.model.sublayers import Access, Sublayer
from bessemer.model.transformer import Transformer

# How a module's code reads a parameter, in addition to `sublayers.Access`: "shard" reads the local shard, "replicated" the full
# parameter with the same gradient on all ranks.
LocalAccess = Literal["shard", "replicated"] | Access


def sharded_dimension(name: str, config: ModelConfig) -> int | None:
    """Return the dimension along which the parameter of this name is sharded, or None if it is replicated."""
    facts = config.parameter_facts(name)
    if facts is not None:
        return facts.tensor_dim
    return 0 if name in ("embedding.weight", "head.weight") else None


def apply_tp(model: Transformer, mesh: ProcessMesh) -> None:
    """Shard a model (on meta, or with equal values on all ranks) over this process's tensor group, in place.

    Its parameters become DTensors on device_mesh["tensor"] with the same names; tied parameters stay tied. Modules of other
    pipeline stages (None) are skipped. Without FSDP, call `reduce_partial_gradients` after the last backward pass of a
    step. Raises InputError as `require_tensor` does.
    """
    require_tensor(model.config, mesh.layout)
    assert mesh.device_mesh is not None
    group = RankGroup.from_mesh(mesh, "tensor")
    config = model.config
    _distribute(model, mesh.device_mesh["tensor"])
    vocabulary = VocabularyShard.from_group(config.vocabulary, group)
    for path, module in model.named_modules():
        if not path or isinstance(module, nn.ModuleList):
            continue
        mixin = _mixin(path, module, config)
        owned = [name for name, parameter in module._parameters.items() if parameter is not None]
        if mixin is not None or owned:
            accesses = {name: _access(f"{path}.{name}", config) for name in owned}
            read_locally(module, type(module), mixin, accesses)
            module.tensor_group = group  # type: ignore[assignment]
        if mixin in (ShardedEmbedding, ShardedHead):
            module.vocabulary = vocabulary  # type: ignore[assignment]
        if mixin is GatheringNorm:
            module.replicated = config.labels > 0  # type: ignore[assignment]


def reduce_partial_gradients(model: nn.Module) -> None:
    """All-reduce gradients that are still partial sums over the tensor group, in one collective per dtype.

    With FSDP2 this does nothing, because FSDP2 reduces them itself.
    """
    partial: dict[tuple[DeviceMesh, torch.dtype], list[tuple[nn.Parameter, Tensor]]] = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements == (Partial(),):
            key = gradient.device_mesh, gradient.dtype
            partial.setdefault(key, []).append((parameter, gradient.to_local()))
    for (device_mesh, _), pairs in partial.items():
        flat = torch.cat([gradient.flatten() for _, gradient in pairs])
        total = all_reduce(flat, "sum", device_mesh.get_group().group_name)
        sums = torch.split(total, [gradient.numel() for _, gradient in pairs])
        for (parameter, gradient), summed in zip(pairs, sums, strict=True):
            parameter.grad = DTensor.from_local(summed.view_as(gradient), device_mesh, [Replicate()], run_check=False)


def _distribute(model: Transformer, device_mesh: DeviceMesh) -> None:
    """Replace every parameter by a DTensor; tied parameters stay tied."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in replaced:
                dimension = sharded_dimension(f"{path}.{name}", model.config)
                placement = Replicate() if dimension is None else Shard(dimension)
                # Without a source rank, each process takes its shard from its local values, without communication.
                value = distribute_tensor(parameter.detach(), device_mesh, [placement], src_data_rank=None)
                replaced[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[name] = replaced[parameter]


def _access(name: str, config: ModelConfig) -> LocalAccess:
    """Return what the model's code reads of the parameter of this name; `_local` explains the values."""
    if sharded_dimension(name, config) is not None:
        return "shard"
    if (facts := config.parameter_facts(name)) is not None:
        return facts.access
    if name.startswith("classifier."):
        return "replicated"
    return "slice" if name == "head.bias" else "partial"


def read_locally(module: nn.Module, base: Any, mixin: Any, accesses: dict[str, LocalAccess]) -> None:
    """Make a module a subclass of `base`, with the mixin if any, whose code reads these parameters as plain tensors."""
    module.__class__ = _subclass(base, mixin, tuple(sorted(accesses.items())))  # type: ignore[assignment]


@cache
def _subclass(base: Any, mixin: Any, accesses: tuple[tuple[str, LocalAccess], ...]) -> type[nn.Module]:
    """Return a subclass of a module's class, with the mixin if any, whose parameters read as plain local tensors.

    `accesses` has (parameter name, access) for each of them, see `_local`.
    """
    bases = (base,) if mixin is None else (mixin, base)
    return type(f"Split{base.__name__}", bases, {name: _property(name, access) for name, access in accesses})


def _property(name: str, access: LocalAccess) -> property:
    def get(module: Any) -> Any:
        parameter = module._parameters[name]
        # FSDP reads its further sharded parameter by this name, and nothing is computed with it while it is sharded.
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
            return parameter
        if access in ("shard", "replicated"):
            return parameter.to_local()
        return None if access == "deferred" else _local(parameter, access, module.tensor_group)

    return property(get)


def _local(parameter: DTensor, access: LocalAccess, group: RankGroup) -> Tensor:
    """Return the part of a replicated parameter that this rank reads: all of it for "partial", its own rows for "slice".

    Its gradient must still be summed over the tensor group.
    """
    whole = parameter.to_local(grad_placements=[Partial()])
    return whole.narrow(0, *group.row_range(len(whole))) if access == "slice" else whole


def _reduce_scatter_with_bias(partial_BTD: Tensor, linear: nn.Module, group: RankGroup) -> Tensor:
    """Reduce-scatter partial matmul outputs to (B, L, D), then add the bias to this rank's tokens."""
    x_BLD, bias = scatter_tokens(partial_BTD, group), linear._parameters["bias"]
    if bias is None:
        return x_BLD
    assert isinstance(bias, DTensor)
    return x_BLD + _local(bias, "partial", group).to(x_BLD.dtype)


class TensorGroupModule(nn.Module):
    """Base class of the mixins that `apply_tp` adds to modules."""

    tensor_group: RankGroup
    vocabulary: VocabularyShard  # only set on the embedding and the head


class ShardedSublayer(TensorGroupModule):
    """A sublayer with this rank's heads or hidden units, applied to all tokens; maps (B, L, D) to (B, L, D).

    `facts` describes the sublayer's parameters.
    """

    facts: Sublayer

    def forward(self, x_BLD: Tensor, *arguments: Any) -> Tensor:
        if any(isinstance(argument, LayerKVCache) for argument in arguments):
            raise InputError("parallel.tensor: generation needs one process; export the run, or load it in one process")
        partial_BTD = super().forward(gather_tokens(x_BLD, self.tensor_group), *arguments)
        return _reduce_scatter_with_bias(partial_BTD, getattr(self, self.facts.output), self.tensor_group)


class NormOverHeads(TensorGroupModule):
    """RMSNorm over the heads of all ranks, where each rank has the elements of its own heads."""

    scale: Any
    eps: float

    def forward(self, x: Tensor) -> Tensor:
        wide = upcast(x)
        width = x.shape[-1] * self.tensor_group.size
        squares = sum_over(wide.square().sum(dim=-1, keepdim=True), self.tensor_group)
        return (wide * (squares / width + self.eps).rsqrt() * self.scale(x)).to(x.dtype)  # type: ignore[no-any-return]


class ShardedEmbedding(TensorGroupModule):
    """An embedding of which each rank looks up its token ids; one rank contributes each token's row to the reduce-scatter."""

    weight: Tensor

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rows_BT, is_local_BT = self.vocabulary.local(tokens_BT)
        x_BTD = F.embedding(rows_BT, self.weight).masked_fill(~is_local_BT[..., None], 0.0)
        if torch.is_autocast_enabled(
            x_BTD.device.type
        ):  # the model casts next; the sum has one nonzero term, so it rounds the same
            x_BTD = x_BTD.to(torch.get_autocast_dtype(x_BTD.device.type))
        return scatter_tokens(x_BTD, self.tensor_group)


class ShardedPositions(TensorGroupModule):
    """Position embeddings of this rank's tokens."""

    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(self.tensor_group.token_shard(positions))  # type: ignore[no-any-return]


class GatheringNorm(TensorGroupModule):
    """The final norm over this rank's tokens, followed by an all-gather of all tokens for the loss.

    `replicated` is True when all ranks compute the same values from there (a classifier), and False when each rank computes
    its vocabulary shard.
    """

    replicated: bool

    def forward(self, x_BLD: Tensor) -> Tensor:
        hidden_BTD = gather_tokens(super().forward(x_BLD), self.tensor_group, replicated=self.replicated)
        # With one sequence it is a view, and FSDP warns when the whole model returns a view.
        return hidden_BTD.clone() if len(hidden_BTD) == 1 else hidden_BTD


class ShardedHead(TensorGroupModule):
    """A language-model head with the output rows of this rank's token ids."""

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits over the full vocabulary, (B, T, V), on every rank."""
        return gather_columns(super().logits(hidden_BTD), self.tensor_group, self.vocabulary.total)  # type: ignore[misc]


# Keyed by the paths of Transformer's modules outside of blocks.
_OUTER_MIXINS = {
    "embedding": ShardedEmbedding,
    "position_embedding": ShardedPositions,
    "norm": GatheringNorm,
    "head": ShardedHead,
}


def _mixin(path: str, module: nn.Module, config: ModelConfig) -> type[nn.Module] | None:
    """Return the mixin of a module, or None if only its parameters are distributed."""
    if isinstance(module, Attention | FeedForward):
        return ShardedSublayer
    facts = config.parameter_facts(f"{path}.weight") if isinstance(module, RMSNorm) else None
    if facts is not None and facts.access == "slice":
        return NormOverHeads
    return _OUTER_MIXINS.get(path)
