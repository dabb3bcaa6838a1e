"""Tokens that others have written: nanoGPT's .bin and Megatron's .bin/.idx, read document by document.

nanogpt   little-endian uint16 ids and nothing else (karpathy/nanoGPT, data/openwebtext/prepare.py), documents set apart by
          end-of-text; also with the header of llm.c and modded-nanogpt: 256 int32, the first 20240520, the second the
          version 1, the third the number of tokens (karpathy/llm.c, dev/data/data_common.py).
megatron  NAME.bin holds the ids, NAME.idx the index (NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py): 9 bytes
          "MMIDIDX\\0\\0", uint64 version 1, uint8 type, uint64 sequences S, uint64 document borders D, then S int32
          lengths in tokens, S int64 places in bytes, D int64 borders counted in sequences (the first 0, the last S), and for
          multimodal data S int8 modes.

An index is validated against the files before a token is read. A document whose last token is not end-of-text gets one;
empty documents are left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.document import identity
from bessemer.errors import InputError
from bessemer.hashing import sampled_sha256
from bessemer.recipe import TokenSource
from bessemer.tokens.documents import Document

HEADER_MAGIC, HEADER_INTS = 20240520, 256
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER_BYTES = 34
INDEX_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, which no ids are
CHUNK_TOKENS = 1 << 22  # searched for end-of-text at a time


@dataclass(frozen=True)
class MegatronIndex:
    """A validated Megatron index. lengths: tokens of each sequence; places: where they begin, in bytes; borders: numbers of
    the sequences at which documents begin, and of all sequences."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    borders: npt.NDArray[np.int64]


def files_of(source: TokenSource) -> list[Path]:
    """The .bin files of a source, sorted. Raises InputError when a path has none."""
    files: set[Path] = set()
    for name in source.paths:
        path = Path(name).expanduser()
        root = Path(path.anchor or ".")
        matches = path.rglob("*.bin") if path.is_dir() else root.glob(str(path.relative_to(path.anchor or ".")))
        here = [path] if path.is_file() else [file for file in matches if file.is_file()]
        if not here:
            raise InputError(f"tokens.sources.{source.name}: {name}: no such file, and no folder with .bin files in it")
        files.update(here)
    return sorted(files)


def facts(source: TokenSource, by_content: bool = False) -> list[list[Any]]:
    """Path, size and modification time of each file, to detect changes; by_content: name, size and a hash of samples."""
    files = files_of(source)
    files += [file.with_suffix(".idx") for file in files if file.with_suffix(".idx").exists()]
    if by_content:
        return [[file.name, file.stat().st_size, sampled_sha256(file)] for file in files]
    return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def documents(source: TokenSource, vocabulary: int, end_of_text: int) -> Iterator[Document]:
    """Every document of a source, file by file. Raises InputError for a damaged file, or ids the vocabulary lacks."""
    read = nanogpt_documents if source.format == "nanogpt" else megatron_documents
    for file in files_of(source):
        filled = (parts for parts in read(file, end_of_text) if any(map(len, parts)))
        for number, parts in enumerate(filled):
            ids = np.concatenate([*parts, [end_of_text]], dtype=np.uint32, casting="unsafe")
            if int(ids.max()) >= vocabulary:
                raise InputError(
                    f"{file}: document {number} has the id {int(ids.max())}, but the tokenizer has only {vocabulary}; were "
                    "these tokens written with it?"
                )
            yield Document(identity(source.name, file.name, str(number)), source.name, ids=ids)


def nanogpt_documents(path: Path, end_of_text: int) -> Iterator[list[npt.NDArray[Any]]]:
    """Documents of one nanoGPT file, each in parts without end-of-text."""
    tokens = nanogpt_tokens(path)
    parts: list[npt.NDArray[Any]] = []
    has_ends = False
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = np.asarray(tokens[start : start + CHUNK_TOKENS])
        ends = np.flatnonzero(chunk == end_of_text)
        has_ends |= len(ends) > 0
        first, *others = np.split(chunk, ends)
        parts.append(first)
        for other in others:
            yield parts
            parts = [other[1:]]
    if not has_ends:
        raise InputError(
            f"{path}: no end-of-text token (id {end_of_text}) in it, so that documents cannot be separated; is "
            "tokenizer.end_of_text the one it was written with?"
        )
    yield parts


