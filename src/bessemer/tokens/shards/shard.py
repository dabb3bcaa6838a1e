"""Token shards on disk, in the plain layout that nanoGPT-style tools read, with a separate index of documents.

NAME-00000.bin  token ids, little-endian uint16 when the vocabulary fits in it, else uint32; an end-of-text token
                after each document; nothing else.
NAME-00000.idx  little-endian: 8 bytes magic "BSMRIDX1", uint64 number of documents D, D+1 uint64 offsets (in tokens;
                the last one is the length of the shard), D identities of 16 bytes each.
NAME-00000.lbl  for labelled documents: D little-endian int32, the number of each document's label in the manifest's
                `labels`; -1 for none.
NAME-00000.msk  for conversations: one byte per token, 1 where the token is trained on.
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
from bessemer.storage.filesystem import AnyPath, StorePath, version
from bessemer.storage.path import StoredNumbers, in_parallel, map_array

MAGIC = b"BSMRIDX1"
IDENTITY_BYTES = 16
NO_LABEL = -1
COUNTS = ("documents", "tokens", "bytes")
SPLITS = ("train", "heldout")


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Return the narrowest unsigned integer type that holds every id of a vocabulary of this size."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One shard, a .bin file and its .idx file, mapped into memory.

    Attributes:
        path: Path of the .bin.
        dtype: Type of the ids.
        stored: Path at which the .bin really is, if not at `path` next to the .idx, as in an object store.
        length: Number of tokens, if known.
        check: Function called with the path of each file before it is read.
    """

    path: AnyPath
    dtype: np.dtype[Any]
    stored: AnyPath | None = None
    length: int | None = None
    check: Callable[[AnyPath], None] = field(default=lambda path: None, compare=False)

    @cached_property
    def tokens(self) -> npt.NDArray[np.unsignedinteger[Any]]:
        """All token ids of the shard; if the .bin is in an object store, an array that fetches slices (`StoredNumbers`)."""
        if isinstance(self.stored, StorePath):
            return cast("npt.NDArray[np.unsignedinteger[Any]]", StoredNumbers(self.stored, self.dtype, self.num_tokens))
        return self._map(self.stored or self.path, self.dtype)

    @cached_property
    def num_tokens(self) -> int:
        return self.length if self.length is not None else version(self.path)[0] // self.dtype.itemsize

    @property
    def offsets(self) -> npt.NDArray[np.uint64]:
        """Start of each document, in tokens, then the end of the last one, (documents + 1,)."""
        return self._index[0]

    @property
    def identities(self) -> npt.NDArray[np.uint8]:
        """Identity of each document, (documents, 16) bytes."""
        return self._index[1]

    @cached_property
    def labels(self) -> npt.NDArray[np.int32]:
        """For each document, the index of its label in the manifest's `labels`; NO_LABEL for none."""
        path = self.path.with_suffix(".lbl")
        return self._map(path, "<i4") if path.exists() else np.full(len(self.identities), NO_LABEL, dtype=np.int32)

    @cached_property
    def is_trained(self) -> npt.NDArray[np.bool_] | None:
        """For each token, True if it is a target of the loss; None: all are."""
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
            raise DamagedFile(f"{path}: damaged: not a complete document index; {again}")
        offsets: npt.NDArray[np.uint64] = raw[16:ends].view("<u8")
        # The length of a shard in a store is not checked if that would need a request.
        last = offsets[-1] if self.length is None and isinstance(self.path, StorePath) else self.num_tokens
        if offsets[0] or (offsets[1:] < offsets[:-1]).any() or offsets[-1] != last:
            why = f"its offsets do not ascend from 0 to the {last} tokens of {self.path.name}"
            raise DamagedFile(f"{path}: damaged: {why}; {again}")
        return offsets, raw[ends:].reshape(count, IDENTITY_BYTES)


