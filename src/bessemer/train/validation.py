"""Scores of a model: the loss on held-out text with bits per byte or the accuracy, scores on tasks, and generated samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bessemer.tokens.held_out import HeldOut
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.choice import model_input
from bessemer.train.engine import MicroBatch
from bessemer.train.generation import Sampling, complete
from bessemer.train.setup import ScoredModel, Training
from bessemer.train.state import TrainState
from bessemer.train.trainer import Trainer

SHORT_TOKENS = 40  # the largest length of a sample that is generated during training


@dataclass(frozen=True)
class Validation:
    """The scores of a model on held-out text.

    Attributes:
        metrics: The scores by name, each also by source. `loss` is in nats per target: a token, a hidden token, or a text for a
            classifier. `bits_per_byte` is nats / ln 2 / bytes of text, which is comparable between tokenizers; it exists if the
            targets are the whole text. Otherwise there is `accuracy`, the share of targets that are the likeliest prediction.
        tokens: The number of targets.
        bytes: The bytes of their text.
        confusion: The texts of each class by predicted class, (labels, labels), for a classifier.
    """

    metrics: dict[str, Any]
    tokens: int
    bytes: int
    confusion: list[list[int]] | None = None

    @property
    def loss(self) -> float:
        """The loss in nats per target."""
        return float(self.metrics["loss"])

    @property
    def bits_per_byte(self) -> float | None:
        """The bits per byte of text; None if undefined."""
        return self.metrics.get("bits_per_byte")

    @property
    def accuracy(self) -> float | None:
        """The share of correctly predicted targets; None if it is not scored."""
        return self.metrics.get("accuracy")

    @property
    def short(self) -> str:
        """The main score as text for the progress bar, such as "bpb 1.234"."""
        if self.bits_per_byte is not None:
            return f"bpb {self.bits_per_byte:.3f}"
        return f"accuracy {self.accuracy:.1%}" if self.accuracy is not None else f"loss {self.loss:.3f}"


@torch.no_grad()
def validate(trainer: Trainer, parts: list[HeldOut], advance: Callable[..., None] = lambda amount: None) -> Validation:
    """Score held-out sequences, divided among data-parallel ranks, and return the scores of all sequences on every rank.

    `parts` has the sequences of each source. `advance` is called after each batch with its number of targets. End-of-text
    tokens count neither as loss nor as bytes. All ranks must call it.
    """
    labels, mesh, is_scored = trainer.model.config.labels, trainer.mesh, False
    nats, correct = np.zeros(len(parts)), np.zeros(len(parts), dtype=np.int64)
    confusion = np.zeros((labels, labels), dtype=np.int64)
    batch = trainer.settings.micro_batch or 1  # the same as in a step, so that a validation needs no more memory
    for number, part in enumerate(parts):
        for start in range(0, len(part.inputs), batch * mesh.layout.data):
            first = start + batch * mesh.data_rank
            rows = slice(first, first + batch)
            targets = part.targets[rows]
            if not len(targets):  # no sequences are left for this rank, but it must take part in the collectives
                rows, targets = slice(0, 1), np.full_like(part.targets[:1], -1)
            starts = None if part.starts is None else part.starts[rows]
            micro_batch = MicroBatch.from_batch(replace(part, inputs=part.inputs[rows], targets=targets, starts=starts))
            nats_BS, predicted_BS = trainer.engine.score(micro_batch)
            nats[number] += float(nats_BS.double().sum())
            if predicted_BS is not None:
                is_scored = True
                is_right = (predicted_BS.cpu() == micro_batch.targets_BS) & (micro_batch.targets_BS >= 0)
                correct[number] += int(is_right.sum())
                if labels:
                    texts = targets[:, 0] >= 0
                    np.add.at(confusion, (targets[texts, 0], predicted_BS[:, 0].cpu().numpy()[texts]), 1)
            advance(int((part.targets[start : start + batch * mesh.layout.data] >= 0).sum()))
    nats, correct, confusion = (mesh.sum_over_data(torch.from_numpy(x)).numpy() for x in (nats, correct, confusion))
    return _validation(trainer, parts, nats.tolist(), correct.tolist() if is_scored else None, confusion)


def _validation(
    trainer: Trainer, parts: list[HeldOut], nats: list[float], correct: list[int] | None, confusion: Any
) -> Validation:
    """Return the scores that follow from the nats and the correct targets of each part. `confusion` is as in `Validation`."""
    config, metrics = trainer.model.config, dict[str, Any]()
    counts, sizes = [part.num_targets for part in parts], [int(part.bytes.sum()) for part in parts]

    def add(name: str, sums: Sequence[float], divisors: list[int], unit: float = 1.0) -> None:
        metrics[name] = sum(sums) / unit / max(sum(divisors), 1)
        rows = zip(parts, sums, divisors, strict=True)
        metrics[f"{name}_by_source"] = {part.source: x / unit / max(n, 1) for part, x, n in rows}

    add("loss", nats, counts)
    if config.causal and not config.labels and sum(sizes) > 0:
        add("bits_per_byte", nats, sizes, math.log(2))
    elif correct:
        add("accuracy", correct, counts)
    return Validation(metrics, sum(counts), sum(sizes), confusion.tolist() if config.labels else None)


def log_writing(training: Training, state: TrainState, advance: Callable[..., None]) -> None:
    """Log the scores on the recipe's tasks as a "tasks" line, and a generated text as a "sample" line.

    The text continues the first prompt of the recipe by greedy decoding. It is generated after `evaluate.samples` of the run's
    validations. Rank 0 does all this while the others wait, and only if it holds the whole model. `advance` reports progress.
    """
    options, trainer = training.recipe.evaluate, training.trainer
    steps = state.step, max(state.step - trainer.settings.validate_every, 0)
    number, before = (step * options.samples // training.steps for step in steps)
    prompts = options.prompts[:1] if number != before else ()
    if not writes_alone(trainer) or (training.score_tasks is None and not prompts):
        return
    subject = scored_model(trainer, training.store, training.recipe.tokenizer.end_of_text)
    with trainer.eager():
        if training.score_tasks is not None:
            training.log.write("tasks", state.step, **training.score_tasks(subject, advance))
        for prompt in prompts:
            length = min(options.sample_tokens, SHORT_TOKENS)
            whole, framing = model_input(training.recipe, training.store, prompt)
            text = complete(subject.model, subject.tokenizer, whole, length, Sampling(), framing, subject.ends)
            training.log.write("sample", state.step, prompt=prompt, text=text)


def writes_alone(trainer: Trainer) -> bool:
    """Return True if this process is rank 0 and holds the whole of a causal model."""
    mesh, config = trainer.mesh, trainer.model.config
    return mesh.is_main and (mesh.is_single or mesh.layout.uses_ddp) and config.causal and not config.labels


def scored_model(trainer: Trainer, store: TokenStore, end_of_text: str) -> ScoredModel:
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", end_of_text)
    return ScoredModel(trainer.model, tokenizer, store.framing, tuple(store.ends), trainer.autocast)
