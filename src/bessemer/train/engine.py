"""Engines that turn the micro-batches of a step into gradients, on one process or on several.

On a CPU, two micro-batches run at a time, each with half of the threads. That is faster than one after the other with all
threads, because the operations between the large matmuls are too short to be split well. With one thread each on two cores, a
step was 8 to 13% faster, and more on a busy machine (docs/background/cpu-step.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bessemer.distributed import data
from bessemer.distributed.context import MicroBatchLoss, gather_sequences
from bessemer.distributed.mesh import ProcessMesh
from bessemer.model import casts
from bessemer.model.transformer import Transformer
from bessemer.recipe import ResolvedTrain
from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.loader import Batch
from bessemer.train.device import Device

if TYPE_CHECKING:
    from bessemer.distributed.pipeline import Pipeline

NUM_WORKERS = 2
_Gradients = tuple[Tensor | None, ...]
Scores = tuple[Tensor, Tensor | None]  # nats of each target, and the likeliest prediction if it is scored; both (B, S)


class MicroBatch(NamedTuple):
    """The inputs of one forward and backward pass.

    Attributes:
        inputs_BT: Token ids.
        targets_BS: Target ids; -1 for none. S is T, or 1 for a classifier.
        starts_BT: True where a document or the padding starts in a packed sequence; None for other packings.
        dropout_B: The key of each sequence's dropout masks (`model.dropout.sequence_keys`); None for no dropout.
    """

    inputs_BT: Tensor
    targets_BS: Tensor
    starts_BT: Tensor | None
    dropout_B: Tensor | None = None

    @classmethod
    def from_batch(cls, part: Batch | HeldOut, dropout_B: Tensor | None = None) -> MicroBatch:
        """Return all sequences of a batch or of held-out text as one micro-batch."""
        starts_BT = None if part.starts is None else torch.from_numpy(part.starts)
        return cls(torch.from_numpy(part.inputs), torch.from_numpy(part.targets), starts_BT, dropout_B)

    def split(self, rows: int) -> list[MicroBatch]:
        """Split into micro-batches of `rows` sequences, in order; the last one may have fewer."""
        columns: list[Any] = [repeat(None) if x is None else x.split(rows) for x in self]  # type: ignore[no-untyped-call]
        return [MicroBatch(*tensors) for tensors in zip(*columns, strict=False)]

    def copy_ahead(self, device: torch.device, copying: torch.cuda.Stream) -> MicroBatch:
        """Copy to a GPU from pinned memory on the stream `copying`.

        The copy overlaps with work that the GPU still computes. Work queued from now on waits for the copy.
        """
        pinned: list[Any] = [None if tensor is None else tensor.pin_memory() for tensor in self]
        computing = torch.cuda.current_stream(device)
        with torch.cuda.stream(copying):
            copies = MicroBatch(*pinned).to(device)
        computing.wait_stream(copying)
        for tensor in copies:
            if tensor is not None:
                tensor.record_stream(computing)
        return copies

    def to(self, device: torch.device) -> MicroBatch:
        copies: list[Any] = [None if tensor is None else tensor.to(device, non_blocking=True) for tensor in self]
        return MicroBatch(*copies)


class DataParallel:
    """The engine of a process that holds the whole model, or its slice by tensor and context parallelism.

    Each process computes its share of the micro-batches. A single process runs two at a time if that is faster. `root` is the
    module that is called for a loss: a ModelWithLoss, wrapped by DDP or FSDP2 if the layout requires it.
    """

    def __init__(self, model: Transformer, root: nn.Module, mesh: ProcessMesh, device: Device) -> None:
        self.model, self.root, self.mesh, self.device = model, root, mesh, device

    def accumulate(self, parts: Sequence[MicroBatch], divisor: Tensor, factor: Tensor) -> list[MicroBatchLoss]:
        """Add the gradient of sum(losses) / divisor * factor over all processes to the parameters' `.grad`.

        Returns the detached loss of each of this process's micro-batches, in order.
        """
        device = self.device
        two = self.mesh.is_single and runs_two_at_a_time(len(parts), device.torch_device, device.compile)
        losses = [partial(self._loss, part) for part in parts]
        around = partial(data.gradient_sync, self.root, self.mesh)
        # Casts can be kept on one process only: FSDP2 reuses the same memory for one weight after another.
        is_bf16 = device.precision.autocast == torch.bfloat16
        keeps = self.mesh.is_single and device.torch_device.type == "cpu" and is_bf16
        parameters = list(self.model.parameters())
        with casts.keep_casts(parameters) if keeps else nullcontext():
            results = accumulate(losses, parameters, divisor, factor, two_at_a_time=two, around=around)
        if not self.mesh.is_single:
            # This import loads DTensors, which takes half a second.
            from bessemer.distributed.tensor import reduce_partial_gradients

            reduce_partial_gradients(self.model)
        return results

    def score(self, part: MicroBatch) -> Scores:
        """Return the nats of each target, and the likeliest prediction if the task scores it (else None); both (B, S)."""
        root = self.root.module if isinstance(self.root, DistributedDataParallel) else self.root
        scores = root(*part.to(self.device.torch_device), scored=True)
        data.reshard(root)
        return _whole_sequences(self.mesh, scores)

    def _loss(self, part: MicroBatch) -> MicroBatchLoss:
        return MicroBatchLoss(*self.root(*part.to(self.device.torch_device)))


class Pipelined:
    """The engine of a process that holds some pipeline stages of a model; its methods are those of DataParallel."""

    def __init__(self, pipeline: Pipeline, mesh: ProcessMesh, device: Device) -> None:
        self.pipeline, self.mesh, self.device = pipeline, mesh, device

    def accumulate(self, parts: Sequence[MicroBatch], divisor: Tensor, factor: Tensor) -> list[MicroBatchLoss]:
        columns: list[Any] = [None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True)]
        batch = MicroBatch(*columns)
        losses = self.pipeline.accumulate(
            *batch.to(self.device.torch_device), micro_batches=len(parts), divisor=divisor, factor=factor,
            hidden_length=self._hidden_length(batch),
        )  # fmt: skip
        from bessemer.distributed.tensor import reduce_partial_gradients

        reduce_partial_gradients(self.pipeline.model)
        return losses

    def score(self, part: MicroBatch) -> Scores:
        scores = self.pipeline.score(*part.to(self.device.torch_device)[:3], self._hidden_length(part))
        whole = None
        if scores is not None:  # sent from the CPU, since a pickled GPU tensor is restored on the sender's device
            whole = [None if one is None else one.cpu() for one in _whole_sequences(self.mesh, scores)]
        nats_BS, predicted_BS = self.mesh.broadcast_from_loss_stage(whole)
        device = self.device.torch_device
        return nats_BS.to(device), None if predicted_BS is None else predicted_BS.to(device)

    def _hidden_length(self, part: MicroBatch) -> int:
        """Return the number of tokens per sequence in this process's hidden states."""
        return part.inputs_BT.shape[1] // self.mesh.size("context") // self.mesh.size("tensor")


