"""Writer of the Hugging Face layout: weights, config.json, generation_config.json, tokenizer files and model card.

A model trained here gets new files; an imported one keeps its own, byte for byte. A whole model is compared with
`transformers` before it is published. One that does not fit in memory is streamed, and its tensors are read back.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.common.errors import BessemerError
from bessemer.common.extensions import is_own
from bessemer.export.family_trial import require_same_keys, small_model
from bessemer.export.gate import ExportCheck, errors_about, verify
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface import comparison
from bessemer.model.huggingface.comparison import Texts
from bessemer.model.huggingface.config import family_of, read_config, to_hugging_face
from bessemer.model.huggingface.weights import SHARD_BYTES, hub_tensors, require_written, write_weights
from bessemer.model.transformer import Transformer
from bessemer.run.files import read_json, write_atomic, write_json
from bessemer.run.stage import staging
from bessemer.storage.hub import foreign_file
from bessemer.tokens.tokenizer import Tokenizer
from bessemer.tokens.tokenizer.chat import chat_template, template_names
from bessemer.tokens.tokenizer.description import Framing, with_framing
from bessemer.tokens.tokenizer.files import CHAT_TEMPLATE, read_table

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
DTYPES_FILE = "bessemer-dtypes.json"  # data type of each tensor of an imported model
CARD, SOURCE_CARD = "README.md", "README-source.md"  # the export's card, and the original card of an imported model
TEMPLATES_FOLDER = "additional_chat_templates"
RECORD = "bessemer.json"


@dataclass(frozen=True)
class ExportFiles:
    """Files and settings of an export in addition to the weights.

    Attributes:
        tokenizer_json: The tokenizer's file. Its folder also holds the generation settings and the chat template.
        end_of_text: Id of the end-of-text token.
        framing: Ids around a text; None: end-of-text before it.
        mask_token: Id of the mask token; None without one.
        labels: Names of a classifier's classes.
        source: An imported model's own files; None for a model trained here.
        dtype: Data type of every tensor. None: that of the source, else float32.
        card: Function that returns the text of README.md for the results of the verification.
        dropout: Dropout keys of config.json; keys left out are 0.
        special: Special tokens by role (bos, pad, ...) of the model that a training started from.
        ends: Ids at which generation ends.
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
    def own_framing(self) -> Framing:
        """Ids around a text in an export of a model trained here."""
        return self.framing or Framing((self.end_of_text,))

    def dtype_of(self, tensor: str) -> torch.dtype:
        """Return the data type in which a tensor is written."""
        if self.dtype is not None:
            return self.dtype
        for name in (tensor, tensor.partition(".")[2]):  # some models omit the outer prefix
            if name in self._source_dtypes:
                return DTYPES.get(self._source_dtypes[name], torch.float32)
        return torch.float32

    @cached_property
    def _source_dtypes(self) -> dict[str, str]:
        path = None if self.source is None else self.source / DTYPES_FILE
        return dict(read_json(path)) if path is not None and path.exists() else {}


def export(model: Transformer, files: ExportFiles, folder: Path, sample: Tensor, texts: Texts) -> ExportCheck:
    """Write a model to a folder in its family's format, and compare it with `transformers`.

    The model's weights are rounded to the data type that they are written in.

    Args:
        model: The model.
        files: Files and settings in addition to the weights.
        folder: Folder to write. It is unchanged after an error.
        sample: (B, T) token ids for which the logits are compared.
        texts: Documents with their ids, without special tokens.

    Raises:
        BessemerError: `transformers` computes other logits, greedy tokens or ids.
    """
    for tensor in hub_tensors(model):
        if (dtype := files.dtype_of(tensor.name)) != torch.float32:
            tensor.scatter(tensor.gather().to(dtype).float())
    with staging(folder) as staged:
        write_weights(model, staged, dtype_of=files.dtype_of)
        write_files(model.config, files, staged)
        with errors_about("export"):
            own, framing = Tokenizer.load_any(files.tokenizer_json), None if files.source else files.own_framing
            check = verify(model, staged, sample, own, texts, framing)
        _record(staged, asdict(check), files)
    return check