def nanogpt_tokens(path: Path) -> npt.NDArray[np.uint16]:
    """The ids of a nanoGPT file, mapped into memory."""
    size = path.stat().st_size
    if size == 0 or size % 2:
        raise InputError(f"{path}: {size} bytes are no whole number of uint16 ids; the file is empty or cut short")
    tokens: npt.NDArray[np.uint16] = np.memmap(path, dtype="<u2", mode="r").view(np.ndarray)
    header = tokens[: 2 * HEADER_INTS].view("<i4") if len(tokens) >= 2 * HEADER_INTS else [0]
    if header[0] == HEADER_MAGIC:
        tokens = tokens[2 * HEADER_INTS :]
        if header[1] != 1 or header[2] != len(tokens):
            raise InputError(
                f"{path}: its header says version {header[1]} and {header[2]} tokens, but {len(tokens)} follow it (only version "
                "1 is known); the file is cut short or of another kind"
            )
    return tokens


def megatron_documents(path: Path, end_of_text: int) -> Iterator[list[npt.NDArray[Any]]]:
    """Documents of one Megatron pair, by its .bin, each in parts without end-of-text."""
    index = megatron_index(path)
    raw = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.zeros(0, dtype=np.uint8)
    for first, last in pairwise(index.borders.tolist()):
        parts = []
        for sequence in range(first, last):
            low = int(index.places[sequence])
            part = np.asarray(raw[low : low + int(index.lengths[sequence]) * index.dtype.itemsize]).view(index.dtype)
            if len(part) and int(part.min()) < 0:
                raise InputError(f"{path}: sequence {sequence} has the id {int(part.min())}; no id is negative")
            parts.append(part)
        if parts and len(parts[-1]) and int(parts[-1][-1]) == end_of_text:
            parts[-1] = parts[-1][:-1]
        yield parts


def megatron_index(path: Path) -> MegatronIndex:
    """The index beside a Megatron .bin. Raises InputError that names what does not hold."""
    where = path.with_suffix(".idx")
    if not where.exists():
        raise InputError(f"{where}: no such file; a Megatron .bin has its index beside it")
    size = where.stat().st_size

    def damaged(why: str) -> InputError:
        return InputError(f"{where}: damaged index: {why}")

    with open(where, "rb") as file:
        header = file.read(INDEX_HEADER_BYTES)
    if len(header) < INDEX_HEADER_BYTES or header[:9] != INDEX_MAGIC:
        raise damaged("it does not begin as a Megatron index (MMIDIDX)")
    version, code, sequences, borders = struct.unpack("<QBQQ", header[9:])
    if version != 1:
        raise damaged(f"version {version}; only 1 is known")
    if code not in INDEX_TYPES:
        raise damaged(f"type {code} is no integer type")
    wanted = INDEX_HEADER_BYTES + 12 * sequences + 8 * borders
    if size not in (wanted, wanted + sequences) or borders < 1:
        raise damaged(f"{size} bytes, but its {sequences} sequences and {borders} borders take {wanted}")
    raw = np.memmap(where, dtype=np.uint8, mode="r")
    ends = INDEX_HEADER_BYTES + np.cumsum([0, 4 * sequences, 8 * sequences, 8 * borders])
    lengths, places, starts = (
        np.asarray(raw[low:high]).view(kind).astype(np.int64)
        for (low, high), kind in zip(pairwise(ends.tolist()), ("<i4", "<i8", "<i8"), strict=True)
    )
    dtype = np.dtype(INDEX_TYPES[code])
    num_bytes = path.stat().st_size
    if (lengths < 0).any() or (places < 0).any() or (places % dtype.itemsize).any():
        raise damaged("a sequence has a negative length, or a place that is not one of a token")
    if sequences and int((places + lengths * dtype.itemsize).max()) > num_bytes:
        raise damaged(f"its sequences reach beyond the {num_bytes} bytes of {path.name}")
    if starts[0] != 0 or starts[-1] != sequences or (np.diff(starts) < 0).any():
        raise damaged("the borders of its documents do not run from 0 to its number of sequences")
    return MegatronIndex(dtype, lengths, places, starts)
