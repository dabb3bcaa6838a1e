"""Updates by the rules of `train/update_rule.py` except Muon, and the parameter groups that each rule updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from bessemer.common.errors import InputError
from bessemer.common.extensions import failure
from bessemer.distributed.sharded_tensors import as_shard_of, gather, is_dtensor, local, put
from bessemer.model.transformer import Transformer
from bessemer.recipe.resolved import ResolvedOptimizer
from bessemer.train.optimizer.moments import UpdatedParameter, decode_slices, format_of, put_unless
from bessemer.train.update_rule import AdamW, Lion, ParameterUpdate, UpdateRule

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Update = Callable[[list[UpdatedParameter], dict[str, Any]], None]  # updates the parameters of a group in place
Kind = Literal["matrix", "embedding", "head", "vector"]


def kind_of(name: str, parameter: Tensor) -> Kind:
    """Classify a parameter as vector, embedding, head or other matrix. A bias is a vector, however many dimensions it has."""
    if parameter.dim() < 2 or name.endswith("bias"):
        return "vector"
    if name.endswith("embedding.weight"):
        return "embedding"
    if name in ("head.weight", "classifier.weight"):
        return "head"
    return "matrix"


def parameter_groups(model: Transformer, config: ResolvedOptimizer) -> list[dict[str, Any]]:
    """Return the groups of a model's trained parameters, as torch's optimizers take them, with all keys of the recipe.

    Vectors (norms, biases) are not decayed, nor are the embedding and the head unless `decay_embeddings`. Muon updates the
    hidden matrices, and AdamW the rest. A group's "rate" is its learning rate as a multiple of the run's. Its "weight_decay" is
    divided by `embedding_rate` and by the factor of `_width_rate`, so that lr x weight_decay, and with it the number of steps
    over which weights are forgotten, does not depend on them.
    """
    named = dict(model.named_parameters())
    tied = model.config.is_tied
    if tied and config.base_width is not None:
        raise InputError("train.optimizer.base_width: needs an untied output head; set model.tie_embeddings = false")
    collected: dict[tuple[Kind, UpdateRule, float, float], list[str]] = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        kind = kind_of(name, parameter)
        rule = config.rule if kind == "matrix" else config.rest_rule
        decayed = kind == "matrix" or (kind in ("embedding", "head") and config.decay_embeddings)
        own = config.embedding_rate if kind == "embedding" and not tied else 1.0
        transferred = own * _width_rate(kind, rule, config, model.config.width)
        rate = config.muon_rate if "muon_rate" in rule.keys else 1.0
        decay = config.weight_decay / transferred if decayed else 0.0
        collected.setdefault((kind, rule, decay, rate * transferred), []).append(name)
    return [
        {**config.model_dump(), "params": [named[name] for name in names], "names": names, "kind": kind, "rule": rule,
         "weight_decay": decay, "rate": rate, "lr": config.learning_rate * rate}
        for (kind, rule, decay, rate), names in collected.items()
    ]  # fmt: skip


def _width_rate(kind: Kind, rule: UpdateRule, config: ResolvedOptimizer, width: int) -> float:
    """Return the factor on the learning rate at `width` if it was tuned at `base_width`.

    The initial weights already follow the maximal update parametrisation (hidden std 1/sqrt(fan-in), head 1/width, embedding
    1), so only Adam's rule is left: hidden matrices and the head learn with 1/fan-in (Yang et al. 2022, Tensor Programs V,
    table 3), where every fan-in is assumed to grow with the width. Lion's updates are as large as Adam's and follow the same
    rule. The size of Muon's update grows with the root of the width, so its factor is the root.

    The caller divides the decay by this factor, because the number of steps over which weights are forgotten, 1 / (learning
    rate x weight_decay), has to hold across widths (Wang and Aitchison 2024).
    """
    if config.base_width is None or kind not in ("matrix", "head"):
        return 1.0
    share = config.base_width / width
    return math.sqrt(share) if "muon_rate" in rule.keys else share


def adamw(parameters: list[UpdatedParameter], group: dict[str, Any]) -> None:
    """Apply AdamW (Loshchilov and Hutter 2019, algorithm 2) in place, by torch's fused kernel.

    Each state has `exp_avg`, `exp_avg_sq` and `step`, the number of updates so far, which is incremented. If the group's `skip`
    is 1, the kernel changes nothing and undoes the increment.
    """
    states = [one.state for one in parameters]
    fused_adamw(
        [one.weight for one in parameters], [one.gradient for one in parameters], [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states], [], [state["step"] for state in states], fused=True, amsgrad=False,
        beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        maximize=False, found_inf=group["skip"],
    )  # fmt: skip


def lion(parameters: list[UpdatedParameter], group: dict[str, Any]) -> None:
    """Apply Lion (Chen et al. 2023, algorithm 2) in place.

    w -= lr (sign(b1 m + (1 - b1) g) + decay w), and then m <- b2 m + (1 - b2) g.
    """
    (update_beta, decay_beta), skip = group["betas"], group["skip"].double()
    rate = (1.0 - skip) * group["lr"]
    for _, weight, gradient, state in parameters:
        moment = state["exp_avg"]
        gradient = torch.where(skip.bool(), moment, gradient)  # a skipped update leaves the moment unchanged
        direction = moment.lerp(gradient, 1.0 - update_beta).sign_()
        weight.mul_(1.0 - rate * group["weight_decay"]).addcmul_(direction, rate, value=-1)
        moment.lerp_(gradient, 1.0 - decay_beta)


def update_by_direction(parameters: list[UpdatedParameter], group: dict[str, Any]) -> None:
    """Decay weights and move them by the directions of the group's rule, in place.

    The rule gets copies of its state, so that a skipped update leaves the state unchanged. Raises BessemerError if the rule
    fails.
    """
    rate, rule = group["lr"], group["rule"]
    for name, weight, gradient, state in parameters:
        update = ParameterUpdate(name, group["step"], rate, group["betas"], group["eps"])
        copies, version = {key: value.clone() for key, value in state.items()}, weight._version
        try:
            direction = rule.direction(weight, gradient, copies, update)
            _require_like("the direction", direction, weight)
            for key, value in state.items():
                _require_like(f"state[{key!r}]", copies.get(key), value)
            if copies.keys() != state.keys() or weight._version != version:
                raise ValueError("changed the weight or the names of the state; only return the direction")
        except Exception as error:
            raise failure(rule, "direction", error, f"step {group['step'] + 1}, {name}") from error
        for key, value in state.items():
            put_unless(group["skip"], value, copies[key])
        decayed = weight.mul(1.0 - rate * group["weight_decay"])
        put_unless(group["skip"], weight, decayed.sub_(direction, alpha=rate))


def _require_like(what: str, value: object, expected: Tensor) -> None:
    """Raise TypeError or ValueError, naming `what`, unless `value` is a tensor with the shape, dtype and device of `expected`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{what} is {type(value).__name__}, not a tensor")
    for fact in ("shape", "dtype", "device"):
        if getattr(value, fact) != getattr(expected, fact):
            raise ValueError(f"{what} has {fact} {getattr(value, fact)}, not {getattr(expected, fact)}")


