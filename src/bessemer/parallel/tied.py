"""Tied embeddings in a pipeline: the first stage looks tokens up in the matrix that the last one predicts them with.

Each has its own copy (`embedding.weight` and `head.weight`). They begin with the same values, their gradients are added up
before the update, and so they stay the same; norms, counts and checkpoints know the first only.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bessemer.model.transformer import Transformer
from bessemer.parallel.team import Team

COPY, ORIGINAL = "head.weight", "embedding.weight"


def is_tied(model: Transformer) -> bool:
    """Whether the whole model that this is a part of has one matrix for both."""
    return model.config.tie_embeddings and not model.config.labels


def whole_name(model: Transformer, name: str) -> str:
    """What a parameter of a stage is called in the whole model: what its first value and a checkpoint go by."""
    return ORIGINAL if name == COPY and is_tied(model) else name


def owned_parameters(model: Transformer) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a process's part that count here: all but the last stage's copy of a tied matrix."""
    return ((name, p) for name, p in model.named_parameters() if not (name == COPY and is_tied(model)))


def tie_group(team: Team) -> dist.ProcessGroup | None:
    """The processes that hold the first and the last stage of this one's pipeline; None: not this one, or one holds both.

    Every process of the run must call it, at the same time.
    """
    if team.is_alone or team.last_stage_place == 0:
        return None
    assert team.mesh is not None
    places = team.mesh.mesh.flatten(1)  # (pipeline, rest)
    mine = None
    for first, last in zip(places[0].tolist(), places[team.last_stage_place].tolist(), strict=True):
        group = dist.new_group([first, last])
        if team.rank in (first, last):
            mine = group
    return mine


@torch.no_grad()
def sum_tied_gradients(model: Transformer, group: dist.ProcessGroup | None) -> None:
    """Give both copies of a tied matrix the sum of their gradients; nothing where neither is.

    After gradients were added up over the parts of the batch: both copies are divided over processes in the same way.
    """
    if not is_tied(model):
        return
    held = [p for name, p in model.named_parameters() if name in (ORIGINAL, COPY) and p.requires_grad]
    if not held:
        return
    gradients = [_local(_gradient(parameter)) for parameter in held]
    if len(held) == 2:
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])
    else:
        assert group is not None, "the other copy lies on another process"
        dist.all_reduce(gradients[0], group=group)


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _local(tensor: Tensor) -> Tensor:
    found: Tensor = getattr(tensor, "_local_tensor", tensor)
    return found
