"""The evaluation of a trained run: all held-out text, the byte 5-gram on the same text, and samples."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.evaluate.generation import Sampling, generate
from bessemer.evaluate.ngram import MAX_ORDER, NgramModel
from bessemer.model.transformer import Transformer
from bessemer.recipe import Recipe
from bessemer.run import RunFolder, write_json
from bessemer.terminal import progress
from bessemer.tokens.held_out import held_out
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.restored import Restored
from bessemer.train.validation import validate


def evaluate(recipe: Recipe, run: RunFolder, store: TokenStore, restored: Restored) -> dict[str, Any]:
    """Evaluate a run's newest checkpoint and write evaluation.json."""
    started = perf_counter()
    parts = held_out(store, recipe.tokens.sequence_length)
    with progress("evaluating", sum(int(part.valid.sum()) for part in parts), "tok") as advance:
        found = validate(restored.step, parts, advance)
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
    result = {
        "step": restored.position.step,
        "loss": found.loss,
        "loss_by_source": found.loss_by_source,
        "bits_per_byte": found.bits_per_byte,
        "bits_per_byte_by_source": found.bits_per_byte_by_source,
        "held_out_bytes": found.bytes,
        "tokens": found.tokens,
        "ngram": ngram_baseline(recipe, store, tokenizer) if recipe.evaluate.ngram else None,
        "samples": samples(recipe, restored, tokenizer),
        "seconds": perf_counter() - started,
    }
    write_json(run.evaluation, result)
    return result


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


def samples(recipe: Recipe, restored: Restored, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """A continuation of each of the recipe's prompts."""
    settings = recipe.evaluate
    found = []
    for number, prompt in enumerate(settings.prompts):
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, recipe.run.seed + number)
        text = complete(restored.step.model, tokenizer, prompt, settings.sample_tokens, sampling)
        found.append({"prompt": prompt, "text": text, "temperature": settings.temperature})
    return found


def complete(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    max_tokens: int,
    sampling: Sampling,
    prefix: list[int] | None = None,
) -> str:
    """The continuation of a prompt. prefix: ids before it; left out: end-of-text, since a document begins after one."""
    ids = tokenizer.encode(prompt)
    if any(token >= model.config.vocabulary for token in ids):
        raise InputError("the prompt has tokens the model does not know; is this the run's own tokenizer?")
    before = [tokenizer.end_of_text] if prefix is None else prefix
    new = generate(
        model, [*before, *ids] or [tokenizer.end_of_text], max_tokens=max_tokens, sampling=sampling,
        end_of_text=tokenizer.end_of_text,
    )  # fmt: skip
    return tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]


def _documents(store: TokenStore, source: str, split: str, tokenizer: Tokenizer) -> list[bytes]:
    """The text of each document, as bytes, back from its tokens: the same text that the model was shown."""
    pieces = tokenizer.token_pieces()
    documents = []
    for shard in store.split(source, split).shards:
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            ids = np.asarray(shard.tokens[int(start) : int(end)]).tolist()
            documents.append(b"".join([pieces[token] for token in ids]))
    return documents
