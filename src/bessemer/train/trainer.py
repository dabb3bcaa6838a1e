"""A training step: forward and backward over the micro-batches, the global gradient norm, clipping, the update.

It waits neither for the device nor for another host: counts, sums and the decision to skip the update stay on the device.
`Trainer.read` copies the numbers of several steps to the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bessemer.common.hashing import key_of
from bessemer.distributed.context import MicroBatchLoss
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh
from bessemer.distributed.sharded_tensors import clip_gradients, local, sum_of_squares
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.guard.detection import SpikeLimits
from bessemer.model import mixture_of_experts as experts
from bessemer.model.dropout import sequence_keys
from bessemer.model.transformer import Transformer
from bessemer.recipe import ResolvedRecipe
from bessemer.tokens.loader import Batch
from bessemer.train import optimizer as optimizers
from bessemer.train import precision as precisions
from bessemer.train import recompute
from bessemer.train.device import Device
from bessemer.train.engine import MicroBatch
from bessemer.train.parallelize import Weights, parallelize, require_trainable, weights_of
from bessemer.train.precision import LossScale, next_scale
from bessemer.train.schedule import learning_rate_share
from bessemer.train.task import task_of


@dataclass(frozen=True)
class StepStats:
    """The statistics of a step before its update.

    Attributes:
        loss: The mean cross-entropy over the global batch, in nats per target.
        objective_loss: The minimised loss per target.
        grad_norm: The global gradient norm before clipping.
        nats: The sum of the cross-entropy by source.
        targets: The number of targets by source.
        load: The load of experts in the global batch as `mixture_of_experts.read_load` returns it, still on the device.
        accuracy: The accuracy of a classifier.
        scale: The loss scale of the next step.
        overflow: True if the loss scale was too large, so that the step is dropped.
        gated: The number of targets that the gate removed.
    """

    loss: float
    objective_loss: float
    grad_norm: float
    nats: list[float]
    targets: list[int]
    load: Tensor = field(compare=False)
    accuracy: float | None = None
    scale: LossScale = field(default_factory=LossScale)
    overflow: bool = False
    gated: int = 0


@dataclass(frozen=True)
class DeviceStats:
    """The statistics of a step on the device, which may still compute them; equal on every process.

    Attributes:
        loss: As in StepStats, a float64 scalar.
        objective_loss: As in StepStats, a float64 scalar.
        grad_norm: As in StepStats, a float64 scalar.
        nats: As in StepStats, (sources,).
        targets: As in StepStats, (sources,).
        scored: The number of correct and of all predictions of a classifier, (2,).
        gated: As in StepStats.
        scale: The fields of the LossScale of the next step, (3,).
        overflow: As in StepStats.
        load: As in StepStats.
    """

    loss: Tensor
    objective_loss: Tensor
    grad_norm: Tensor
    nats: Tensor
    targets: Tensor
    scored: Tensor
    gated: Tensor
    scale: Tensor
    overflow: Tensor
    load: Tensor

    def skip_flag(self, limits: SpikeLimits | None = None) -> Tensor:
        """Return 1 if the update must not reach the weights, else 0, as a float32 scalar.

        It is 1 if loss or norm is not finite, or both exceed the limits.
        """
        is_bad = ~(self.loss.isfinite() & self.grad_norm.isfinite())
        if limits is not None:
            is_bad |= (self.loss > limits.loss) & (self.grad_norm > limits.grad_norm)
        return is_bad.float()

    @property
    def row(self) -> Tensor:
        """All statistics except the load as one float64 vector for `host_stats`, (10 + 2 sources,)."""
        scalars = self.loss, self.objective_loss, self.grad_norm, self.gated, self.overflow
        parts = *scalars, self.scored, self.scale, self.nats, self.targets
        return torch.cat([part.double().view(-1) for part in parts])


def host_stats(row: list[float], load: Tensor) -> StepStats:
    """Return the statistics in a `DeviceStats.row` that was copied to the host, with the load on the device."""
    (loss, objective, norm, gated, overflow, correct, num_scored, value, good, skipped), by_source = row[:10], row[10:]
    num_sources = len(by_source) // 2
    return StepStats(
        loss, objective, norm, by_source[:num_sources], [int(count) for count in by_source[num_sources:]], load,
        correct / num_scored if num_scored else None, LossScale(value, int(good), int(skipped)), bool(overflow), int(gated),
    )  # fmt: skip


class Trainer:
    """The model with its engine and optimizer, and the two halves of a training step."""

    def __init__(
        self, recipe: ResolvedRecipe, model: Transformer, device: Device, end_of_text: int, num_sources: int,
        mesh: ProcessMesh = SINGLE_PROCESS, weights: Weights | None = None, recomputed: int | None = None,
    ) -> None:  # fmt: skip
        """Divide the model over the mesh and build its optimizer.

        Args:
            recipe: The resolved recipe.
            model: The initialised model; with several processes, a shell that `weights` initialises.
            device: The device of this process.
            end_of_text: The id of the token between documents.
            num_sources: The number of sources, for the sums by source.
            mesh: The mesh of processes.
            weights: The weights with several processes; None takes those of the model.
            recomputed: The number of recomputed blocks, as planned before the model was allocated; None computes it from the
                recipe.
        """
        self.settings, self.device, self.mesh = recipe.train, device, mesh
        self.end_of_text, self.num_sources = end_of_text, num_sources
        config = model.config
        if device.precision.fp8 is not None:
            precisions.require_fp8(config, recipe.parallel, recipe.train.micro_batch)
        precisions.apply_flags(device.precision)
        self.task = task_of(recipe.train, recipe.tokens.document_mask, config, end_of_text)
        if recomputed is None:
            recomputed = recompute.blocks_recomputed(recipe.train, recipe.parallel, config, device)
        self.recomputed = recomputed
        require_trainable(recipe.train, recipe.parallel, config, device.torch_device.type)
        weights = weights or weights_of(model)
        self.model, self.engine = parallelize(recipe.train, model, mesh, self.task, device, recomputed, weights)
        self.optimizer = optimizers.build(self.model, recipe.train.optimizer, device.precision.update_dtype)
        self.dropout_key = key_of("dropout", recipe.run.seed)
        self.average = optimizers.WeightAverage(self.model, recipe.train.ema) if recipe.train.ema else None
        self._copying = torch.cuda.Stream(device.torch_device) if device.is_cuda else None  # type: ignore[no-untyped-call]

    def forward_backward(self, batch: Batch, scale: Tensor | None = None) -> DeviceStats:
        """Accumulate the gradients of the global batch's mean loss over its micro-batches, without waiting for the device.

        The sum of the losses is divided by the valid targets of the global batch, not of a micro-batch or a rank, so that the
        gradient does not depend on how the batch is divided.

        Args:
            batch: The batch of this data-parallel rank.
            scale: The loss scale in fp16 (`LossScale.to_tensor`); None for the initial scale.
        """
        device = self.device.torch_device
        counts = self._counts(batch)
        targets, gated = counts[:-1], counts[-1]
        num_targets = targets.sum().clamp(min=1)
        scale = LossScale().to_tensor(device) if scale is None else scale
        factor = scale[0].float() if self.device.precision.scaled else torch.ones((), device=device)
        self._zero_gradients()
        experts.start_step(self.model, factor / num_targets)
        losses = self.engine.accumulate(self._micro_batches(batch), num_targets, factor)
        if self.device.precision.scaled and (gradients := [local(gradient) for gradient in self._gradients()]):
            torch._foreach_mul_(gradients, (1.0 / factor).to(gradients[0].device))  # exact, for a power of two
        norm, sums, load = self._sums(batch, losses)
        experts.set_load(self.model, load)
        sums[1] += load[:, -1].sum()
        loss, objective = sums[:2] / num_targets
        overflow = torch.zeros_like(loss)
        if self.device.precision.scaled:
            scale, overflow = next_scale(scale, loss, norm)
        return DeviceStats(loss, objective, norm, sums[4:], targets, sums[2:4], gated, scale, overflow, load)

    def _counts(self, batch: Batch) -> Tensor:
        """Count the targets of the global batch by source, and last those that the gate removed, (sources + 1,). Collective."""
        targets_BS, source_B = torch.from_numpy(batch.targets), torch.from_numpy(batch.source)
        counts = torch.zeros(self.num_sources + 1, dtype=torch.int64)
        if self.mesh.leads_data:
            counts.index_add_(0, source_B, (targets_BS >= 0).sum(dim=1))
            counts[-1] = sum(segment.tokens for segment in batch.ignored)
        return self.mesh.sum_on_device(self.device.send(counts))

    def _sums(self, batch: Batch, losses: list[MicroBatchLoss]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the global gradient norm, a vector of sums over all processes, (4 + sources,), and the load of experts.

        The sums are of nats, of the minimised loss, of correct and of all scored predictions, and of nats by source. The load
        has a row for each layer with experts: the tokens of each expert, and last the sum of the auxiliary loss.
        """
        device, is_loss_rank = self.device.torch_device, float(self.mesh.is_loss_rank)
        none = torch.zeros(0, dtype=torch.float64, device=device)
        nats_B = torch.cat([none, *(loss.nats_B.double() for loss in losses)])
        correct_B = torch.cat([none, *(loss.correct_B.double() for loss in losses if loss.correct_B is not None)])
        nats = torch.zeros(self.num_sources, dtype=torch.float64, device=device)
        if len(nats_B):
            nats.index_add_(0, self.device.send(torch.from_numpy(batch.source)), nats_B)
        totals = torch.cat([none, *(loss.total.double()[None] for loss in losses)])
        scored = torch.stack([correct_B.sum(), torch.full_like(nats_B.sum(), len(correct_B))])
        sums = is_loss_rank * torch.cat([nats_B.sum()[None], totals.sum()[None], scored, nats])
        load = experts.read_load(self.model, device)
        sums = torch.cat([sums, load.flatten()])
        if self.mesh.is_single:
            norm = nn.utils.get_total_norm(self._gradients()).double()
        else:
            pairs = [(p, p.grad) for _, p in owned_parameters(self.model) if p.grad is not None]
            square = sum_of_squares(pairs, self.mesh).to(device)  # for this process's part of the gradient
            sums = self.mesh.sum_on_device(torch.cat([square[None], sums]))
            norm, sums = sums[0].sqrt(), sums[1:]
        sums, load_N = torch.split(sums, [len(sums) - load.numel(), load.numel()])
        return norm, sums, load_N.view(load.shape)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        dropout_B = None
        if self.settings.dropout.is_on:
            dropout_B = sequence_keys(self.dropout_key, torch.from_numpy(batch.samples))
        whole = MicroBatch.from_batch(batch, dropout_B)
        if self._copying is not None:
            whole = whole.copy_ahead(self.device.torch_device, self._copying)
        return whole.split(self.settings.micro_batch)

    def _zero_gradients(self) -> None:
        # DDP keeps buckets for all gradients. Gradients set to None would be allocated in addition to them.
        self.optimizer.zero_grad(set_to_none=not self.mesh.layout.uses_ddp)

    def update(self, step: int, grad_norm: Tensor, factor: float = 1.0, skip: Tensor | None = None) -> float:
        """Clip to the global norm and take optimizer step `step` (0-based). Returns the learning rate.

        Args:
            step: The number of the update (0-based).
            grad_norm: The global gradient norm.
            factor: A factor on the scheduled learning rate.
            skip: A scalar on the device; 1 leaves weights and states unchanged. The host need not know its value.
        """
        config, steps = self.settings.optimizer, self.settings.steps
        rate = config.learning_rate * learning_rate_share(self.settings.schedule, step, steps) * factor
        optimizers.set_learning_rate(self.optimizer, rate)
        clip_gradients(self.model.parameters(), config.clip_norm, grad_norm)
        skip = torch.zeros_like(grad_norm, dtype=torch.float32) if skip is None else skip
        self.optimizer.step(skip, step)
        experts.update_biases(self.model, skip)
        self._zero_gradients()  # to free memory for a validation or a save
        if self.average is not None:
            self.average.update(step, skip)
        return rate

    def read(self, stats: Sequence[DeviceStats]) -> list[StepStats]:
        """Wait for the device, and return the statistics of several steps on the host, those of rank 0 on every process.

        All ranks must call it.
        """
        rows = self.device.read(torch.stack([one.row for one in stats])).tolist()
        return [host_stats(row, one.load) for row, one in zip(self.mesh.broadcast(rows), stats, strict=True)]

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the model has the moving average of its weights, if the recipe has one."""
        return contextlib.nullcontext() if self.average is None else self.average.swap_in()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which matmuls run in the recipe's precision."""
        return precisions.autocast(self.device.precision, self.device.torch_device)

    def eager(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which blocks are not compiled, for shapes that differ from those of a step."""
        return torch.compiler.set_stance("force_eager") if self.device.compile else contextlib.nullcontext()

    def hidden(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """Return the hidden states of a batch on the device, (B, T, D)."""
        hidden_BTD: Tensor = self.model(inputs_BT, self.task.documents(inputs_BT, starts_BT))
        return hidden_BTD
