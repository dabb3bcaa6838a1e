"""Import of a Hugging Face model as a run, with its weights as the checkpoint of step 0."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.checkpoint import save
from bessemer.common.environment import describe
from bessemer.common.errors import InputError
from bessemer.export import gate
from bessemer.export.hugging_face import keep_files
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface import comparison
from bessemer.model.huggingface.check import ImportCheck, check_read, require_classes
from bessemer.model.huggingface.config import read_config, recipe_keys, to_hugging_face
from bessemer.model.huggingface.weights import read_model
from bessemer.model.transformer import Transformer
from bessemer.recipe import ResolvedRecipe, dump, parse
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_atomic, write_json
from bessemer.run.stage import mark_stage, staging
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.files import end_ids, end_of_text, file_in, read_table, side_files, special_tokens
from bessemer.train.device import Device, choose
from bessemer.train.state import TrainState, capture
from bessemer.train.trainer import Trainer

SAMPLE_TOKENS = 64  # tokens per row for which the logits are compared


def import_model(source: Path, run: RunDirectory, name: str, root: str, commit: str | None = None) -> dict[str, Any]:
    """Import a model into a new run directory, verified against `transformers`.

    The run directory appears complete by one rename, or not at all.

    Args:
        source: Folder of the model.
        run: The new run directory.
        name: Name of the run.
        root: Folder that holds run directories.
        commit: Commit on the hub that `source` came from.

    Returns:
        The results of the comparison: the values of `ExportCheck`, and in `note` why not all was compared.

    Raises:
        InputError: The folder is not a supported model, its tokenizer does not fit, or the run directory has other files.
        BessemerError: `transformers` computes something else.
    """
    if run.path.is_dir() and {path.name for path in run.path.iterdir()} - {run.lock_file.name}:
        raise InputError(f"{run.path}: the folder is not empty; choose another name with --name")
    require_classes(source, read_config(source))
    model = read_model(source)
    config, tokenizer = model.config, read_tokenizer(source)
    if tokenizer.vocabulary > config.vocabulary:
        has = f"the tokenizer has {tokenizer.vocabulary} ids, the model only {config.vocabulary} embeddings"
        raise InputError(f"{source}: {has}; use the model's own tokenizer")
    read = check_read(source, model)
    with gate.errors_about(str(source)):
        imported = {**_compared(source, model, tokenizer, read), "model_size": config.size, "commit": commit}
    recipe = _recipe(source, run, name, root, tokenizer)
    try:
        run.path.parent.mkdir(parents=True, exist_ok=True)
        staged = RunDirectory(Path(tempfile.mkdtemp(prefix=f".{run.path.name}.", dir=run.path.parent)))
    except OSError as error:
        raise InputError(f"{run.path.parent}: cannot be written ({error.strerror}); choose another --dir") from None
    try:
        _write(staged, source, config, tokenizer)
        write_atomic(staged.recipe, dump(recipe))
        device = _save(recipe, staged, model, tokenizer)
        facts = {"imported": {"source": str(source), **imported}}
        write_json(staged.environment, describe(device.name, device.precision.name) | facts)
        staged.path.chmod(0o755)  # a temporary folder is private to its owner, unlike other run directories
        run.lock_file.unlink(missing_ok=True)
        os.rename(staged.path, run.path)
    except BaseException:
        shutil.rmtree(staged.path, ignore_errors=True)
        raise
    return imported


def _compared(source: Path, model: Transformer, tokenizer: Tokenizer, read: ImportCheck) -> dict[str, Any]:
    """Compare a model's tokenizer and, if the model fits in memory twice, its greedy tokens with those of `transformers`.

    `read` is the earlier comparison of the logits while the weights were read. It tells if the model fits: all layers were
    compared then.
    """
    sample, texts = gate_inputs(model, tokenizer)
    if read.layers < read.of_layers:
        theirs = comparison.load_tokenizer(source)
        return {
            "architecture": to_hugging_face(model.config, 0)["architectures"][0], "parameters": model.config.parameters,
            "logits_max_difference": read.max_difference, "greedy_tokens_equal": 0, "note": read.line,
            "tokenizer_documents_equal": comparison.compare_tokenizers(theirs, tokenizer, comparison.framing_of(theirs)),
        }  # fmt: skip
    check = gate.verify(model, source, sample, tokenizer, texts)
    worst = max(read.max_difference or 0.0, check.logits_max_difference)
    return asdict(check) | {"logits_max_difference": worst, "note": read.note}


def _write(run: RunDirectory, source: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Copy the model's own files into the run directory, and write the tokenizer as a run stores it."""
    framing = comparison.framing_of(comparison.load_tokenizer(source))
    with staging(run.source) as staged:
        keep_files(source, staged)
    with staging(run.tokens) as staged:
        shutil.copyfile(file_in(source), staged / "tokenizer.json")
        for file in side_files(source):
            shutil.copyfile(file, staged / file.name)
        facts = {
            "vocabulary": tokenizer.vocabulary, "end_of_text": tokenizer.end_of_text, "sha256": tokenizer.sha256,
            "mask_token": tokenizer.mask_token, "prefix": framing.before, "suffix": framing.after,
            "ends": end_ids(source, tokenizer) or [tokenizer.end_of_text], "trained": False,
        }  # fmt: skip
        labels = _labels(source, config)
        manifest = {"format": 1, "tokenizer": facts, "labels": labels, "sources": {}, "files": {}}
        write_json(staged / "manifest.json", manifest)
        mark_stage(staged, "import")


