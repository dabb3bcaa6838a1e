"""Scores on held-out text: the loss, and bits per byte or the accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bessemer.tokens.held_out import HeldOut
from bessemer.train.engine import MicroBatch
from bessemer.train.trainer import Trainer


@dataclass(frozen=True)
class Validation:
    """loss: nats a target (a token, a hidden token, or a text for a classifier).

    bits_per_byte: nats / ln 2 / bytes of text, comparable between tokenizers; None where the targets are not the whole
    text, or the tokens do not account for it. accuracy: share of targets that are the likeliest prediction; None where
    that is not scored. confusion: (labels, labels) texts of each class by predicted class, for a classifier.
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
        """The main score, for the progress bar."""
        if self.bits_per_byte is not None:
            return f"bpb {self.bits_per_byte:.3f}"
        return f"right {self.accuracy:.1%}" if self.accuracy is not None else f"loss {self.loss:.3f}"

    def scores(self) -> dict[str, Any]:
        """The objective's scores besides the loss, by the names of the metrics."""
        if self.bits_per_byte is not None:
            return {"bits_per_byte": self.bits_per_byte, "bits_per_byte_by_source": self.bits_per_byte_by_source}
        if self.accuracy is None:
            return {}
        return {"accuracy": self.accuracy, "accuracy_by_source": self.accuracy_by_source or {}}


@torch.no_grad()
def validate(trainer: Trainer, parts: list[HeldOut], advance: Callable[..., None] = lambda amount: None) -> Validation:
    """Score held-out sequences in a fixed order, divided among data-parallel ranks; every process returns the scores of all.

    End-of-text tokens count neither as loss nor as bytes. Collective.
    """
    labels, mesh, is_scored = trainer.model.config.labels, trainer.mesh, False
    nats, correct = np.zeros(len(parts)), np.zeros(len(parts), dtype=np.int64)
    confusion = np.zeros((labels, labels), dtype=np.int64)
    batch = trainer.settings.micro_batch or 1  # so that a validation never needs more memory than a step
    for number, part in enumerate(parts):
        for start in range(0, len(part.inputs), batch * mesh.layout.data):
            first = start + batch * mesh.data_rank
            rows = slice(first, first + batch)
            targets = part.targets[rows]
            if not len(targets):  # no sequences are left for this rank, but the others need it in their collectives
                rows, targets = slice(0, 1), np.full_like(part.targets[:1], -1)
            starts = None if part.starts is None else part.starts[rows]
            micro_batch = MicroBatch.of(replace(part, inputs=part.inputs[rows], targets=targets, starts=starts))
            nats_BS, predicted_BS = trainer.engine.score(micro_batch)
            nats[number] += float(nats_BS.double().sum())
            if predicted_BS is not None:
                is_scored = True
                correct[number] += int(
                    ((predicted_BS.cpu() == micro_batch.targets_BS) & (micro_batch.targets_BS >= 0)).sum()
                )
                if labels:
                    texts = targets[:, 0] >= 0
                    np.add.at(confusion, (targets[texts, 0], predicted_BS[:, 0].cpu().numpy()[texts]), 1)
            advance(int((part.targets[start : start + batch * mesh.layout.data] >= 0).sum()))
    nats, correct, confusion = (mesh.sum_over_data(torch.from_numpy(x)).numpy() for x in (nats, correct, confusion))
    return _validation(trainer, parts, nats.tolist(), correct.tolist() if is_scored else None, confusion)


def _validation(
    trainer: Trainer, parts: list[HeldOut], nats: list[float], correct: list[int] | None, confusion: Any
) -> Validation:
    """The scores of sums by source."""
    names = [part.source for part in parts]
    counts, sizes = [part.num_targets for part in parts], [int(part.bytes.sum()) for part in parts]
    num_targets, num_bytes, total = max(sum(counts), 1), sum(sizes), sum(nats)

    def by_source(sums: list[Any], divisors: list[int]) -> dict[str, float]:
        return {name: x / max(n, 1) for name, x, n in zip(names, sums, divisors, strict=True)}

    is_text = trainer.task.counts_bytes and num_bytes > 0
    bits = by_source([x / math.log(2) for x in nats], sizes)
    return Validation(
        loss=total / num_targets,
        bits_per_byte=total / math.log(2) / num_bytes if is_text else None,
        bits_per_byte_by_source=bits if is_text else {},
        loss_by_source=by_source(nats, counts),
        tokens=sum(counts),
        bytes=num_bytes,
        accuracy=sum(correct) / num_targets if correct else None,
        accuracy_by_source=by_source(correct, counts) if correct else None,
        confusion=confusion.tolist() if trainer.model.config.labels else None,
    )
