"""Tokens that others have written: nanoGPT's .bin files, read document by document.

Little-endian ids and nothing else (karpathy/nanoGPT, data/openwebtext/prepare.py), documents set apart by end-of-text; also with
the header of llm.c and its descendants: 256 int32, a magic number, a version and the number of tokens (karpathy/llm.c,
dev/data/data_common.py). Empty documents are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.document import identity
from bessemer.errors import InputError
from bessemer.hashing import sampled_sha256
from bessemer.recipe import TokenSource
from bessemer.store_path import mapped
from bessemer.tokens.documents import Document
from bessemer.tokens.shards import token_dtype

HEADER_BYTES = 1024
HEADER_MAGICS = (20240520, 20240801, 278895051)  # llm.c's of GPT-2 and of Llama 3, whose ids are uint32; NeMo's
ID_BYTES = {"uint16": 2, "uint32": 4, "int64": 8}
CHUNK_TOKENS = 1 << 22  # searched for end-of-text at a time


def files_of(source: TokenSource) -> list[Path]:
    """The .bin files of a source, sorted. Raises InputError when a path has none."""
    files: set[Path] = set()
    for name in source.paths:
        path = Path(name).expanduser()
        matches = (
            [path]
            if path.is_file()
            else map(Path, glob(str(path / "**/*.bin" if path.is_dir() else path), recursive=True))
        )
        here = [file for file in matches if file.is_file()]
        if not here:
            raise InputError(f"tokens.sources.{source.name}: {name}: no such file, and no folder with .bin files in it")
        files.update(here)
    return sorted(files)


def facts(source: TokenSource, by_content: bool = False) -> list[list[Any]]:
    """Path, size and modification time of each file, to detect changes; by_content: name, size and a hash of samples."""
    files = files_of(source)
    asked = [] if source.dtype is None else [[source.dtype]]
    if by_content:
        return asked + [[file.name, file.stat().st_size, sampled_sha256(file)] for file in files]
    return asked + [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def documents(source: TokenSource, vocabulary: int, end_of_text: int) -> Iterator[Document]:
    """Every document of a source, file by file. Raises InputError for a damaged file, or ids the vocabulary lacks."""
    for file in files_of(source):
        tokens = nanogpt_tokens(file, source, vocabulary)
        ends = np.concatenate([at + np.flatnonzero(chunk == end_of_text) for at, chunk in _chunks(tokens)])
        if not len(ends):
            raise InputError(
                f"{file}: no end-of-text token (id {end_of_text}) in it, so that documents cannot be separated; is "
                f"tokenizer.end_of_text the one it was written with, and {_key(source)} the width of its ids?"
            )
        spans = zip(np.append(0, ends + 1), np.append(ends, len(tokens)), strict=True)
        for number, (start, end) in enumerate(span for span in spans if span[0] < span[1]):
            if (largest := int(tokens[start:end].max())) >= vocabulary:
                raise InputError(
                    f"{file}: document {number} has the id {largest}, but the tokenizer has only {vocabulary}; were these "
                    f"tokens written with it? If so, say how wide they are: {_key(source)} = one of {', '.join(ID_BYTES)}"
                )
            ids = np.concatenate([tokens[start:end], [end_of_text]], dtype=np.uint32, casting="unsafe")
            yield Document(identity(source.name, file.name, str(number)), source.name, ids=ids)


def _key(source: TokenSource) -> str:
    return f"tokens.sources.{source.name}.dtype"


def nanogpt_tokens(path: Path, source: TokenSource, vocabulary: int) -> npt.NDArray[Any]:
    """Map the ids of a nanoGPT file, as wide as the source's `dtype` or the header says, else as the vocabulary needs. Raises
    InputError where they look wider."""
    raw = mapped(path, np.uint8)
    asked = ID_BYTES.get(source.dtype or "")
    head = raw[:HEADER_BYTES].view("<u4") if len(raw) >= HEADER_BYTES else np.zeros(HEADER_BYTES // 4, "<u4")
    if head[0] in HEADER_MAGICS or (head[:3].all() and not head[4:].any()):
        version, count, body = int(head[1]), int(head[2]), raw[HEADER_BYTES:]
        widths = (4,) if head[0] == HEADER_MAGICS[1] else (2, 4, 8)
        fitting = [width for width in widths if width * count == len(body) and asked in (None, width)]
        if not fitting:
            said = f"version {version} and {count} {source.dtype or ''} tokens, but {len(body)} bytes follow it"
            raise InputError(f"{path}: its header says {said}; the file is cut short or of another kind")
        return body.view(f"<u{fitting[0]}")
    width = asked or token_dtype(vocabulary).itemsize
    if not len(raw) or len(raw) % width:
        said = f"{len(raw)} bytes are no whole number of ids of {width} bytes"
        raise InputError(f"{path}: {said}; the file is empty, cut short or of another width, which {_key(source)} says")
    ids = raw.view(f"<u{width}")
    if not asked and not any(chunk[1::2].any() for _, chunk in _chunks(ids)):
        raise InputError(f"{path}: every other id of {width} bytes is 0; say how many bytes an id has: {_key(source)}")
    return ids


def _chunks(tokens: npt.NDArray[Any]) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Stretches of the ids, each with its place."""
    return ((start, tokens[start : start + CHUNK_TOKENS]) for start in range(0, len(tokens), CHUNK_TOKENS))
