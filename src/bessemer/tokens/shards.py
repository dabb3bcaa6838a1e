"""Token shards on disk: the plain layout that nanoGPT-style tools read, with an index of documents beside it.

NAME-00000.bin  token ids, little-endian uint16 when the vocabulary fits in it, else uint32; an end-of-text token
                after each document; nothing else.
NAME-00000.idx  little-endian: 8 bytes magic "BSMRIDX1", uint64 number of documents D, D+1 uint64 offsets (in tokens;
                the last one is the length of the shard), D identities of 16 bytes each.
NAME-00000.lbl  where documents have labels: D little-endian int32, the number of each document's label in the manifest's
                `labels`; -1 for a document without one.
manifest.json   sources, counts and SHA-256 of every file, and the tokenizer's hash.

Written by `writer.ShardWriter`.

NAME is SOURCE-train or SOURCE-heldout.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from bessemer.errors import BessemerError, InputError
from bessemer.run import read_json
from bessemer.tokens.pieces import Framing

MAGIC = b"BSMRIDX1"
IDENTITY_BYTES = 16
NO_LABEL = -1

TokenIds = npt.NDArray[np.unsignedinteger[Any]]


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Narrowest unsigned type that holds every id."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Shard:
    """One .bin/.idx pair, memory-mapped."""

    path: Path
    dtype: np.dtype[Any]

    @cached_property
    def tokens(self) -> TokenIds:
        """All ids of the shard, mapped into memory."""
        # A plain view: a memmap goes through Python for every slice.
        return np.memmap(self.path, dtype=self.dtype, mode="r").view(np.ndarray)

    @cached_property
    def num_tokens(self) -> int:
        """How many ids there are; asks for the file's size and does not open it."""
        return self.path.stat().st_size // self.dtype.itemsize

    @cached_property
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
        if not path.exists():
            return np.full(len(self.identities), NO_LABEL, dtype=np.int32)
        return np.fromfile(path, dtype="<i4")

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        raw = np.memmap(self.path.with_suffix(".idx"), dtype=np.uint8, mode="r")
        if raw[:8].tobytes() != MAGIC:
            raise BessemerError(f"{self.path.with_suffix('.idx')}: not a document index; build the tokens again")
        count = int(raw[8:16].view("<u8")[0])
        ends = 16 + 8 * (count + 1)
        return raw[16:ends].view("<u8"), raw[ends:].reshape(count, IDENTITY_BYTES)


