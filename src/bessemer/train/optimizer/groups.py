"""Which parameter belongs where: by its name and its dimensions, its update rule, its decay and its learning rate.

Shapes: D width, F hidden width, G key/value heads, R query heads of each, K width of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from bessemer.errors import InputError
from bessemer.recipe import Optimizer as Settings

Kind = Literal["matrix", "embedding", "head", "vector"]
Rule = Literal["adamw", "muon", "lion"]


@dataclass(frozen=True)
class Group:
    """Parameters that are updated alike.

    weight_decay: decoupled, multiplied with the group's learning rate; rate: the group's learning rate as a multiple
    of the run's; named: the parameters by name.
    """

    kind: Kind
    rule: Rule
    weight_decay: float
    rate: float
    named: tuple[tuple[str, Tensor], ...]


def kind_of(name: str, parameter: Tensor) -> Kind:
    """What a parameter is. A bias stays a vector when it has the dimensions of heads."""
    if parameter.dim() < 2 or name.endswith("bias"):
        return "vector"
    if name.endswith("embedding.weight"):
        return "embedding"
    if name in ("head.weight", "classifier.weight"):
        return "head"
    return "matrix"


def matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """The matrices that a hidden parameter is made of, as views (..., columns) whose other dimensions are the rows.

    `attention.qkv` (G, R + 2, K, D) is queries (G, R, K, D), keys (G, K, D) and values (G, K, D); `mlp.gate_up`
    (2, F, D) is gate and up.
    """
    if name.endswith("attention.qkv"):
        return [tensor[:, :-2], tensor[:, -2], tensor[:, -1]]
    if name.endswith("mlp.gate_up"):
        return list(tensor.unbind(0))
    return [tensor]


def grouped(model: nn.Module, settings: Settings) -> list[Group]:
    """The groups of a model's parameters.

    Vectors (norms, biases) are not decayed, nor are the embedding and the head unless `decay_embeddings`. Muon takes
    the hidden matrices and leaves the rest to AdamW. Frozen parameters are in none.
    """
    named = dict(model.named_parameters())
    tied = "head.weight" not in named and any(
        name == "head.weight" for name, _ in model.named_parameters(remove_duplicate=False)
    )
    if tied and settings.base_width is not None:
        raise InputError("train.optimizer.base_width needs a head of its own; set model.tie_embeddings = false")
    width: int = model.config.width if hasattr(model, "config") else 0  # type: ignore[union-attr,assignment]
    collected: dict[tuple[Kind, Rule, float, float], list[tuple[str, Tensor]]] = {}
    for name, parameter in named.items():
        if not parameter.requires_grad:
            continue
        kind = kind_of(name, parameter)
        rule: Rule = "lion" if settings.kind == "lion" else "adamw"
        if settings.kind == "muon" and kind == "matrix":
            rule = "muon"
        decayed = kind == "matrix" or (kind in ("embedding", "head") and settings.decay_embeddings)
        rate = settings.embedding_rate if kind == "embedding" and not tied else 1.0
        if rule == "muon":
            rate *= settings.muon_rate
        transferred = _width_rate(kind, rule, settings, width)
        decay = settings.weight_decay / transferred if decayed else 0.0
        collected.setdefault((kind, rule, decay, rate * transferred), []).append((name, parameter))
    return [Group(*key, tuple(members)) for key, members in collected.items()]


def _width_rate(kind: Kind, rule: Rule, settings: Settings, width: int) -> float:
    """Share of the learning rate that holds at `width` when it was found at `base_width`.

    The initial weights are those of the maximal update parametrisation already (hidden std 1/sqrt(fan-in), head
    1/width, embedding 1), so Adam's rule is left: hidden matrices and the head learn with 1/fan-in (Yang et al. 2022,
    Tensor Programs V, table 3), where every fan-in is taken to grow with the width, and attention keeps 1/sqrt(K)
    since K stays. Lion's updates are as large as Adam's and follow the same rule. An orthogonalised update has a
    spectral norm of its own choosing, and sqrt(rows / columns), that of muon_scale "spectral", is the one that holds at
    every width (Yang, Simon and Bernstein 2023, condition 1); that of "match_rms" grows with the root of the width.

    The decay per step, learning rate x weight_decay, is not scaled with it: what has to hold across widths is the
    number of steps over which weights are forgotten (Wang and Aitchison 2024), so the caller divides the decay by this.
    """
    if settings.base_width is None or kind not in ("matrix", "head"):
        return 1.0
    share = settings.base_width / width
    if rule == "muon":
        return 1.0 if settings.muon_scale == "spectral" else math.sqrt(share)
    return share