Engine = DataParallel | Pipelined


def _whole_sequences(mesh: ProcessMesh, scores: Scores) -> Scores:
    nats_BS, predicted_BS = scores
    return gather_sequences(mesh, nats_BS), None if predicted_BS is None else gather_sequences(mesh, predicted_BS)


def runs_two_at_a_time(micro_batches: int, device: torch.device, compiled: bool) -> bool:
    """Return True if micro-batches run two at a time: eagerly on a CPU, with enough threads and micro-batches."""
    enough = micro_batches >= NUM_WORKERS and torch.get_num_threads() >= NUM_WORKERS
    return device.type == "cpu" and not compiled and enough


def concurrent_micro_batches(train: ResolvedTrain, sequence_length: int, device: torch.device, compiled: bool) -> int:
    batch, micro = train.global_batch_tokens, train.micro_batch
    return NUM_WORKERS if runs_two_at_a_time(batch // sequence_length // micro, device, compiled) else 1


def accumulate(
    losses: Sequence[Callable[[], MicroBatchLoss]], parameters: Sequence[Tensor], divisor: Tensor, factor: Tensor, *,
    two_at_a_time: bool, around: Callable[..., AbstractContextManager[Any]] = lambda last: nullcontext(),
) -> list[MicroBatchLoss]:  # fmt: skip
    """Add the gradient of sum(losses) / divisor * factor to the parameters' `.grad`, and return each loss detached.

    Gradients are added in the order of the losses in both modes, so that the same number of threads gives the same bits.

    Args:
        losses: One function per micro-batch. If two run at a time, they must not draw from torch's random numbers.
        parameters: The parameters. If two run at a time, their `.grad` must be None.
        divisor: The number of targets of the global batch.
        factor: The loss scale.
        two_at_a_time: Run two micro-batches at a time.
        around: Context of each micro-batch if one runs at a time; `last` is True for the last one.
    """
    results, threads = [], torch.get_num_threads()
    for_each = max(threads // NUM_WORKERS, 1)
    try:
        if two_at_a_time and not torch.autograd._profiler_enabled():
            torch.set_num_threads(1)  # this thread only adds; more threads would wait for the workers' cores, spinning
            return _accumulate_two(losses, parameters, divisor, factor, for_each)
        # The profiler records one thread only. Serial micro-batches with the workers' number of threads give the same bits.
        if two_at_a_time:
            torch.set_num_threads(for_each)
        for number, compute in enumerate(losses, 1):
            with around(last=number == len(losses)):
                loss = compute()
                with casts.additions() as more:
                    torch.autograd.backward(loss.total / divisor * factor)
                for add in more:
                    add()
            results.append(loss.detached())
    finally:
        if two_at_a_time:
            torch.set_num_threads(threads)
    return results


def _accumulate_two(
    losses: Sequence[Callable[[], MicroBatchLoss]], parameters: Sequence[Tensor], divisor: Tensor, factor: Tensor, threads: int
) -> list[MicroBatchLoss]:  # fmt: skip
    """Run `accumulate` with two micro-batches at a time.

    At most NUM_WORKERS + 1 sets of gradients exist in addition to the sum: one is added while the next ones are computed.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]

    def gradients(compute: Callable[[], MicroBatchLoss]) -> tuple[MicroBatchLoss, _Gradients, casts.Additions]:
        loss = compute()
        with casts.additions() as more:
            parts = torch.autograd.grad(loss.total / divisor * factor, trained, allow_unused=True)
        return loss.detached(), parts, more

    waiting, results = iter(losses), []
    pending = deque(_pool(threads).submit(gradients, compute) for compute in islice(waiting, NUM_WORKERS))
    while pending:
        loss, parts, more = pending.popleft().result()
        pending.extend(_pool(threads).submit(gradients, compute) for compute in islice(waiting, 1))
        for parameter, gradient in zip(trained, parts, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        for add in more:
            add()
        del parts, more
        results.append(loss)
    return results


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return workers whose operations use `threads` threads each; torch stores that number per thread."""
    return ThreadPoolExecutor(NUM_WORKERS, "micro-batch", initializer=torch.set_num_threads, initargs=(threads,))
