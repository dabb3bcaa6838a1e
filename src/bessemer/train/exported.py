"""A trained run in the Hugging Face layout: whole and held against `transformers`, or tensor by tensor where it is too large."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from bessemer.checkpoint import Checkpoint, latest
from bessemer.checkpoint.average import mean_of, newest
from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import written_dropout
from bessemer.model.huggingface.export import export
from bessemer.model.huggingface.files import DTYPES, Beside
from bessemer.model.huggingface.stream import stream
from bessemer.model.initialisation import shell
from bessemer.recipe import Recipe
from bessemer.run import RunFolder
from bessemer.terminal import warn
from bessemer.tokens.held_out import held_out
from bessemer.tokens.labelled import whole_texts
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.train.card import model_card
from bessemer.train.device import available_bytes, choose
from bessemer.train.imported import gate_inputs
from bessemer.train.restored import open_trained
from bessemer.train.start import carried_dropout

MODELS_IN_MEMORY = 2.5  # in fp32: ours, transformers', and what comparing them takes


def export_trained(recipe: Recipe, run: RunFolder, folder: Path, average: int = 1) -> str:
    """Write the newest checkpoint's weights to `folder`: their moving average when the run keeps one, or the mean of so many
    newest checkpoints. Returns what was checked, as a line.

    Raises InputError when there is no checkpoint, BessemerError when what was written is not the model.
    """
    settings = recipe.train.model_copy(update={"device": "cpu", "precision": "fp32", "compile": "off"})
    device, store = choose(settings), TokenStore.open(run.tokens)
    checkpoints = checkpoints_of(run, average)
    config = ModelConfig.from_dict(checkpoints[0].facts["model"])
    beside = _beside(recipe, run, store, config, checkpoints[0].step)
    streams = recipe.export.stream
    if streams is None:
        streams = MODELS_IN_MEMORY * 4 * config.parameters > available_bytes(device)
    if streams:
        return _streamed(beside, config, checkpoints, folder)
    model = open_trained(recipe, run, store, device, average).step.model
    tokenizer = Tokenizer.load(store.folder / "tokenizer.json", recipe.tokenizer.end_of_text)
    if store.sources:
        parts = held_out(store, recipe.tokens.sequence_length, max_tokens=4 * recipe.tokens.sequence_length)
        rows = [tokenizer.decode(row.tolist()) for part in parts for row in part.tokens[:4]]
        length = recipe.tokens.sequence_length
        classifies = recipe.train.objective == "classify"
        sequences = whole_texts(store, length) if classifies else parts[0].tokens[:2, :-1]
        sample, texts = torch.from_numpy(sequences), [(text, tokenizer.encode(text)) for text in rows]
    else:
        sample, texts = gate_inputs(model, tokenizer)
    check = export(model, beside, folder, sample, texts)
    greedy = f", {check.greedy_tokens_equal} greedy tokens equal" if check.greedy_tokens_equal else ""
    return f"{check.architecture} in {folder}: transformers' logits differ by {check.logits_max_difference:.1e}{greedy}"


def _beside(recipe: Recipe, run: RunFolder, store: TokenStore, config: ModelConfig, step: int) -> Beside:
    """What goes into the export with the weights; an imported model's own files where the run has them."""
    source = run.source if (run.source / "config.json").exists() else None
    labels = tuple(store.labels) if config.labels else ()
    dtype = DTYPES.get(recipe.export.dtype or "")
    return Beside(
        store.folder / "tokenizer.json", store.end_of_text, store.framing, store.mask_token, labels, source, dtype,
        card=lambda check: model_card(recipe, run, store, config, step, check),
        dropout=written_dropout(config, recipe.train.dropout) if recipe.train.dropout.is_on else carried_dropout(recipe),
        special=store.special, ends=store.ends,
    )  # fmt: skip


def _streamed(beside: Beside, config: ModelConfig, checkpoints: list[Checkpoint], folder: Path) -> str:
    with ExitStack() as stack:
        read = reader(checkpoints, stack)
        check = stream(shell(config), read, beside, folder)
    return f"{check.tensors} tensors in {folder}, each read back and equal; {check.logits}"


def checkpoints_of(run: RunFolder, average: int) -> list[Checkpoint]:
    """The newest checkpoint, or so many of the newest. Raises InputError where there is none."""
    if average > 1:
        return newest(run.checkpoints, average, on_damage=warn)
    found = latest(run.checkpoints, on_damage=warn)
    if found is None:
        raise InputError(f"{run.path}: no checkpoint yet; train it with `bessemer train RECIPE`")
    return [found]


def reader(checkpoints: list[Checkpoint], stack: ExitStack) -> Callable[[str], Tensor]:
    """Gives a weight by its name, in fp32; of several checkpoints, the mean."""
    opened = [stack.enter_context(checkpoint.opened()) for checkpoint in checkpoints]
    if len(opened) == 1:
        part = "ema" if "ema" in checkpoints[0] else "model"
        return lambda name: opened[0].read(part, name).float()

    return lambda name: mean_of(opened, name)
