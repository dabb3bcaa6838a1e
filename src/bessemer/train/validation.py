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
    """Score held-out sequences in a fixed order, each by one part of the team. End-of-text tokens count neither as loss nor
    as bytes. Every process of the team calls it and gets the scores of all."""
    labels, team, scored = step.model.config.labels, step.team, False
    totals, right = np.zeros(len(parts)), np.zeros(len(parts), dtype=np.int64)
    confusion = np.zeros((labels, labels), dtype=np.int64)
    batch = step.settings.micro_batch or 1  # so that a validation never needs more memory than a step
    for number, part in enumerate(parts):
        inputs, wanted = part.inputs, part.wanted
        for start in range(0, len(inputs), batch * team.layout.data):
            first = start + batch * team.data_rank
            rows = slice(first, first + batch)
            mine = wanted[rows]
            if not len(
                mine
            ):  # nothing is left for this part of the team, but the others need its hand in their collectives
                rows, mine = slice(0, 1), np.full_like(wanted[:1], -1)
            inputs_BT, targets_BS = torch.from_numpy(inputs[rows]), torch.from_numpy(mine)
            starts_BT = None if part.starts is None else torch.from_numpy(part.starts[rows])
            nats_BS, predicted_BS = step.engine.score(MicroBatch(inputs_BT, targets_BS, starts_BT))
            totals[number] += float(nats_BS.double().sum())
            if predicted_BS is not None:
                scored = True
                right[number] += int(((predicted_BS.cpu() == targets_BS) & (targets_BS >= 0)).sum())
            if labels and predicted_BS is not None:
                texts = mine[:, 0] >= 0
                np.add.at(confusion, (mine[texts, 0], predicted_BS[:, 0].cpu().numpy()[texts]), 1)
            advance(int(part.valid[start : start + batch * team.layout.data].sum()))
    names = [part.source for part in parts]
    totals, right, confusion = (team.sum_of_parts(torch.from_numpy(x)).numpy() for x in (totals, right, confusion))
    nats = dict(zip(names, totals.tolist(), strict=True))
    correct = dict(zip(names, right.tolist(), strict=True)) if scored else {}
    counted = {part.source: int(part.valid.sum()) for part in parts}
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
