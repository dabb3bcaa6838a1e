"""What a folder declares apart from what is computed: ids of special tokens, names of classes, dtype, chat template.

`transformers` takes much of it as it is and fails later, or never says that it is not used.
"""

from __future__ import annotations

from pathlib import Path

import torch

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import read_settings
from bessemer.model.huggingface.settings import Settings
from bessemer.tokens.pretrained import CARRIED, chat_template, read_table, template_error, token_ids

FILES = ("generation_config.json", "config.json")


def check_claims(folder: Path, config: ModelConfig) -> list[str]:
    """What is wrong in a folder but hinders nothing, a sentence each. config: as read from its config.json.

    Raises InputError on what cannot work.
    """
    settings = read_settings(folder)
    for name in CARRIED:
        if name.endswith(".json"):
            read_table(folder / name)  # transformers' own error about one would not name it
    for key in ("dtype", "torch_dtype"):
        name = settings.raw(key)
        known = isinstance(name, str) and isinstance(getattr(torch, name.removeprefix("torch."), None), torch.dtype)
        if name is not None and not known:
            raise settings.wrong(key, "is no dtype; float32, bfloat16 or float16 is expected")
    warnings = _ids(folder, config) + (_classes(settings, config.labels) if config.labels else [])
    template = chat_template(folder)
    if template is not None and (error := template_error(template)) is not None:
        warnings.append(f"{folder}: its chat template does not parse ({error}); `bessemer chat` needs --template")
    return warnings


def require_classes(folder: Path, config: ModelConfig) -> None:
    """Raise InputError for a head that gives a score of a text and chooses no class."""
    settings = read_settings(folder)
    if config.labels == 1 or (config.labels and settings.raw("problem_type") == "regression"):
        key = "num_labels = 1" if config.labels == 1 else 'problem_type = "regression"'
        raise InputError(
            f"{settings.path}: {key} makes its head a regression (a score of each text, as of a reward model), which is not "
            "supported: a classifier chooses among two classes or more. model.from starts from its body, with a new head"
        )


def _ids(folder: Path, config: ModelConfig) -> list[str]:
    """Ids beyond the vocabulary."""
    warnings = []
    for role in ("pad", "bos", "eos"):
        for name in FILES:
            beyond = [number for number in token_ids(folder / name, role) if number >= config.vocabulary]
            if not beyond:
                continue
            what = f"{folder / name}: {role}_token_id = {beyond[0]} is beyond the vocabulary of {config.vocabulary} ids"
            if role == "pad":
                raise InputError(
                    f"{what}, so no batch can be padded with it; give the tokenizer's padding token, or null"
                )
            if config.causal and not config.labels:
                no_end = "; no text ends at it" if role == "eos" else ""
                warnings.append(f"{what}{no_end}: it is ignored")
                break
    return warnings


def _classes(settings: Settings, labels: int) -> list[str]:
    """Names of classes that cannot be told apart, or two tables that say different things."""
    named, numbers = settings.table("id2label"), settings.table("label2id")
    names = {number: named.raw(number) for number in named}
    if names and sorted(names) != sorted(map(str, range(labels))):
        raise settings.wrong("id2label", f"does not name the classes 0 to {labels - 1}, each once")
    warnings = []
    twice = sorted({str(name) for name in names.values() if list(names.values()).count(name) > 1})
    if twice:
        warnings.append(
            f"{settings.path}: id2label calls more than one class {twice[0]!r}; they cannot be told apart by name"
        )
    different = [name for name in numbers if names and names.get(str(numbers.raw(name))) != name]
    if different and not twice:
        number = numbers.raw(different[0])
        warnings.append(
            f"{settings.path}: label2id says that {different[0]!r} is class {number}, id2label that this is "
            f"{names.get(str(number))!r}; id2label is taken"
        )
    return warnings
