"""Tensor parallelism: every matrix of a block cut over a group of processes, with sequence parallelism between them.

Attention is cut between key/value heads (with the query heads that share one), the MLP between hidden units, embedding
and output matrix between ids (Shoeybi et al. 2019, section 3); outside of these each process has T / t of the tokens
(Korthikanti et al. 2022, section 4.2.2). Everything else is on every process in full, and its gradient there is a summand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import Transformer
from bessemer.parallel import tensor_modules as modules
from bessemer.parallel.exchange import Share, all_reduce
from bessemer.parallel.team import Team
from bessemer.parallel.tensor_modules import Read, become
from bessemer.parallel.vocabulary import VocabularyShard
from bessemer.recipe import Parallel

# Parameters of every block that are cut, and along which dimension. The biases of qkv and gate_up are cut with them. Those
# of `up` and of the head are vectors, in which FSDP would have no other dimension to cut: each process has all of them.
_CUT = {
    "attention.qkv": 0,
    "attention.qkv_bias": 0,
    "attention.out.weight": 1,
    "mlp.gate_up": 1,
    "mlp.gate_up_bias": 1,
    "mlp.up.weight": 0,
    "mlp.down.weight": 1,
}
_SPECIAL_READS: dict[str, Read] = {
    "attention.out.bias": "later",
    "mlp.down.bias": "later",
    "mlp.up.bias": "slice",
    "head.bias": "slice",
}


def cut_dimension(name: str) -> int | None:
    """The dimension along which a tensor group cuts the parameter of this name; None: each process has all of it."""
    if name in ("embedding.weight", "head.weight"):
        return 0
    return next((dimension for ending, dimension in _CUT.items() if name.endswith(f".{ending}")), None)


def check(config: ModelConfig, layout: Parallel) -> None:
    """Refuse a model that a layout's tensor groups cannot cut. Raises InputError with the sizes that work.

    A vocabulary need not divide: the last process then has fewer ids.
    """
    tensor = layout.tensor
    heads = "model.kv_heads" if config.kv_heads != config.heads else "model.heads"
    wanted: dict[str, tuple[int, Callable[[int], bool]]] = {
        heads: (config.kv_heads, lambda size: config.kv_heads % size == 0),
        "model.mlp_width": (config.mlp_width, lambda size: config.mlp_width % size == 0),
        "model.vocabulary": (config.vocabulary, lambda size: _all_have_ids(config, size)),
        "tokens.sequence_length": (
            config.sequence_length,
            lambda size: config.sequence_length % (layout.context * size) == 0,
        ),
    }
    for key, (value, fits) in wanted.items():
        if not fits(tensor):
            sizes = [size for size in range(1, config.kv_heads + 1) if all(test(size) for _, test in wanted.values())]
            over = f" over parallel.context = {layout.context}" if "sequence" in key and layout.context > 1 else ""
            raise InputError(
                f"parallel.tensor: {key} = {value}{over} cannot be divided by {tensor} processes; "
                f"sizes that work for this model: {', '.join(map(str, sizes)) or 'none'}"
            )


def _all_have_ids(config: ModelConfig, size: int) -> bool:
    return Share(size - 1, size, GroupName("")).rows(config.vocabulary)[1] > 0


def split(model: Transformer, team: Team) -> None:
    """Cut a model (on meta, or with values that all processes of the group have alike) over this process's tensor group.

    Its parameters become DTensors on mesh["tensor"], under the same names; tied ones stay one. Blocks, embedding or head
    that are None or absent lie elsewhere and are passed over. Without FSDP, finish_gradients comes after the last backward
    pass of a step. Raises InputError as `check` does.
    """
    if team.size("tensor") == 1:
        return
    check(model.config, team.layout)
    assert team.mesh is not None
    share = Share(team.place("tensor"), team.size("tensor"), team.group("tensor").group_name)
    _distribute(model, team.mesh["tensor"])
    config = model.config
    vocabulary = VocabularyShard.of(config.vocabulary, share)
    for path, module in model.named_modules():
        if not path or isinstance(module, nn.ModuleList):
            continue
        mixin = _mixin(path, config)
        owned = [name for name, parameter in module._parameters.items() if parameter is not None]
        if mixin is not None or owned:
            become(module, share, mixin, {name: _read(f"{path}.{name}", config) for name in owned})
        if mixin in (modules.SplitEmbedding, modules.SplitHead):
            module.vocabulary = vocabulary  # type: ignore[assignment]
        if mixin is modules.Gathered:
            module.alike = config.labels > 0  # type: ignore[assignment]


def finish_gradients(model: nn.Module) -> None:
    """Sum the gradients that are still this process's summands over the tensor group: one collective for each dtype.

    FSDP2 does it by itself, so there it finds nothing to do.
    """
    waiting: dict[tuple[DeviceMesh, torch.dtype], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements == (Partial(),):
            waiting.setdefault((gradient.device_mesh, gradient.dtype), []).append(parameter)
    for (mesh, _), parameters in waiting.items():
        parts = [_local_gradient(parameter) for parameter in parameters]
        total = all_reduce(torch.cat([part.flatten() for part in parts]), "sum", mesh.get_group().group_name)
        summed = torch.split(total, [part.numel() for part in parts])
        for parameter, part, found in zip(parameters, parts, summed, strict=True):
            parameter.grad = DTensor.from_local(found.view_as(part), mesh, [Replicate()], run_check=False)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def _distribute(model: nn.Module, mesh: DeviceMesh) -> None:
    """Put a DTensor in the place of every parameter; one parameter in two places stays one."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                cut = cut_dimension(f"{path}.{name}")
                placement = Replicate() if cut is None else Shard(cut)
                # No source: each process takes its part of what it has, and nothing is sent.
                value = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
                made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[parameter]


def _mixin(path: str, config: ModelConfig) -> type[nn.Module] | None:
    """How the module at a path computes when it is split; None: as ever."""
    whole = {
        "embedding": modules.SplitEmbedding,
        "position_embedding": modules.SplitPositions,
        "norm": modules.Gathered,
        "head": modules.SplitHead,
    }
    endings = {".attention": modules.SplitAttention, ".mlp": modules.SplitMLP}
    if config.qk_norm == "full":
        endings |= {".q_norm": modules.NormOverHeads, ".k_norm": modules.NormOverHeads}
    return whole.get(path) or next((mixin for ending, mixin in endings.items() if path.endswith(ending)), None)


def _read(name: str, config: ModelConfig) -> Read:
    """How the code of the model reads a parameter."""
    if cut_dimension(name) is not None:
        return "own"
    if name.startswith("classifier."):
        return "alike"
    if config.qk_norm == "full" and name.endswith(("q_norm.weight", "k_norm.weight")):
        return "slice"
    return next((read for ending, read in _SPECIAL_READS.items() if name.endswith(ending)), "summed")
