"""One training step: forward and backward over the micro-batches, the global gradient norm, clipping, the update."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bessemer.model.attention import Documents
from bessemer.model.decoder import Decoder
from bessemer.recipe import Recipe
from bessemer.tokens.loader import Batch
from bessemer.train import optimizer as optimizers
from bessemer.train.accumulate import accumulate, concurrent
from bessemer.train.device import Device
from bessemer.train.objective import chunked_cross_entropy
from bessemer.train.schedule import learning_rate_share


@dataclass(frozen=True)
class Gradients:
    """What a step found before its update. loss: nats a token over the global batch; grad_norm: before clipping;
    nats, targets: sums by source."""

    loss: float
    grad_norm: float
    nats: list[float]
    targets: list[int]


class TrainStep:
    """The model, its optimizer, and how a batch moves them."""

    def __init__(self, recipe: Recipe, model: Decoder, device: Device, end_of_text: int, num_sources: int) -> None:
        self.settings, self.tokens, self.device = recipe.train, recipe.tokens, device
        self.end_of_text, self.num_sources = end_of_text, num_sources
        self.model = model.to(device.place)
        self.optimizer = optimizers.build(self.model, recipe.train.optimizer)
        if device.compile:
            for block in self.model.blocks:
                block.compile()

    def gradients(self, batch: Batch) -> Gradients:
        """Accumulate the gradients of the global batch's mean loss over its micro-batches.

        The sum of the losses is divided by the valid targets of the whole batch, never of a micro-batch, so the
        gradient does not depend on how the batch is cut.
        """
        tokens = torch.from_numpy(batch.tokens)
        inputs_BT, targets_BT = tokens[:, :-1], tokens[:, 1:]
        valid = int((targets_BT >= 0).sum())
        micro = self.settings.micro_batch or len(tokens)
        self.optimizer.zero_grad(set_to_none=True)
        parts = zip(torch.split(inputs_BT, micro), torch.split(targets_BT, micro), strict=True)
        losses = [partial(self._loss, *part) for part in parts]
        two = concurrent(len(losses), self.device.place, self.device.compile)
        nats_B = accumulate(losses, list(self.model.parameters()), max(valid, 1), two_at_a_time=two)
        by_sequence = torch.cat(nats_B).double().cpu()
        source = torch.from_numpy(batch.source)
        nats = torch.zeros(self.num_sources, dtype=torch.float64).index_add_(0, source, by_sequence)
        counted = (targets_BT >= 0).sum(dim=1)
        targets = torch.zeros(self.num_sources, dtype=torch.int64).index_add_(0, source, counted)
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        return Gradients(float(by_sequence.sum()) / max(valid, 1), float(norm), nats.tolist(), targets.tolist())

    def update(self, step: int, grad_norm: float) -> float:
        """Clip to the global norm and take the optimizer step number `step` (0-based). Returns the learning rate."""
        peak, steps = self.settings.optimizer.learning_rate, self.settings.steps
        assert peak is not None and steps is not None, "the recipe is resolved"
        rate = peak * learning_rate_share(self.settings.schedule, step, steps)
        optimizers.set_learning_rate(self.optimizer, rate)
        nn.utils.clip_grads_with_norm_(
            self.model.parameters(),
            self.settings.optimizer.clip_norm,
            torch.tensor(grad_norm, device=self.device.place),
        )
        self.optimizer.step()
        return rate

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Matrix products in the asked precision; nothing to do in fp32."""
        if self.device.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.place.type, dtype=self.device.dtype)

    def documents(self, inputs_BT: Tensor) -> Documents | None:
        """Where the documents of packed sequences lie, when attention has to stay inside them."""
        return Documents.of(inputs_BT, self.end_of_text) if self.tokens.document_mask else None

    def _loss(self, inputs_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Differentiable sum of the losses of a micro-batch, and each sequence's nats."""
        place = self.device.place
        inputs_BT, targets_BT = inputs_BT.to(place, non_blocking=True), targets_BT.to(place, non_blocking=True)
        with self.autocast():
            hidden_BTD = self.model(inputs_BT, self.documents(inputs_BT))
            loss = chunked_cross_entropy(
                hidden_BTD.flatten(0, 1),
                self.model.head.weight,
                targets_BT.flatten(),
                chunk=self.settings.loss_chunk,
                z_loss=self.settings.z_loss,
                label_smoothing=self.settings.label_smoothing,
            )
        return loss.total, loss.nats_N.view(targets_BT.shape).sum(dim=1)
