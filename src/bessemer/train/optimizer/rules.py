"""Update rules (AdamW, Lion, Muon) and the parameter groups that they update.

To add an elementwise rule: its facts in UPDATE_RULES (recipe/train.py), its function here and in ELEMENTWISE.

Shapes: D width, F hidden width, G key/value heads, R query heads of each, K width of a head; N matrices of one shape, R rows,
C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from bessemer.common.errors import InputError
from bessemer.distributed.sharded_tensors import as_shard_of, local, put
from bessemer.model.transformer import Transformer
from bessemer.recipe import Optimizer as OptimizerConfig
from bessemer.recipe.train import UPDATE_RULES

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

State = dict[str, Tensor]
ElementwiseRule = Callable[[list[Tensor], list[Tensor], list[State], dict[str, Any]], None]
Kind = Literal["matrix", "embedding", "head", "vector"]

# The quintic a x + b x^3 + c x^5 that Jordan et al. (2024, "Muon", section "Newton-Schulz") chose for its steep start:
# five steps bring singular values from 0.01 to 1 into about [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
EPSILON = 1e-7
STACK_ELEMENTS = 1 << 25  # elements orthogonalised together: batches small matmuls without a second model in memory


def kind_of(name: str, parameter: Tensor) -> Kind:
    """The kind of a parameter. A bias is a vector even where it has the dimensions of heads."""
    if parameter.dim() < 2 or name.endswith("bias"):
        return "vector"
    if name.endswith("embedding.weight"):
        return "embedding"
    if name in ("head.weight", "classifier.weight"):
        return "head"
    return "matrix"


def matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices of a fused hidden parameter, as views (..., columns) whose other dimensions are the rows.

    `attention.qkv` (G, R + 2, K, D) is queries (G, R, K, D), keys (G, K, D) and values (G, K, D); `mlp.gate_up`
    (2, F, D) is gate and up.
    """
    if name.endswith("attention.qkv"):
        return [tensor[:, :-2], tensor[:, -2], tensor[:, -1]]
    if name.endswith("mlp.gate_up"):
        return list(tensor.unbind(0))
    return [tensor]


def parameter_groups(model: Transformer, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The groups of a model's trained parameters, as torch's optimizers take them.

    Vectors (norms, biases) are not decayed, nor are the embedding and the head unless `decay_embeddings`. Muon takes the hidden
    matrices and leaves the rest to AdamW. rate: the group's learning rate as a multiple of the run's; the decoupled weight decay
    is multiplied with the group's learning rate.
    """
    assert config.learning_rate is not None and config.betas is not None, "the recipe is resolved"
    named = dict(model.named_parameters())
    tied = model.config.is_tied
    if tied and config.base_width is not None:
        raise InputError("train.optimizer.base_width needs a head of its own; set model.tie_embeddings = false")
    collected: dict[tuple[Kind, str, float, float], list[str]] = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        kind = kind_of(name, parameter)
        rule = config.kind if kind == "matrix" else config.rest_kind
        decayed = kind == "matrix" or (kind in ("embedding", "head") and config.decay_embeddings)
        rate = config.embedding_rate if kind == "embedding" and not tied else 1.0
        if rule == "muon":
            rate *= config.muon_rate
        transferred = _width_rate(kind, rule, config, model.config.width)
        decay = config.weight_decay / transferred if decayed else 0.0
        collected.setdefault((kind, rule, decay, rate * transferred), []).append(name)
    shared = {
        "betas": tuple(config.betas), "eps": config.eps, "momentum": config.muon_momentum, "scale": config.muon_scale,
        "cautious": config.cautious_decay,
    }  # fmt: skip
    return [
        {"params": [named[name] for name in names], "names": names, "kind": kind, "rule": rule, "weight_decay": decay,
         "rate": rate, "lr": config.learning_rate * rate, **shared}
        for (kind, rule, decay, rate), names in collected.items()
    ]  # fmt: skip


def _width_rate(kind: Kind, rule: str, config: OptimizerConfig, width: int) -> float:
    """Factor on the learning rate at `width` when it was tuned at `base_width`.

    The initial weights are those of the maximal update parametrisation already (hidden std 1/sqrt(fan-in), head 1/width,
    embedding 1), so only Adam's rule is left: hidden matrices and the head learn with 1/fan-in (Yang et al. 2022, Tensor
    Programs V, table 3), every fan-in assumed to grow with the width. Lion's updates are as large as Adam's and follow the same
    rule. An orthogonalised update with muon_scale "spectral" holds at every width (Yang, Simon and Bernstein 2023, condition 1);
    that of "match_rms" grows with the root of the width.

    The caller divides the decay by this, because the number of steps over which weights are forgotten, 1 / (learning rate x
    weight_decay), has to hold across widths (Wang and Aitchison 2024).
    """
    if config.base_width is None or kind not in ("matrix", "head"):
        return 1.0
    share = config.base_width / width
    if rule == "muon":
        return 1.0 if config.muon_scale == "spectral" else math.sqrt(share)
    return share


def adamw(weights: list[Tensor], gradients: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2), in place, by torch's fused kernel.

    Each state has `exp_avg`, `exp_avg_sq` and `step`, the number of updates so far, which is incremented. Where the group's
    `skip` is 1 the kernel changes nothing, and the increment is undone.
    """
    fused_adamw(
        weights, gradients, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states], [],
        [state["step"] for state in states], fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1],
        lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        found_inf=group["skip"],
    )  # fmt: skip


