"""Samples: what a causal model writes after the recipe's prompts, at the end of a run and while it trains."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.generation import Sampling, generate
from bessemer.model.transformer import Transformer
from bessemer.recipe import Evaluate
from bessemer.tokens.pieces import Framing
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.session import Training
from bessemer.train.state import TrainState

SHORT_TOKENS = 40  # of a sample written while the model trains


def log_sample(training: Training, state: TrainState) -> None:
    """Log what the model writes after the first prompt, in greedy decoding, as a line of kind "sample"; after some of the
    validations, `evaluate.samples` times in a run.

    Only where each process holds the whole model; it is written by rank 0, while the others wait. Nothing that the training
    depends on changes.
    """
    options, mesh, trainer = training.recipe.evaluate, training.trainer.mesh, training.trainer
    every = trainer.settings.validate_every or training.pace.steps
    number, before = (
        step * options.samples // training.pace.steps for step in (state.step, max(state.step - every, 0))
    )
    is_whole = mesh.is_single or mesh.layout.uses_ddp
    if number == before or not (mesh.is_main and is_whole and options.prompts and trainer.model.config.causal):
        return
    if trainer.model.config.labels:
        return
    tokenizer = Tokenizer.load(training.store.folder / "tokenizer.json", training.recipe.tokenizer.end_of_text)
    prompt, length = options.prompts[0], min(options.sample_tokens, SHORT_TOKENS)
    with torch.compiler.set_stance("force_eager"):  # other shapes than a step's: not worth a compilation
        text = complete(
            trainer.model, tokenizer, prompt, length, Sampling(), training.store.framing, training.store.ends
        )
    training.log.write("sample", state.step, prompt=prompt, text=text)


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


def complete(
    model: Transformer, tokenizer: Tokenizer, prompt: str, max_tokens: int, sampling: Sampling,
    framing: Framing | None = None, ends: Collection[int] = (),
) -> str:  # fmt: skip
    """The continuation of a prompt, in which special tokens stand for themselves.

    framing: ids before it, left out: end-of-text, after which a document begins; ends: ids to stop at, left out: end-of-text.
    """
    require_writer(model.config)
    ids = tokenizer.encode_marked(prompt)
    if any(token >= model.config.vocabulary for token in ids):
        raise InputError("the prompt has tokens the model does not know; is this the run's own tokenizer?")
    before = (tokenizer.end_of_text,) if framing is None else framing.before
    new = generate(
        model, [*before, *ids] or [tokenizer.end_of_text], max_tokens=max_tokens, sampling=sampling,
        ends=ends or (tokenizer.end_of_text,),
    )  # fmt: skip
    return tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]


def require_writer(config: ModelConfig) -> None:
    """Raises InputError for a model that does not write, and says what it does instead."""
    if config.labels:
        raise InputError(
            "this run's model is a classifier and writes no text; `bessemer evaluate RUN` shows how well it tells its classes "
            "apart, `bessemer export RUN FOLDER` makes it usable in transformers"
        )
    if not config.causal:
        raise InputError(
            "this run's model is an encoder, which sees both sides of a word and so writes no text; `bessemer evaluate RUN` "
            "lets it fill in hidden words (fill_ins in evaluation.json), train.objective = classify builds on it"
        )