def gate_inputs(model: Transformer, tokenizer: Tokenizer) -> tuple[Tensor, list[tuple[str, list[int]]]]:
    """Return inputs for comparing an imported model with `transformers`.

    Args:
        model: The model.
        tokenizer: Its tokenizer.

    Returns:
        Random token ids of shape (2, T), or (1, T) for a classifier, and fixed texts, each with its token ids.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(SAMPLE_TOKENS, model.config.positions_length)
    rows = 1 if model.config.labels else 2  # classifiers of transformers take one text if they have no padding token
    sample = torch.randint(0, tokenizer.vocabulary, (rows, length), generator=generator)
    # Classifiers of transformers skip padding, which may have any special id, so the last token must not be special.
    sample[:, -1] = next(number for number in range(tokenizer.vocabulary) if number not in tokenizer.special)
    return sample, [(text, tokenizer.encode(text)) for text in comparison.PLAIN_TEXTS]


def read_tokenizer(source: Path) -> Tokenizer:
    """Load the tokenizer of a model's folder, with the end-of-text and mask tokens that its files name.

    Args:
        source: Folder of the model.

    Raises:
        InputError: The tokenizer is unusable, or no end-of-text token is named.
    """
    file = file_in(source)
    loaded = Tokenizer.load_any(file)
    if loaded.vocabulary <= len(loaded.special):
        raise InputError(f"{file}: has only special tokens; replace it by the model's own tokenizer")
    tokens = special_tokens(loaded, [source])
    ends = end_of_text(tokens)
    if ends is None:
        raise InputError(f"{source / 'tokenizer_config.json'}: eos_token is missing; add the token that ends a text")
    return Tokenizer.load(file, ends, tokens.get("mask"))


def _labels(source: Path, config: ModelConfig) -> list[str]:
    """Return the names of a classifier's classes in the order of their ids."""
    names = read_table(source / "config.json").get("id2label") or {}
    return [str(names.get(str(number), f"LABEL_{number}")) for number in range(config.labels)]


def _recipe(source: Path, run: RunDirectory, name: str, root: str, tokenizer: Tokenizer) -> ResolvedRecipe:
    """Return the recipe of an imported run: the model's dimensions, no corpus, and one step that is never trained."""
    import tomli_w

    keys = {key: value for key, value in recipe_keys(source).items() if value is not None}
    config = read_config(source)
    objective = "classify" if config.labels else "causal" if config.causal else "masked"
    mask = tokenizer.special.get(tokenizer.mask_token) if tokenizer.mask_token is not None else None
    values = {
        "run": {"name": name, "dir": root},
        "tokenizer": {
            "path": str((run.tokens / "tokenizer.json").absolute()), "end_of_text": tokenizer.end_of_text_token,
            **({} if mask is None else {"mask_token": mask}),
        },
        "tokens": {"sequence_length": config.positions_length},
        "model": keys,
        "train": {"objective": objective, "steps": 1, "global_batch_tokens": config.positions_length, "micro_batch": 1,
                  "optimizer": {"learning_rate": 1e-5}},
    }  # fmt: skip
    return recipe_defaults.resolve(parse(tomli_w.dumps(values), f"import of {source}"), config.vocabulary)


def _save(recipe: ResolvedRecipe, run: RunDirectory, model: Transformer, tokenizer: Tokenizer) -> Device:
    device = choose(recipe.train.model_copy(update={"device": "cpu", "precision": "fp32", "compile": "off"}))
    trainer = Trainer(recipe, model, device, tokenizer.end_of_text, 0)
    tensors, facts = capture(trainer, TrainState(), recipe, TokenStore.open(run.tokens))
    save(run.checkpoints, 0, tensors, {**facts, "model": model.config.to_dict()}, recipe.checkpoint.keep)
    return device