class Split:
    """The tokens of one source and split: its shards, read as one stream."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.starts = np.cumsum([0, *(shard.num_tokens for shard in shards)])
        self.num_tokens = int(self.starts[-1])
        self._views: dict[int, list[tuple[int, npt.NDArray[Any]]]] = {}

    def num_sequences(self, length: int) -> int:
        """Whole sequences of `length` inputs, each with the token that follows its last one."""
        return max(self.num_tokens - 1, 0) // length

    def read(self, start: int, out: npt.NDArray[Any]) -> None:
        """Copy tokens [start, start + len(out)) of the stream into `out`; a shard's border is no border here."""
        number = int(np.searchsorted(self.starts, start, side="right")) - 1
        done = 0
        while done < len(out):
            tokens = self.shards[number].tokens
            offset = start + done - int(self.starts[number])
            part = tokens[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            number += 1

    def sequences(self, numbers: npt.NDArray[np.int64], length: int) -> npt.NDArray[Any]:
        """Training sequences by number, (len(numbers), length + 1) in the stored type: inputs and one token more."""
        windows = self._windows(length)
        if len(self.shards) == 1:
            return windows[0][1][numbers]
        out = np.empty((len(numbers), length + 1), dtype=self.shards[0].dtype)
        whole = np.zeros(len(numbers), dtype=np.bool_)
        for first, window in windows:
            here = (numbers >= first) & (numbers < first + len(window))
            if here.any():
                out[here] = window[numbers[here] - first]
                whole |= here
        for row in np.flatnonzero(~whole):  # sequences that lie over a border
            self.read(int(numbers[row]) * length, out[row])
        return out

    def _windows(self, length: int) -> list[tuple[int, npt.NDArray[Any]]]:
        """For each shard the number of the first sequence that it holds whole, and all that it holds as rows of a view."""
        if length in self._views:
            return self._views[length]
        found: list[tuple[int, npt.NDArray[Any]]] = []
        for shard, base in zip(self.shards, self.starts.tolist(), strict=False):
            first = -(-base // length)
            offset = first * length - base
            count = (len(shard.tokens) - offset - 1) // length
            if count > 0:
                size = shard.tokens.itemsize
                rows = as_strided(shard.tokens[offset:], (count, length + 1), (length * size, size), writeable=False)
                found.append((first, rows))
        self._views[length] = found
        return found

    def documents(self, start: int, end: int) -> list[str]:
        """Identities of the documents that have a token in [start, end) of the stream."""
        found = []
        number = max(int(np.searchsorted(self.starts, start, side="right")) - 1, 0)
        for shard, base in zip(self.shards[number:], self.starts[number:], strict=False):
            low, high = max(start - int(base), 0), min(end - int(base), shard.num_tokens)
            if low >= high:
                break
            first = int(np.searchsorted(shard.offsets, low, side="right")) - 1
            last = int(np.searchsorted(shard.offsets, high, side="left"))
            found += [shard.identities[number].tobytes().hex() for number in range(first, last)]
        return found


@dataclass(frozen=True)
class TokenStore:
    """The tokens folder of a run, opened: the manifest and every source's splits."""

    folder: Path
    manifest: dict[str, Any]

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Open a tokens folder; a shard that is missing or has another length is named."""
        if not (folder / "manifest.json").exists():
            raise InputError(f"{folder}: no tokens here; write them with `bessemer tokens RECIPE`")
        manifest = read_json(folder / "manifest.json")
        for name, facts in manifest["files"].items():
            path = folder / name
            if not path.exists():
                raise BessemerError(f"{path}: missing; the manifest lists it. Build the tokens again")
            if path.stat().st_size != facts["bytes"]:
                raise BessemerError(
                    f"{path}: {path.stat().st_size} bytes, but the manifest says {facts['bytes']}; build the tokens again"
                )
        return cls(folder, manifest)

    def verify(self) -> None:
        """Read every file and compare its SHA-256 with the manifest's; the first damaged one is named."""
        for name, facts in self.manifest["files"].items():
            with open(self.folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
                    raise BessemerError(f"{self.folder / name}: its content has changed; build the tokens again")

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.manifest["tokenizer"]["vocabulary"])

    @property
    def end_of_text(self) -> int:
        """Id of the token after each document."""
        return int(self.manifest["tokenizer"]["end_of_text"])

    @property
    def mask_token(self) -> int | None:
        """Id of the token that stands where one is hidden; None where the tokenizer was not asked for one."""
        found = self.manifest["tokenizer"].get("mask_token")
        return None if found is None else int(found)

    @property
    def framing(self) -> Framing:
        """What the model is used with around a text: end-of-text first, or what an imported tokenizer adds."""
        facts = self.manifest["tokenizer"]
        before = facts.get("prefix")
        return Framing(tuple([self.end_of_text] if before is None else before), tuple(facts.get("suffix", ())))

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids at which generation ends: end-of-text, or what an imported model names."""
        return tuple(self.manifest["tokenizer"].get("ends", (self.end_of_text,)))

    @property
    def special(self) -> dict[str, str]:
        """Special tokens by role of the model that this run's training starts from; empty for a model of its own."""
        return dict(self.manifest["tokenizer"].get("special", {}))

    @property
    def counts_bytes(self) -> bool:
        """Whether the tokens account for the bytes of the text, so that bits per byte mean something."""
        return bool(self.manifest["tokenizer"].get("counts_bytes", True))

    @property
    def text_prefix(self) -> bytes:
        """What the tokenizer puts before every text, and a document's first token stands for too."""
        return str(self.manifest["tokenizer"].get("text_prefix", "")).encode()

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes of the documents, in the order of their numbers; none where documents have no labels."""
        return tuple(self.manifest.get("labels", ()))

    @property
    def train_tokens(self) -> int:
        """Tokens to train on, of all sources."""
        return sum(int(source["train"]["tokens"]) for source in self.manifest["sources"].values())

    @property
    def held_out_tokens(self) -> int:
        """Tokens held out, of all sources."""
        return sum(int(source["heldout"]["tokens"]) for source in self.manifest["sources"].values())

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources, in the recipe's order."""
        return tuple(self.manifest["sources"])

    def split(self, source: str, split: str) -> Split:
        """Tokens of one source; split: "train" or "heldout"."""
        dtype = token_dtype(self.vocabulary)
        names = sorted(name for name in self.manifest["sources"][source][split]["files"] if name.endswith(".bin"))
        return Split([Shard(self.folder / name, dtype) for name in names])

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """How many bytes of text each id stands for; 0 for special tokens."""
        lengths: npt.NDArray[np.int64] = np.load(self.folder / "token_bytes.npy")
        return lengths
