"""Checks of a folder that `bessemer import` or `model.from` reads.

They compare the logits with those of `transformers`, and check the metadata: special tokens, classes, dtype and chat
template.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.common.console import warn
from bessemer.common.environment import available_memory
from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface import comparison
from bessemer.model.huggingface.comparison import SAFELY, logits_of, require_close, understood_copy
from bessemer.model.huggingface.config import LEFT_OVER, read_config, read_settings, unread_keys
from bessemer.model.huggingface.families import family_named
from bessemer.model.huggingface.weights import BY_TOKEN
from bessemer.model.transformer import Transformer, meta_model
from bessemer.tokens.tokenizer.chat import chat_template, render
from bessemer.tokens.tokenizer.files import TOKENIZER_SIDE_FILES, read_table, token_ids

SAMPLE_TOKENS, LONGEST_SAMPLE = 64, 320  # the sample grows to twice the window, up to the longest sample
SHORT_WINDOW = 16  # window in both models if the model's window is longer than the sample
LAYERS = (16, 8, 4, 2, 1)  # numbers of layers to compare if the full model does not fit
_ID_FILES = ("generation_config.json", "config.json")
MODELS_IN_MEMORY = 1.5  # fp32 models in memory: that of transformers and the working memory of the comparison


@dataclass(frozen=True)
class ImportCheck:
    """The result of comparing an imported model with `transformers`.

    Attributes:
        max_difference: Largest absolute difference of a logit, or of a hidden state if our model has a new head; None
            if nothing was compared.
        layers: Number of layers that were compared, from the first.
        of_layers: Number of layers of the model.
        note: Why not all was compared, or what was changed for the comparison.
    """

    max_difference: float | None
    layers: int
    of_layers: int
    note: str = ""

    @property
    def line(self) -> str:
        if self.max_difference is None:
            return f"not compared with transformers: {self.note}"
        line = f"transformers computes the same within {self.max_difference:.1e}"
        return f"{line} ({self.note})" if self.note else line


@torch.no_grad()
def check_read(folder: Path, model: Transformer) -> ImportCheck:
    """Compare an imported model with `transformers` on the same folder, on a few random tokens in fp32.

    If the two models together do not fit into memory, only their first layers are compared. If the model's attention
    window is longer than the sample, both models are compared with a short window. Prints a warning for each line
    of `check_metadata`.

    Raises InputError when `transformers` cannot read the folder, and BessemerError when the two models differ.
    """
    own, settings = read_config(folder), read_settings(folder)
    for line in check_metadata(folder, own):
        warn(line)
    # Options that a recipe changes on purpose, such as a soft cap, are not part of the import.
    config = own.with_changes(
        labels=model.config.labels,
        pooling=own.pooling if own.labels else model.config.pooling,
        sequence_length=model.config.sequence_length,
    )
    # Read the folder's window directly, so that the check also detects a window that the import ignored.
    keys, types = family_named(own.family).keys, settings.raw("layer_types")
    window_key = keys.get("window", "sliding_window")
    window = settings.raw(window_key)
    short = SHORT_WINDOW if isinstance(window, int) and 2 * window > LONGEST_SAMPLE else 0
    room = available_memory()
    unread = unread_keys(folder)
    notes = [f"config.json: {', '.join(unread)}: ignored, as by transformers"] if unread else []
    layers = next((n for n in (config.layers, *LAYERS) if n <= config.layers and _bytes(config, n) <= room), None)
    if layers is None:
        note = f"one layer needs {_bytes(config, 1):,.0f} bytes, but only {room:,} are free"
        return ImportCheck(None, 0, config.layers, "; ".join([note, *notes]))
    if layers < config.layers:
        notes.append(f"the first {layers} of {config.layers} layers, since two whole models do not fit into memory")
    notes += [f"windows of {config.window:,} shortened to {short} in both"] if short and config.window else []
    changes = {keys["layers"]: layers} | ({"layer_types": types[:layers]} if types else {})
    changes |= {window_key: short} if short else {}
    reduced = config.with_changes(layers=layers, window=min(short or config.window, config.window))
    with understood_copy(folder, **changes) as copy:
        worst = _compare(folder, copy, _sharing(model, reduced))
    return ImportCheck(worst, layers, config.layers, "; ".join(notes))


def _bytes(config: ModelConfig, layers: int) -> float:
    return MODELS_IN_MEMORY * 4 * config.with_changes(layers=layers).parameters


def _compare(folder: Path, copy: Path, ours: Transformer) -> float:
    """Return the largest absolute difference between our model and `transformers`' model of the folder.

    It is that of a logit, or of a hidden state if our model has a new head. `copy` is a copy of `folder` with a
    config.json that may have fewer layers or a short window.
    """
    own = read_config(copy)
    family, read = family_named(own.family), set[str]()
    theirs = _load(folder, copy, family.classifier if own.labels else family.architecture, read)
    sample_BT = _sample(ours.config, theirs.config.pad_token_id)
    new_head = own.labels != ours.config.labels  # then hidden states are compared
    computed = ours(sample_BT) if new_head else logits_of(ours, sample_BT)
    with comparison.errors_of(f"{folder}: transformers loads the model, but cannot run it"):
        if new_head:
            wanted = theirs.base_model(sample_BT)[0]
        else:  # one text at a time, because a classifier without a padding token rejects larger batches
            wanted = torch.cat([theirs(row_1T).logits for row_1T in torch.split(sample_BT, 1)])
    for key in read & set(unread_keys(folder)):
        raise read_settings(folder).error(key, f"is read by {type(theirs).__name__}, but not supported; {LEFT_OVER}")
    what = f"the {'hidden states' if new_head else 'logits'} and those of transformers' {type(theirs).__name__}"
    remedy = "; nothing was written. Please report this config.json"
    return require_close(computed, wanted, f"{folder}: {what}", remedy)


def _load(folder: Path, copy: Path, architecture: str, read: set[str]) -> Any:
    """Load `copy` with the class of `transformers` named `architecture`, in fp32, from local files only.

    From then on, each key of config.json that the model reads, when it is built or run, is added to `read`. `folder` is
    named in errors.
    """
    kind = getattr(comparison.quiet_transformers(), architecture)
    with comparison.errors_of(f"{folder}: transformers cannot load the model"):
        base: Any = kind.config_class

        def note(self: Any, key: str) -> Any:
            read.add(key)
            return base.__getattribute__(self, key)

        noting: Any = type(base.__name__, (base,), {"__getattribute__": note})
        config = noting.from_pretrained(copy, local_files_only=True)
        read.clear()  # the configuration's own code has read every key
        return kind.from_pretrained(copy, config=config, dtype=torch.float32, **SAFELY).eval()


def _sample(config: ModelConfig, padding: int | None) -> Tensor:
    """Return random ids, (2, T), without the padding id, because some models skip it when counting positions."""
    length = min(max(SAMPLE_TOKENS, min(2 * config.window, LONGEST_SAMPLE)), config.positions_length)
    ids = torch.arange(config.vocabulary)
    ids = ids[ids != padding] if config.vocabulary > 1 and padding is not None else ids
    return ids[torch.randint(0, len(ids), (2, length), generator=torch.Generator().manual_seed(0))]


def _sharing(model: Transformer, config: ModelConfig) -> Transformer:
    """Return a model of another configuration, such as fewer layers, that shares the memory of this one."""
    other = meta_model(config)
    ours = {name: t[: config.vocabulary] if name in BY_TOKEN else t for name, t in model.state_dict().items()}
    other.load_state_dict(ours, strict=False, assign=True)  # computing with a missing tensor, left on meta, would fail
    return other.eval()


def check_metadata(folder: Path, config: ModelConfig) -> Iterator[str]:
    """Yield warnings about inconsistent metadata of a folder, one sentence each; the model can still be read.

    `config` is the one read from its config.json. Raises InputError on metadata that make it unusable.
    """
    for name in TOKENIZER_SIDE_FILES:
        if name.endswith(".json"):
            read_table(folder / name)  # names the file in its error, which transformers' error does not
    names = read_settings(folder).table("id2label")
    if config.labels and list(names) and sorted(names) != sorted(map(str, range(config.labels))):
        raise read_settings(folder).error("id2label", f"must name each class from 0 to {config.labels - 1} once")
    for role, name in product(("pad", "bos", "eos"), _ID_FILES):
        for number in token_ids(folder / name, role):
            what = f"{folder / name}: {role}_token_id = {number} is beyond the vocabulary of {config.vocabulary} ids"
            if number >= config.vocabulary and role == "pad":
                raise InputError(f"{what}; set it to the tokenizer's, or to null")
            if number >= config.vocabulary and config.causal and not config.labels:
                yield f"{what}, and is ignored"
    try:
        render(chat_template(folder) or "", {}, [{"role": "user", "content": "a"}])
    except InputError as error:
        yield f"{folder}: {error}; use `bessemer chat` with --template"


def require_classes(folder: Path, config: ModelConfig) -> None:
    """Raise InputError for a head that returns a score of a text instead of a class."""
    settings = read_settings(folder)
    if config.labels == 1 or (config.labels and settings.raw("problem_type") == "regression"):
        raise InputError(
            f"{settings.path}: its head is a regression, not a classifier; use its body only, with model.from"
        )
