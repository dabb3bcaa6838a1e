"""An export of a model that does not fit into memory: tensor by tensor out of a checkpoint, one file at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from bessemer.errors import BessemerError
from bessemer.model.huggingface.export import SHARD_BYTES, write_weights
from bessemer.model.huggingface.files import Beside, record, write_files
from bessemer.model.huggingface.weights import Value, parts
from bessemer.model.transformer import Transformer
from bessemer.run import read_json, staging

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StreamCheck:
    """What was compared. tensors: read back and equal; logits: why transformers' were not held against ours."""

    parameters: int
    tensors: int
    logits: str = "not compared: the model was never whole in memory"


@torch.no_grad()
def stream(
    model: Transformer,
    read: Callable[[str], Tensor],
    beside: Beside,
    folder: Path,
    shard_bytes: int = SHARD_BYTES,
) -> StreamCheck:
    """Write a model to `folder` as its family's model, without ever holding more of it than one file.

    model: without memory for its weights (`initialisation.shell`); read: gives the whole values of one named parameter,
    `lambda name: files.read("model", name)` of a checkpoint; beside: what lies beside the weights; shard_bytes: of a file,
    at the most, where no single tensor is larger. Each file is read back and every tensor compared with a second reading
    of `read`, under its name, in the order of the index. That `transformers` computes the same logits from the same
    tensors is what the gate of `export` shows, on any model of the family that fits. Raises BessemerError, and leaves
    `folder` as it was, when a tensor differs.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}

    def value(parameter: Tensor) -> Tensor:
        found = read(name_of[parameter])  # type: ignore[index]
        if found.shape != parameter.shape:
            name = name_of[parameter]  # type: ignore[index]
            raise BessemerError(f"export: tensor {name} is {list(found.shape)}, the model's is {list(parameter.shape)}")
        return found.to(parameter.dtype)

    with staging(folder) as staged:
        write_weights(model, staged, value, shard_bytes, beside.dtype_of)
        write_files(model.config, beside, staged)
        check = StreamCheck(model.config.parameters, _compared(model, value, beside, staged))
        record(staged, check.__dict__, beside)
    return check


def _compared(model: Transformer, value: Value, beside: Beside, folder: Path) -> int:
    """Number of tensors, each of which was equal to what it was made from when it was read back."""
    index = folder / INDEX
    file_of = read_json(index)["weight_map"] if index.exists() else {}
    count = 0
    for part in parts(model, value):
        with safe_open(folder / file_of.get(part.name, "model.safetensors"), framework="pt") as file:
            if not torch.equal(file.get_tensor(part.name), part.theirs().to(beside.dtype_of(part.name))):
                raise BessemerError(f"export: tensor {part.name} is not the same after reading it back")
        count += 1
    return count
