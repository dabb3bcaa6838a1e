"""What lies in an export beside the weights: config.json, generation_config.json and the tokenizer's files.

A model trained here gets files of our own. An imported one keeps those it came with, byte for byte.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from bessemer.errors import BessemerError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import read_config, to_hugging_face
from bessemer.run import read_json, write_atomic, write_json
from bessemer.tokens.pieces import Framing, with_framing
from bessemer.tokens.pretrained import chat_template, read_table
from bessemer.tokens.tokenizer import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
DTYPES_FILE = "bessemer-dtypes.json"  # the dtype of each tensor of an imported model
CARD, SOURCE_CARD = "README.md", "README-source.md"  # ours, and that of an imported model
TEMPLATES_FOLDER = "additional_chat_templates"
RECORD = "bessemer.json"


@dataclass(frozen=True)
class Beside:
    """What an export holds beside the weights.

    framing: the ids around a text, None: end-of-text before it; source: an imported model's own files; dtype: of every
    tensor, None: as the source has them, else float32; card: the text of README.md from what the gate measured; dropout:
    keys of config.json, 0 where left out; special: special tokens by role (bos, pad, ...) of the model that a training started
    from, whose chat template and generation settings lie beside `tokenizer_json`; ends: ids at which generation ends then.
    """

    tokenizer_json: Path
    end_of_text: int
    framing: Framing | None = None
    mask_token: int | None = None
    labels: tuple[str, ...] = ()
    source: Path | None = None
    dtype: torch.dtype | None = None
    card: Callable[[dict[str, Any]], str] | None = None
    dropout: Mapping[str, float] = field(default_factory=dict)
    special: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[int, ...] = ()

    @property
    def around(self) -> Framing | None:
        """The ids that must stand around a text; None: those that the source's own tokenizer puts there."""
        return None if self.source is not None else self.framing or Framing((self.end_of_text,))

    def dtype_of(self, tensor: str) -> torch.dtype:
        """The dtype that a tensor is written in."""
        if self.dtype is not None or not self._source_dtypes:
            return self.dtype or torch.float32
        for name in (tensor, tensor.partition(".")[2]):  # some folders leave out the outer prefix
            if name in self._source_dtypes:
                return DTYPES.get(self._source_dtypes[name], torch.float32)
        return torch.float32

    @cached_property
    def _source_dtypes(self) -> dict[str, str]:
        path = None if self.source is None else self.source / DTYPES_FILE
        return dict(read_json(path)) if path is not None and path.exists() else {}


def write_files(config: ModelConfig, beside: Beside, folder: Path) -> None:
    """Everything but the weights and the model card."""
    if beside.source is not None:
        _write_source(config, beside, folder)
        return
    settings = to_hugging_face(config, beside.end_of_text) | dict(beside.dropout)
    own = _special_ids(beside)
    settings |= {key: own[key] for key in own if key in settings}
    if beside.labels:
        named = {str(number): name for number, name in enumerate(beside.labels)}
        settings |= {"id2label": named, "label2id": {name: int(number) for number, name in named.items()}}
    write_json(folder / "config.json", settings | _dtype_keys(beside.dtype or torch.float32))
    if config.causal and not config.labels:
        kept = read_table(beside.tokenizer_json.parent / "generation_config.json") if own else {}
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), beside.end_of_text)
        write_json(folder / "generation_config.json", kept | ids | {key: own[key] for key in ids if key in own})
    _write_tokenizer(beside, config, folder)


def keep_files(source: Path, folder: Path) -> None:
    """Copy an imported model's files without its weights, and note the dtype of each of its tensors."""
    from safetensors import safe_open

    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(WEIGHTS) and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    if (source / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(source / TEMPLATES_FOLDER, folder / TEMPLATES_FOLDER)
    dtypes: dict[str, str] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                dtypes[name] = SAFETENSORS_DTYPES.get(file.get_slice(name).get_dtype(), "float32")
    write_json(folder / DTYPES_FILE, dtypes)


def record(folder: Path, check: dict[str, Any], beside: Beside) -> None:
    """Write the model card, and bessemer.json: what was checked, and the files."""
    if beside.card is not None:
        if (folder / CARD).exists():
            (folder / CARD).rename(folder / SOURCE_CARD)
        write_atomic(folder / CARD, beside.card(check))
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / RECORD, {**check, "files": files})


def _write_source(config: ModelConfig, beside: Beside, folder: Path) -> None:
    """An imported model's own files; config.json changes only where another dtype is asked for."""
    source = beside.source
    assert source is not None
    for path in sorted(source.iterdir()):
        if path.name in (DTYPES_FILE, RECORD):
            continue
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    if beside.dtype is not None:
        settings = read_json(folder / "config.json")
        named = {key: value for key, value in _dtype_keys(beside.dtype).items() if key in settings}
        write_json(folder / "config.json", settings | (named or _dtype_keys(beside.dtype)))
    family, own = read_config(folder)
    if own.with_changes(sequence_length=config.sequence_length, max_positions=config.max_positions) != config:
        raise BessemerError(
            f"export: {source / 'config.json'} describes another {family} than the weights; was the run's folder changed?"
        )


def _special_ids(beside: Beside) -> dict[str, Any]:
    """Keys of config.json for the special tokens of the model that a training started from."""
    if not beside.special:
        return {}
    tokenizer = Tokenizer.load_any(beside.tokenizer_json)
    found: dict[str, Any] = {f"{role}_token_id": tokenizer.id_of(token) for role, token in beside.special.items()}
    return found | {"eos_token_id": list(beside.ends) if len(beside.ends) > 1 else beside.ends[0]}


def _dtype_keys(dtype: torch.dtype) -> dict[str, str]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}  # the second for transformers before 4.56


def _write_tokenizer(beside: Beside, config: ModelConfig, folder: Path) -> None:
    """The tokenizer, which puts end-of-text before a text: so the model was trained, and so our own commands use it."""
    framing = beside.around
    assert framing is not None
    description = json.loads(beside.tokenizer_json.read_text(encoding="utf-8"))
    write_json(folder / "tokenizer.json", with_framing(description, framing))
    added = {token["id"]: token["content"] for token in description["added_tokens"]}
    token = added[beside.end_of_text]
    inputs = (
        ["input_ids", "token_type_ids", "attention_mask"] if config.token_types else ["input_ids", "attention_mask"]
    )
    has_own_ends = not config.causal and "sep" in beside.special  # [CLS] and [SEP] in the place of bos and eos
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("pad_token",) if has_own_ends else ("bos_token", "eos_token", "pad_token"), token),
        **{f"{role}_token": name for role, name in beside.special.items()},
        # A classifier reads what it was trained on; anything else reads as far as its positions go.
        "model_max_length": config.sequence_length if config.labels else config.positions_length,
        "model_input_names": inputs,
        # Generation goes on at the right end of each row of a batch.
        "padding_side": "left" if config.causal and not config.labels else "right",
        "clean_up_tokenization_spaces": False,
    }
    if framing == Framing((beside.end_of_text,)):
        settings["add_bos_token"] = True
    if beside.mask_token is not None:
        settings["mask_token"] = added[beside.mask_token]
    if beside.special and (template := chat_template(beside.tokenizer_json.parent)) is not None:
        write_atomic(folder / "chat_template.jinja", template)
    write_json(folder / "tokenizer_config.json", settings)
