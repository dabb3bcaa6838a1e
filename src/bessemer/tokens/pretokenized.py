r"""Readers of tokens that other programs wrote, document by document, without empty documents.

nanogpt   .bin files that contain only little-endian ids (karpathy/nanoGPT, data/openwebtext/prepare.py), with documents
          separated by end-of-text; also with the header of llm.c and its descendants: 256 int32, a magic number, a version and
          the number of tokens (karpathy/llm.c, dev/data/data_common.py).
megatron  NAME.bin holds the ids, NAME.idx the index (NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py): 9 bytes
          "MMIDIDX\0\0", uint64 version 1, uint8 type, uint64 sequences S, uint64 document borders D, then S int32
          lengths in tokens, S int64 offsets in bytes, D int64 borders counted in sequences (the first 0, the last S), and for
          multimodal data S int8 modes.
"""

from __future__ import annotations

from collections.abc import Iterator
from glob import glob
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import InputError
from bessemer.common.hashing import sampled_sha256
from bessemer.corpus.document import identity
from bessemer.recipe import TokenSource
from bessemer.storage.path import map_array
from bessemer.tokens.shards.shard import token_dtype

HEADER_BYTES = 1024
LLAMA3_MAGIC = 20240801  # llm.c's files for Llama 3, whose ids are uint32
HEADER_MAGICS = (20240520, LLAMA3_MAGIC, 278895051)  # two of llm.c, one of NeMo
ID_BYTES = {"uint16": 2, "uint32": 4, "int64": 8}
INDEX_HEADER = np.dtype([("magic", "S9"), ("version", "<u8"), ("type", "u1"), ("sequences", "<u8"), ("borders", "<u8")])
INDEX_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, which cannot be ids
CHUNK_TOKENS = 1 << 22  # searched for end-of-text at a time

Ints = npt.NDArray[np.int64]


def files_of(source: TokenSource) -> list[Path]:
    """Return the .bin files of a source, sorted. Raises InputError when a path has none."""
    files: set[Path] = set()
    for name in source.paths:
        path = Path(name).expanduser()
        pattern = path / "**/*.bin" if path.is_dir() else path
        if not (here := [one for one in map(Path, (str(path), *glob(str(pattern), recursive=True))) if one.is_file()]):
            raise InputError(f"tokens.sources.{source.name}: {name}: no such file, and no folder with .bin files in it")
        files.update(here)
    return sorted(files)


