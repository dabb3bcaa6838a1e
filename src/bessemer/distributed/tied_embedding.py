"""Tied embeddings in a pipeline: the first stage embeds with the same matrix that the last stage uses for its output.

Each of the two stages has a copy (`embedding.weight` and `head.weight`). The copies start equal and their gradients are
summed before the update, so they stay equal. Norms, counts and checkpoints use `embedding.weight` only
(`owned_parameters`); code that must see every tensor of a process uses both (`compared_parameters`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bessemer.distributed.mesh import TIMEOUT, ProcessMesh
from bessemer.model.transformer import Transformer

COPY, ORIGINAL = "head.weight", "embedding.weight"


def whole_name(model: Transformer, name: str) -> str:
    """Return the name that a stage's parameter has in the full model and in checkpoints."""
    return ORIGINAL if name == COPY and model.config.is_tied else name


def owned_parameters(model: Transformer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield this process's named parameters without the last stage's copy of a tied matrix."""
    return ((name, p) for name, p in model.named_parameters() if not (name == COPY and model.config.is_tied))


def compared_parameters(model: Transformer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all of this process's parameters, with the names under which replicas must be equal.

    A stage that holds only the copy of a tied matrix yields it under the name of the original, because both must be equal bit for
    bit. A process that holds both yields each under its own name.
    """
    names = dict(model.named_parameters())
    return ((name if ORIGINAL in names else whole_name(model, name), p) for name, p in names.items())


def tie_group(mesh: ProcessMesh) -> dist.ProcessGroup | None:
    """Create the process group of the first and the last stage. Collective: every process of the run must call it.

    Returns None on processes of other stages, and when one process holds both stages.
    """
    if mesh.is_single or mesh.loss_coordinate == 0:
        return None
    assert mesh.device_mesh is not None
    by_stage = mesh.device_mesh.mesh.flatten(1)  # (pipeline, rest)
    own = None
    for first, last in zip(by_stage[0].tolist(), by_stage[mesh.loss_coordinate].tolist(), strict=True):
        # Gradients of offloaded weights are on the CPU, which NCCL does not support.
        both = "cpu:gloo,cuda:nccl" if mesh.layout.offload and mesh.device_mesh.device_type == "cuda" else None
        group = dist.new_group([first, last], backend=both, timeout=TIMEOUT)
        if mesh.rank in (first, last):
            own = group
    return own


@torch.no_grad()
def sum_tied_gradients(model: Transformer, group: dist.ProcessGroup | None) -> None:
    """Set the gradient of both copies of a tied matrix to their sum.

    Called after gradients were reduced over data-parallel ranks: both copies are sharded in the same way.
    """
    if not model.config.is_tied:
        return
    copies = [p for name, p in model.named_parameters() if name in (ORIGINAL, COPY) and p.requires_grad]
    if not copies:
        return
    gradients = [_local_gradient(parameter) for parameter in copies]
    if len(copies) == 2:
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])
    else:
        assert group is not None, "the other copy is on another process"
        dist.all_reduce(gradients[0], group=group)


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient: Tensor = getattr(parameter.grad, "_local_tensor", parameter.grad)
    return gradient
