"""Element-wise update rules (AdamW, Lion), and the parameter groups that each rule updates.

To add an element-wise rule: its facts in OPTIMIZERS (recipe/train.py), its function here and in ELEMENTWISE.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw as fused_adamw

from bessemer.common.errors import InputError
from bessemer.distributed.sharded_tensors import local
from bessemer.model.transformer import Transformer
from bessemer.recipe.resolved import ResolvedOptimizer
from bessemer.train.optimizer.moments import State, UpdateRule, decoded_slices, format_of, put_unless

ElementwiseRule = Callable[[list[Tensor], list[Tensor], list[State], dict[str, Any]], None]
Kind = Literal["matrix", "embedding", "head", "vector"]


def kind_of(name: str, parameter: Tensor) -> Kind:
    """The kind of a parameter. A bias is a vector even where it has the dimensions of heads."""
    if parameter.dim() < 2 or name.endswith("bias"):
        return "vector"
    if name.endswith("embedding.weight"):
        return "embedding"
    if name in ("head.weight", "classifier.weight"):
        return "head"
    return "matrix"


def parameter_groups(model: Transformer, config: ResolvedOptimizer) -> list[dict[str, Any]]:
    """Return the groups of a model's trained parameters, as torch's optimizers take them, with all keys of the recipe.

    Vectors (norms, biases) are not decayed, nor are the embedding and the head unless `decay_embeddings`. Muon takes the hidden
    matrices and leaves the rest to AdamW. rate: the group's learning rate as a multiple of the run's; the decoupled weight decay
    is multiplied with the group's learning rate.
    """
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
    return [
        {**config.model_dump(), "params": [named[name] for name in names], "names": names, "kind": kind, "rule": rule,
         "weight_decay": decay, "rate": rate, "lr": config.learning_rate * rate}
        for (kind, rule, decay, rate), names in collected.items()
    ]  # fmt: skip


def _width_rate(kind: Kind, rule: str, config: ResolvedOptimizer, width: int) -> float:
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
    (update_beta, decay_beta), skip = group["betas"], group["skip"].double()
    rate = (1.0 - skip) * group["lr"]
    for weight, gradient, state in zip(weights, gradients, states, strict=True):
        moment = state["exp_avg"]
        gradient = torch.where(skip.bool(), moment, gradient)  # which leaves the moment as it is
        direction = moment.lerp(gradient, 1.0 - update_beta).sign_()
        weight.mul_(1.0 - rate * group["weight_decay"]).addcmul_(direction, rate, value=-1)
        moment.lerp_(gradient, 1.0 - decay_beta)


def cautiously(
    update: ElementwiseRule, weights: list[Tensor], gradients: list[Tensor], states: list[State], group: dict[str, Any]
) -> None:
    """A rule with decay only where the update moves an element towards zero, or not at all: w -= lr (u + decay [u w >= 0] w)
    (Chen et al. 2025, "Cautious Weight Decay", algorithm 1). A weight at a time, since what it was before is kept."""
    plain = group | {"weight_decay": 0.0}
    for weight, gradient, state in zip(weights, gradients, states, strict=True):
        before = weight.clone()
        update([weight], [gradient], [state], plain)
        put_unless(group["skip"], weight, decayed_where_aligned(weight, before, before - weight, group))


def decayed_where_aligned(weight: Tensor, before: Tensor, step: Tensor, group: dict[str, Any]) -> Tensor:
    """Return the weight, decayed where the update, which subtracts `step` from `before`, has its sign or is zero."""
    return weight.sub(before * (step * before >= 0), alpha=group["lr"] * group["weight_decay"])


def update_elements(
    update: ElementwiseRule, names: list[str], weights: list[Tensor], gradients: list[Tensor], states: list[State],
    group: dict[str, Any],
) -> None:  # fmt: skip
    """Update the shards of a group by an element-wise rule: together where the moments are fp32, else tensor by tensor."""
    shards = [local(weight) for weight in weights]
    if group["cautious_decay"] and group["weight_decay"]:
        update = partial(cautiously, update)
    coded = [n for n, weight in enumerate(weights) if format_of(weight, group["state"]) == "8bit"]
    plain = [n for n in range(len(weights)) if n not in coded]
    update([shards[n] for n in plain], [gradients[n] for n in plain], [states[n] for n in plain], group)
    for n in coded:
        flat, gradient_N = shards[n].view(-1), gradients[n].reshape(-1)
        for part, moments in decoded_slices(weights[n], states[n], ELEMENTWISE[group["rule"]], group["skip"]):
            update([flat[part]], [gradient_N[part]], [moments], group)


# In these an element's update depends on its own gradient and moments only, so that tensors may be sharded anywhere.
ELEMENTWISE = {
    "adamw": UpdateRule(
        partial(update_elements, adamw), {"exp_avg": True, "exp_avg_sq": False}, others={"step": lambda _: ()}
    ),
    "lion": UpdateRule(partial(update_elements, lion), {"exp_avg": True}),
}
