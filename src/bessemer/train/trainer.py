"""A training step: forward and backward over the micro-batches, the global gradient norm, clipping, the update.

On a GPU the step waits for nothing (`Trainer.enqueue`, `update` with tensors): train/steps.py.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer.common.hashing import key_of
from bessemer.distributed.context import MicroBatchLoss
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh
from bessemer.distributed.sharded_tensors import clip_gradients, local, sum_of_squares
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.guard.detection import SpikeLimits
from bessemer.model.dropout import sequence_keys
from bessemer.model.transformer import Transformer
from bessemer.recipe import ResolvedRecipe
from bessemer.tokens.loader import Batch
from bessemer.train import optimizer as optimizers
from bessemer.train import precision as precisions
from bessemer.train import recompute
from bessemer.train.device import Device, HostCopy
from bessemer.train.engine import MicroBatch
from bessemer.train.objective import task_of
from bessemer.train.parallelize import Weights, parallelize, require_trainable, weights_of
from bessemer.train.precision import FIRST_SCALE, LossScale
from bessemer.train.schedule import batch_factor, learning_rate_share

DEFERRING = ("cuda",)  # devices that compute while the host goes on


@dataclass(frozen=True)
class StepStats:
    """Statistics of a step before its update.

    loss: nats a target over the global batch; grad_norm: before clipping; nats, targets: sums by source; accuracy: of a
    classifier; scale: the loss scale of the next step; overflow: the loss scale was too large, so that the step must be
    dropped; gated: targets that the gate took away.
    """

    loss: float
    grad_norm: float
    nats: list[float]
    targets: list[int]
    accuracy: float | None = None
    scale: LossScale = FIRST_SCALE
    overflow: bool = False
    gated: int = 0


@dataclass(frozen=True)
class DeferredStats:
    """Statistics of a step that the device still computes.

    loss, grad_norm: float64 scalars on the device; numbers: both, then nats and correct predictions by sequence of this process,
    of which there are `num_nats` of nats; source_B: source of each sequence; targets, gated: as in StepStats; is_scaled: the loss
    was scaled, as in fp16.
    """

    loss: Tensor
    grad_norm: Tensor
    numbers: HostCopy
    num_nats: int
    source_B: Tensor
    targets: list[int]
    gated: int
    mesh: ProcessMesh
    is_scaled: bool

    def skip_flag(self, limits: SpikeLimits | None) -> Tensor:
        """1 where the update must not reach the weights, since loss or norm is not finite or both exceed the limits, else 0: a
        float32 scalar on the device, as torch's optimizers take it for found_inf."""
        is_bad = ~(self.loss.isfinite() & self.grad_norm.isfinite())
        if limits is not None:
            is_bad |= (self.loss > limits.loss) & (self.grad_norm > limits.grad_norm)
        return is_bad.float()

    def read(self, scale: LossScale = FIRST_SCALE) -> StepStats:
        """Wait for the device until the step's passes are done. scale: of this step, which stays as it is except in fp16.
        Collective."""
        host = self.numbers.read()
        (loss, norm), nats_B, correct_B = host[:2].tolist(), host[2 : 2 + self.num_nats], host[2 + self.num_nats :]
        by_source = torch.zeros(len(self.targets), dtype=torch.float64)
        if len(nats_B):
            by_source.index_add_(0, self.source_B, nats_B)
        scored = torch.tensor([float(correct_B.sum()), len(correct_B)], dtype=torch.float64)
        sums = torch.cat([scored, by_source])
        correct, num_scored, *nats = self.mesh.sum(float(self.mesh.is_loss_rank) * sums).tolist()
        accuracy, overflow = correct / num_scored if num_scored else None, False
        if self.is_scaled and math.isfinite(loss):
            overflow = scale.can_fall and not math.isfinite(norm)
            scale = scale.after(math.isfinite(norm))
        return StepStats(loss, norm, nats, self.targets, accuracy, scale, overflow, self.gated)