@torch.no_grad()
def stream(
    model: Transformer, read: Callable[[str], Tensor], files: ExportFiles, folder: Path, shard_bytes: int = SHARD_BYTES
) -> int:
    """Write a model to a folder in its family's format, holding at most one file of it in memory.

    Each file is read back, and every tensor is compared with a second reading of its source. Logits are not compared. The
    comparison in `export` shows, on any smaller model of the family, that `transformers` computes the same logits from the
    same tensors.

    Args:
        model: A model on the meta device (`transformer.meta_model`).
        read: Function that returns the whole values of a named parameter.
        files: Files and settings in addition to the weights.
        folder: Folder to write. It is unchanged after an error.
        shard_bytes: Maximum size of a file, unless a single tensor is larger.

    Returns:
        The number of tensors.

    Raises:
        BessemerError: A tensor differs from its source.
    """

    def value(name: str, parameter: Tensor) -> Tensor:
        values = read(name)
        if values.shape != parameter.shape:
            raise BessemerError(f"export: tensor {name} has shape {list(values.shape)}, not {list(parameter.shape)}")
        return values.to(parameter.dtype)

    with staging(folder) as staged:
        write_weights(model, staged, value, shard_bytes, files.dtype_of)
        write_files(model.config, files, staged)
        require_same_tokenizer(files, staged)
        count = require_written(model, staged, value, files.dtype_of)
        logits = "not compared: the model was exported tensor by tensor"
        _record(staged, {"parameters": model.config.parameters, "tensors": count, "logits": logits}, files)
    return count


def require_same_tokenizer(files: ExportFiles, folder: Path) -> None:
    """Raise BessemerError unless `transformers` tokenizes with an export's files as the trained tokenizer does.

    Args:
        files: Files and settings of the export.
        folder: Folder with the export's small files.
    """
    with errors_about("export"):
        theirs = comparison.load_tokenizer(folder)
        framing = comparison.framing_of(theirs) if files.source else files.own_framing
        comparison.compare_tokenizers(theirs, Tokenizer.load_any(files.tokenizer_json), framing)


def try_export(config: ModelConfig, files: ExportFiles, folder: Path) -> None:
    """Write a model's files without its weights, and check that `transformers` reads them in the same way.

    For a user's family, a small model is exported too.

    Args:
        config: Configuration of the model.
        files: Files and settings of the export.
        folder: Folder to write.

    Raises:
        BessemerError: `transformers` tokenizes or computes differently.
    """
    write_files(config, files, folder)
    require_same_tokenizer(files, folder)
    if not is_own(type(family := family_of(config))):
        require_same_keys(family)
        tokenizer, sample = Tokenizer.load_any(files.tokenizer_json), torch.arange(48).view(2, -1) % config.vocabulary
        texts = [(text, tokenizer.encode(text)) for text in comparison.PLAIN_TEXTS]
        export(small_model(config), files, folder / "small", sample, texts)


def _record(folder: Path, check: dict[str, Any], files: ExportFiles) -> None:
    """Write the model card, and bessemer.json with the results of the verification and the files."""
    if files.card is not None:
        if (folder / CARD).exists():
            (folder / CARD).rename(folder / SOURCE_CARD)
        write_atomic(folder / CARD, files.card(check))
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    write_json(folder / RECORD, {**check, "files": sizes})


def write_files(config: ModelConfig, files: ExportFiles, folder: Path) -> None:
    """Write all files except the weights and the model card."""
    if files.source is not None:
        _write_source(config, files, files.source, folder)
        return
    settings = to_hugging_face(config, files.end_of_text, files.labels) | dict(files.dropout)
    special = _special_ids(files)
    settings |= {key: special[key] for key in special if key in settings}
    write_json(folder / "config.json", settings | _dtype_keys(files.dtype or torch.float32))
    if config.causal and not config.labels:
        keys = read_table(files.tokenizer_json.parent / "generation_config.json") if files.special else {}
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), files.end_of_text)
        write_json(folder / "generation_config.json", keys | ids | {key: special[key] for key in ids if key in special})
    _write_tokenizer(files, config, folder)


