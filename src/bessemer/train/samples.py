"""What a causal model writes and how it scores on tasks, at the end of a run and while it trains."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bessemer.model.generation import Sampling, complete
from bessemer.model.transformer import Transformer
from bessemer.recipe import Evaluate
from bessemer.tasks.files import EvaluationTask, open_task
from bessemer.tasks.scoring import ScoredModel, score_task
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.session import Training
from bessemer.train.state import TrainState
from bessemer.train.trainer import Trainer

SHORT_TOKENS = 40  # of a sample written while the model trains


def log_sample(training: Training, state: TrainState) -> None:
    """Log what the model writes after the first prompt, in greedy decoding, as a line of kind "sample"; after some of the
    validations, `evaluate.samples` times in a run.

    Only where each process holds the whole model; it is written by rank 0, while the others wait. Nothing that the training
    depends on changes.
    """
    options, trainer = training.recipe.evaluate, training.trainer
    every = trainer.settings.validate_every or training.pace.steps
    number, before = (
        step * options.samples // training.pace.steps for step in (state.step, max(state.step - every, 0))
    )
    if number == before or not (options.prompts and writes_alone(trainer)):
        return
    subject = scored_model(trainer, training.store, training.recipe.tokenizer.end_of_text)
    prompt, length = options.prompts[0], min(options.sample_tokens, SHORT_TOKENS)
    with _eager(trainer):
        text = complete(subject.model, subject.tokenizer, prompt, length, Sampling(), subject.framing, subject.ends)
    training.log.write("sample", state.step, prompt=prompt, text=text)


def log_tasks(training: Training, state: TrainState) -> None:
    """Log the scores on the first items of the recipe's tasks as a line of kind "tasks", by score and task, and under `content` a
    number of what each task asks. As `log_sample`."""
    options, trainer = training.recipe.evaluate, training.trainer
    if not (options.tasks and writes_alone(trainer)):
        return
    subject = scored_model(trainer, training.store, training.recipe.tokenizer.end_of_text)
    by_score: dict[str, dict[str, float]] = {}
    with _eager(trainer):
        for reference in options.tasks:
            task = opened_task(reference, options.task_items)
            scored = score_task(task, subject)
            by_score.setdefault("content", {})[scored.name] = int(task.content[:12], 16)
            for name, score in scored.scores.items():
                by_score.setdefault(name, {})[scored.name] = score["value"] or 0.0
    training.log.write("tasks", state.step, **by_score)


def _eager(trainer: Trainer) -> AbstractContextManager[object]:
    """Not compiled: the shapes are others than a step's, and not worth a compilation."""
    return torch.compiler.set_stance("force_eager") if trainer.device.compile else nullcontext()


@cache
def opened_task(reference: str, limit: int) -> EvaluationTask:
    """A task of the recipe, read once."""
    return open_task(reference, limit=limit)


@cache
def loaded_tokenizer(path: Path, changed_ns: int, end_of_text: str) -> Tokenizer:
    """The tokenizer of a run, read once. changed_ns: the file's time of change."""
    return Tokenizer.load(path, end_of_text)


def writes_alone(trainer: Trainer) -> bool:
    """Whether this process is rank 0 and holds the whole of a model that writes."""
    mesh, config = trainer.mesh, trainer.model.config
    return mesh.is_main and (mesh.is_single or mesh.layout.uses_ddp) and config.causal and not config.labels


def scored_model(trainer: Trainer, store: TokenStore, end_of_text: str) -> ScoredModel:
    """The trainer's model, to be examined."""
    path = store.folder / "tokenizer.json"
    tokenizer = loaded_tokenizer(path, path.stat().st_mtime_ns, end_of_text)
    return ScoredModel(trainer.model, tokenizer, store.framing, tuple(store.ends), trainer.autocast)


def samples(
    options: Evaluate, seed: int, store: TokenStore, model: Transformer, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """A continuation of each of the recipe's prompts."""
    continued = []
    for number, prompt in enumerate(options.prompts):
        sampling = Sampling(options.temperature, options.top_k, options.top_p, seed + number)
        text = complete(model, tokenizer, prompt, options.sample_tokens, sampling, store.framing, store.ends)
        continued.append({"prompt": prompt, "text": text, "temperature": options.temperature})
    return continued