class Trainer:
    """The model with its engine and optimizer, and the two halves of a training step."""

    def __init__(
        self, recipe: ResolvedRecipe, model: Transformer, device: Device, end_of_text: int, num_sources: int,
        mesh: ProcessMesh = SINGLE_PROCESS, weights: Weights | None = None, recomputed: int | None = None,
    ) -> None:  # fmt: skip
        """model: initialised, or with several processes a shell that `weights` initialises; recomputed: number of blocks, as
        planned before the model was allocated; None: computed now from the recipe."""
        self.settings, self.device, self.mesh = recipe.train, device, mesh
        self.end_of_text, self.num_sources = end_of_text, num_sources
        config = model.config
        if device.precision.fp8 is not None:
            precisions.require_fp8(config, recipe.parallel, recipe.train.micro_batch)
        precisions.apply_flags(device.precision)
        self.batches = recipe.batches
        self.task = task_of(recipe.train, recipe.tokens.document_mask, config, end_of_text)
        if recomputed is None:
            recomputed = recompute.blocks_recomputed(recipe.train, recipe.parallel, config, device)
        self.recomputed = recomputed
        if not mesh.is_single:
            require_trainable(recipe.train, recipe.parallel, config, device.torch_device)
            weights = weights or weights_of(model)
        self.model, self.engine = parallelize(recipe.train, model, mesh, self.task, device, recomputed, weights)
        self.optimizer = optimizers.build(self.model, recipe.train.optimizer)
        self.dropout_key = key_of("dropout", recipe.run.seed)
        self.average = optimizers.WeightAverage(self.model, recipe.train.ema) if recipe.train.ema else None
        self._copying = torch.cuda.Stream(device.torch_device) if device.is_cuda else None  # type: ignore[no-untyped-call]
        # The host chooses fp16's next loss scale, and updates what lies in its memory.
        is_on_device = not device.precision.scaled and not recipe.parallel.offload
        self.defers = device.torch_device.type in DEFERRING and is_on_device

    def forward_backward(self, batch: Batch, scale: LossScale = FIRST_SCALE) -> StepStats:
        """Accumulate the gradients of the global batch's mean loss over its micro-batches. scale: of the loss, in fp16.

        The sum of the losses is divided by the valid targets of the global batch, not of a micro-batch or a rank, so that the
        gradient does not depend on how the batch is divided.
        """
        return self.enqueue(batch, scale).read(scale)

    def enqueue(self, batch: Batch, scale: LossScale = FIRST_SCALE) -> DeferredStats:
        """As `forward_backward`, without waiting for the device."""
        *counted, gated = self._counts(batch)
        factor = scale.value if self.device.precision.scaled else 1.0
        losses = self._accumulate(batch, max(sum(counted), 1), factor)
        if factor != 1.0:  # a power of two, so that this is exact
            torch._foreach_mul_([local(gradient) for gradient in self._gradients()], 1.0 / factor)
        device = self.device.torch_device
        nats = [loss.nats_B for loss in losses]
        correct = [loss.correct_B for loss in losses if loss.correct_B is not None]
        none = torch.zeros(0, dtype=torch.float64, device=device)
        by_sequence_N, num_nats = torch.cat([none, *(x.double() for x in (*nats, *correct))]), sum(map(len, nats))
        total = by_sequence_N[:num_nats].sum()
        if self.mesh.is_single:
            norm = nn.utils.get_total_norm(self._gradients()).double()
        else:
            pairs = [(p, p.grad) for _, p in owned_parameters(self.model) if p.grad is not None]
            square = sum_of_squares(pairs, self.mesh).to(device)  # of this process's part of the gradient
            pair = torch.stack([square, float(self.mesh.is_loss_rank) * total])
            square, total = self.mesh.sum_on_device(pair).unbind()
            norm = square.sqrt()
        # A tensor: kernels multiply by the reciprocal of a number.
        loss = total / torch.full_like(total, max(sum(counted), 1))
        numbers = HostCopy(torch.cat([torch.stack([loss, norm]), by_sequence_N]))
        return DeferredStats(
            loss, norm, numbers, num_nats, torch.from_numpy(batch.source), counted, gated, self.mesh,
            self.device.precision.scaled,
        )  # fmt: skip

    def _counts(self, batch: Batch) -> list[int]:
        """Targets of the global batch by source, and those that the gate took away. Collective."""
        targets_BS, source_B = torch.from_numpy(batch.targets), torch.from_numpy(batch.source)
        counts = torch.zeros(self.num_sources + 1, dtype=torch.int64)
        counts.index_add_(0, source_B, (targets_BS >= 0).sum(dim=1))
        counts[-1] = sum(piece.tokens for piece in batch.gated)
        return self.mesh.sum_over_data(counts).tolist()

    def _accumulate(self, batch: Batch, num_targets: int, factor: float) -> list[MicroBatchLoss]:
        self._zero_gradients()
        return self.engine.accumulate(self._micro_batches(batch), num_targets, factor)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        dropout_B = None
        if self.settings.dropout.is_on:
            dropout_B = sequence_keys(self.dropout_key, torch.from_numpy(batch.samples))
        whole = MicroBatch.of(batch, dropout_B)
        if self._copying is not None:
            whole = whole.copied_ahead(self.device.torch_device, self._copying)
        return whole.split(self.settings.micro_batch)

    def _zero_gradients(self) -> None:
        # DDP keeps buckets for all gradients; set to None, gradients would be allocated besides them.
        self.optimizer.zero_grad(set_to_none=not self.mesh.layout.uses_ddp)

    def update(self, step: int, grad_norm: float | Tensor, factor: float = 1.0, skip: Tensor | None = None) -> float:
        """Clip to the global norm and take the optimizer step number `step` (0-based). skip: a scalar on the device, 1 where
        weights and states must stay as they are, which the host need not know. Returns the learning rate, with the factor."""
        config, steps = self.settings.optimizer, self.settings.steps
        rate = config.learning_rate * learning_rate_share(self.settings.schedule, step, steps)
        rate *= batch_factor(config, self.batches.tokens(step)) * factor
        optimizers.set_learning_rate(self.optimizer, rate)
        clip_gradients(self.model.parameters(), config.clip_norm, grad_norm)
        skip = torch.zeros((), device=self.device.torch_device) if skip is None else skip
        self.optimizer.step(skip)
        self._zero_gradients()  # frees memory for a validation or a save
        if self.average is not None:
            self.average.update(step, skip)
        return rate

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the model has the moving average of its weights, if the recipe has one."""
        return contextlib.nullcontext() if self.average is None else self.average.swapped_in()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Context in which matmuls run in the recipe's precision."""
        return precisions.autocast(self.device.precision, self.device.torch_device)

    def eager(self) -> contextlib.AbstractContextManager[object]:
        """Context in which blocks are not compiled, for shapes that are others than a step's, and not worth a compilation."""
        return torch.compiler.set_stance("force_eager") if self.device.compile else contextlib.nullcontext()

    def hidden(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """Hidden states of a batch on the device, (B, T, D)."""
        hidden_BTD: Tensor = self.model(inputs_BT, self.task.documents(inputs_BT, starts_BT))
        return hidden_BTD
