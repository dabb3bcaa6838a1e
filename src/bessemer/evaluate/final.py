"""Final evaluation of a run on all held-out text and its tasks.

Language models also get baselines and samples, and classifiers scores by class.
"""

from __future__ import annotations

import math
import os
from time import perf_counter
from typing import Any

import numpy as np

from bessemer.common.console import counted, progress, size
from bessemer.common.errors import InputError
from bessemer.common.log_file import json_line
from bessemer.evaluate import ppmd
from bessemer.evaluate.ngram import MAX_ORDER, NgramModel
from bessemer.evaluate.task_files import EvaluationTask, open_tasks
from bessemer.model.transformer import Transformer
from bessemer.recipe import ResolvedRecipe
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, write_atomic
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.choice import model_input
from bessemer.train.generation import Sampling, complete, require_writer
from bessemer.train.state import Restored
from bessemer.train.trainer import Trainer
from bessemer.train.validation import Validation, scored_model, validate


def evaluate(
    recipe: ResolvedRecipe, run: RunDirectory, store: TokenStore, restored: Restored, items: str = "tasks"
) -> dict[str, Any]:
    """Score a run's weights on held-out text and tasks.

    Args:
        recipe: Resolved recipe of the run.
        run: The run directory.
        store: Its tokens.
        restored: The restored weights.
        items: Folder in the run directory for the results of each task item.

    Returns:
        The content of evaluation.json.

    Raises:
        InputError: The run has no held-out text.
    """
    started = perf_counter()
    if not store.sources:
        raise InputError(
            f"{run.path}: an imported model has no held-out text; write a recipe with text and "
            'model.from = "hf:FOLDER", whose run starts by scoring these weights'
        )
    parts = restored.trainer.task.held_out(recipe, store)
    with progress("evaluating", sum(part.num_targets for part in parts), "tok") as advance:
        scored = validate(restored.trainer, parts, advance)
    result = {
        "step": restored.state.step, "objective": recipe.train.objective,
        "precision": restored.trainer.device.precision.name, "bits_per_byte": None, **scored.metrics,
        "held_out_bytes": scored.bytes, "tokens": scored.tokens, **_examples(recipe, store, restored, scored),
    }  # fmt: skip
    if recipe.evaluate.tasks:
        result["tasks"] = task_scores(recipe, run, store, restored.trainer, items)
    return {**result, "seconds": perf_counter() - started}


def task_scores(
    recipe: ResolvedRecipe, run: RunDirectory, store: TokenStore, trainer: Trainer, items: str = "tasks"
) -> list[dict[str, Any]]:
    """Score a model on the recipe's tasks, and write the result of each item to NAME.jsonl of its task.

    Args:
        recipe: Resolved recipe of the run.
        run: The run directory.
        store: Its tokens.
        trainer: The trainer with the model.
        items: Folder in the run directory for the results of each task item.

    Returns:
        One dict per task: its entry of `tasks` in evaluation.json, with its scores, `precision` and `contamination`, a
            sentence on whether its text was found in the corpus.
    """
    require_writer(trainer.model.config)
    tasks = open_tasks(recipe.evaluate.tasks)
    from bessemer.evaluate.harness import score_task

    subject, rows = scored_model(trainer, store, recipe.tokenizer.end_of_text), []
    with progress("tasks", sum(len(task.task.instances) for task in tasks), "text") as advance:
        for task in tasks:
            scored, answers = score_task(task, subject, advance=advance)
            path = run.path / items / f"{task.name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, b"".join(map(json_line, answers)))
            scored["precision"] = trainer.device.precision.name  # earlier rows may have another precision
            rows.append({**scored, "contamination": contamination_of(task, recipe, run)})
    return rows


def score_line(scores: dict[str, Any]) -> str:
    """Return the result line of the evaluation stage for a result of `evaluate`."""
    loss = f"loss {scores['loss']:.3f}"
    if scores["bits_per_byte"] is not None:
        text = f"{scores['bits_per_byte']:.3f} bits per byte on all {size(scores['held_out_bytes'])} held out"
        if (ngram := scores["ngram"]) is not None:
            text += f"; a byte {ngram['order']}-gram on the same text: {ngram['bits_per_byte']:.3f}"
            if (other := scores.get("ppmd")) is not None:
                text += f", PPMd order {other['order']}: {other['bits_per_byte']:.3f}"
        return text
    if scores.get("accuracy") is None:
        return f"{loss} on {scores['tokens']:,} held-out tokens"
    right = f"{scores['accuracy']:.1%} of {scores['tokens']:,} held-out"
    if "classes" not in scores:
        return f"{right} hidden tokens guessed right, {loss}"
    sizes = [sum(row) for row in scores["confusion"]]
    always = max(sizes) / max(sum(sizes), 1)
    return f"{right} texts put in the right class, {loss}; always the most frequent class: {always:.1%}"


def contamination_of(task: EvaluationTask, recipe: ResolvedRecipe, run: RunDirectory) -> str:
    """Describe whether the text of a task was found in the training text.

    Of the recipe's contamination sets, one with the task's files counts, else one with the task's name.
    """
    settings = recipe.corpus.contamination
    files = [os.path.abspath(file) for file in task.files]
    same = [one for one in settings.sets if os.path.abspath(os.path.expanduser(one.path)) in files]
    entry = next((one for one in (*same, *settings.sets) if one in same or one.name == task.name), None)
    if entry is None:
        return "the corpus was not searched for it"
    path = run.corpus / "statistics.json"
    rows = read_json(path, run.command("corpus")).get("contamination") if path.exists() else None
    touched = next((row.get("items_touched") for row in rows or [] if row.get("name") == entry.name), None)
    if not touched:
        return (
            f"none of the set {entry.name} found in the corpus" if touched == 0 else f"searched for (set {entry.name})"
        )
    done = {"drop": "their documents were dropped", "mask": "they were masked", "report": "they were kept"}
    return f"{counted(int(touched), 'item')} of the set {entry.name} found in the corpus; {done[settings.action]}"


