"""How the micro-batches of a step become gradients: on one process, or on many that share the model or the batch.

On a CPU two micro-batches run at a time, each with half of the threads: that is faster than one after the other with all of
them, because the operations between the large matmuls are too short to be split well. With one thread each on two cores a
step was 8 to 13% faster, more beside a busy neighbour (docs/notes/cpu-step.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bessemer.model.dropout import DropoutMasks
from bessemer.model.loss import MicroBatchLoss
from bessemer.model.transformer import Transformer
from bessemer.parallel import data
from bessemer.parallel.context import gather_sequences, local_batch
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh
from bessemer.parallel.pipeline import Pipeline
from bessemer.parallel.tensor import reduce_partial_gradients
from bessemer.recipe import Dropout, Train
from bessemer.train import precision as precisions
from bessemer.train.device import Device
from bessemer.train.task import Task

NUM_WORKERS = 2
Scores = tuple[Tensor, Tensor | None]  # nats of each target and, where it is scored, the likeliest prediction; (B, S)


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one forward and backward pass, on the CPU. dropout_B: the key of each sequence's dropout masks
    (`model.dropout.sequence_keys`); None: no dropout."""

    inputs_BT: Tensor
    targets_BS: Tensor
    starts_BT: Tensor | None
    dropout_B: Tensor | None = None

    def split(self, rows: int) -> list[MicroBatch]:
        """Micro-batches of `rows` sequences each, in order; the last one may have fewer."""
        parts = [slice(first, first + rows) for first in range(0, len(self.inputs_BT), rows)]
        starts, keys = ([None if x is None else x[part] for part in parts] for x in (self.starts_BT, self.dropout_B))
        return [
            MicroBatch(self.inputs_BT[part], self.targets_BS[part], *extras)
            for part, *extras in zip(parts, starts, keys, strict=True)
        ]

    def to(self, place: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The four tensors on the device."""
        starts, keys = (None if x is None else x.to(place, non_blocking=True) for x in (self.starts_BT, self.dropout_B))
        return self.inputs_BT.to(place, non_blocking=True), self.targets_BS.to(place, non_blocking=True), starts, keys


class Engine(Protocol):
    """Computes gradients and scores on this process's part of the model and the batch."""

    def accumulate(self, parts: Sequence[MicroBatch], divisor: int, factor: float) -> list[MicroBatchLoss]:
        """Put the gradient of sum(losses) / divisor * factor over all processes into the parameters' `.grad`.

        Returns the loss of each of this process's micro-batches, detached, in order.
        """
        ...

    def score(self, part: MicroBatch) -> Scores:
        """Nats of each target without z-loss and label smoothing, and the likeliest prediction where that is scored."""
        ...


class ModelWithLoss(nn.Module):
    """Token ids and targets to the loss: what DDP and FSDP2 wrap, since the loss reads the head's weights too."""

    def __init__(
        self, model: Transformer, task: Task, device: Device, dropout: Dropout, mesh: ProcessMesh = SINGLE_PROCESS
    ) -> None:
        super().__init__()
        self.model, self.task, self.device, self.dropout, self.mesh = model, task, device, dropout, mesh

    def forward(
        self, inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None, dropout_B: Tensor | None = None,
        scored: bool = False,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """The fields of a MicroBatchLoss, or with `scored` the result of Task.score: FSDP2's hooks find tensors in plain
        tuples only."""
        with precisions.autocast(self.device.arithmetic, self.device.torch_device):
            masks = (
                None if dropout_B is None else DropoutMasks.from_sequences(self.dropout, dropout_B, inputs_BT.shape[1])
            )
            batch = local_batch(self.mesh, inputs_BT, targets_BS, self.task.documents(inputs_BT, starts_BT), masks)
            hidden_BTD = self.model(batch.inputs_BS, batch.documents, masks=batch.masks)
            if scored:
                return self.task.score(self.model, hidden_BTD, batch.inputs_BS, batch.targets_BS)
            loss = self.task.loss(self.model, hidden_BTD, batch.inputs_BS, batch.targets_BS, batch.masks)
        return loss.total, loss.nats_B, loss.correct_B


class OneProcess:
    """Micro-batches one after the other, or two at a time where that is faster."""

    def __init__(self, root: ModelWithLoss) -> None:
        self.root, self.parameters = root, list(root.model.parameters())

    def accumulate(self, parts: Sequence[MicroBatch], divisor: int, factor: float) -> list[MicroBatchLoss]:
        device = self.root.device
        two = runs_two_at_a_time(len(parts), device.torch_device, device.compile)
        losses = [partial(self._loss, part) for part in parts]
        return accumulate(losses, self.parameters, divisor, factor, two_at_a_time=two)

    def score(self, part: MicroBatch) -> Scores:
        nats_BS, predicted_BS = self.root(*part.to(self.root.device.torch_device), scored=True)
        return nats_BS, predicted_BS

    def _loss(self, part: MicroBatch) -> MicroBatchLoss:
        return MicroBatchLoss(*self.root(*part.to(self.root.device.torch_device)))


class DataParallel:
    """Each process computes its own micro-batches, all the same number. root: wrapped by DDP or FSDP2, or by neither with
    tensor parallelism alone."""

    def __init__(self, model: Transformer, root: nn.Module, mesh: ProcessMesh, device: Device) -> None:
        self.model, self.root, self.mesh, self.device = model, root, mesh, device

    def accumulate(self, parts: Sequence[MicroBatch], divisor: int, factor: float) -> list[MicroBatchLoss]:
        losses = []
        for number, part in enumerate(parts):
            with data.micro_batch(self.root, self.mesh, last=number == len(parts) - 1):
                loss = MicroBatchLoss(*self.root(*part.to(self.device.torch_device)))
                torch.autograd.backward(loss.total / divisor * factor)
            losses.append(loss.detached())
        reduce_partial_gradients(self.model)
        return losses

    def score(self, part: MicroBatch) -> Scores:
        root = self.root.module if isinstance(self.root, DistributedDataParallel) else self.root
        scores = root(*part.to(self.device.torch_device), scored=True)
        data.reshard(root)
        return _whole_sequences(self.mesh, scores)


class Pipelined:
    """The model's blocks are divided among pipeline stages."""

    def __init__(self, pipeline: Pipeline, mesh: ProcessMesh, device: Device) -> None:
        self.pipeline, self.mesh, self.device = pipeline, mesh, device

    def accumulate(self, parts: Sequence[MicroBatch], divisor: int, factor: float) -> list[MicroBatchLoss]:
        starts = [part.starts_BT for part in parts if part.starts_BT is not None]
        keys = [part.dropout_B for part in parts if part.dropout_B is not None]
        batch = MicroBatch(
            torch.cat([part.inputs_BT for part in parts]),
            torch.cat([part.targets_BS for part in parts]),
            torch.cat(starts) if starts else None,
            torch.cat(keys) if keys else None,
        )
        losses = self.pipeline.accumulate(
            *batch.to(self.device.torch_device), micro_batches=len(parts), divisor=divisor, factor=factor,
            tokens=self._tokens(batch),
        )  # fmt: skip
        reduce_partial_gradients(self.pipeline.model)
        return losses

    def score(self, part: MicroBatch) -> Scores:
        scores = self.pipeline.score(*part.to(self.device.torch_device)[:3], self._tokens(part))
        whole = None
        if scores is not None:  # by the CPU: a pickled GPU tensor would come out on the sender's device
            whole = [None if one is None else one.cpu() for one in _whole_sequences(self.mesh, scores)]
        nats_BS, predicted_BS = self.mesh.broadcast_from_loss_stage(whole)
        place = self.device.torch_device
        return nats_BS.to(place), None if predicted_BS is None else predicted_BS.to(place)

    def _tokens(self, part: MicroBatch) -> int:
        """Tokens of a sequence in this process's hidden states."""
        return part.inputs_BT.shape[1] // self.mesh.size("context") // self.mesh.size("tensor")


def _whole_sequences(mesh: ProcessMesh, scores: Scores) -> Scores:
    nats_BS, predicted_BS = scores
    return gather_sequences(mesh, nats_BS), None if predicted_BS is None else gather_sequences(mesh, predicted_BS)


def runs_two_at_a_time(micro_batches: int, place: torch.device, compiled: bool) -> bool:
    """Whether micro-batches run two at a time: eagerly on a CPU, with enough threads and micro-batches."""
    enough = micro_batches >= NUM_WORKERS and torch.get_num_threads() >= NUM_WORKERS
    return place.type == "cpu" and not compiled and enough


def concurrent_micro_batches(train: Train, sequence_length: int, place: torch.device, compiled: bool) -> int:
    """How many micro-batches are computed at a time."""
    batch, micro = train.global_batch_tokens, train.micro_batch
    assert batch is not None and micro is not None, "the recipe is resolved"
    return NUM_WORKERS if runs_two_at_a_time(batch // sequence_length // micro, place, compiled) else 1


def accumulate(
    losses: Sequence[Callable[[], MicroBatchLoss]], parameters: Sequence[Tensor], divisor: int, factor: float = 1.0, *,
    two_at_a_time: bool,
) -> list[MicroBatchLoss]:  # fmt: skip
    """Put the gradient of sum(losses) / divisor * factor into the parameters' `.grad`, which must be None before.

    losses: one function for each micro-batch; they must not draw from torch's random numbers when two run at a time.
    Returns each loss, detached. Gradients are added in the order of the losses either way, so that the same number of
    threads gives the same bits.
    """
    if not two_at_a_time:
        return _one_by_one(losses, divisor, factor)
    threads = max(torch.get_num_threads() // NUM_WORKERS, 1)
    if torch.autograd._profiler_enabled():  # the profiler sees one thread; one by one gives the same bits
        with _num_threads(threads):
            return _one_by_one(losses, divisor, factor)
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def gradients(compute: Callable[[], MicroBatchLoss]) -> tuple[tuple[Tensor | None, ...], MicroBatchLoss]:
        loss = compute()
        return torch.autograd.grad(loss.total / divisor * factor, trained, allow_unused=True), loss.detached()

    # At most NUM_WORKERS sets of gradients exist at a time, besides the sum.
    pool = _pool(threads)
    pending: list[Future[tuple[tuple[Tensor | None, ...], MicroBatchLoss]]] = []
    rest, results = list(losses), []
    while rest or pending:
        while rest and len(pending) < NUM_WORKERS:
            pending.append(pool.submit(gradients, rest.pop(0)))
        parts, loss = pending.pop(0).result()
        if rest:
            pending.append(pool.submit(gradients, rest.pop(0)))
        _add(trained, parts)
        del parts
        results.append(loss)
    return results


def _one_by_one(losses: Sequence[Callable[[], MicroBatchLoss]], divisor: int, factor: float) -> list[MicroBatchLoss]:
    results = []
    for compute in losses:
        loss = compute()
        torch.autograd.backward(loss.total / divisor * factor)
        results.append(loss.detached())
    return results


@contextmanager
def _num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _add(parameters: list[Tensor], gradients: tuple[Tensor | None, ...]) -> None:
    sums, summands = [], []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            sums.append(parameter.grad)
            summands.append(gradient)
    if sums:
        torch._foreach_add_(sums, summands)


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Workers whose operations use `threads` threads each; torch keeps that number by thread."""
    return ThreadPoolExecutor(NUM_WORKERS, "micro-batch", initializer=torch.set_num_threads, initargs=(threads,))