def keep_files(source: Path, folder: Path) -> None:
    """Copy an imported model's files without its weights, and record the data type of each of its tensors."""
    from safetensors import safe_open

    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS) and not path.name.startswith("."):
            shutil.copyfile(foreign_file(source, path.name), folder / path.name)
    for path in sorted((source / TEMPLATES_FOLDER).glob("*")):
        (folder / TEMPLATES_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(foreign_file(source, f"{TEMPLATES_FOLDER}/{path.name}"), folder / TEMPLATES_FOLDER / path.name)
    dtypes: dict[str, str] = {}
    for path in source.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                dtypes[name] = _SAFETENSORS_DTYPES.get(file.get_slice(name).get_dtype(), "float32")
    write_json(folder / DTYPES_FILE, dtypes)


def _write_source(config: ModelConfig, files: ExportFiles, source: Path, folder: Path) -> None:
    """Copy an imported model's own files from `source` to `folder`; config.json changes only if `files.dtype` is set."""
    for path in sorted(source.iterdir()):
        if path.name not in (DTYPES_FILE, RECORD):
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    if files.dtype is not None:
        settings, dtype = read_json(folder / "config.json"), _dtype_keys(files.dtype)
        named = {key: value for key, value in dtype.items() if key in settings}
        write_json(folder / "config.json", settings | (named or dtype))
    own = read_config(folder)
    if own.with_changes(sequence_length=config.sequence_length, max_positions=config.max_positions) != config:
        raise BessemerError(f"export: {source / 'config.json'} does not belong to the weights; restore it")


def _special_ids(files: ExportFiles) -> dict[str, Any]:
    """Return the keys of config.json for special token ids that differ from end-of-text.

    They are those of the model that a training started from, or several ids at which generation ends.
    """
    if not files.special:
        return {"eos_token_id": list(files.ends)} if len(files.ends) > 1 else {}
    tokenizer = Tokenizer.load_any(files.tokenizer_json)
    ids: dict[str, Any] = {f"{role}_token_id": tokenizer.id_of(token) for role, token in files.special.items()}
    return ids | {"eos_token_id": list(files.ends) if len(files.ends) > 1 else files.ends[0]}


def _dtype_keys(dtype: torch.dtype) -> dict[str, str]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": name, "torch_dtype": name}  # transformers before 4.56 reads the second key


def _write_tokenizer(files: ExportFiles, config: ModelConfig, folder: Path) -> None:
    """Write tokenizer.json with the ids that the model saw around each text, its settings and its chat template."""
    framing = files.own_framing
    description = read_json(files.tokenizer_json)
    write_json(folder / "tokenizer.json", with_framing(description, framing))
    added = {token["id"]: token["content"] for token in description["added_tokens"]}
    token = added[files.end_of_text]
    has_own_ends = not config.causal and "sep" in files.special  # [CLS] and [SEP] replace bos and eos
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("pad_token",) if has_own_ends else ("bos_token", "eos_token", "pad_token"), token),
        **{f"{role}_token": name for role, name in files.special.items()},
        # A classifier reads its training length; any other model reads up to its context length.
        "model_max_length": config.sequence_length if config.labels else config.positions_length,
        "model_input_names": ["input_ids", *(["token_type_ids"] if config.token_types else []), "attention_mask"],
        # Generation continues at the right end of each row of a batch.
        "padding_side": "left" if config.causal and not config.labels else "right",
        "clean_up_tokenization_spaces": False,
    }
    if framing == Framing((files.end_of_text,)):
        settings["add_bos_token"] = True
    elif files.special and "bos_token" not in template_names(files.tokenizer_json.parent, token):
        settings.pop("bos_token", None)  # a chat template would write it
    if files.mask_token is not None:
        settings["mask_token"] = added[files.mask_token]
    if (template := chat_template(files.tokenizer_json.parent)) is not None:
        write_atomic(folder / CHAT_TEMPLATE, template)
    write_json(folder / "tokenizer_config.json", settings)
