"""The loss of a micro-batch, and the interface of a training objective.

Shapes: B sequences of a micro-batch, T tokens, D width, S targets of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import Transformer


@dataclass(frozen=True)
class MicroBatchLoss:
    """total: sum of the losses over the targets of a micro-batch, differentiable until detached; nats_B: each sequence's
    sum, detached; correct_B: correctly predicted targets of each sequence, where the objective counts them."""

    total: Tensor
    nats_B: Tensor
    correct_B: Tensor | None = None

    def detached(self) -> MicroBatchLoss:
        """Without the graph of the backward pass."""
        return MicroBatchLoss(self.total.detach(), self.nats_B.detach(), self.correct_B)


class Objective(Protocol):
    """The methods of `train.task.Task` that the last stage calls."""

    def loss(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor,
        masks: DropoutMasks | None = None,
    ) -> MicroBatchLoss: ...  # fmt: skip

    def score(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor
    ) -> tuple[Tensor, Tensor | None]: ...