class SplitTokens:
    """The tokens of one source and split: its shards, read as one stream of all documents in order."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.starts = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        self.num_tokens = int(self.starts[-1])

    def num_sequences(self, length: int, is_padded: bool = False) -> int:
        """Return the number of sequences of `length` inputs into which the stream can be cut.

        Each needs one more token, the target of its last input. An incomplete last sequence counts only with `is_padded`.
        """
        count = max(self.num_tokens - 1, 0)
        return -(-count // length) if is_padded else count // length

    def read(self, start: int, out: npt.NDArray[Any], field: str = "tokens") -> None:
        """Copy tokens [start, start + len(out)) of the stream, or their mask if `field` is "is_trained", into `out`."""
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        done = 0
        while done < len(out):
            offset = start + done - int(self.starts[number])
            part = getattr(self.shards[number], field)[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            number += 1

    def sequences(self, numbers: npt.NDArray[np.int64], length: int, padding: int = 0) -> npt.NDArray[Any]:
        """Return some sequences of the stream; sequence n begins at token n * length.

        Args:
            numbers: Values of n.
            length: Number of inputs of a sequence.
            padding: Id for positions past the end of the stream.

        Returns:
            The inputs and one more token of each sequence, (len(numbers), length + 1), in the stored integer type.
        """
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
        """Return the start of each document in the stream and its size, both in tokens, as two arrays, (documents,)."""
        bounds = [base + shard.offsets.astype(np.int64) for shard, base in zip(self.shards, self.starts, strict=False)]
        none = np.zeros(0, dtype=np.int64)
        starts = np.concatenate([none, *(part[:-1] for part in bounds)])
        return starts, np.concatenate([none, *(part[1:] for part in bounds)]) - starts

    def documents(self, start: int, end: int) -> list[tuple[str, int]]:
        """Return (identity, start in the stream) of each document that has a token in [start, end) of the stream."""
        rows: list[tuple[str, int]] = []
        first = max(int(np.searchsorted(self.starts, start, side="right")) - 1, 0)
        for shard, base in zip(self.shards[first:], self.starts[first:].tolist(), strict=False):
            if base >= end:
                break
            low = int(np.searchsorted(shard.offsets, max(start - base, 0), side="right")) - 1
            high = int(np.searchsorted(shard.offsets[:-1], end - base, side="left"))
            names = (identity.tobytes().hex() for identity in shard.identities[low:high])
            rows += zip(names, (base + shard.offsets[low:high].astype(np.int64)).tolist(), strict=True)
        return rows


def tokens_command(folder: AnyPath) -> str:
    """Return the command line that writes the tokens in a folder again."""
    return "bessemer tokens RECIPE" if isinstance(folder, StorePath) else RunDirectory(folder.parent).command("tokens")


class ShardWriter:
    """A writer of the shards of one source and split.

    A new shard begins when the next document would exceed `shard_tokens` tokens; documents are never cut.
    """

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int, labelled: bool = False,
        masked: bool = False,
    ) -> None:  # fmt: skip
        """Open a writer.

        Args:
            folder: Folder of the shards.
            name: Prefix of the files' names, SOURCE-SPLIT.
            dtype: Type of the ids.
            shard_tokens: Largest number of tokens in a shard with several documents.
            labelled: Write a .lbl file with the labels of documents.
            masked: Write a .msk file that says which tokens are targets of the loss.
        """
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.files: dict[str, dict[str, Any]] = {}
        self.counts, self.shards = dict.fromkeys(COUNTS, 0), 0
        self.labelled, self.masked = labelled, masked
        # The open shard's files by suffix, and the identity, number of tokens and label of each document.
        self._open: dict[str, BinaryIO] = {}
        self._records: list[tuple[bytes, int, int]] = []
        self._open_tokens = 0

    def add(
        self, identity: str, ids: npt.ArrayLike, num_bytes: int, label: int = NO_LABEL,
        is_trained: npt.NDArray[np.bool_] | None = None,
    ) -> None:  # fmt: skip
        """Append a document.

        Args:
            identity: 32 hexadecimal digits.
            ids: Its tokens, end-of-text included.
            num_bytes: Bytes of its text.
            label: Index of its label in the manifest's `labels`.
            is_trained: For each token, True if it is a target of the loss; required if the writer is `masked`.
        """
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
        """Finish the open shard, if any: write its index and flush its files to disk."""
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
        """Return the numbers of `documents`, `tokens` and `bytes`, and under `files` the size and SHA-256 of each file."""
        return {**self.counts, "files": self.files}

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.name}-{self.shards:05d}{suffix}"
