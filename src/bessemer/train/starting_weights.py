"""The weights that a run starts from: initial ones, those of a Hugging Face folder, or those of another run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bessemer.checkpoint import SavedCheckpoint, latest
from bessemer.checkpoint.protocol import trained_checkpoints
from bessemer.checkpoint.selection import find_step
from bessemer.common.console import say, warn
from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.check import check_read
from bessemer.model.huggingface.weights import BY_TOKEN, HEADS, read_model, require_weights
from bessemer.model.transformer import Transformer, build_model
from bessemer.recipe.model import idle_keys
from bessemer.run.directory import RunDirectory, Weights, checkpoint_steps
from bessemer.storage.hub import local_folder
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.store import require_equal_tokenizers
from bessemer.train.trainer import Trainer

# The options in which the model of another run may differ: those of the head and the sequence length, and its name.
FREE_OPTIONS = {
    "labels", "pooling", "sequence_length", "max_positions", "head_transform", "transform_bias", "head_bias",
    "logit_soft_cap", "family",
}  # fmt: skip


def starting_model(source: str | None, config: ModelConfig, seed: int, store: TokenStore, checked: bool) -> Transformer:
    """Return the model at step 0, in fp32 on the CPU.

    Args:
        source: The value of model.from; None for initial weights.
        config: The model.
        seed: The seed of the initial weights.
        store: The token shards, whose manifest names the tokens added to the imported model's tokenizer.
        checked: Compare the imported weights with `transformers`; True on one of several processes.

    Raises:
        InputError: The folder's weights are not this model's.
        BessemerError: `transformers` computes something else from them.
    """
    if source is None:
        return build_model(config, seed)
    folder = local_folder(source)
    model = read_model(folder, config, seed)
    if checked:
        say(f"  starting from the weights of {folder}: {check_read(folder, model).line}")
    _start_added_tokens(model, store.manifest["tokenizer"].get("added", {}))
    return model


@torch.no_grad()
def _start_added_tokens(model: Transformer, added: Mapping[str, Sequence[int]]) -> None:
    """Set the embedding and output rows of added tokens to the mean of other rows.

    `added` maps the id of each added token, as text, to the ids that encoded the token's text before; the mean is over
    these, or over all earlier rows if there are none.
    """
    for name, parameter in model.named_parameters():
        for number, pieces in added.items() if name in BY_TOKEN else ():
            parameter[int(number)] = parameter[list(pieces) or slice(min(map(int, added)))].mean(0)


def require_source(source: str | None, config: ModelConfig) -> None:
    """Raise InputError if the folder of model.from lacks tensors of this model, or positions for its sequences.

    Downloads the weights of a model on the hub.
    """
    if source is None:
        return
    folder = local_folder(source)
    if config.positions == "learned" and config.sequence_length > config.max_positions:
        has = f"{folder} has only {config.max_positions} positions"
        raise InputError(f"tokens.sequence_length: {config.sequence_length} is too long: {has}; reduce it")
    require_weights(folder, config)


def require_same_model(folder: Path, start: ModelConfig, config: ModelConfig) -> None:
    """Raise InputError if the run to start from, in `folder`, has another model."""
    theirs, ours = start.to_dict(), config.to_dict()
    free = FREE_OPTIONS.union(idle_keys(ours))
    differ = [key for key, value in ours.items() if key not in free and theirs[key] != value]
    if differ:
        changes = "; ".join(f"{key} is {ours[key]} instead of {theirs[key]}" for key in differ[:4])
        raise InputError(f"train.start: {folder}: its model differs ({changes}); leave [model] out to take that run's")


@torch.no_grad()
def start_from(trainer: Trainer, folder: Path, store: TokenStore, step: int | str | None = None) -> str:
    """Load the weights of the run in `folder`, and its head if it fits. Returns a line for the terminal.

    `step` is the step of the checkpoint, or "best"; None means the newest. Raises InputError if the run has no checkpoint,
    another tokenizer or another model.
    """
    run = RunDirectory(folder)
    checkpoint: SavedCheckpoint | None = None
    if step is not None:
        checkpoint = trained_checkpoints(run, Weights(step=find_step(run, step, "train.start_step")))[0]
    elif checkpoint_steps(run.checkpoints):
        checkpoint = latest(run.checkpoints, on_damage=warn)
    if checkpoint is None:
        raise InputError(f"train.start: {folder}: has no checkpoint; train that run first, or restore its checkpoints")
    require_equal_tokenizers(folder, store.manifest["tokenizer"]["sha256"])
    require_same_model(folder, ModelConfig.from_dict(checkpoint.facts["model"]), trainer.model.config)
    part = "ema" if "ema" in checkpoint else "model"  # the weights that evaluation and export use
    stored, own = checkpoint.contents[part], dict(trainer.model.named_parameters())
    fitting = {name: one for name, one in own.items() if name in stored and stored[name].shape == tuple(one.shape)}
    for name in (*own, *stored):
        if name not in fitting and not name.startswith(HEADS):
            raise InputError(f"train.start: {checkpoint.folder}: {name} differs from [model]; use the same options")
    checkpoint.fill(part, fitting.items())
    new = own.keys() - fitting.keys()
    line = f"starting from {'the moving average at ' if part == 'ema' else ''}step {checkpoint.step} of {folder}"
    return line + (f"; new: {', '.join(sorted(new))}" if new else "")
