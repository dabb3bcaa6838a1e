"""How the micro-batches of a step become gradients: on one process, or on many that share the model or the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import Transformer
from bessemer.parallel import data
from bessemer.parallel.context import share, whole
from bessemer.parallel.pipeline import Pipeline
from bessemer.parallel.team import ALONE, Team
from bessemer.parallel.tensor import finish_gradients
from bessemer.recipe import Dropout
from bessemer.train import precision as precisions
from bessemer.train.accumulate import accumulate, concurrent
from bessemer.train.device import Device
from bessemer.train.task import Outcome, Task


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass reads, on the CPU. dropout_B: the key of each sequence's dropout masks
    (`model.dropout.sequence_keys`); None: nothing is dropped."""

    inputs_BT: Tensor
    targets_BS: Tensor
    starts_BT: Tensor | None
    dropout_B: Tensor | None = None

    def split(self, rows: int) -> list[MicroBatch]:
        """Micro-batches of so many sequences each, in order; the last one of what is left."""
        parts = [slice(first, first + rows) for first in range(0, len(self.inputs_BT), rows)]
        starts, keys = ([None if x is None else x[part] for part in parts] for x in (self.starts_BT, self.dropout_B))
        return [
            MicroBatch(self.inputs_BT[part], self.targets_BS[part], *extras)
            for part, *extras in zip(parts, starts, keys, strict=True)
        ]

    def on(self, place: torch.device) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """On the device."""
        starts, keys = (None if x is None else x.to(place, non_blocking=True) for x in (self.starts_BT, self.dropout_B))
        return self.inputs_BT.to(place, non_blocking=True), self.targets_BS.to(place, non_blocking=True), starts, keys


class Engine(Protocol):
    """Computes gradients; what it wraps around the model is its own affair."""

    def accumulate(self, parts: Sequence[MicroBatch], divisor: int, factor: float) -> list[Outcome]:
        """Put the gradient of sum(losses) / divisor * factor into the parameters' `.grad`, over all processes.

        Returns the outcome of each of this process's micro-batches, detached, in order.
        """
        ...

    def score(self, part: MicroBatch) -> tuple[Tensor, Tensor | None]:
        """Nats of each target, without extras, and what is likeliest there, where that is scored; both (B, S)."""
        ...


class ModelWithLoss(nn.Module):
    """Token ids and targets to the loss: what DDP and FSDP2 wrap, since the loss reads the head's weights too."""

    def __init__(self, model: Transformer, task: Task, device: Device, dropout: Dropout, team: Team = ALONE) -> None:
        super().__init__()
        self.model, self.task, self.device, self.dropout, self.team = model, task, device, dropout, team

    def forward(
        self, inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None, dropout_B: Tensor | None = None,
        scored: bool = False,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        """(total, nats_B, correct_B) of an Outcome, or with `scored` what Task.score gives: hooks of FSDP2 look for tensors
        in plain tuples only."""
        with precisions.autocast(self.device.arithmetic, self.device.place):
            masks = (
                None if dropout_B is None else DropoutMasks.from_sequences(self.dropout, dropout_B, inputs_BT.shape[1])
            )
            mine = share(self.team, inputs_BT, targets_BS, self.task.documents(inputs_BT, starts_BT), masks)
            hidden_BTD = self.model(mine.inputs_BS, mine.documents, masks=mine.masks)
            inputs_BT, targets_BS = mine.inputs_BS, mine.targets_BS
            if scored:
                return self.task.score(self.model, hidden_BTD, inputs_BT, targets_BS)
            found = self.task.loss(self.model, hidden_BTD, inputs_BT, targets_BS, mine.masks)
        return found.total, found.nats_B, found.correct_B


class OneProcess:
    """One after the other, or two at a time where that is faster."""

    def __init__(self, whole: ModelWithLoss) -> None:
        self.whole, self.parameters = whole, list(whole.model.parameters())

    def accumulate(self, parts: Sequence[MicroBatch], divisor: int, factor: float) -> list[Outcome]:
        device = self.whole.device
        two = concurrent(len(parts), device.place, device.compile)
        losses = [partial(self._loss, part) for part in parts]
        return accumulate(losses, self.parameters, divisor, factor, two_at_a_time=two)

    def score(self, part: MicroBatch) -> tuple[Tensor, Tensor | None]:
        nats_BS, predicted_BS = self.whole(*part.on(self.whole.device.place), scored=True)
        return nats_BS, predicted_BS

    def _loss(self, part: MicroBatch) -> Outcome:
        return Outcome(*self.whole(*part.on(self.whole.device.place)))


class DataParallel:
    """Every process has its own micro-batches, as many as the others; `root` is wrapped by DDP or FSDP2, or by neither when
    the processes only share matrices and sequences."""

    def __init__(self, model: Transformer, root: nn.Module, team: Team, device: Device) -> None:
        self.model, self.root, self.team, self.device = model, root, team, device

    def accumulate(self, parts: Sequence[MicroBatch], divisor: int, factor: float) -> list[Outcome]:
        known = []
        for number, part in enumerate(parts):
            with data.micro_batch(self.root, self.team, last=number == len(parts) - 1):
                total, nats_B, correct_B = self.root(*part.on(self.device.place))
                torch.autograd.backward(total / divisor * factor)
            known.append(Outcome(total.detach(), nats_B.detach(), correct_B))
        finish_gradients(self.model)
        return known

    def score(self, part: MicroBatch) -> tuple[Tensor, Tensor | None]:
        root = self.root.module if isinstance(self.root, DistributedDataParallel) else self.root
        nats_BS, predicted_BS = root(*part.on(self.device.place), scored=True)
        data.give_back(root)
        return _of_whole_sequences(self.team, nats_BS, predicted_BS)


class Pipelined:
    """The model's blocks lie on several processes, which pass the hidden states of many micro-batches on."""

    def __init__(self, pipeline: Pipeline, team: Team, device: Device) -> None:
        self.pipeline, self.team, self.device = pipeline, team, device

    def accumulate(self, parts: Sequence[MicroBatch], divisor: int, factor: float) -> list[Outcome]:
        starts = [part.starts_BT for part in parts if part.starts_BT is not None]
        keys = [part.dropout_B for part in parts if part.dropout_B is not None]
        batch = MicroBatch(
            torch.cat([part.inputs_BT for part in parts]),
            torch.cat([part.targets_BS for part in parts]),
            torch.cat(starts) if starts else None,
            torch.cat(keys) if keys else None,
        )
        found = self.pipeline.accumulate(
            *batch.on(self.device.place), micro_batches=len(parts), divisor=divisor, factor=factor,
            tokens=self._tokens(batch),
        )  # fmt: skip
        finish_gradients(self.pipeline.model)
        return [Outcome(one.total, one.nats_B, one.correct_B) for one in found]

    def score(self, part: MicroBatch) -> tuple[Tensor, Tensor | None]:
        found = self.pipeline.score([part.on(self.device.place)[:3]], self._tokens(part))
        scored = _of_whole_sequences(self.team, *found[0]) if found else None
        nats_BS, predicted_BS = self.team.from_last_stage(scored)
        return nats_BS, predicted_BS

    def _tokens(self, part: MicroBatch) -> int:
        """Tokens of a sequence whose hidden states this process passes on."""
        return part.inputs_BT.shape[1] // self.team.size("context") // self.team.size("tensor")


def _of_whole_sequences(team: Team, nats_BS: Tensor, predicted_BS: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores of whole sequences, from those of the tokens that are here."""
    if team.size("context") == 1:
        return nats_BS, predicted_BS
    return whole(team, nats_BS), None if predicted_BS is None else whole(team, predicted_BS)
