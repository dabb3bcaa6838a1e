"""A model over several processes: cut, wrapped, and given its weights, each process only its own part.

The order is the one in which the cuts lie inside each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from bessemer.errors import InputError
from bessemer.layout import dial
from bessemer.layout.stages import Span, spans, stages_at
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import Transformer, initial_tensor, meta_model
from bessemer.parallel import context, data, stage, tensor, tied
from bessemer.parallel.local import put
from bessemer.parallel.pipeline import Pipeline, require_micro_batches, require_schedule
from bessemer.parallel.stage import Stage
from bessemer.parallel.team import Team
from bessemer.recipe import Batches, Recipe
from bessemer.tokens import outlook
from bessemer.train import device as devices
from bessemer.train import precision as precisions
from bessemer.train import recompute
from bessemer.train.device import Device
from bessemer.train.engine import DataParallel, Engine, ModelWithLoss, Pipelined
from bessemer.train.task import Task, config_of

Weights = Callable[[str, torch.Size], Tensor]  # (name, shape) of a whole tensor to its values, on the CPU


def require_fit(recipe: Recipe, config: ModelConfig, place: torch.device) -> None:
    """Raise InputError when a resolved recipe cannot be split as it says."""
    layout, train, length = recipe.parallel, recipe.train, recipe.tokens.sequence_length
    assert train.global_batch_tokens is not None and train.micro_batch is not None, "the recipe is resolved"
    sequences = train.global_batch_tokens // length
    if complaint := layout.batch_complaint(sequences, train.micro_batch, length):
        raise InputError(complaint)
    if layout.world > 1 and train.optimizer.state == "8bit":
        raise InputError(
            "train.optimizer.state: 8bit keeps scales of 256 neighbouring elements, which no cut respects; with several "
            "processes take fp32 or bf16 and parallel.shard, which divides it"
        )
    tensor.check(config, layout)
    context.require_config(config, layout)
    context.require_length(layout.context, length)
    if layout.tensor > 1 and length % (layout.context * layout.tensor):
        unit = layout.context * layout.tensor
        raise InputError(
            f"tokens.sequence_length: {length} tokens do not divide among parallel.context x parallel.tensor = {unit}; the "
            f"nearest that do are {length // unit * unit} and {(length // unit + 1) * unit}"
        )
    if layout.pipeline > 1:
        spans(config, layout)
        require_schedule(layout, place)
        batches = Batches.of(recipe)
        for step in range(batches.ramp_steps + 1):
            require_micro_batches(layout, batches.sequences(step) // layout.data // train.micro_batch)


def require_layout(recipe: Recipe, tokens: Path, micro_batch_tokens: int) -> None:
    """Raise InputError when a recipe's layout cannot train it on this machine, before anything is built for it.

    tokens: the run's folder of them, which need not be there yet; micro_batch_tokens: as `dial.resolve`.
    """
    vocabulary, labels = outlook.vocabulary(recipe, tokens), outlook.labels(recipe, tokens)
    resolved = dial.resolve(recipe, vocabulary, micro_batch_tokens=micro_batch_tokens, labels=labels)
    device = devices.choose(recipe.train)
    devices.require_devices(device, recipe.parallel.world)
    require_fit(resolved, config_of(resolved, vocabulary, labels), device.place)


def build(
    recipe: Recipe, config: ModelConfig, team: Team, task: Task, device: Device, recomputed: int,
    weights: Weights | None, memory: AbstractContextManager[object] | None = None,
) -> tuple[Transformer, Engine]:  # fmt: skip
    """The model of a resolved recipe, split as it says, with its values, and what computes its gradients.

    weights: None leaves the values to chance; memory: what it is given memory inside of. With fake tensors in there it
    takes none, which is for train/simulate.py.
    """
    memory = memory or nullcontext()
    require_fit(recipe, config, device.place)
    model = meta_model(config).to(device.arithmetic.weights)
    if tied.is_tied(model):
        model.head.tie(model.embedding)
    task.prepare(model)
    model.use_linear(precisions.product_of(device.arithmetic))
    held = _stages_here(recipe, config, team)
    if held:
        stage.cut(model, held)
    tensor.split(model, team)
    context.apply(model, team)
    # torch cannot compile a recomputation that reads DTensors (2.13): there the compiled block is what is recomputed.
    inside = device.compile and team.size("tensor") > 1 and recipe.train.recompute == "full"
    if inside:
        for block in filter(None, model.blocks):
            block.forward = torch.compile(block.forward)
    recompute.apply(model, recipe.train.recompute, recomputed)
    if device.compile and not inside:
        for block in filter(None, model.blocks):
            block.compile()
    narrow = device.arithmetic.autocast
    if held:
        return model, _pipelined(recipe, model, held, team, task, device, weights, memory)
    root: nn.Module = ModelWithLoss(model, task, device, recipe.train.dropout, team)
    if data.uses_fsdp(team):
        data.shard(root, list(model.blocks), team, narrow)
    with memory:
        materialise(model, team, device, weights)
        if data.uses_ddp(team):
            root = data.copy(root, device.place)
    return model, DataParallel(model, root, team, device)


def _pipelined(
    recipe: Recipe, model: Transformer, held: list[Span], team: Team, task: Task, device: Device,
    weights: Weights | None, memory: AbstractContextManager[object],
) -> Engine:  # fmt: skip
    """The stages of this process, each wrapped by itself."""
    arithmetic, place = device.arithmetic, device.place

    def read(
        inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None, dropout_B: Tensor | None
    ) -> context.Share:
        rates, length = recipe.train.dropout, inputs_BT.shape[1]
        masks = None if dropout_B is None else DropoutMasks.from_sequences(rates, dropout_B, length)
        return context.share(team, inputs_BT, targets_BS, task.documents(inputs_BT, starts_BT), masks)

    autocast = functools.partial(precisions.autocast, arithmetic, place)
    stages = [Stage(stage.part_of(model, span), span, task, autocast, read) for span in held]
    if data.uses_fsdp(team):
        for one in stages:
            data.shard(one, one.blocks, team, arithmetic.autocast)
    with memory:
        materialise(model, team, device, weights)
    # A backward pass in two parts walks through a block many times, which recompute and compiled blocks do not allow.
    apart = recipe.train.recompute == "none" and not device.compile
    dtype = arithmetic.autocast or arithmetic.weights
    return Pipelined(Pipeline(model, stages, team, place, dtype, split_backward=apart), team, device)


def _stages_here(recipe: Recipe, config: ModelConfig, team: Team) -> list[Span]:
    """The stages of this process's place in the pipeline; none where there is no pipeline."""
    if team.layout.pipeline == 1:
        return []
    every = spans(config, team.layout)
    return [every[number] for number in stages_at(team.layout, team.place("pipeline"))]


@torch.no_grad()
def materialise(model: Transformer, team: Team, device: Device, weights: Weights | None) -> None:
    """Give the model memory and its weights. Each process computes one whole tensor after the other and keeps its part, so
    that no more than one is ever there whole, and every layout starts from the same values."""
    model.to_empty(device=torch.device("cpu") if team.layout.offload else device.place)
    if tied.is_tied(model) and team.layout.pipeline == 1:  # to_empty gives the two names storage of their own
        model.head.tie(model.embedding)
    if weights is None:
        return
    for name, parameter in model.named_parameters():
        put(parameter, weights(tied.whole_name(model, name), parameter.shape))


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    """The weights of a fresh start."""
    return lambda name, shape: initial_tensor(name, shape, config, seed)


def weights_of(model: Transformer) -> Weights:
    """The weights of a model that is there whole."""
    named = dict(model.named_parameters())
    return lambda name, shape: named[name].detach()
