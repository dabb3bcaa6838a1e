"""The division of a model over several processes: sharded, wrapped and initialised, each process holding only its part.

The order in `parallelize` is the order in which the splits nest: pipeline stages, tensor, context, expert, activation
checkpointing, compile, FSDP2 or DDP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bessemer.common.errors import InputError
from bessemer.distributed import context, data, tied_embedding, validity
from bessemer.distributed.mesh import ProcessMesh
from bessemer.distributed.sharded_tensors import put
from bessemer.distributed.stages import StageSpan, stage_spans, stages_at
from bessemer.model import attention
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import Transformer, initial_tensor, meta_model
from bessemer.recipe import Parallel, ResolvedTrain, Train
from bessemer.train import precision as precisions
from bessemer.train import recompute
from bessemer.train.device import Device
from bessemer.train.engine import DataParallel, Engine, Pipelined
from bessemer.train.task import ObjectiveTask

Weights = Callable[[str, torch.Size], Tensor]  # from the name and shape of a whole tensor to its values on the CPU


def require_trainable(train: ResolvedTrain, layout: Parallel, config: ModelConfig, device_type: str) -> None:
    """Raise InputError if the layout of a resolved recipe cannot divide its model and batch on devices of a type of torch."""
    if max(layout.world, layout.expert) == 1:
        return
    length = config.sequence_length
    sequences = train.global_batch_tokens // length
    if complaint := layout.batch_complaint(sequences, train.micro_batch):
        raise InputError(complaint)
    if layout.world > 1 and train.optimizer.state == "8bit":
        raise InputError("train.optimizer.state: 8bit needs one process; with several, use fp32 and parallel.shard")
    if layout.pipeline > 1 and train.is_frozen:
        raise InputError("train.classify.frozen: a pipeline would train only its last stage; set parallel.pipeline = 1")
    batches = train.batches(length)
    unit = layout.data * (train.micro_batch if layout.pipeline > 1 else 1)
    for step in range(batches.ramp_steps + 1):
        size = batches.sequences(step)
        if size % unit:  # ranks with fewer micro-batches would leave the others waiting in a collective
            raise InputError(
                f"train.batch_ramp: the {size} sequences of step {step + 1} are not divisible by {unit} (replicate x shard, in a "
                "pipeline x train.micro_batch); make start_tokens and train.micro_batch multiples of it, or remove the ramp"
            )
        validity.require_valid(config, layout, -(-size // (layout.data * train.micro_batch)))
    if layout.pipeline > 1:
        from bessemer.distributed import pipeline  # loads the compiler, which takes half a second

        pipeline.require_schedule(layout, device_type)


def parallelize(
    train: ResolvedTrain, model: Transformer, mesh: ProcessMesh, task: ObjectiveTask, device: Device, recomputed: int,
    weights: Weights | None = None,
) -> tuple[Transformer, Engine]:  # fmt: skip
    """Divide a model over the mesh, and return it with its weights and the engine that computes its gradients.

    Args:
        train: The [train] table.
        model: The initialised model. With several processes only its configuration is used.
        mesh: The mesh; with several processes, `require_trainable` has passed.
        task: The objective of the training.
        device: The device of this process.
        recomputed: The number of blocks that recompute their activations.
        weights: The weights with several processes; None leaves them uninitialised.
    """
    layout, precision = mesh.layout, device.precision
    if mesh.is_single:
        model = (model.double() if precision.weights == torch.float64 else model).to(device.torch_device)
    else:
        model = meta_model(model.config).to(precision.weights)
        if model.config.is_tied:
            model.head.tie(model.embedding)
    task.prepare(model)
    model.use_linear(precisions.linear_of(precision, device.torch_device))
    local_spans = list[StageSpan]()
    if layout.pipeline > 1:
        from bessemer.distributed import pipeline  # loads the compiler, which takes half a second

        all_spans = stage_spans(model.config, layout)
        local_spans = [all_spans[number] for number in stages_at(layout, mesh.coordinate("pipeline"))]
        pipeline.keep_stages(model, local_spans)
    _divide_layers(model, mesh)
    _recompute_and_compile(train, model, device, recomputed, layout.tensor > 1)

    roots: list[Any] = []
    autocast = functools.partial(precisions.autocast, precision, device.torch_device)
    common = task, autocast, functools.partial(context.read_batch, mesh, task, train.dropout)
    if layout.pipeline > 1:
        roots = [pipeline.Stage(span, pipeline.stage_model(model, span), *common) for span in local_spans]
    else:
        roots.append(context.ModelWithLoss(model, *common))
    if layout.uses_fsdp:
        for root in roots:
            data.apply_fsdp(root, list(filter(None, root.model.blocks)), mesh, precision.autocast)
    if not mesh.is_single:
        materialise(model, mesh, device, weights)
    if layout.pipeline > 1:
        splits = train.recompute == "none" and not device.compile
        running = pipeline.Pipeline(model, roots, mesh, device.torch_device, precision.dtype, split_backward=splits)
        return model, Pipelined(running, mesh, device)
    root = data.apply_ddp(roots[0], device.torch_device) if layout.uses_ddp else roots[0]
    return model, DataParallel(model, root, mesh, device)


def _divide_layers(model: Transformer, mesh: ProcessMesh) -> None:
    """Divide matrices, sequences and experts over the groups of this process. Modules with DTensors load in half a second."""
    if mesh.layout.tensor > 1:
        from bessemer.distributed import tensor

        tensor.apply_tp(model, mesh)
    context.apply_cp(model, mesh)
    if model.config.experts and not mesh.is_single:
        from bessemer.distributed import expert

        expert.apply_ep(model, mesh)


def _recompute_and_compile(train: Train, model: Transformer, device: Device, blocks: int, is_sharded: bool) -> None:
    """Compile each block together with its recomputation.

    torch cannot compile a recomputed block that reads DTensors (2.13). If `is_sharded`, the compiled block is recomputed
    instead.
    """
    compiled = list(filter(None, model.blocks)) if device.compile else []
    if compiled:
        attention.leave_out_of_compilation()
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(True, warn_only=True)  # also for kernels that the compiler chooses
    compile_first = is_sharded and train.recompute == "full"
    if compile_first:
        for block in compiled:
            block.forward = torch.compile(block.forward)
    recompute.apply_recompute(model, train.recompute, blocks)
    if not compile_first:
        for block in compiled:
            block.compile()


@torch.no_grad()
def materialise(model: Transformer, mesh: ProcessMesh, device: Device, weights: Weights | None) -> None:
    """Allocate the model and initialise it one whole tensor at a time, so that every layout starts from the same values."""
    model.to_empty(device=torch.device("cpu") if mesh.layout.offload else device.torch_device)
    if model.config.is_tied and mesh.layout.pipeline == 1:  # to_empty has separated the storage of the two names
        model.head.tie(model.embedding)
    if weights is None:
        return
    for name, parameter in model.named_parameters():
        put(parameter, weights(tied_embedding.whole_name(model, name), parameter.shape))


def initial_weights(config: ModelConfig, seed: int) -> Weights:
    return lambda name, shape: initial_tensor(name, shape, config, seed)


def weights_of(model: Transformer) -> Weights:
    named = dict(model.named_parameters())
    return lambda name, shape: named[name].detach()
