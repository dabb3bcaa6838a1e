"""Token shards on disk: the plain layout that nanoGPT-style tools read, with an index of documents beside it.

NAME-00000.bin  token ids, little-endian uint16 when the vocabulary fits in it, else uint32; an end-of-text token
                after each document; nothing else.
NAME-00000.idx  little-endian: 8 bytes magic "BSMRIDX1", uint64 number of documents D, D+1 uint64 offsets (in tokens;
                the last one is the length of the shard), D identities of 16 bytes each.
NAME-00000.lbl  of labelled documents: D little-endian int32, the number of each document's label in the manifest's
                `labels`; -1 for none.
NAME-00000.msk  of conversations: a byte a token, 1 where it is trained on.
manifest.json   sources, counts and SHA-256 of every file, and the tokenizer's hash.

NAME is SOURCE-train or SOURCE-heldout.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import DamagedFile
from bessemer.common.hashing import fingerprint
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_atomic
from bessemer.storage.filesystem import AnyPath, StorePath
from bessemer.storage.path import StoredNumbers, file_size, in_parallel, map_array

MAGIC = b"BSMRIDX1"
IDENTITY_BYTES = 16
NO_LABEL = -1
COUNTS = ("documents", "tokens", "bytes")
SPLITS = ("train", "heldout")


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Narrowest unsigned type that holds every id."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One .bin/.idx pair, memory-mapped. stored: where the .bin is, if apart from the .idx; length: in tokens, if known; check:
    called with the path of each file before it is read."""

    path: AnyPath
    dtype: np.dtype[Any]
    stored: AnyPath | None = None
    length: int | None = None
    check: Callable[[AnyPath], None] = field(default=lambda path: None, compare=False)

    @cached_property
    def tokens(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """All ids of the shard; of a store an array of which single ids and slices are fetched (`StoredNumbers`)."""
        if isinstance(self.stored, StorePath):
            return cast("npt.NDArray[np.unsignedinteger[Any]]", StoredNumbers(self.stored, self.dtype, self.num_tokens))
        return self._map(self.stored or self.path, self.dtype)

    @cached_property
    def num_tokens(self) -> int:
        return self.length if self.length is not None else file_size(self.path) // self.dtype.itemsize

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Where each document starts, in tokens, and where the last one ends."""
        return self._index[0]

    @property
    def identities(self) -> npt.NDArray[np.uint8]:
        """Identity of each document: (documents, 16) bytes."""
        return self._index[1]

    @cached_property
    def labels(self) -> npt.NDArray[np.int32]:
        """Number of each document's label; NO_LABEL for none."""
        path = self.path.with_suffix(".lbl")
        return self._map(path, "<i4") if path.exists() else np.full(len(self.identities), NO_LABEL, dtype=np.int32)

    @cached_property
    def is_trained(self) -> npt.NDArray[np.bool_] | None:
        """Which ids the loss is of; None: of all."""
        path = self.path.with_suffix(".msk")
        return self._map(path, np.bool_) if path.exists() else None

    def _map(self, path: AnyPath, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self.check(path)
        return map_array(path, dtype)

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        path, raw = self.path.with_suffix(".idx"), self._map(self.path.with_suffix(".idx"), np.uint8)
        again = f"write it again with `{tokens_command(path.parent)}`"
        count = int(raw[8:16].view("<u8")[0]) if len(raw) >= 24 and raw[:8].tobytes() == MAGIC else -1
        ends = 16 + 8 * (count + 1)
        if count < 0 or len(raw) != ends + IDENTITY_BYTES * count:
            raise DamagedFile(f"{path}: damaged: not a document index, or not a whole one; {again}")
        offsets: npt.NDArray[np.uint64] = raw[16:ends].view("<u8")
        # A store is not asked for a length that is not known.
        last = offsets[-1] if self.length is None and isinstance(self.path, StorePath) else self.num_tokens
        if offsets[0] or (offsets[1:] < offsets[:-1]).any() or offsets[-1] != last:
            why = f"its offsets do not ascend from 0 to the {last} tokens of {self.path.name}"
            raise DamagedFile(f"{path}: damaged: {why}; {again}")
        return offsets, raw[ends:].reshape(count, IDENTITY_BYTES)


class SplitTokens:
    """The tokens of one source and split: its shards, read as one stream."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.starts = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        self.num_tokens = int(self.starts[-1])

    def num_sequences(self, length: int, is_padded: bool = False) -> int:
        """Sequences of `length` inputs, each with the token that follows its last one; whole ones unless the last is padded."""
        count = max(self.num_tokens - 1, 0)
        return -(-count // length) if is_padded else count // length

    def read(self, start: int, out: npt.NDArray[Any], field: str = "tokens") -> None:
        """Copy tokens [start, start + len(out)) of the stream into `out`, across shards. field: or their "is_trained"."""
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        done = 0
        while done < len(out):
            offset = start + done - int(self.starts[number])
            part = getattr(self.shards[number], field)[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            number += 1

    def sequences(self, numbers: npt.NDArray[np.int64], length: int, padding: int = 0) -> npt.NDArray[Any]:
        """Sequences by number, (len(numbers), length + 1) in the stored type: inputs and one token more; what is past the end of
        the stream is padded."""
        out = np.full((len(numbers), length + 1), padding, dtype=self.shards[0].dtype)
        starts = (numbers.astype(np.int64) * length).tolist()
        rows = [row[: self.num_tokens - start] for row, start in zip(out, starts, strict=True)]
        if any(isinstance(shard.stored, StorePath) for shard in self.shards):
            in_parallel(self.read, starts, rows)
        else:
            for start, row in zip(starts, rows, strict=True):
                self.read(start, row)
        return out

    def document_spans(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where each document starts in the stream, and its size, in tokens."""
        bounds = [base + shard.offsets.astype(np.int64) for shard, base in zip(self.shards, self.starts, strict=False)]
        none = np.zeros(0, dtype=np.int64)
        starts = np.concatenate([none, *(part[:-1] for part in bounds)])
        return starts, np.concatenate([none, *(part[1:] for part in bounds)]) - starts

    def documents(self, start: int, end: int) -> list[tuple[str, int]]:
        """Return the identities of the documents that have a token in [start, end) of the stream, and where each begins."""
        found: list[tuple[str, int]] = []
        first = max(int(np.searchsorted(self.starts, start, side="right")) - 1, 0)
        for shard, base in zip(self.shards[first:], self.starts[first:].tolist(), strict=False):
            if base >= end:
                break
            low = int(np.searchsorted(shard.offsets, max(start - base, 0), side="right")) - 1
            high = int(np.searchsorted(shard.offsets[:-1], end - base, side="left"))
            names = (identity.tobytes().hex() for identity in shard.identities[low:high])
            found += zip(names, (base + shard.offsets[low:high].astype(np.int64)).tolist(), strict=True)
        return found


def tokens_command(folder: AnyPath) -> str:
    """Return the command that writes a tokens folder again."""
    return "bessemer tokens RECIPE" if isinstance(folder, StorePath) else RunDirectory(folder.parent).command("tokens")


class ShardWriter:
    """Writes the shards of one source and split, a new one when `shard_tokens` is reached; documents are never cut."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int, labelled: bool = False,
        masked: bool = False,
    ) -> None:  # fmt: skip
        """labelled: documents have labels; masked: the loss is of some of their tokens."""
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.files: dict[str, dict[str, Any]] = {}
        self.counts, self.shards = dict.fromkeys(COUNTS, 0), 0
        self.labelled, self.masked = labelled, masked
        # Of the open shard: its files by suffix, and the identity, tokens and label of each document.
        self._open: dict[str, BinaryIO] = {}
        self._records: list[tuple[bytes, int, int]] = []
        self._open_tokens = 0

    def add(
        self, identity: str, ids: npt.ArrayLike, num_bytes: int, label: int = NO_LABEL,
        is_trained: npt.NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        """Append a document. identity: 32 hexadecimal digits; ids: its tokens, end-of-text included; label: its number;
        is_trained: of each token, where the shards are masked."""
        tokens = np.ascontiguousarray(ids, dtype=self.dtype)
        if self._open_tokens and self._open_tokens + len(tokens) > self.shard_tokens:
            self.close()
        if not self._records:
            suffixes = (".bin", ".msk") if self.masked else (".bin",)
            self._open = {suffix: self._path(suffix).open("wb", buffering=1 << 20) for suffix in suffixes}
        self._open[".bin"].write(tokens.data)
        if self.masked:
            assert is_trained is not None and len(is_trained) == len(tokens)
            self._open[".msk"].write(is_trained.tobytes())
        self._records.append((bytes.fromhex(identity), len(tokens), label))
        self._open_tokens += len(tokens)
        for name, count in zip(COUNTS, (1, len(tokens), num_bytes), strict=True):
            self.counts[name] += count

    def close(self) -> None:
        """Finish the open shard."""
        if not self._records:
            return
        identities, sizes, labels = zip(*self._records, strict=True)
        for file in self._open.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        if self.labelled:
            write_atomic(self._path(".lbl"), np.array(labels, "<i4").tobytes())
        numbers = np.array([len(sizes), 0, *np.cumsum(sizes)], "<u8")
        write_atomic(self._path(".idx"), MAGIC + numbers.tobytes() + b"".join(identities))
        suffixes = (*self._open, *((".lbl",) if self.labelled else ()), ".idx")
        self.files |= {(path := self._path(suffix)).name: fingerprint(path) for suffix in suffixes}
        self.shards += 1
        self._open, self._records, self._open_tokens = {}, [], 0

    def facts(self) -> dict[str, Any]:
        """Return the counts, and the size and SHA-256 of each file."""
        return {**self.counts, "files": self.files}

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.name}-{self.shards:05d}{suffix}"
