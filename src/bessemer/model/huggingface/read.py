"""From the Hugging Face layout: a folder of config.json and safetensors to one of our models."""

from __future__ import annotations

import contextlib
import difflib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import read_config
from bessemer.model.huggingface.families import FAMILIES
from bessemer.model.huggingface.family import Tensors
from bessemer.model.huggingface.weights import Part, parts
from bessemer.model.initialisation import build, shell
from bessemer.model.transformer import Transformer

# Buffers of older versions, which a folder may hold and no model reads.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids")
_HEADS = ("head.", "classifier.")  # of our parameters
LFS_POINTER = b"version https://git-lfs"
_READ = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_model(folder: Path, config: ModelConfig | None = None, seed: int = 0) -> Transformer:
    """The model of a folder, in fp32 on the CPU. Reads safetensors only: a pickle could run code.

    config: the configuration to fill, when it differs from the folder's own in what no tensor has (the sequence
    length), or puts a classifier in the place of the language head: then the new head has its initial weights of
    `seed`. Raises InputError that names the first tensor that is missing, unexpected, wrongly shaped or not finite.
    """
    family, own = read_config(folder)
    wanted = own if config is None else config
    tensors, found = FAMILIES[family].tensors, require_weights(folder, wanted)
    model = build(wanted, seed)
    for part in parts(model, family=family):
        theirs = found.name_of(part.name)
        if theirs is not None and found.shape(theirs) == part.shape:  # else it is a new head's
            _take(folder, found, theirs, part)
    if model.config.tie_embeddings and not model.config.labels:
        _require_tied(folder, found, tensors, model.embedding.weight)
    return model


def require_weights(folder: Path, config: ModelConfig) -> _Folder:
    """The folder's tensors, once their names and shapes are those of a model; nothing is read of them. Raises as `read_model`."""
    family, own = read_config(folder)
    found, new_head = _Folder(folder, FAMILIES[family].tensors.base), config.labels > 0 and config.labels != own.labels
    _require_tensors(folder, found, _expected(folder, found, config, family), family, config, new_head)
    return found


def _output_names(tensors: Tensors) -> list[str]:
    """What the output matrix is called."""
    paths = [theirs for theirs, ours in tensors.outer if ours in ("head", "head.weight")]
    return [f"{path.removesuffix('.weight')}.weight" for path in paths]


def _require_tied(folder: Path, found: _Folder, tensors: Tensors, embedding_VD: Tensor) -> None:
    """Raise InputError when a folder that says its matrices are tied has an output matrix of its own."""
    for name in map(found.name_of, _output_names(tensors)):
        if name is not None and not torch.equal(found.read(name).to(embedding_VD.dtype), embedding_VD.detach()):
            raise InputError(
                f"{folder}: tie_word_embeddings is true in config.json, but {name} is another matrix than the embedding; set "
                "it to false if the model has an output matrix of its own, or remove the tensor"
            )


def _expected(folder: Path, found: _Folder, config: ModelConfig, family: str) -> dict[str, Part]:
    """The tensors that a folder should have, by name; nothing is allocated, whatever its config.json says."""
    if config.layers > len(found.names):
        raise InputError(
            f"{folder}: config.json says {config.layers} layers, but the weights are {len(found.names)} tensors; is it the "
            "config.json of these weights?"
        )
    try:
        return {part.name: part for part in parts(shell(config), family=family)}
    except (RuntimeError, OverflowError) as error:  # a tensor of more elements than can be counted
        raise InputError(f"{folder}: config.json describes a model beyond any memory: {error}") from None


