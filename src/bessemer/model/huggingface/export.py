"""To the Hugging Face layout; an export that `transformers` does not reproduce is not published."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from bessemer.model.huggingface.files import Beside, record, write_files
from bessemer.model.huggingface.gate import ExportCheck, Texts, errors_about, verify
from bessemer.model.huggingface.weights import Value, parts
from bessemer.model.transformer import Transformer
from bessemer.run import staging, write_json

SHARD_BYTES = 5_000_000_000  # what the hub's tools expect a weights file to stay under


def export(model: Transformer, beside: Beside, folder: Path, sample: Tensor, texts: Texts) -> ExportCheck:
    """Write `model` to `folder` as its family's model and check it there.

    beside: what lies beside the weights; sample: (B, T) token ids on which the logits are compared; texts: documents with
    their ids, without special tokens. Weights are rounded to the dtype they are written in.
    Raises BessemerError, and leaves `folder` as it was, when `transformers` gives other logits, other greedy
    tokens or other ids.
    """
    for part in parts(model):
        if (dtype := beside.dtype_of(part.name)) != torch.float32:
            part.take(part.theirs().to(dtype).float())
    with staging(folder) as staged:
        write_weights(model, staged, dtype_of=beside.dtype_of)
        write_files(model.config, beside, staged)
        with errors_about("export"):
            check = verify(model, staged, sample, texts, beside.around)
        record(staged, check.__dict__, beside)
    return check


def write_weights(
    model: Transformer,
    folder: Path,
    value: Value = lambda parameter: parameter.detach(),
    shard_bytes: int | None = None,
    dtype_of: Callable[[str], torch.dtype] = lambda tensor: torch.float32,
) -> None:
    """safetensors, in files of at most SHARD_BYTES with an index, as the hub lays them out.

    value: gives each parameter's values when they are written, so that a model on the meta device can be written while
    one file's worth of it is in memory; shard_bytes: in place of SHARD_BYTES; dtype_of: of a tensor by its name.
    """
    from safetensors.torch import save_file

    cut = [0]  # how many tensors each file has
    held = total = 0
    for part in parts(model):
        num_bytes = math.prod(part.shape) * dtype_of(part.name).itemsize
        if held and held + num_bytes > (shard_bytes or SHARD_BYTES):
            cut.append(0)
            held = 0
        cut[-1] += 1
        held += num_bytes
        total += num_bytes
    coming, index = parts(model, value), dict[str, str]()
    for number, count in enumerate(cut, start=1):
        name = f"model-{number:05d}-of-{len(cut):05d}.safetensors" if len(cut) > 1 else "model.safetensors"
        shard = {part.name: part.theirs().to(dtype_of(part.name)).cpu() for part in islice(coming, count)}
        save_file(shard, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, name))
        del shard  # before the next one is read
    if len(cut) > 1:
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