def facts(source: TokenSource, by_content: bool = False) -> list[list[Any]]:
    """Return path, size and modification time of each file of a source, to detect changes.

    With `by_content` return name, size and a hash of samples of the content instead.
    """
    files = files_of(source)
    if source.format == "megatron":
        files += [index for file in files if (index := file.with_suffix(".idx")).exists()]
    asked = [] if source.dtype is None else [[source.dtype]]
    if by_content:
        return asked + [[file.name, file.stat().st_size, sampled_sha256(file)] for file in files]
    return asked + [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def documents(source: TokenSource, vocabulary: int, end_of_text: int) -> Iterator[tuple[str, npt.NDArray[np.uint32]]]:
    """Yield identity and ids (end-of-text last) of every document of a source, file by file.

    Raises InputError for a damaged file, or for ids outside the vocabulary.
    """
    read = megatron_documents if source.format == "megatron" else nanogpt_documents
    for file in files_of(source):
        for number, tokens in enumerate(filter(len, read(file, source, vocabulary, end_of_text))):
            if wrong := [one for one in (int(tokens.min()), int(tokens.max())) if not 0 <= one < vocabulary]:
                raise InputError(
                    f"{file}: document {number} has the id {wrong[0]}, but the tokenizer has only {vocabulary}; were these "
                    f"tokens written with it? If so, say how wide they are: {_key(source)} = one of {', '.join(ID_BYTES)}"
                )
            ids = np.concatenate([tokens, [end_of_text]], dtype=np.uint32, casting="unsafe")
            yield identity(source.name, file.name, str(number)), ids


def _key(source: TokenSource) -> str:
    return f"tokens.sources.{source.name}.dtype"


def nanogpt_documents(path: Path, source: TokenSource, vocabulary: int, end_of_text: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the documents of a nanoGPT file, without end-of-text."""
    tokens = nanogpt_tokens(path, source, vocabulary)
    ends = np.concatenate([at + np.flatnonzero(chunk == end_of_text) for at, chunk in _chunks(tokens)])
    if not len(ends):
        raise InputError(
            f"{path}: no end-of-text token (id {end_of_text}) in it, so that documents cannot be separated; is "
            f"tokenizer.end_of_text the one it was written with, and {_key(source)} the width of its ids?"
        )
    for start, end in zip(np.append(0, ends + 1), np.append(ends, len(tokens)), strict=True):
        yield tokens[start:end]


def nanogpt_tokens(path: Path, source: TokenSource, vocabulary: int) -> npt.NDArray[Any]:
    """Map the ids of a nanoGPT file into memory. Raises InputError if they look wider than assumed.

    The width of an id is the source's `dtype` or that of the header, else the narrowest type for the vocabulary.
    """
    raw = map_array(path, np.uint8)
    asked = ID_BYTES.get(source.dtype or "")
    head = raw[:HEADER_BYTES].view("<u4") if len(raw) >= HEADER_BYTES else np.zeros(HEADER_BYTES // 4, "<u4")
    if head[0] in HEADER_MAGICS or (head[:3].all() and not head[4:].any()):
        version, count, body = int(head[1]), int(head[2]), raw[HEADER_BYTES:]
        width = 4 if head[0] == LLAMA3_MAGIC else len(body) // max(count, 1)
        if width not in ID_BYTES.values() or width * count != len(body) or asked not in (None, width):
            said = f"version {version} and {count} {source.dtype or ''} tokens, but {len(body)} bytes follow it"
            raise InputError(f"{path}: its header says {said}; the file is cut short or of another kind")
        return body.view(f"<u{width}")
    width = asked or token_dtype(vocabulary).itemsize
    if not len(raw) or len(raw) % width:
        said = f"{len(raw)} bytes are no whole number of ids of {width} bytes"
        raise InputError(f"{path}: {said}; the file is empty, cut short or of another width, which {_key(source)} says")
    ids = raw.view(f"<u{width}")
    if not asked and not any(chunk[1::2].any() for _, chunk in _chunks(ids)):
        raise InputError(f"{path}: every other id of {width} bytes is 0; say how many bytes an id has: {_key(source)}")
    return ids


def _chunks(tokens: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Yield successive chunks of the ids, each with its offset."""
    return ((start, tokens[start : start + CHUNK_TOKENS]) for start in range(0, len(tokens), CHUNK_TOKENS))


def megatron_documents(
    path: Path, source: TokenSource, vocabulary: int, end_of_text: int
) -> Iterator[npt.NDArray[Any]]:
    """Yield the documents of a Megatron .bin/.idx pair, given its .bin, without end-of-text."""
    dtype, lengths, places, borders = megatron_index(path)
    raw = map_array(path, np.uint8)
    spans = list(zip(places.tolist(), (places + lengths * dtype.itemsize).tolist(), strict=True))
    for first, last in pairwise(borders.tolist()):
        tokens = np.concatenate([raw[low:high] for low, high in spans[first:last]] or [raw[:0]]).view(dtype)
        yield tokens[: len(tokens) - (len(tokens) > 0 and int(tokens[-1]) == end_of_text)]


def megatron_index(path: Path) -> tuple[np.dtype[Any], Ints, Ints, Ints]:
    """Read the index of a Megatron .bin file. Raises InputError for a damaged index.

    Returns:
        The type of an id; the tokens of each sequence; the offset of each sequence, in bytes; the numbers of the
            sequences at which documents begin, and last the number of sequences.
    """
    where = path.with_suffix(".idx")
    if not where.exists():
        raise InputError(f"{where}: no such file; a Megatron .bin has its index beside it")
    raw = map_array(where, np.uint8)
    header = (
        raw[: INDEX_HEADER.itemsize] if len(raw) >= INDEX_HEADER.itemsize else np.zeros(INDEX_HEADER.itemsize, np.uint8)
    )
    magic, version, code, sequences, borders = header.view(INDEX_HEADER)[0].item()
    ends = list(accumulate((INDEX_HEADER.itemsize, 4 * sequences, 8 * sequences, 8 * borders)))
    is_whole = len(raw) in (ends[-1], ends[-1] + sequences) and borders > 0
    if magic != b"MMIDIDX" or version != 1 or code not in INDEX_TYPES or not is_whole:
        raise InputError(f"{where}: damaged index: not a whole one of version 1 (MMIDIDX) with integer ids")
    lengths, places, starts = (
        raw[low:high].view(kind).astype(np.int64)
        for (low, high), kind in zip(pairwise(ends), ("<i4", "<i8", "<i8"), strict=True)
    )
    dtype, num_bytes = np.dtype(INDEX_TYPES[code]), path.stat().st_size
    is_inside = (lengths >= 0) & (places >= 0) & (places <= num_bytes - lengths * dtype.itemsize)
    if not is_inside.all() or (places % dtype.itemsize).any():
        raise InputError(f"{where}: damaged index: a sequence is not within the {num_bytes} bytes of {path.name}")
    if starts[0] != 0 or starts[-1] != sequences or (np.diff(starts) < 0).any():
        raise InputError(
            f"{where}: damaged index: the borders of its documents do not run from 0 to its {sequences} sequences"
        )
    return dtype, lengths, places, starts
