"""Weights in the Hugging Face layout: our parameters under the names of `transformers`, and reading a folder's safetensors.

Shapes: G key/value heads, R query heads for each, K width of a head, D width, F hidden width.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bessemer.common.errors import BessemerError, InputError
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import family_of, read_config
from bessemer.model.huggingface.families import ModelFamily, family_named
from bessemer.model.sublayers import JOINT
from bessemer.model.transformer import Transformer, build_model, meta_model
from bessemer.run.files import read_json, write_json
from bessemer.storage.hub import foreign_file

ParameterReader = Callable[[str, Tensor], Tensor]  # maps a parameter's name and the parameter to its values

# Buffers of older versions, which a folder may have and no model reads.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids")
BY_TOKEN = ("embedding.weight", "head.weight", "head.bias")  # our parameters with a row for each token
HEADS = ("head.", "classifier.")  # prefixes of our parameters that depend on the objective
SHARD_BYTES = 5_000_000_000  # maximum size of a weights file that the hub's tools expect
WEIGHTS_INDEX = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HubTensor:
    """A tensor of `transformers` as views of one of our parameters, concatenated along its rows.

    Attributes:
        name: Name of the tensor in transformers.
        ours: Path of our parameter.
        views: The parts of our parameter, in the order of the tensor's rows.
        matrix: True if the tensor has two dimensions; ours may have more before the last.
        transposed: True if the tensor is (in, out), as in GPT-2.
    """

    name: str
    ours: str
    views: tuple[Tensor, ...]
    matrix: bool
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows = sum(map(self._rows, self.views))
        if not self.matrix:
            return (rows,)
        columns = self.views[0].shape[-1]
        return (columns, rows) if self.transposed else (rows, columns)

    def gather(self) -> Tensor:
        """Return a copy of our values as their tensor."""
        flat = [view.reshape(self._rows(view), -1) if self.matrix else view.reshape(-1) for view in self.views]
        whole = torch.cat(flat) if len(flat) > 1 else flat[0]
        return (whole.T if self.transposed else whole).clone(memory_format=torch.contiguous_format)

    @torch.no_grad()
    def scatter(self, theirs: Tensor) -> None:
        """Copy their tensor, whose shape has been checked, into our parameter."""
        rows = [self._rows(view) for view in self.views]
        for view, values in zip(self.views, torch.split(theirs.T if self.transposed else theirs, rows), strict=True):
            view.copy_(values.reshape(view.shape))

    def _rows(self, view: Tensor) -> int:
        return view.shape[:-1].numel() if self.matrix else view.numel()


def hub_tensors(
    model: Transformer,
    value: ParameterReader = lambda name, parameter: parameter.detach(),
    family: ModelFamily | None = None,
) -> Iterator[HubTensor]:
    """Yield every tensor of `transformers`' model of a family as views of our parameters; a tied matrix appears once.

    Args:
        model: Our model.
        value: Maps a parameter to the values to write: itself, its gradient, or values read from a checkpoint.
        family: The family whose names to use; None takes the one with the model's options.
    """
    names = family or family_of(model.config)
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    if model.config.is_tied:
        parameters.pop("head.weight", None)

    def read(path: str) -> Tensor:
        return value(path, parameters[path])

    read_joint = lru_cache(maxsize=2)(read)  # the views of a joint parameter and of its bias follow one another
    pairs = [(theirs, ours, False) for ours, theirs in names.outer_tensors.items()]
    for layer in range(len(model.blocks)):
        prefix = names.layer_prefix.format(layer)
        pairs += [
            (f"{prefix}.{theirs}", f"blocks.{layer}.{ours}", theirs in names.transposed)
            for ours, theirs in names.layer_tensors.items()
        ]
    for theirs, ours, transposed in pairs:
        for name, path, indices in _tensors_of_module(theirs, ours, model.config.experts):
            if path in parameters:
                whole, is_bias = (read_joint if indices else read)(path), name.endswith("bias")
                parts = tuple(whole[index] for index in indices) or (whole,)
                yield HubTensor(name, path, parts, whole.dim() >= 2 and not is_bias, transposed and not is_bias)


def _tensors_of_module(theirs: str, ours: str, experts: int) -> list[tuple[str, str, tuple[Any, ...]]]:
    """Return the tensors of one module as (name in `transformers`, path of our parameter, indices into that parameter).

    Several indices stand for parts that are concatenated; no indices mean the full parameter. `theirs` and `ours` are
    an entry of `ModelFamily.outer_tensors` or `layer_tensors`, and `experts` is the number of experts, for a module of
    each expert.
    """
    path, _, part = ours.partition(":")
    if "{}" in theirs:  # a matrix of each expert
        inside = JOINT[path.split(".", 2)[-1]][part][1:] if part else ()
        return [(f"{theirs.format(expert)}.weight", path, ((expert, *inside),)) for expert in range(experts)]
    if path.endswith((".weight", ".bias")):
        return [(theirs, path, ())]
    if (joint := JOINT.get(path.split(".", 2)[-1])) is not None:
        indices = (joint[part],) if part else tuple(joint.values())  # transformers' joint tensors have the same order
        return [(f"{theirs}.weight", path, indices), (f"{theirs}.bias", f"{path}_bias", indices)]
    return [(f"{theirs}.{kind}", f"{path}.{kind}", ()) for kind in ("weight", "bias")]


def read_model(folder: Path, config: ModelConfig | None = None, seed: int = 0) -> Transformer:
    """Read the model of a folder, in fp32 on the CPU. Only safetensors are read, because a pickle could run code.

    Args:
        folder: A folder in the Hugging Face layout.
        config: The configuration to fill, if it differs from the folder's in options without a tensor (the sequence
            length), or replaces the language head by a classifier.
        seed: Seed of the initial weights of a new head.

    Raises:
        InputError: A tensor is missing, unexpected, wrongly shaped or not finite; the message names the first.
    """
    if config is not None:
        family_named(config.family or "qwen3")  # loads the class, which may be the one that reads the folder
    own = read_config(folder)
    wanted = own if config is None else config
    weights = require_weights(folder, wanted)
    model = build_model(wanted, seed)
    for tensor in hub_tensors(model, family=family_named(own.family)):
        theirs = weights.name_of(tensor.name)
        if theirs is not None and weights.shapes[theirs] == _stored_shape(tensor, own):  # otherwise part of a new head
            values = weights.read_finite(theirs)
            more = values.new_zeros((tensor.shape[0] - len(values), *values.shape[1:]))  # rows of added tokens
            tensor.scatter(torch.cat([values, more]) if len(more) else values)
    if model.config.is_tied:
        _require_tied(weights, family_named(own.family), model.embedding.weight[: own.vocabulary])
    return model


def require_weights(folder: Path, config: ModelConfig) -> WeightsFolder:
    """Return the folder's tensors after checking their names and shapes against a model; no values are read.

    Raises InputError as `read_model` does.
    """
    own = read_config(folder)
    family = family_named(own.family)
    weights = WeightsFolder(folder, family.base_prefix)
    if config.layers > len(weights.shapes):
        raise InputError(f"{folder}: config.json has {config.layers} layers, the files {len(weights.shapes)} tensors")
    try:  # the meta device allocates no memory, even for a wrong config.json
        expected = {tensor.name: tensor for tensor in hub_tensors(meta_model(config), family=family_named(own.family))}
    except (RuntimeError, OverflowError) as error:  # a tensor has more elements than an integer can count
        raise InputError(f"{folder}: the model of config.json is too large for any memory: {error}") from None
    new_head = config.labels > 0 and config.labels != own.labels
    optional = {name for name, tensor in expected.items() if new_head and tensor.ours.startswith(HEADS)}
    _require_names(weights, expected, optional, family, config, new_head)
    for name, tensor in expected.items():
        theirs, shape = weights.name_of(name), _stored_shape(tensor, own)
        if theirs is not None and name not in optional and weights.shapes[theirs] != shape:
            has = list(weights.shapes[theirs])
            raise InputError(f"{folder}: tensor {theirs} has shape {has}, but config.json needs {list(shape)}")
    return weights


def _stored_shape(tensor: HubTensor, own: ModelConfig) -> tuple[int, ...]:
    """Return the shape that a folder with the configuration `own` has for a tensor of our model.

    It differs for tensors with a row per token id, if tokens were added to our model.
    """
    return (own.vocabulary, *tensor.shape[1:]) if tensor.ours in BY_TOKEN else tensor.shape


def _require_names(
    weights: WeightsFolder, expected: dict[str, HubTensor], optional: set[str], family: ModelFamily, config: ModelConfig,
    new_head: bool,
) -> None:  # fmt: skip
    """Raise InputError that names the first missing or unexpected tensor of a folder.

    `expected` maps names to the model's tensors. A folder may lack those in `optional`, and with `new_head` may have
    another head.
    """
    folder = weights.folder
    absent = [name for name in expected if weights.name_of(name) is None and name not in optional]
    known = {weights.name_of(name) for name in expected}
    extra = [name for name in weights.shapes if name not in known and not is_unread(name, family, config, new_head)]
    headless = bool(config.labels) or not config.causal  # otherwise tie_word_embeddings may be wrong
    if absent and headless and all(expected[name].ours.startswith(HEADS) for name in absent):
        wanted = family.classifier if config.labels else family.architecture
        raise InputError(
            f"{folder}: the weights have no head of a {wanted} (tensor {absent[0]} is missing); add one with "
            f"{wanted}.from_pretrained(FOLDER).save_pretrained(OTHER), and the same with AutoTokenizer"
        )
    if absent:
        raise InputError(f"{folder}: tensor {absent[0]} is missing ({len(absent)} of {len(expected)} missing)")
    if extra:
        raise InputError(f"{folder}: tensor {extra[0]} does not belong to this config.json ({len(extra)} in all)")


def is_unread(name: str, family: ModelFamily, config: ModelConfig, new_head: bool = False) -> bool:
    """Return True for a tensor that is safe to ignore: a buffer, a copy of a tied matrix, or a head that our model lacks."""
    if name.endswith(_BUFFERS) or name.startswith(family.unread):
        return True
    if (config.tie_embeddings or config.labels) and name in _output_names(family):
        return True
    heads = tuple(theirs for ours, theirs in family.outer_tensors.items() if f"{ours}.".startswith(HEADS))
    return new_head and name.startswith(heads)


def _output_names(family: ModelFamily) -> list[str]:
    """Return the names of the output matrix in transformers."""
    paths = [theirs for ours, theirs in family.outer_tensors.items() if ours in ("head", "head.weight")]
    return [f"{path.removesuffix('.weight')}.weight" for path in paths]


def _require_tied(weights: WeightsFolder, family: ModelFamily, embedding_VD: Tensor) -> None:
    """Raise InputError if a folder declares its matrices tied but has a different output matrix."""
    for name in map(weights.name_of, _output_names(family)):
        if name is not None and not torch.equal(weights.read(name).to(embedding_VD.dtype), embedding_VD.detach()):
            has = "but config.json has tie_word_embeddings = true"
            raise InputError(f"{weights.folder}: {name} differs from the embedding, {has}; set it to false")


class WeightsFolder:
    """The tensors of a folder's safetensors files, by name, read one at a time.

    `base` is the prefix that names lack in a folder saved from a model without its head.
    """

    def __init__(self, folder: Path, base: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder, self._base = folder, base
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(folder):
            try:
                reader: Any = safe_open(foreign_file(folder, file), framework="pt")
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    self._files[name] = reader
                    self.shapes[name] = tuple(reader.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise InputError(f"{folder / file}: cannot be read: {_why_unreadable(folder / file, error)}") from None

    def name_of(self, name: str) -> str | None:
        """Return the name of a tensor in this folder, or None if it is missing.

        Some folders leave out the outer prefix, and older ones use gamma and beta.
        """
        for candidate in (name, name.removeprefix(self._base)):
            older = candidate.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            for spelling in (candidate, older):
                if spelling in self.shapes:
                    return spelling
        return None

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)  # type: ignore[no-any-return]

    def read_finite(self, name: str) -> Tensor:
        """Return a tensor in fp32. Raises InputError if it is quantised or has values that are not finite."""
        tensor = self.read(name)
        if tensor.dtype not in _DTYPES:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{self.folder}: tensor {name} is {dtype}; use float32, bfloat16 or float16")
        if count := int((~torch.isfinite(tensor)).sum()):
            raise InputError(f"{self.folder}: tensor {name} is damaged: {count} values are not finite")
        return tensor.float()


def _weight_files(folder: Path) -> list[str]:
    """Return the safetensors files of a folder: those in its index, or the single file. Raises InputError if any is missing."""
    index = foreign_file(folder, "model.safetensors.index.json")
    if index.exists():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            files = sorted({str(Path(name)) for name in names})
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{index}: not a valid index of weights: {type(error).__name__}: {error}") from None
        for file in files:
            if Path(file).name != file:
                raise InputError(f"{index}: names a file outside its folder: {file}")
            if not (folder / file).exists():
                raise InputError(f"{folder / file}: missing, though {index.name} names it; download it again")
        return files
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]
    pickles = [path.name for path in folder.glob("*.bin")]
    fix = f"; if you trust the pickle {min(pickles)}, convert it by transformers' save_pretrained" if pickles else ""
    raise InputError(f"{folder}: model.safetensors is missing{fix}")


def _why_unreadable(path: Path, error: Exception) -> str:
    with contextlib.suppress(OSError), path.open("rb") as stream:
        if stream.read(len(_LFS_POINTER)) == _LFS_POINTER:
            return "it is a Git LFS pointer, not the weights; run `git lfs pull` in that folder"
    return str(error)


def write_weights(
    model: Transformer, folder: Path, value: ParameterReader = lambda name, parameter: parameter.detach(),
    shard_bytes: int | None = None,
    dtype_of: Callable[[str], torch.dtype] = lambda tensor: torch.float32,
) -> None:  # fmt: skip
    """Write a model as safetensors in the hub's layout: files of at most SHARD_BYTES, with an index if there are several.

    Args:
        model: The model; it may be on the meta device.
        folder: The folder to write to.
        value: Returns each parameter's values when they are written, so that only one file's tensors are in memory.
        shard_bytes: Maximum size of a file, instead of SHARD_BYTES.
        dtype_of: Returns the dtype of a tensor by its name.
    """
    from safetensors.torch import save_file

    sizes = [math.prod(tensor.shape) * dtype_of(tensor.name).itemsize for tensor in hub_tensors(model)]
    counts, file_bytes = [0], 0  # `counts` has the number of tensors of each file
    for num_bytes in sizes:
        if file_bytes and file_bytes + num_bytes > (shard_bytes or SHARD_BYTES):
            counts.append(0)
            file_bytes = 0
        counts[-1] += 1
        file_bytes += num_bytes
    tensors, index = hub_tensors(model, value), dict[str, str]()
    for number, count in enumerate(counts, start=1):
        name = f"model-{number:05d}-of-{len(counts):05d}.safetensors" if len(counts) > 1 else "model.safetensors"
        shard = {tensor.name: tensor.gather().to(dtype_of(tensor.name)).cpu() for tensor in islice(tensors, count)}
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(folder.stat().st_mode & 0o666)  # safetensors creates files that only the owner can read
        index.update(dict.fromkeys(shard, name))
        del shard  # frees its memory before the next one is read
    if len(counts) > 1:
        write_json(folder / WEIGHTS_INDEX, {"metadata": {"total_size": sum(sizes)}, "weight_map": index})


def require_written(
    model: Transformer, folder: Path, value: ParameterReader, dtype_of: Callable[[str], torch.dtype]
) -> int:
    """Return the number of tensors after reading each back from the folder.

    Raises BessemerError unless each equals the tensor that `write_weights` wrote.
    """
    from safetensors import safe_open

    index = folder / WEIGHTS_INDEX
    file_of = read_json(index)["weight_map"] if index.exists() else {}
    count = 0
    for tensor in hub_tensors(model, value):
        with safe_open(folder / file_of.get(tensor.name, "model.safetensors"), framework="pt") as file:
            if not torch.equal(file.get_tensor(tensor.name), tensor.gather().to(dtype_of(tensor.name))):
                raise BessemerError(f"export: tensor {tensor.name} differs after reading it back")
        count += 1
    return count
