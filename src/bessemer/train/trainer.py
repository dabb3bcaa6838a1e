"""A training step: forward and backward over the micro-batches, the global gradient norm, clipping, the update."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer.hashing import key_of
from bessemer.model.dropout import sequence_keys
from bessemer.model.transformer import Transformer
from bessemer.parallel.context import MicroBatchLoss
from bessemer.parallel.dtensors import clip_gradients, local, sum_of_squares
from bessemer.parallel.mesh import SINGLE_PROCESS, ProcessMesh
from bessemer.parallel.tied import owned_parameters
from bessemer.recipe import Recipe
from bessemer.tokens.loader import Batch
from bessemer.train import optimizer as optimizers
from bessemer.train import precision as precisions
from bessemer.train import recompute, split
from bessemer.train.device import Device
from bessemer.train.engine import MicroBatch
from bessemer.train.learning_rate import batch_factor, learning_rate_share
from bessemer.train.optimizer.qk_clip import QkClip
from bessemer.train.precision import FIRST_SCALE, LossScale
from bessemer.train.split import Weights
from bessemer.train.task import task_of


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


class Trainer:
    """The model with its engine and optimizer, and the two halves of a training step."""

    def __init__(
        self, recipe: Recipe, model: Transformer, device: Device, end_of_text: int, num_sources: int,
        mesh: ProcessMesh = SINGLE_PROCESS, weights: Weights | None = None, recomputed: int | None = None,
    ) -> None:  # fmt: skip
        """model: initialised, or with several processes a shell that `weights` initialises; recomputed: number of blocks, as
        planned before the model was allocated; None: computed now from the recipe."""
        self.settings, self.device, self.mesh = recipe.train, device, mesh
        self.end_of_text, self.num_sources = end_of_text, num_sources
        config = model.config
        if device.precision.fp8 is not None:
            precisions.require_fp8(config, recipe.parallel, recipe.train.micro_batch or 1)
        precisions.apply_flags(device.precision)
        self.batches = recipe.batches
        self.task = task_of(recipe.train, recipe.tokens.document_mask, config, end_of_text)
        if recomputed is None:
            recomputed = recompute.blocks_recomputed(recipe.train, recipe.parallel, config, device)
        self.recomputed = recomputed
        tau = recipe.train.optimizer.qk_clip
        self.qk_clip = None if tau is None else QkClip(config, tau, mesh, device.compile)
        if not mesh.is_single:
            split.require_trainable(recipe.train, recipe.parallel, config, device.torch_device)
            weights = weights or split.weights_of(model)
        self.model, self.engine = split.build(
            recipe.train, model, mesh, self.task, device, recomputed, weights, clip=self.qk_clip
        )
        self.optimizer = optimizers.build(self.model, recipe.train.optimizer)
        self.dropout_key = key_of("dropout", recipe.run.seed)
        self.average = optimizers.WeightAverage(self.model, recipe.train.ema) if recipe.train.ema else None

    def forward_backward(self, batch: Batch, scale: LossScale = FIRST_SCALE) -> StepStats:
        """Accumulate the gradients of the global batch's mean loss over its micro-batches. scale: of the loss, in fp16.

        The sum of the losses is divided by the valid targets of the global batch, not of a micro-batch or a rank, so that the
        gradient does not depend on how the batch is divided.
        """
        targets_BS, source_B = torch.from_numpy(batch.targets), torch.from_numpy(batch.source)
        counts = torch.zeros(self.num_sources + 1, dtype=torch.int64)
        counts.index_add_(0, source_B, (targets_BS >= 0).sum(dim=1))
        counts[-1] = sum(piece.tokens for piece in batch.gated)
        *counted, gated = self.mesh.sum_over_data(counts).tolist()
        num_targets = max(sum(counted), 1)
        scaled = self.device.precision.scaled
        factor = scale.value if scaled else 1.0
        self._zero_gradients()
        with contextlib.nullcontext() if self.qk_clip is None else self.qk_clip.recording():
            losses = self.engine.accumulate(self._micro_batches(batch), num_targets, factor)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if scaled:  # by a power of two, which is exact
            torch._foreach_mul_([local(gradient) for gradient in gradients], 1.0 / factor)
        if self.mesh.is_single:
            sums, norm = self._loss_sums(losses, source_B, nn.utils.get_total_norm(gradients))
        else:
            sums, _ = self._loss_sums(losses, source_B)
            pairs = [(p, p.grad) for _, p in owned_parameters(self.model) if p.grad is not None]
            square = torch.tensor([sum_of_squares(pairs, self.mesh)], dtype=torch.float64)
            reduced = self.mesh.sum(torch.cat([square, float(self.mesh.is_loss_rank) * sums]))
            norm, sums = math.sqrt(reduced[0]), reduced[1:]
        total, correct, num_scored = float(sums[0]), float(sums[1]), int(sums[2])
        loss, overflow = total / num_targets, False
        if scaled and math.isfinite(loss):
            overflow = scale.can_fall and not math.isfinite(norm)
            scale = scale.after(math.isfinite(norm))
        accuracy = correct / num_scored if num_scored else None
        return StepStats(loss, norm, sums[3:].tolist(), counted, accuracy, scale, overflow, gated)

    def _loss_sums(
        self, losses: list[MicroBatchLoss], source_B: Tensor, norm: Tensor | None = None
    ) -> tuple[Tensor, float]:
        """Of this process's micro-batches: nats, correct predictions, scored targets, and nats by source, in float64; and the
        norm. They leave the device together: a GPU is waited for once a step."""
        nats = [loss.nats_B for loss in losses]
        correct = [loss.correct_B for loss in losses if loss.correct_B is not None]
        numbers = [] if norm is None else [norm.reshape(1)]
        if not (nats or numbers):
            return torch.zeros(3 + self.num_sources, dtype=torch.float64), 0.0
        host = torch.cat([x.double() for x in (*nats, *correct, *numbers)]).cpu()
        nats_B, correct_B, numbers_1 = host.split([sum(map(len, x)) for x in (nats, correct, numbers)])  # type: ignore[no-untyped-call]
        by_source = torch.zeros(self.num_sources, dtype=torch.float64)
        if nats:
            by_source.index_add_(0, source_B, nats_B)
        of_all = torch.tensor([float(nats_B.sum()), float(correct_B.sum()), len(correct_B)], dtype=torch.float64)
        return torch.cat([of_all, by_source]), float(numbers_1.sum())

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        dropout_B = None
        if self.settings.dropout.is_on:
            dropout_B = sequence_keys(self.dropout_key, torch.from_numpy(batch.samples))
        whole = MicroBatch.of(batch, dropout_B)
        if self.device.is_cuda:
            whole = whole.pinned()
        return whole.split(self.settings.micro_batch or len(batch.inputs))

    def _zero_gradients(self) -> None:
        # DDP keeps buckets for all gradients; set to None, gradients would be allocated besides them.
        self.optimizer.zero_grad(set_to_none=not self.mesh.layout.uses_ddp)

    def update(self, step: int, grad_norm: float, rate_factor: float = 1.0) -> float:
        """Clip to the global norm and take the optimizer step number `step` (0-based). Returns the learning rate, with the
        factor."""
        config = self.settings.optimizer
        assert config.learning_rate is not None, "the recipe is resolved"
        rate = config.learning_rate * learning_rate_share(self.settings.schedule, step, self.settings.steps_at(step))
        rate *= batch_factor(config, self.batches.tokens(step)) * rate_factor
        optimizers.set_learning_rate(self.optimizer, rate)
        clip_gradients(self.model.parameters(), config.clip_norm, grad_norm)
        self.optimizer.step()
        if self.qk_clip is not None:
            self.qk_clip.clip(self.model)
        self._zero_gradients()  # frees memory for a validation or a save
        if self.average is not None:
            self.average.update(step)
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
