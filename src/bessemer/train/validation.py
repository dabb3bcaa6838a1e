"""What is scored on held-out text: the loss, and bits per byte or the accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bessemer.tokens.held_out import HeldOut
from bessemer.train.engine import MicroBatch
from bessemer.train.step import TrainStep


@dataclass(frozen=True)
class Validation:
    """loss: nats a target: of a token of text, of a hidden token, or of a text for a classifier.

    bits_per_byte: nats / ln 2 / bytes of text, which no tokenizer can flatter; None where the targets are not the whole
    text, or the tokens do not account for it. accuracy: share of the targets that are the likeliest prediction; None where
    that is not scored. confusion: (labels, labels) texts of each class by what they were taken for, for a classifier.
    """

    loss: float
    bits_per_byte: float | None
    bits_per_byte_by_source: dict[str, float]
    loss_by_source: dict[str, float]
    tokens: int
    bytes: int
    accuracy: float | None = None
    accuracy_by_source: dict[str, float] | None = None
    confusion: list[list[int]] | None = None

    @property
    def short(self) -> str:
        """The score that matters, for a line on the terminal."""
        if self.bits_per_byte is not None:
            return f"bpb {self.bits_per_byte:.3f}"
        return f"right {self.accuracy:.1%}" if self.accuracy is not None else f"loss {self.loss:.3f}"

    def scores(self) -> dict[str, Any]:
        """What the objective is scored by beside its loss, by the names of the metrics."""
        if self.bits_per_byte is not None:
            return {"bits_per_byte": self.bits_per_byte, "bits_per_byte_by_source": self.bits_per_byte_by_source}
        if self.accuracy is None:
            return {}
        return {"accuracy": self.accuracy, "accuracy_by_source": self.accuracy_by_source or {}}


@torch.no_grad()
def validate(step: TrainStep, parts: list[HeldOut], advance: Callable[..., None] = lambda amount: None) -> Validation:
    """Score held-out sequences in a fixed order. End-of-text tokens count neither as loss nor as bytes."""
    nats: dict[str, float] = {}
    counted: dict[str, int] = {}
    correct: dict[str, int] = {}
    labels = step.model.config.labels
    confusion = np.zeros((labels, labels), dtype=np.int64)
    batch = step.settings.micro_batch or 1  # so that a validation never needs more memory than a step
    for part in parts:
        inputs, wanted, total, right = part.inputs, part.wanted, 0.0, 0
        for start in range(0, len(inputs), batch):
            rows = slice(start, start + batch)
            inputs_BT, targets_BS = (torch.from_numpy(x[rows]) for x in (inputs, wanted))
            starts_BT = None if part.starts is None else torch.from_numpy(part.starts[rows])
            nats_BS, predicted_BS = step.engine.score(MicroBatch(inputs_BT, targets_BS, starts_BT))
            total += float(nats_BS.double().sum())
            if predicted_BS is not None:
                right += int(((predicted_BS.cpu() == targets_BS) & (targets_BS >= 0)).sum())
                correct[part.source] = right
            if labels and predicted_BS is not None:
                np.add.at(confusion, (wanted[rows, 0], predicted_BS[:, 0].cpu().numpy()), 1)
            advance(int(part.valid[rows].sum()))
        nats[part.source], counted[part.source] = total, int(part.valid.sum())
    bytes_of = {part.source: int(part.bytes.sum()) for part in parts}
    all_bytes, all_counted = sum(bytes_of.values()), sum(counted.values())
    bits = {name: nats[name] / math.log(2) / max(bytes_of[name], 1) for name in nats}
    is_text = step.task.counts_bytes and all_bytes > 0
    return Validation(
        loss=sum(nats.values()) / max(all_counted, 1),
        bits_per_byte=sum(nats.values()) / math.log(2) / max(all_bytes, 1) if is_text else None,
        bits_per_byte_by_source=bits if is_text else {},
        loss_by_source={name: nats[name] / max(counted[name], 1) for name in nats},
        tokens=all_counted,
        bytes=all_bytes,
        accuracy=sum(correct.values()) / max(all_counted, 1) if correct else None,
        accuracy_by_source={name: correct[name] / max(counted[name], 1) for name in correct} or None,
        confusion=confusion.tolist() if labels else None,
    )
