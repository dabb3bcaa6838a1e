"""Tensors in pieces: who writes which, whether they make up the whole, and a slice of the whole out of them.

A piece is a box: an offset and a shape in the whole tensor. Pieces carry nothing of the layout that made them, so what
one layout wrote, any other reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from bessemer.errors import BessemerError
from bessemer.parallel.local import Box, piece_of

Tensors = Mapping[str, Mapping[str, Tensor]]  # part ("model", "optimizer", ...) -> name -> tensor or DTensor
Duty = dict[str, tuple[str, tuple[str, ...]]]  # part -> the file that a process writes, and the names in it


@dataclass(frozen=True)
class Piece:
    """This process's part of a tensor. shape: of the whole; offset: of `data` in it."""

    shape: Box
    offset: Box
    data: Tensor


@dataclass(frozen=True)
class Described:
    """A piece without its values, for the others."""

    dtype: str
    shape: Box
    offset: Box
    size: Box
    nbytes: int


@dataclass(frozen=True)
class Source:
    """Where a piece of a stored tensor lies. file: its name in the checkpoint; key: the tensor in it; shape: of the piece."""

    file: str
    key: str
    offset: Box
    shape: Box


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint. dtype: as torch prints it; shape: of the whole; pieces: which make it up exactly."""

    dtype: str
    shape: Box
    pieces: tuple[Source, ...]


Held = dict[str, dict[str, Piece]]
Table = dict[tuple[str, str], Described]
Contents = dict[str, dict[str, Stored]]


def held_by(tensors: Tensors) -> Held:
    """The pieces of named tensors that this process holds. Raises BessemerError that names the tensor."""
    found: Held = {}
    for part, named in tensors.items():
        found[part] = {}
        for name, tensor in named.items():
            try:
                found[part][name] = Piece(*piece_of(tensor))
            except BessemerError as error:
                raise BessemerError(f"checkpoint: {part} tensor {name}: {error}") from None
    return found


def table_of(held: Held) -> Table:
    """What the others need to know of this process's pieces."""
    return {
        (part, name): Described(
            str(piece.data.dtype), piece.shape, piece.offset, tuple(piece.data.shape), piece.data.nbytes
        )
        for part, named in held.items()
        for name, piece in named.items()
    }


def assign(tables: list[Table]) -> tuple[list[Duty], Contents]:
    """Who writes what, by rank, and what the checkpoint will hold.

    A piece that several processes hold (replicas) is written by the one that has least to write so far, so that all
    share the work. A part's file is `PART.safetensors` when one process writes it, else
    `PART-00001-of-0000N.safetensors`. Raises BessemerError when processes disagree about a tensor, or their pieces do
    not make up the whole.
    """
    holders: dict[tuple[str, str], dict[tuple[Box, Box], list[int]]] = {}
    seen: dict[tuple[str, str], tuple[int, Described]] = {}
    for rank, table in enumerate(tables):
        for place, piece in table.items():
            first, other = seen.setdefault(place, (rank, piece))
            if (other.dtype, other.shape) != (piece.dtype, piece.shape):
                raise BessemerError(
                    f"checkpoint: {place[0]} tensor {place[1]} is {other.dtype} {list(other.shape)} on rank {first}, but "
                    f"{piece.dtype} {list(piece.shape)} on rank {rank}"
                )
            boxes = holders.setdefault(place, {})
            if prod(piece.size):
                boxes.setdefault((piece.offset, piece.size), []).append(rank)
    writers: dict[tuple[str, str], dict[tuple[Box, Box], int]] = {}
    load = [0] * len(tables)
    for place in sorted(holders, key=lambda place: (-seen[place][1].nbytes, place)):
        require_cover(f"checkpoint: {place[0]} tensor {place[1]}", seen[place][1].shape, holders[place])
        writers[place] = {}
        for box, ranks in holders[place].items():
            writer = min(ranks, key=lambda rank: (load[rank], rank))
            load[writer] += tables[writer][place].nbytes
            writers[place][box] = writer
    return _named(tables, seen, writers)


