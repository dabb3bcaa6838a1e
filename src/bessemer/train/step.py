"""One training step: forward and backward over the micro-batches, the global gradient norm, clipping, the update."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bessemer.model.attention import Documents
from bessemer.model.dropout import sequence_keys
from bessemer.model.transformer import Transformer
from bessemer.parallel import data
from bessemer.parallel.local import local
from bessemer.parallel.numbers import clip, squares
from bessemer.parallel.team import ALONE, Team
from bessemer.parallel.tied import owned_parameters
from bessemer.recipe import Batches, Recipe
from bessemer.tokens.loader import Batch
from bessemer.tokens.order import key_of
from bessemer.train import fp8, recompute, split
from bessemer.train import optimizer as optimizers
from bessemer.train import precision as precisions
from bessemer.train.device import Device
from bessemer.train.ema import WeightAverage
from bessemer.train.engine import Engine, MicroBatch, ModelWithLoss, OneProcess
from bessemer.train.precision import FIRST_SCALE, LossScale
from bessemer.train.schedule import batch_factor, learning_rate_share
from bessemer.train.split import Weights
from bessemer.train.task import task_of


@dataclass(frozen=True)
class Gradients:
    """What a step found before its update. loss: nats a target over the global batch; grad_norm: before clipping;
    nats, targets: sums by source; accuracy: share of the targets predicted right, for a classifier; scale: the loss
    scale of the next step; overflow: the scale was too large for this step, which is then given up through no fault of
    the run."""

    loss: float
    grad_norm: float
    nats: list[float]
    targets: list[int]
    accuracy: float | None = None
    scale: LossScale = FIRST_SCALE
    overflow: bool = False


class TrainStep:
    """The model, its optimizer, and how a batch moves them."""

    def __init__(
        self, recipe: Recipe, model: Transformer, device: Device, end_of_text: int, num_sources: int,
        team: Team = ALONE, weights: Weights | None = None, recomputed: int | None = None,
    ) -> None:  # fmt: skip
        """model: with its values; for a team, what `weights` gives takes their place, and the model may be a shell. recomputed:
        blocks, as planned before the model took memory; None: what the recipe asks for, counted now."""
        self.settings, self.device, self.team = recipe.train, device, team
        self.end_of_text, self.num_sources = end_of_text, num_sources
        config = model.config
        if device.arithmetic.fp8 is not None:
            fp8.check(config, recipe.train.micro_batch or 1)
        precisions.apply_flags(device.arithmetic)
        self.batches = Batches.of(recipe)
        self.task = task_of(recipe, config, end_of_text)
        self.recomputed = recompute.blocks_recomputed(recipe, config, device) if recomputed is None else recomputed
        self.engine: Engine
        if team.is_alone:
            wide = model.double() if device.arithmetic.weights == torch.float64 else model
            self.model = wide.to(device.place)
            self.task.prepare(self.model)
            self.model.use_linear(precisions.product_of(device.arithmetic))
            recompute.apply(self.model, recipe.train.recompute, self.recomputed)
            if device.compile:
                for block in self.model.blocks:
                    block.compile()
            self.engine = OneProcess(ModelWithLoss(self.model, self.task, device, recipe.train.dropout))
        else:
            given = weights or split.weights_of(model)
            self.model, self.engine = split.build(recipe, config, team, self.task, device, self.recomputed, given)
        self.optimizer = optimizers.build(self.model, recipe.train.optimizer)
        self.dropout_key = key_of("dropout", recipe.run.seed)
        self.average = WeightAverage(self.model, recipe.train.ema) if recipe.train.ema else None

    def gradients(self, batch: Batch, scale: LossScale = FIRST_SCALE) -> Gradients:
        """Accumulate the gradients of the global batch's mean loss over its micro-batches.

        scale: factor of the loss on its way back, in a precision that has one.

        The sum of the losses is divided by the valid targets of the whole batch, never of a micro-batch or of a process's
        part, so the gradient does not depend on how the batch is cut.
        """
        targets_BS = torch.from_numpy(batch.wanted)
        source, counted = torch.from_numpy(batch.source), (targets_BS >= 0).sum(dim=1)
        targets = torch.zeros(self.num_sources, dtype=torch.int64).index_add_(0, source, counted)
        targets = self.team.sum_of_parts(targets)
        valid = max(int(targets.sum()), 1)
        factor = scale.value if self.device.arithmetic.scaled else 1.0
        # DDP keeps memory for all gradients; without it before the last micro-batch they would lie in memory of their own too.
        self.optimizer.zero_grad(set_to_none=not data.uses_ddp(self.team))
        done = self.engine.accumulate(self._micro_batches(batch), valid, factor)
        nats = torch.zeros(self.num_sources, dtype=torch.float64)
        total, correct, scored = 0.0, 0.0, 0
        if done:
            by_sequence = torch.cat([loss.nats_B for loss in done]).double().cpu()
            nats.index_add_(0, source, by_sequence)
            total = float(by_sequence.sum())
            correct_B = [loss.correct_B for loss in done if loss.correct_B is not None]
            correct, scored = float(sum(part.double().sum() for part in correct_B)), sum(map(len, correct_B))
        found = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.device.arithmetic.scaled:
            torch._foreach_mul_(
                [local(gradient) for gradient in found], 1.0 / factor
            )  # a power of two: nothing is rounded
        if self.team.is_alone:
            norm = float(nn.utils.get_total_norm(found))
        else:
            tells = 1.0 if self.team.tells else 0.0
            pairs = [(p, p.grad) for _, p in owned_parameters(self.model) if p.grad is not None]
            told = torch.tensor([total, correct, scored], dtype=torch.float64)
            square = torch.tensor([squares(pairs, self.team)], dtype=torch.float64)
            summed = self.team.sum(torch.cat([square, tells * told, tells * nats]))
            norm, total, correct, scored = math.sqrt(summed[0]), float(summed[1]), float(summed[2]), int(summed[3])
            nats = summed[4:]
        mean = total / valid
        accuracy = correct / scored if scored else None
        overflow = False
        if self.device.arithmetic.scaled and math.isfinite(mean):
            overflow = scale.can_fall and not math.isfinite(norm)
            scale = scale.after(math.isfinite(norm))
        return Gradients(mean, norm, nats.tolist(), targets.tolist(), accuracy, scale, overflow)

    def _micro_batches(self, batch: Batch) -> list[MicroBatch]:
        dropout_B = None
        if self.settings.dropout.is_on:
            samples_B = torch.from_numpy(batch.samples(self.team.data_rank, self.team.layout.data))
            dropout_B = sequence_keys(self.dropout_key, samples_B)
        starts_BT = None if batch.starts is None else torch.from_numpy(batch.starts)
        whole = MicroBatch(torch.from_numpy(batch.inputs), torch.from_numpy(batch.wanted), starts_BT, dropout_B)
        return whole.split(self.settings.micro_batch or len(whole.inputs_BT))

    def update(self, step: int, grad_norm: float) -> float:
        """Clip to the global norm and take the optimizer step number `step` (0-based). Returns the learning rate."""
        peak = self.settings.optimizer.learning_rate
        assert peak is not None, "the recipe is resolved"
        rate = peak * learning_rate_share(self.settings.schedule, step, self.settings.steps_at(step))
        rate *= batch_factor(self.settings.optimizer, self.batches.tokens(step))
        optimizers.set_learning_rate(self.optimizer, rate)
        if self.team.is_alone:
            largest = torch.tensor(grad_norm, device=self.device.place, dtype=self.device.arithmetic.weights)
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.settings.optimizer.clip_norm, largest)
        else:
            clip(self.model.parameters(), self.settings.optimizer.clip_norm, grad_norm)
        self.optimizer.step()
        # Their memory is for what may follow before the next step: a validation, a save.
        self.optimizer.zero_grad(set_to_none=not data.uses_ddp(self.team))
        if self.average is not None:
            self.average.update(step)
        return rate

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model computes with the weights it is judged by: their moving average, if the recipe has one."""
        return contextlib.nullcontext() if self.average is None else self.average.in_place()

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Matrix products in the asked precision; nothing to do in fp32."""
        return precisions.autocast(self.device.arithmetic, self.device.place)

    def documents(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Documents | None:
        """What attention stays inside of, in a batch. starts_BT: where pieces of packed documents begin."""
        return self.task.documents(inputs_BT, starts_BT)

    def hidden(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """Hidden states of a batch on the device, (B, T, D)."""
        hidden_BTD: Tensor = self.model(inputs_BT, self.documents(inputs_BT, starts_BT))
        return hidden_BTD