def lion(weights: list[Tensor], gradients: list[Tensor], states: list[State], group: dict[str, Any]) -> None:
    """Lion (Chen et al. 2023, algorithm 2), in place: w -= lr (sign(b1 m + (1 - b1) g) + decay w), then m follows g by b2."""
    (update_beta, decay_beta), rate = group["betas"], group["lr"]
    for weight, gradient, state in zip(weights, gradients, states, strict=True):
        moment = state["exp_avg"]
        direction = moment.lerp(gradient, 1.0 - update_beta).sign_()
        moved = weight.mul(1.0 - rate * group["weight_decay"]).add_(direction, alpha=-rate)
        put_unless(group["skip"], weight, moved)
        put_unless(group["skip"], moment, moment.lerp(gradient, 1.0 - decay_beta))


def cautiously(
    update: ElementwiseRule, weights: list[Tensor], gradients: list[Tensor], states: list[State], group: dict[str, Any]
) -> None:
    """A rule with decay only where the update moves an element towards zero, or not at all: w -= lr (u + decay [u w >= 0] w)
    (Chen et al. 2025, "Cautious Weight Decay", algorithm 1). A weight at a time, since what it was before is kept."""
    plain = group | {"weight_decay": 0.0}
    for weight, gradient, state in zip(weights, gradients, states, strict=True):
        before = weight.clone()
        update([weight], [gradient], [state], plain)
        put_unless(group["skip"], weight, _decayed_where_aligned(weight, before, before - weight, group))