def _named(
    tables: list[Table],
    seen: dict[tuple[str, str], tuple[int, Described]],
    writers: dict[tuple[str, str], dict[tuple[Box, Box], int]],
) -> tuple[list[Duty], Contents]:
    """Files get their names when it is known how many processes write each part."""
    of_part: dict[str, set[int]] = {part: set() for part, _ in seen}
    for (part, _), boxes in writers.items():
        of_part[part].update(boxes.values())
    file_of: dict[tuple[str, int], str] = {}
    for part, ranks in of_part.items():
        for number, rank in enumerate(sorted(ranks), start=1):
            shared = f"{part}-{number:05d}-of-{len(ranks):05d}.safetensors"
            file_of[part, rank] = shared if len(ranks) > 1 else f"{part}.safetensors"
    names: list[dict[str, list[str]]] = [{} for _ in tables]
    contents: Contents = {part: {} for part in of_part}
    for (part, name), (_, piece) in seen.items():
        sources = []
        for (offset, shape), rank in writers[part, name].items():
            names[rank].setdefault(part, []).append(name)
            sources.append(Source(file_of[part, rank], name, offset, shape))
        contents[part][name] = Stored(piece.dtype, piece.shape, tuple(sources))
    duties = [
        {part: (file_of[part, rank], tuple(named)) for part, named in mine.items()} for rank, mine in enumerate(names)
    ]
    return duties, contents


def require_cover(what: str, shape: Box, boxes: Iterable[tuple[Box, Box]]) -> None:
    """Raise BessemerError unless boxes (offset, shape), none of them empty, make up a tensor exactly.

    The boxes' sides cut the tensor into cells; each cell must lie in one box.
    """
    listed = list(boxes)
    if prod(shape) == 0 and not listed:
        return
    where = f"{what}: its {len(listed)} pieces"
    for offset, size in listed:
        outside = any(at < 0 or n < 1 or at + n > whole for at, n, whole in zip(offset, size, shape, strict=False))
        if len(offset) != len(shape) or len(size) != len(shape) or outside:
            raise BessemerError(f"{where} do not fit: {list(size)} at {list(offset)} of {list(shape)}")
    cuts = [
        sorted({0, whole, *(at for box in listed for at in (box[0][axis], box[0][axis] + box[1][axis]))})
        for axis, whole in enumerate(shape)
    ]
    number = [{at: index for index, at in enumerate(line)} for line in cuts]
    covered = np.zeros([len(line) - 1 for line in cuts], dtype=np.int32)
    for offset, size in listed:
        cells = tuple(
            slice(number[axis][at], number[axis][at + n]) for axis, (at, n) in enumerate(zip(offset, size, strict=True))
        )
        covered[cells] += 1
    if (covered == 0).any():
        raise BessemerError(f"{where} leave out a part of its {list(shape)}")
    if (covered > 1).any():
        raise BessemerError(f"{where} overlap within its {list(shape)}")


def gathered(
    stored: Stored, offset: Box, shape: Box, take: Callable[[Source, tuple[slice, ...]], Tensor], dtype: torch.dtype
) -> Tensor:
    """A slice of a stored tensor, put together on the CPU from the pieces that it meets.

    take: gives a slice of one piece.
    """
    made = torch.empty(shape, dtype=dtype)
    for source in stored.pieces:
        begin = tuple(max(a, b) for a, b in zip(offset, source.offset, strict=True))
        end = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, shape, source.offset, source.shape, strict=True))
        if any(low >= high for low, high in zip(begin, end, strict=True)):
            continue
        there = tuple(slice(low - at, high - at) for low, high, at in zip(begin, end, source.offset, strict=True))
        here = tuple(slice(low - at, high - at) for low, high, at in zip(begin, end, offset, strict=True))
        made[here] = take(source, there)
    return made
