"""The checkpoint format: the manifest, the assignment of shards to ranks, and readers for any layout.

A stored shard is a box in the whole tensor, given by its offset and shape. It does not name the layout that wrote it, so any
other layout can read it. The manifest calls shards "pieces". Keys of manifest.json:

format   2; in format 1, of one process, each tensor is whole in PART.safetensors and there are no pieces
step     the step after which the checkpoint was saved
files    name -> bytes, sha256
tensors  part -> name -> [dtype, shape of the whole tensor]
pieces   part -> name -> [[file, key, offset in the whole tensor, shape], ...]
facts    the values besides tensors that a resume needs, from `capture` of train/state.py
sha256   hash of all of the above
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bessemer.checkpoint.files import DTYPES, tensor_dtypes
from bessemer.common.errors import BessemerError
from bessemer.distributed.sharded_tensors import Box, fill, local_shard
from bessemer.run.files import read_json

MANIFEST = "manifest.json"
FORMAT = 2
PARTS = ("model", "optimizer", "ema", "rng")

Tensors = Mapping[str, Mapping[str, Tensor]]  # part ("model", "optimizer", ...) -> name -> tensor or DTensor
SavePlan = dict[str, tuple[str, list[str]]]  # part -> (file that a rank writes, names of the tensors in it)
Key = tuple[str, str]  # (part, name) of a tensor
WriterRanks = dict[Key, dict[tuple[Box, Box], int]]  # tensor -> (offset, shape) of a shard -> rank that writes it


@dataclass(frozen=True)
class ShardMetadata:
    """The metadata of one process's shard of a tensor, which the ranks exchange.

    Attributes:
        dtype: The dtype as torch prints it.
        shape: The shape of the whole tensor.
        offset: The offset of the shard in the whole tensor.
        size: The shape of the shard.
        nbytes: The size of the shard in bytes.
    """

    dtype: str
    shape: Box
    offset: Box
    size: Box
    nbytes: int


@dataclass(frozen=True)
class StoredShard:
    """A shard in a file of a checkpoint.

    Attributes:
        file: The name of the file.
        key: The name of the tensor in the file.
        offset: The offset of the shard in the whole tensor.
        shape: The shape of the shard.
    """

    file: str
    key: str
    offset: Box
    shape: Box


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: The dtype as torch prints it.
        shape: The shape of the whole tensor.
        shards: The shards, which cover the tensor exactly.
    """

    dtype: str
    shape: Box
    shards: tuple[StoredShard, ...]


Contents = dict[str, dict[str, StoredTensor]]


def dump_manifest(step: int, files: dict[str, dict[str, Any]], contents: Contents, facts: dict[str, Any]) -> str:
    """Return the JSON text of a manifest. `files` has the "bytes" and "sha256" of each file, and `facts` the other values."""
    tensors: dict[str, Any] = {}
    pieces: dict[str, Any] = {}
    for part, named in contents.items():
        tensors[part] = {name: [t.dtype, t.shape] for name, t in named.items()}
        pieces[part] = {name: [[p.file, p.key, p.offset, p.shape] for p in t.shards] for name, t in named.items()}
    keys = {"format": FORMAT, "step": step, "files": files, "tensors": tensors, "pieces": pieces, "facts": facts}
    return json.dumps(_signed(keys))


