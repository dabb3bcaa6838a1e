"""The evaluation of a trained run on all held-out text: for a language model beside a byte 5-gram and with samples, for a
masked one with hidden words filled in, for a classifier class by class."""

from __future__ import annotations

import math
from collections.abc import Collection
from time import perf_counter
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.evaluate.classes import by_class
from bessemer.evaluate.fill import fill_ins
from bessemer.evaluate.generation import Sampling, generate
from bessemer.evaluate.ngram import MAX_ORDER, NgramModel
from bessemer.model.config import ModelConfig
from bessemer.model.transformer import Transformer
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, write_json
from bessemer.terminal import progress
from bessemer.tokens.pieces import Framing
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.restored import Restored
from bessemer.train.validation import Validation, validate


def evaluate(recipe: Recipe, run: RunFolder, store: TokenStore, restored: Restored) -> dict[str, Any]:
    """Evaluate a run's newest checkpoint and write evaluation.json. Raises InputError where there is no held-out text."""
    started = perf_counter()
    if not store.sources:
        raise InputError(
            f"{run.path}: an imported model has no held-out text to be scored on; give a recipe text and "
            'model.from = "hf:FOLDER": its run begins with the score of the weights as they came'
        )
    parts = restored.step.task.held_out(recipe, store)
    with progress("evaluating", sum(int(part.valid.sum()) for part in parts), "tok") as advance:
        found = validate(restored.step, parts, advance)
    result = {
        "step": restored.position.step,
        "objective": recipe.train.objective,
        "loss": found.loss,
        "loss_by_source": found.loss_by_source,
        "bits_per_byte": None,
        **found.scores(),
        "held_out_bytes": found.bytes,
        "tokens": found.tokens,
        **_shown(recipe, store, restored, found),
    }
    result["seconds"] = perf_counter() - started
    write_json(run.evaluation, result)
    return result


def _shown(recipe: Recipe, store: TokenStore, restored: Restored, found: Validation) -> dict[str, Any]:
    """What an objective is shown by: what a model writes, what it fills in, or the classes it tells apart."""
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
    if found.confusion is not None:
        classes = by_class(store.labels, found.confusion)
        return {"ngram": None, "samples": [], "classes": classes, "confusion": found.confusion}
    if recipe.train.objective == "masked":
        return {"ngram": None, "samples": [], "fill_ins": fill_ins(recipe, store, restored, tokenizer)}
    compares = recipe.evaluate.ngram and found.bits_per_byte is not None
    baseline = ngram_baseline(recipe, store, tokenizer) if compares else None
    return {"ngram": baseline, "samples": samples(recipe, store, restored, tokenizer)}


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


def ngram_baseline(recipe: Recipe, store: TokenStore, tokenizer: Tokenizer) -> dict[str, Any]:
    """The interpolated byte 5-gram: trained on the same training text, scored on the same held-out text."""
    started = perf_counter()
    budget = recipe.evaluate.ngram_max_bytes
    texts = {name: _documents(store, name, "train", tokenizer) for name in store.sources}
    whole = sum(len(document) for documents in texts.values() for document in documents)
    if whole > budget:  # an even part of each source
        texts = {name: documents[: max(int(len(documents) * budget / whole), 1)] for name, documents in texts.items()}
    training = [document for documents in texts.values() for document in documents]
    model = NgramModel(training)
    nats: dict[str, float] = {}
    bytes_of: dict[str, int] = {}
    for name in store.sources:
        documents = _documents(store, name, "heldout", tokenizer)
        if documents:
            nats[name], bytes_of[name] = model.nats(documents), sum(map(len, documents))
    return {
        "order": MAX_ORDER,
        "bits_per_byte": sum(nats.values()) / math.log(2) / max(sum(bytes_of.values()), 1),
        "bits_per_byte_by_source": {name: nats[name] / math.log(2) / max(bytes_of[name], 1) for name in nats},
        "train_bytes": sum(map(len, training)),
        "all_train_bytes": whole,
        "seconds": perf_counter() - started,
    }


def samples(recipe: Recipe, store: TokenStore, restored: Restored, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A continuation of each of the recipe's prompts."""
    settings = recipe.evaluate
    found = []
    for number, prompt in enumerate(settings.prompts):
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, recipe.run.seed + number)
        count, model = settings.sample_tokens, restored.step.model
        text = complete(model, tokenizer, prompt, count, sampling, store.framing, store.ends)
        found.append({"prompt": prompt, "text": text, "temperature": settings.temperature})
    return found


def complete(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    sampling: Sampling,
    framing: Framing | None = None,
    ends: Collection[int] = (),
) -> str:
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


def _documents(store: TokenStore, source: str, split: str, tokenizer: Tokenizer) -> list[bytes]:
    """The text of each document, as bytes, back from its tokens: the same text that the model was shown."""
    pieces = tokenizer.token_pieces()
    documents = []
    for shard in store.split(source, split).shards:
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            ids = np.asarray(shard.tokens[int(start) : int(end)]).tolist()
            documents.append(b"".join([pieces[token] for token in ids]).removeprefix(store.text_prefix))
    return documents