def update_group(parameters: list[UpdatedParameter], group: dict[str, Any]) -> None:
    """Update the shards of a group by its rule, except Muon: fp32 moments together, 8-bit moments tensor by tensor."""
    rule: UpdateRule = group["rule"]
    update = KERNELS.get(type(rule), update_by_direction)
    if rule.needs_whole:
        for parameter in parameters:
            if is_dtensor(parameter.weight):
                _update_gathered(update, parameter, parameter.weight, group)
            else:
                update([parameter], group)
        return
    plain, coded = list[UpdatedParameter](), list[UpdatedParameter]()
    for parameter in parameters:
        is_plain = format_of(parameter.weight, group["state"]) == "fp32"
        (plain if is_plain else coded).append(parameter._replace(weight=local(parameter.weight)))
    update(plain, group)
    for parameter in coded:
        for part in decode_slices(parameter, rule, group["skip"]):
            update([part], group)


def _update_gathered(update: Update, parameter: UpdatedParameter, weight: DTensor, group: dict[str, Any]) -> None:
    """Update a whole tensor: the processes that hold its shards gather it and compute the same update. All ranks must call it."""
    moments, whole = group["rule"].moments, gather(weight, local(weight))
    whole_state = {
        key: gather(weight, value) if key in moments else value.to(whole.device)
        for key, value in parameter.state.items()
    }
    update([UpdatedParameter(parameter.name, whole, gather(weight, parameter.gradient), whole_state)], group)
    put(weight, whole)
    for key, value in parameter.state.items():
        put(as_shard_of(weight, value) if key in moments else value, whole_state[key])


KERNELS: dict[type[UpdateRule], Update] = {AdamW: adamw, Lion: lion}  # they update many tensors at a time