def _examples(recipe: ResolvedRecipe, store: TokenStore, restored: Restored, scored: Validation) -> dict[str, Any]:
    """Return the entries `samples`, `ngram` and `ppmd` of evaluation.json, or `classes` and `confusion` for a classifier."""
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
    none: dict[str, Any] = {"ngram": None, "ppmd": None, "samples": []}
    if scored.confusion is not None:
        return {**none, "classes": scores_by_class(store.labels, scored.confusion), "confusion": scored.confusion}
    if recipe.predicts_hidden:
        return none
    # Baselines cannot be scored on the assistant's answers alone.
    compares = recipe.evaluate.ngram and scored.bits_per_byte is not None and not recipe.chat_parts
    scores = baselines(recipe.evaluate.ngram_max_bytes, store, tokenizer) if compares else {}
    return {**none, **scores, "samples": samples(recipe, store, restored.trainer.model, tokenizer)}


def samples(
    recipe: ResolvedRecipe, store: TokenStore, model: Transformer, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Generate a continuation of each of the recipe's prompts, and return the prompts with their continuations."""
    options, continued = recipe.evaluate, []
    for number, prompt in enumerate(options.prompts):
        sampling = Sampling(options.temperature, options.top_k, options.top_p, recipe.run.seed + number)
        whole, framing = model_input(recipe, store, prompt)
        text = complete(model, tokenizer, whole, options.sample_tokens, sampling, framing, store.ends)
        continued.append({"prompt": prompt, "text": text, "temperature": options.temperature})
    return continued


def baselines(max_bytes: int, store: TokenStore, tokenizer: Tokenizer) -> dict[str, Any]:
    """Score the baselines on the held-out text, after reading the training text.

    Args:
        max_bytes: Maximum bytes of training text for the 5-gram.
        store: Tokens of the run.
        tokenizer: Its tokenizer.

    Returns:
        Scores of the interpolated byte 5-gram (`ngram`) and of PPMd (`ppmd`, None without its extra).
    """
    texts = {name: _documents(store, name, "train", tokenizer) for name in store.sources}
    held_out = {name: parts for name in store.sources if (parts := _documents(store, name, "heldout", tokenizer))}
    sizes = {name: sum(map(len, documents)) for name, documents in held_out.items()}

    def score(order: int, bits: float, training: list[bytes], started: float) -> dict[str, Any]:
        return {
            "order": order, "bits_per_byte": bits / max(sum(sizes.values()), 1), "train_bytes": sum(map(len, training)),
            "all_train_bytes": sum(len(one) for documents in texts.values() for one in documents),
            "seconds": perf_counter() - started,
        }  # fmt: skip

    started, training = perf_counter(), _even_part(texts, max_bytes)
    model = NgramModel(training)
    bits = {name: model.nats(documents) / math.log(2) for name, documents in held_out.items()}
    by_source = {name: bits[name] / max(sizes[name], 1) for name in bits}
    ngram = {**score(MAX_ORDER, sum(bits.values()), training, started), "bits_per_byte_by_source": by_source}
    started, training = perf_counter(), _even_part(texts, ppmd.MAX_TRAIN_BYTES)
    compressed = ppmd.ppmd_bits(training, [one for documents in held_out.values() for one in documents])
    return {"ngram": ngram, "ppmd": None if compressed is None else score(ppmd.ORDER, compressed, training, started)}


def _even_part(texts: dict[str, list[bytes]], max_bytes: int) -> list[bytes]:
    """Return the first documents of each source, the same share of each, with about `max_bytes` in total."""
    whole = sum(len(document) for documents in texts.values() for document in documents)
    share = min(max_bytes / max(whole, 1), 1.0)
    return [document for part in texts.values() for document in part[: max(int(len(part) * share), 1)]]


def _documents(store: TokenStore, source: str, split: str, tokenizer: Tokenizer) -> list[bytes]:
    """Return the text of each document as bytes, decoded from its tokens, so that baselines read the model's text."""
    pieces = tokenizer.token_byte_values()
    documents = []
    for shard in store.split(source, split).shards:
        tokens = shard.tokens[:]  # one request for a remote shard
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            ids = np.asarray(tokens[int(start) : int(end)]).tolist()
            documents.append(b"".join([pieces[token] for token in ids]).removeprefix(store.text_prefix))
    return documents


def scores_by_class(labels: tuple[str, ...], confusion: list[list[int]]) -> list[dict[str, Any]]:
    """Return the number of texts, precision, recall and F1 of each class; None if a score is undefined.

    Precision is the share of texts predicted as the class that belong to it. Recall is the share of texts of the class that
    are predicted as it. F1 is their harmonic mean, 2 tp / (2 tp + fp + fn), 0 if no prediction is right.

    Args:
        labels: Names of the classes.
        confusion: (labels, labels) counts of texts by true class (row) and predicted class (column).
    """
    rows = []
    for number, label in enumerate(labels):
        right = confusion[number][number]
        texts, guesses = sum(confusion[number]), sum(row[number] for row in confusion)
        rows.append({
            "label": label, "texts": texts, "precision": right / guesses if guesses else None,
            "recall": right / texts if texts else None, "f1": 2 * right / (texts + guesses) if texts + guesses else None,
        })  # fmt: skip
    return rows