def _require_tensors(
    folder: Path, found: _Folder, expected: dict[str, Part], family: str, config: ModelConfig, new_head: bool
) -> None:
    """Raise InputError that names the first tensor that is missing, unexpected or wrongly shaped."""
    tensors = FAMILIES[family].tensors
    optional = {name for name, part in expected.items() if new_head and part.ours.startswith(_HEADS)}
    absent = [name for name in expected if found.name_of(name) is None and name not in optional]
    known = {found.name_of(name) for name in expected}
    extra = [name for name in found.names if name not in known and not _may_be_left(name, tensors, config, new_head)]
    headless = bool(config.labels) or not config.causal  # else tie_word_embeddings may be what is wrong
    if absent and headless and all(expected[name].ours.startswith(_HEADS) for name in absent):
        wanted = FAMILIES[family].classifier if config.labels else FAMILIES[family].architecture
        raise InputError(
            f"{folder}: the weights have no head of a {wanted} (tensor {absent[0]} is missing); a model without its head, or "
            f"with that of another task, is read once transformers has given it one: {wanted}.from_pretrained(FOLDER)"
            ".save_pretrained(OTHER), and the same with AutoTokenizer"
        )
    if absent:
        near = difflib.get_close_matches(absent[0], extra, n=1)
        raise InputError(
            f"{folder}: tensor {absent[0]} is missing ({len(absent)} of {len(expected)} are)"
            + (f"; there is {near[0]} instead" if near else "")
        )
    if extra:
        raise InputError(
            f"{folder}: tensor {extra[0]} belongs to no part of the model that config.json describes ({len(extra)} do "
            "not); is it the config.json of these weights?"
        )
    for name, part in expected.items():
        theirs = found.name_of(name)
        if theirs is not None and name not in optional and found.shape(theirs) != part.shape:
            raise InputError(
                f"{folder}: tensor {theirs} is {list(found.shape(theirs))}, config.json makes it {list(part.shape)}"
            )


def _take(folder: Path, found: _Folder, name: str, part: Part) -> None:
    tensor = found.read(name)
    if tensor.dtype not in _READ:
        raise InputError(
            f"{folder}: tensor {name} is stored as {str(tensor.dtype).removeprefix('torch.')}: quantised weights are not read; "
            "convert them to float32, bfloat16 or float16"
        )
    if not torch.isfinite(tensor).all():
        count = int((~torch.isfinite(tensor)).sum())
        raise InputError(f"{folder}: tensor {name} has {count} values that are not finite; the weights are damaged")
    part.take(tensor.float())


def _may_be_left(name: str, tensors: Tensors, config: ModelConfig, new_head: bool) -> bool:
    """Whether a tensor that no part of the model takes is none of its own: a buffer, a tied copy, another head."""
    if name.endswith(_BUFFERS) or name.startswith(tensors.unread):
        return True
    if (config.tie_embeddings or config.labels) and name in _output_names(tensors):
        return True
    heads = tuple(theirs for theirs, ours in tensors.outer if f"{ours}.".startswith(_HEADS))
    return new_head and name.startswith(heads)


class _Folder:
    """The tensors of a folder's safetensors files, by name, read one at a time.

    base: prefix that the names lack where the folder was saved from a model without its head.
    """

    def __init__(self, folder: Path, base: str) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = _files_of(index)
        elif (folder / "model.safetensors").exists():
            files = ["model.safetensors"]
        else:
            others = sorted(path.name for path in folder.glob("*.bin"))
            raise InputError(
                f"{folder}: has no model.safetensors"
                + (
                    f", only {others[0]}, a pickle, which could run code; if you trust it, convert it once with "
                    f"transformers: AutoModel...from_pretrained({str(folder)!r}).save_pretrained(OTHER)"
                    if others
                    else ""
                )
            )
        self._base = base
        self._opened: dict[str, Any] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file in files:
            if Path(file).name != file:
                raise InputError(f"{index}: names a file outside its folder: {file}")
            if not (folder / file).exists():
                raise InputError(
                    f"{folder / file}: missing, though model.safetensors.index.json names it; download it again"
                )
            try:
                opened: Any = safe_open(folder / file, framework="pt")
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    self._opened[name] = opened
                    self._shapes[name] = tuple(opened.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise InputError(f"{folder / file}: cannot be read: {_why_unreadable(folder / file, error)}") from None

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def name_of(self, name: str) -> str | None:
        """The name a tensor goes by here: some folders leave out the outer prefix, older ones say gamma and beta."""
        for candidate in (name, name.removeprefix(self._base)):
            if candidate in self._shapes:
                return candidate
            older = candidate.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            if older in self._shapes:
                return older
        return None

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[name].get_tensor(name)
        return tensor


def _why_unreadable(path: Path, error: Exception) -> str:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        if stream.read(len(LFS_POINTER)) == LFS_POINTER:
            return "it is a pointer of Git LFS, not the weights; run `git lfs pull` in that folder"
    return str(error)


def _files_of(index: Path) -> list[str]:
    """The files that an index of shards names."""
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({str(Path(name)) for name in names})
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index}: is not an index of weights: {type(error).__name__}: {error}") from None
