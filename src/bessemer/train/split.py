"""A model over several processes: cut, wrapped, and given its weights, each process only its own part.

The order is the one in which the cuts lie inside each other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.initialisation import initial, shell
from bessemer.model.transformer import Transformer
from bessemer.parallel import data
from bessemer.parallel.local import put
from bessemer.parallel.team import Team
from bessemer.recipe import Recipe
from bessemer.train import precision as precisions
from bessemer.train import recompute
from bessemer.train.device import Device
from bessemer.train.engine import DataParallel, Engine, ModelWithLoss
from bessemer.train.task import Task

Weights = Callable[[str, torch.Size], Tensor]  # (name, shape) of a whole tensor to its values, on the CPU


def require_fit(recipe: Recipe) -> None:
    """Raise InputError when a resolved recipe cannot be split as it says."""
    layout, train, length = recipe.parallel, recipe.train, recipe.tokens.sequence_length
    assert train.global_batch_tokens is not None and train.micro_batch is not None, "the recipe is resolved"
    sequences = train.global_batch_tokens // length
    if sequences % (layout.data * train.micro_batch):
        fits = [n for n in range(1, sequences // layout.data + 1) if sequences % (layout.data * n) == 0]
        possible = f"train.micro_batch may be {', '.join(map(str, fits[:12]))}" if fits else (
            f"a global batch of a multiple of {layout.data * length} tokens would do"
        )  # fmt: skip
        raise InputError(
            f"parallel: {layout.data} parts of the batch (replicate x shard) with train.micro_batch = {train.micro_batch} do "
            f"not divide the {sequences} sequences of a global batch; {possible}"
        )
    if layout.world > 1 and train.optimizer.state == "8bit":
        raise InputError(
            "train.optimizer.state: 8bit keeps scales of 256 neighbouring elements, which no cut respects; with several "
            "processes take fp32 or bf16 and parallel.shard, which divides it"
        )


def build(
    recipe: Recipe, config: ModelConfig, team: Team, task: Task, device: Device, recomputed: int, weights: Weights
) -> tuple[Transformer, Engine]:
    """The model of a resolved recipe, split as it says, with its values, and what computes its gradients."""
    require_fit(recipe)
    model = shell(config).to(device.arithmetic.weights)
    if config.tie_embeddings and not config.labels:
        model.head.tie(model.embedding)
    task.prepare(model)
    model.use_product(precisions.product_of(device.arithmetic))
    recompute.apply(model, recipe.train.recompute, recomputed)
    if device.compile:
        for block in model.blocks:
            block.compile()
    root = ModelWithLoss(model, task, device)
    if data.uses_ddp(team):
        materialise(model, device, False, weights)
        return model, DataParallel(data.copy(root, device.place), team, device)
    if data.uses_fsdp(team):
        data.shard(root, list(model.blocks), team, device.arithmetic.autocast)
    materialise(model, device, recipe.parallel.offload, weights)
    return model, DataParallel(root, team, device)


@torch.no_grad()
def materialise(model: Transformer, device: Device, offload: bool, weights: Weights) -> None:
    """Give the model memory and its weights. Each process computes one whole tensor after the other and keeps its part, so
    that no more than one is ever there whole, and every layout starts from the same values."""
    place = torch.device("cpu") if offload else device.place
    model.to_empty(device=place)
    config = model.config
    if config.tie_embeddings and not config.labels:  # to_empty gives the two names storage of their own
        model.head.tie(model.embedding)
    for name, parameter in model.named_parameters():
        put(parameter, weights(name, parameter.shape))


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """The weights of a fresh start."""
    return lambda name, shape: initial(name, shape, config, seed)


def weights_of(model: Transformer) -> Weights:
    """The weights of a model that is there whole."""
    named = dict(model.named_parameters())
    return lambda name, shape: named[name].detach()