def _decayed_where_aligned(weight: Tensor, before: Tensor, step: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the weight, decayed where the update, which subtracts `step` from `before`, has its sign or is zero."""
    return weight.sub(before * (step * before >= 0), alpha=group["lr"] * group["weight_decay"])


def put_unless(skip: Tensor, target: Tensor, value: Tensor) -> None:
    """Write a value into a tensor, in place, unless `skip` is 1: a scalar on the device, which the host need not know."""
    torch.where(skip.to(target.device).bool(), target, value, out=target)


# Rules in which an element's update depends on its own gradient and moments only, so that tensors may be sharded anywhere.
ELEMENTWISE = {"adamw": adamw, "lion": lion}
assert UPDATE_RULES.keys() == {*ELEMENTWISE, "muon"}


def orthogonalise(matrices_NRC: Tensor) -> Tensor:
    """Approximately U V^T of each matrix U S V^T, by five Newton-Schulz steps (Jordan et al. 2024).

    In bf16 on CUDA; in fp32 elsewhere, since a CPU without bf16 units would take several times as long.
    """
    a, b, c = COEFFICIENTS
    dtype = torch.bfloat16 if matrices_NRC.device.type == "cuda" else torch.float32
    tall = matrices_NRC.shape[1] > matrices_NRC.shape[2]
    x = (matrices_NRC.mT if tall else matrices_NRC).to(dtype)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + EPSILON)  # singular values of at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def update_scale(rows: int, columns: int, kind: str) -> float:
    """Factor on an orthogonalised update.

    match_rms: 0.2 sqrt(max(rows, columns)), which gives it the root mean square of about 0.2 that AdamW's updates have
    (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2). spectral: sqrt(max(1, rows / columns)) (Jordan
    et al. 2024).
    """
    if kind == "match_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def muon(directed: Iterable[tuple[str, Tensor, Tensor]], group: dict[str, Any]) -> None:
    """Decay weights and move them along their orthogonalised directions, in place; matrices of a shape together.

    directed: name, weight and direction of each parameter, consumed one by one, so that not all directions are in memory
    at once.
    """
    waiting: dict[
        torch.Size, list[tuple[Tensor, Tensor]]
    ] = {}  # by shape: directions, and the weights that they update
    for name, weight, direction in directed:
        if not group["cautious"]:
            put_unless(group["skip"], weight, weight.mul(1.0 - group["lr"] * group["weight_decay"]))
        for part, target in zip(matrices(name, direction), matrices(name, weight), strict=True):
            matrix_RC = part.reshape(-1, part.shape[-1])
            stack = waiting.setdefault(matrix_RC.shape, [])
            stack.append((matrix_RC, target))
            if matrix_RC.numel() * len(stack) >= STACK_ELEMENTS:
                _move(waiting.pop(matrix_RC.shape), group)
    for stack in waiting.values():
        _move(stack, group)


def muon_sharded(
    names: Sequence[str], weights: Sequence[DTensor], direction_of: Callable[[int], Tensor], group: dict[str, Any]
) -> None:
    """As `muon`, for sharded parameters; direction_of: the local shard of the direction of the parameter of that number.

    Singular values belong to whole matrices. Each is orthogonalised by one process of its mesh, which sends the update to the
    others; all work at once, on parameters of about equal size (Liu et al. 2025, section 2.3, "Distributed Muon"). The order
    follows from names and shapes alone, so that it is the same on every process and in every run.
    """
    from torch.distributed.tensor import DTensor

    meshes: dict[DeviceMesh, list[int]] = {}
    for number, weight in enumerate(weights):
        meshes.setdefault(weight.device_mesh, []).append(number)
    for mesh, numbers in meshes.items():
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        here = 0  # among the processes of the mesh, in its order
        for place, size in zip(coordinate, mesh.shape, strict=True):
            here = here * size + place
        largest_first = sorted(numbers, key=lambda number: (-weights[number].numel(), number))
        for first in range(0, len(numbers), mesh.size()):
            owners = {number: owner for owner, number in enumerate(largest_first[first : first + mesh.size()])}
            mine: dict[int, Tensor] = {}
            for number, owner in owners.items():
                whole = DTensor.from_local(
                    direction_of(number), mesh, weights[number].placements, run_check=False, shape=weights[number].shape,
                    stride=weights[number].stride(),
                ).full_tensor()  # fmt: skip
                device = whole.device  # the mesh's: weights that parallel.offload keeps are on the CPU
                if owner == here:
                    mine[number] = whole
            for number, whole in mine.items():
                mine[number] = torch.zeros_like(whole)
                muon([(names[number], mine[number], whole)], group)  # which decays nothing: the weights are zeros
            for number, owner in owners.items():
                shard = local(weights[number])
                update = mine.pop(number) if owner == here else shard.new_empty(weights[number].shape, device=device)
                _broadcast(update, mesh, owner)
                own = torch.empty_like(shard)
                put(as_shard_of(weights[number], own), update)
                if group["cautious"]:
                    decayed = _decayed_where_aligned(shard, shard, -own, group)
                else:
                    decayed = shard.mul(1.0 - group["lr"] * group["weight_decay"])
                put_unless(group["skip"], shard, decayed.add_(own))


def _broadcast(tensor: Tensor, mesh: DeviceMesh, owner: int) -> None:
    """Send a tensor from the process at place `owner` of a mesh to all of it, one dimension after another."""
    places = []
    for size in reversed(mesh.shape):
        owner, place = divmod(owner, size)
        places.append(place)
    for dimension, place in enumerate(reversed(places)):
        torch.distributed.broadcast(tensor, group=mesh.get_group(dimension), group_src=place)


def nesterov(moment: Tensor, gradient: Tensor, momentum: float, skip: Tensor) -> Tensor:
    """Update the moment (an average, so that its scale is the gradient's) and return Nesterov's direction."""
    averaged = moment.lerp(gradient, 1.0 - momentum)
    put_unless(skip, moment, averaged)
    return gradient.lerp(averaged, momentum)


def _move(stack: list[tuple[Tensor, Tensor]], group: dict[str, Any]) -> None:
    directions = [direction for direction, _ in stack]
    rows, columns = directions[0].shape
    size = group["lr"] * update_scale(rows, columns, group["scale"])
    if directions[0].is_cuda:
        updates = list(orthogonalise(torch.stack(directions)).unbind(0))
    else:  # some CPUs round a batched matmul by the number of matrices in it, which depends on offloading
        updates = [orthogonalise(direction.unsqueeze(0)).squeeze(0) for direction in directions]
    for (_, target), update in zip(stack, updates, strict=True):
        decayed, step = target, update.reshape(target.shape)
        if group["cautious"]:
            decayed = _decayed_where_aligned(target, target, step, group)
        put_unless(group["skip"], target, decayed.add(step.to(target.dtype), alpha=-size))