def load_manifest(folder: Path) -> SavedCheckpoint:
    """Load the manifest of a checkpoint, in either format.

    Checks the manifest's hash and that the shards of each tensor cover it. The files are not read; `verify` of protocol.py does
    that.

    Raises:
        BessemerError: The manifest is missing, damaged or from a newer version. The message names the file.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise BessemerError(f"{folder}: {MANIFEST} is missing")
    keys = read_json(path)
    if not isinstance(keys, dict) or keys != _signed({key: keys[key] for key in keys if key != "sha256"}):
        raise BessemerError(f"{path}: damaged: its hash does not match its content")
    if keys.get("format") not in (1, FORMAT):
        raise BessemerError(f"{path}: format {keys.get('format')} is not supported; update Bessemer")
    try:
        pieces = keys["pieces"] if keys["format"] == FORMAT else None
        contents = {
            part: {name: _stored(part, name, tensor[0], tuple(tensor[1]), pieces) for name, tensor in named.items()}
            for part, named in keys["tensors"].items()
        }
        checkpoint = SavedCheckpoint(folder, int(keys["step"]), keys["files"], contents, keys["facts"], keys["sha256"])
        for part, named in contents.items():
            for name, tensor in named.items():
                what = f"{path}: {part} tensor {name}"
                if tensor.dtype not in DTYPES:
                    raise BessemerError(f"{what} has the unsupported dtype {tensor.dtype!r}")
                require_cover(what, tensor.shape, [(shard.offset, shard.shape) for shard in tensor.shards])
                if unknown := [shard.file for shard in tensor.shards if shard.file not in checkpoint.files]:
                    raise BessemerError(f"{what} is in {unknown[0]}, which has no hash")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BessemerError(f"{path}: not a valid checkpoint manifest ({type(error).__name__}: {error})") from None
    if outside := [name for name in checkpoint.files if Path(name).name != name]:
        raise BessemerError(f"{path}: names a file outside the checkpoint folder: {outside[0]}")
    return checkpoint


def require_dtypes(folder: Path, contents: Contents, files: Iterable[str]) -> None:
    """Raise BessemerError unless the tensors in these files have the dtypes that the manifest records."""
    types = {file: tensor_dtypes(folder / file) for file in files}
    for part, named in contents.items():
        for name, t in named.items():
            for shard in (shard for shard in t.shards if shard.file in types):
                if (dtype := types[shard.file].get(shard.key)) != DTYPES[t.dtype]:
                    raise BessemerError(f"{folder / shard.file}: {part} tensor {name} is of {dtype}, not {t.dtype}")


def _stored(part: str, name: str, dtype: str, shape: Box, pieces: dict[str, Any] | None) -> StoredTensor:
    if pieces is None:
        listed = [] if prod(shape) == 0 else [(f"{part}.safetensors", name, (0,) * len(shape), shape)]
    else:
        listed = [(file, key, tuple(offset), tuple(size)) for file, key, offset, size in pieces[part][name]]
    return StoredTensor(dtype, shape, tuple(StoredShard(*one) for one in listed))


def _signed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with the SHA-256 of its content."""
    plain = json.loads(json.dumps(manifest))
    return {**plain, "sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def local_shards(tensors: Tensors) -> dict[Key, tuple[ShardMetadata, Tensor]]:
    """Return this process's shard of each tensor.

    Raises BessemerError for a part that is not in PARTS and for a tensor that has no shard here; the message names it.
    """
    shards: dict[Key, tuple[ShardMetadata, Tensor]] = {}
    for part, named in tensors.items():
        if part not in PARTS:
            raise BessemerError(f"checkpoint: part {part} is not one of {', '.join(PARTS)}")
        for name, tensor in named.items():
            try:
                shape, offset, data = local_shard(tensor)
            except BessemerError as error:
                raise BessemerError(f"checkpoint: {part} tensor {name}: {error}") from None
            metadata = ShardMetadata(str(data.dtype), shape, offset, tuple(data.shape), data.nbytes)
            shards[part, name] = metadata, data
    return shards


def global_plan(by_rank: list[dict[Key, ShardMetadata]]) -> tuple[list[SavePlan], Contents]:
    """Assign shards to ranks: return each rank's (file, tensor names) by part, and the contents of the checkpoint.

    If several ranks hold the same shard (replicas), the rank with the least to write so far writes it. A part's file is
    `PART.safetensors` when one rank writes it, else `PART-00001-of-0000N.safetensors`.

    Raises:
        BessemerError: Ranks disagree about a tensor, or its shards do not cover it.
    """
    holders: dict[Key, dict[tuple[Box, Box], list[int]]] = {}
    first_seen: dict[Key, tuple[int, ShardMetadata]] = {}
    for rank, shards in enumerate(by_rank):
        for key, shard in shards.items():
            first, other = first_seen.setdefault(key, (rank, shard))
            if (other.dtype, other.shape) != (shard.dtype, shard.shape):
                raise BessemerError(
                    f"checkpoint: {key[0]} tensor {key[1]} is {other.dtype} {list(other.shape)} on rank {first}, but "
                    f"{shard.dtype} {list(shard.shape)} on rank {rank}"
                )
            boxes = holders.setdefault(key, {})
            if prod(shard.size):
                boxes.setdefault((shard.offset, shard.size), []).append(rank)
    writers: WriterRanks = {}
    load = [0] * len(by_rank)
    for key in sorted(holders, key=lambda key: (-first_seen[key][1].nbytes, key)):
        require_cover(f"checkpoint: {key[0]} tensor {key[1]}", first_seen[key][1].shape, holders[key])
        writers[key] = {}
        for box, ranks in holders[key].items():
            writers[key][box] = writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += by_rank[writer][key].nbytes
    file_of = _file_names(writers)
    plans: list[SavePlan] = [{} for _ in by_rank]
    contents: Contents = {part: {} for part, _ in first_seen}
    for (part, name), (_, shard) in first_seen.items():
        for rank in writers[part, name].values():
            plans[rank].setdefault(part, (file_of[part, rank], []))[1].append(name)
        of_boxes = writers[part, name].items()
        stored = (StoredShard(file_of[part, rank], name, *box) for box, rank in of_boxes)
        contents[part][name] = StoredTensor(shard.dtype, shard.shape, tuple(stored))
    return plans, contents


def _file_names(writers: WriterRanks) -> dict[tuple[str, int], str]:
    """Return the file name for each part and writing rank."""
    ranks_of: dict[str, set[int]] = {}
    for (part, _), boxes in writers.items():
        ranks_of.setdefault(part, set()).update(boxes.values())
    names = {}
    for part, ranks in ranks_of.items():
        for number, rank in enumerate(sorted(ranks), start=1):
            suffix = f"-{number:05d}-of-{len(ranks):05d}" if len(ranks) > 1 else ""
            names[part, rank] = f"{part}{suffix}.safetensors"
    return names


def require_cover(what: str, shape: Box, boxes: Iterable[tuple[Box, Box]]) -> None:
    """Raise BessemerError unless non-empty boxes (offset, shape) cover a tensor exactly once.

    The sides of the boxes divide the tensor into cells, and each cell must be in exactly one box. The message starts with
    `what`.
    """
    listed = list(boxes)
    if prod(shape) == 0 and not listed:
        return
    where = f"{what}: its {len(listed)} shards"
    for offset, size in listed:
        outside = any(at < 0 or n < 1 or at + n > whole for at, n, whole in zip(offset, size, shape, strict=False))
        if len(offset) != len(shape) or len(size) != len(shape) or outside:
            raise BessemerError(f"{where} do not fit: shape {list(size)} at offset {list(offset)} of {list(shape)}")
    edges = [
        sorted({0, whole, *(at for box in listed for at in (box[0][axis], box[0][axis] + box[1][axis]))})
        for axis, whole in enumerate(shape)
    ]
    cell = [{at: index for index, at in enumerate(line)} for line in edges]
    covered = np.zeros([len(line) - 1 for line in edges], dtype=np.int32)
    for offset, size in listed:
        spans = zip(cell, offset, size, strict=True)
        covered[tuple(slice(of_axis[at], of_axis[at + n]) for of_axis, at, n in spans)] += 1
    if (covered == 0).any():
        raise BessemerError(f"{where} do not cover its shape {list(shape)}")
    if (covered > 1).any():
        raise BessemerError(f"{where} overlap in its shape {list(shape)}")


def assemble(
    stored: StoredTensor, offset: Box, shape: Box, read: Callable[[StoredShard, tuple[slice, ...]], Tensor],
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Return a slice of a stored tensor in CPU memory, assembled from the shards that it overlaps.

    `offset` and `shape` are those of the slice in the whole tensor. `read` returns a slice of one shard.
    """
    result = torch.empty(shape, dtype=dtype)
    for shard in stored.shards:
        begin = tuple(max(a, b) for a, b in zip(offset, shard.offset, strict=True))
        end = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, shard.offset, shard.shape, strict=True))
        if any(low >= high for low, high in zip(begin, end, strict=True)):
            continue
        source = tuple(slice(low - at, high - at) for low, high, at in zip(begin, end, shard.offset, strict=True))
        target = tuple(slice(low - at, high - at) for low, high, at in zip(begin, end, offset, strict=True))
        result[target] = read(shard, source)
    return result


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk.

    Attributes:
        files: The "bytes" and "sha256" of each file, by name.
        contents: The stored tensors by part ("model", "optimizer", ...) and name.
        facts: The values besides tensors that a resume needs.
        sha256: The hash of the manifest.
    """

    folder: Path
    step: int
    files: dict[str, dict[str, Any]]
    contents: Contents
    facts: dict[str, Any]
    sha256: str

    def __contains__(self, part: str) -> bool:
        """Return True if the checkpoint has this part.

        There is no "optimizer" part before the first update, and an "ema" part only with train.ema.
        """
        return part in self.contents

    def tensors(self, part: str) -> dict[str, Tensor]:
        """Return the whole tensors of one part ("model", "optimizer", ...) on the CPU.

        They are mapped from the files as by `CheckpointFiles.whole`.
        """
        with self.open_files() as files:
            return {name: files.whole(part, name) for name in self._named(part)}

    def fill(self, part: str, named: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a part's values into tensors or DTensors of any layout; each process fills its shard.

        Tensors that are only in the checkpoint are ignored.

        Args:
            part: The part, such as "model".
            named: The tensors to fill. A name may occur twice, as for a tied matrix with two copies.

        Raises:
            BessemerError: A tensor is missing or has another shape. No tensor is changed then.
        """
        targets = list(named)
        for name, tensor in targets:
            stored = self._named(part).get(name)
            if stored is None or stored.shape != tuple(tensor.shape):
                has = f"has shape {list(stored.shape)}" if stored else "is missing"
                needs = f"the model needs {list(tensor.shape)}; use a checkpoint of this model"
                raise BessemerError(f"{self.folder}: {part} tensor {name} {has}, but {needs}")
        with self.open_files() as files:
            for name, tensor in targets:
                fill(tensor, partial(files.read_slice, part, name))

    @contextmanager
    def open_files(self) -> Iterator[CheckpointFiles]:
        """Open the files of the checkpoint on demand, and close them at the end of the block.

        If the checkpoint is removed, its space is freed once the block has ended and the tensors mapped by `whole` are deleted.
        """
        with ExitStack() as stack:
            yield CheckpointFiles(self, stack)

    def _named(self, part: str) -> dict[str, StoredTensor]:
        if part not in self.contents:
            raise BessemerError(f"{self.folder}: has no part {part!r}, only {', '.join(sorted(self.contents))}")
        return self.contents[part]


class CheckpointFiles:
    """A reader of tensors from a checkpoint, which opens each file at its first use."""

    def __init__(self, checkpoint: SavedCheckpoint, stack: ExitStack) -> None:
        self._checkpoint, self._stack, self._open = checkpoint, stack, dict[str, Any]()

    def whole(self, part: str, name: str) -> Tensor:
        """Return a whole tensor of a part ("model", "optimizer", ...) on the CPU.

        A tensor of a single shard is mapped from its file, not copied, and keeps the file's space in use.
        """
        shards = self._stored(part, name).shards
        return self._read_shard(shards[0]) if len(shards) == 1 else self.read(part, name)

    def read(self, part: str, name: str) -> Tensor:
        """Return a copy of a whole tensor on the CPU."""
        shape = self._stored(part, name).shape
        return self.read_slice(part, name, (0,) * len(shape), shape)

    def read_slice(self, part: str, name: str, offset: Box, shape: Box) -> Tensor:
        """Return a copy of a slice of a tensor on the CPU; the slice must be inside the tensor."""
        stored = self._stored(part, name)
        dtype: torch.dtype = getattr(torch, stored.dtype.removeprefix("torch."))
        return assemble(stored, offset, shape, self._read_shard, dtype)

    def _read_shard(self, shard: StoredShard, slices: tuple[slice, ...] = ()) -> Tensor:
        path = self._checkpoint.folder / shard.file
        try:
            if shard.file not in self._open:
                self._open[shard.file] = self._stack.enter_context(safe_open(path, framework="pt"))
            file = self._open[shard.file]
            if tuple(file.get_slice(shard.key).get_shape()) != shard.shape:
                raise BessemerError(f"{path}: tensor {shard.key} does not have its recorded shape {list(shard.shape)}")
            tensor: Tensor = file.get_slice(shard.key)[slices] if slices else file.get_tensor(shard.key)
            return tensor
        except (SafetensorError, OSError) as error:
            raise BessemerError(f"{path}: tensor {shard.key} cannot be read: {error}") from None

    def _stored(self, part: str, name: str) -> StoredTensor:
        named = self._checkpoint._named(part)
        if name not in named:
            raise BessemerError(f"{self._checkpoint.folder}: part {part} has no tensor {name}")
        return named[name]


def weight_reader(checkpoints: list[SavedCheckpoint], stack: ExitStack) -> Callable[[str], Tensor]:
    """Return a function that loads one full weight by name as fp32 on the CPU.

    For one checkpoint it loads the moving average of the weight if there is one. For several it loads their mean (Izmailov et
    al. 2018), summed in float64. `stack` closes the files. Raises BessemerError if the models differ.
    """
    shapes = [{name: one.shape for name, one in each.contents["model"].items()} for each in checkpoints]
    for checkpoint, own in zip(checkpoints, shapes, strict=True):
        for name in sorted(own.keys() | shapes[0].keys()):
            if own.get(name) != shapes[0].get(name):
                raise BessemerError(f"{checkpoint.folder}: tensor {name} differs in shape; average only one run")
    first, *others = (stack.enter_context(checkpoint.open_files()) for checkpoint in checkpoints)
    part = "ema" if not others and "ema" in checkpoints[0] else "model"

    def read(name: str) -> Tensor:
        weight = first.read(part, name)
        if others:
            weight = weight.double()
            for files in others:
                weight += files.read(part, name)
            weight.div_(len(checkpoints))
        return weight.float()

    return read
