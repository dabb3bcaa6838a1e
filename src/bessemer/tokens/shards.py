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

import hashlib
import os
from functools import cache, cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import DamagedFile, InputError
from bessemer.common.hashing import digest, file_sha256, verify_files
from bessemer.run.files import read_json, recorded_files, stage_facts, verify_stage, write_atomic
from bessemer.storage.filesystem import AnyPath, Location
from bessemer.storage.path import map_array, published_folder, wrong_size
from bessemer.tokens.pieces import Framing
from bessemer.tokens.stream import MAGIC, NO_LABEL, Shard, SplitTokens, tokens_command

MANIFEST = "manifest.json"
SPLITS = ("train", "heldout")
LARGE = (".bin", ".idx", ".lbl", ".msk", ".pack")  # verified when they are read; others when a store is opened
COUNTS = ("documents", "tokens", "bytes")


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """Narrowest unsigned type that holds every id."""
    return np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")


@cache
def _largest_id(path: Path, dtype: np.dtype[Any], modified_ns: int) -> int:
    return int(map_array(path, dtype).max(initial=0))


class TokenStore:
    """The tokens folder of a run, opened: the manifest and every source's splits."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        tokenizer = manifest["tokenizer"]
        self.folder, self.manifest = folder, manifest
        self.is_verified = False  # then shards are read as they are
        self.sources: tuple[str, ...] = tuple(manifest.get("sources", ()))  # in the recipe's order
        self.labels: tuple[str, ...] = tuple(manifest.get("labels", ()))  # classes, by the number of their label
        self.vocabulary: int = tokenizer["vocabulary"]  # number of ids
        self.end_of_text: int = tokenizer["end_of_text"]  # id of the token after each document
        self.mask_token: int | None = tokenizer.get("mask_token")
        # The ids around a text: end-of-text first, or what an imported tokenizer adds.
        self.framing = Framing(tuple(tokenizer.get("prefix", [self.end_of_text])), tuple(tokenizer.get("suffix", ())))
        self.ends: tuple[int, ...] = tuple(tokenizer.get("ends", (self.end_of_text,)))  # generation ends at them
        # Special tokens by role of the model that the training starts from; empty for a model of its own.
        self.special: dict[str, str] = dict(tokenizer.get("special", {}))
        # Whether the tokens account for the bytes of the text, so that bits per byte are defined.
        self.counts_bytes = bool(tokenizer.get("counts_bytes", True))
        # Put before every text by the tokenizer; the bytes of a document's first token include it.
        self.text_prefix: bytes = tokenizer.get("text_prefix", "").encode()

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Open a tokens folder. Raises DamagedFile for a small file that is not as it was written, and for a shard of another
        size; the content of shards is verified when it is read."""
        if not (folder / MANIFEST).exists():
            raise InputError(f"{folder}: no tokens here; write them with `bessemer tokens RECIPE`")
        try:
            store = cls(folder, read_json(folder / MANIFEST))
        except (InputError, AttributeError, KeyError, TypeError) as error:
            why = f"damaged ({str(error).partition(';')[0]})"
            raise DamagedFile(f"{folder / MANIFEST}: {why}; write it again with `{tokens_command(folder)}`") from None
        store.verify(reads=False)
        return store

    @classmethod
    def described(cls, folder: Path) -> TokenStore | None:
        """What a manifest says, without a look at the shards; None where there is none that can be read."""
        try:
            verify_stage(folder, "", lambda name: name == MANIFEST)
            return cls(folder, read_json(folder / MANIFEST)) if (folder / MANIFEST).exists() else None
        except (InputError, AttributeError, KeyError, TypeError):  # reported by the stage that makes it again
            return None

    def verify(self, reads: bool = True) -> None:
        """Raise DamagedFile for the first file that is not as it was written, and for a shard with ids or offsets that cannot be.

        reads: hash every file, once in a process, and those in a store by their size; else small files only.
        """
        again = tokens_command(self.folder)
        if reads and self._names_stored:
            stored = {name: self.manifest["files"][name] for name in self._names_stored}
            if isinstance(self._stored, Path):
                verify_files(self._stored, stored, again)
            elif damage := wrong_size(self._stored, {name: facts["bytes"] for name, facts in stored.items()}):
                raise DamagedFile(f"{damage}; write it again with `{again}`")
        unread = {} if reads else {name: {"sha256": None} for name in self._written if Path(name).suffix in LARGE}
        written = {name: {**facts, **unread.get(name, {})} for name, facts in self._written.items()}
        verify_files(self.folder, written, again)
        for shard in (self.shard(name) for name in self.manifest["files"] if reads and name.endswith(".bin")):
            _ = shard.offsets, shard.tokens

    def check(self, path: AnyPath) -> None:
        """Verify a file of a shard before it is read. Raises DamagedFile."""
        facts = self._written.get(path.name) or self.manifest.get("files", {}).get(path.name)
        if self.is_verified or facts is None or isinstance(path, Location):
            return
        verify_files(path.parent, {path.name: facts}, tokens_command(self.folder))
        if path.suffix == ".bin":
            dtype = token_dtype(self.vocabulary)
            if (largest := _largest_id(path, dtype, path.stat().st_mtime_ns)) >= self.vocabulary:
                why = f"it has the id {largest}, but the vocabulary has {self.vocabulary} ids"
                raise DamagedFile(f"{path}: damaged: {why}; write it again with `{tokens_command(self.folder)}`")

    @cached_property
    def _written(self) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 of the files that are here, by the receipt of the stage, else by the manifest."""
        files: dict[str, dict[str, Any]] = {name: dict(facts) for name, facts in self.manifest.get("files", {}).items()}
        for name, facts in recorded_files(self.folder).items():
            files.setdefault(name, {}).update({key: value for key, value in facts.items() if value is not None})
        return {name: facts for name, facts in files.items() if name not in self._names_stored}

    @property
    def digest(self) -> str:
        """Of the tokens: of the hashes of all files, and of the tokenizer."""
        return digest(self.manifest["files"], self.manifest["tokenizer"]["sha256"])

    @property
    def train_tokens(self) -> int:
        return sum(int(source["train"]["tokens"]) for source in self.manifest["sources"].values())

    @property
    def held_out_tokens(self) -> int:
        return sum(int(source["heldout"]["tokens"]) for source in self.manifest["sources"].values())

    def split(self, source: str, split: str) -> SplitTokens:
        """Tokens of one source; split: "train" or "heldout"."""
        names = sorted(name for name in self.manifest["sources"][source][split]["files"] if name.endswith(".bin"))
        return SplitTokens([self.shard(name) for name in names])

    def shard(self, name: str) -> Shard:
        """A shard by the name of its .bin."""
        dtype, facts = token_dtype(self.vocabulary), self.manifest["files"].get(name)
        length = None if facts is None else facts["bytes"] // dtype.itemsize
        stored = self._stored / name if name in self._names_stored else None
        return Shard(self.folder / name, dtype, stored, length, self.check)

    @cached_property
    def _stored(self) -> AnyPath:
        return published_folder(self.folder)

    @cached_property
    def _names_stored(self) -> frozenset[str]:
        """Names of the files that are in a store."""
        return frozenset(stage_facts(self.folder).get("stored", ()))

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Number of bytes of text of each id; 0 for special tokens."""
        lengths: npt.NDArray[np.int64] = np.load(self.folder / "token_bytes.npy")
        return lengths


class ShardWriter:
    """Writes the shards of one source and split, a new one when `shard_tokens` is reached; documents are never cut."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int, labelled: bool = False,
        masked: bool = False,
    ) -> None:  # fmt: skip
        """labelled: documents have labels; masked: the loss is of some of their tokens."""
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.files: dict[str, dict[str, Any]] = {}
        self.documents = self.tokens = self.bytes = self.shards = 0
        self.labelled, self.masked = labelled, masked
        # Of the open shard: its files, the hash of its ids, and the identity, tokens and label of each document.
        self._bin: BinaryIO | None = None
        self._mask: BinaryIO | None = None
        self._hash = hashlib.sha256()
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
            self._finish()
        if self._bin is None:
            self._bin, self._hash = self._open(".bin"), hashlib.sha256()
            self._mask = self._open(".msk") if self.masked else None
        self._bin.write(tokens.data)
        self._hash.update(tokens.data)
        if self._mask is not None:
            assert is_trained is not None and len(is_trained) == len(tokens)
            self._mask.write(is_trained.tobytes())
        self._records.append((bytes.fromhex(identity), len(tokens), label))
        self._open_tokens += len(tokens)
        self.documents += 1
        self.tokens += len(tokens)
        self.bytes += num_bytes

    def close(self) -> None:
        """Finish the open shard."""
        if self._records:
            self._finish()

    def facts(self) -> dict[str, Any]:
        """Counts and files, as the manifest keeps them."""
        return {**{name: getattr(self, name) for name in COUNTS}, "files": sorted(self.files)}

    def _finish(self) -> None:
        for file in (self._bin, self._mask):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
                file.close()
        identities, sizes, labels = zip(*self._records, strict=True)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype("<u8")
        size = self._open_tokens * self.dtype.itemsize
        self.files[self._path(".bin").name] = {"bytes": size, "sha256": self._hash.hexdigest()}
        if self.masked:
            mask = self._path(".msk")
            self.files[mask.name] = {"bytes": self._open_tokens, "sha256": file_sha256(mask)}
        if self.labelled:
            self._write(".lbl", np.array(labels, "<i4").tobytes())
        count = np.array([len(identities)], dtype="<u8")
        self._write(".idx", MAGIC + count.tobytes() + offsets.tobytes() + b"".join(identities))
        self.shards += 1
        self._bin = self._mask = None
        self._open_tokens, self._records = 0, []

    def _write(self, suffix: str, data: bytes) -> None:
        path = self._path(suffix)
        write_atomic(path, data)
        self.files[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self.name}-{self.shards:05d}{suffix}"

    def _open(self, suffix: str) -> BinaryIO:
        return open(self._path(suffix), "wb", buffering=1 << 20)


def require_equal_tokenizers(start: Path, ours: str) -> None:
    """Raise InputError when the run in the folder `start` was trained with a tokenizer of another SHA-256 than `ours`."""
    tokens = start / "tokens"
    if TokenStore.open(tokens).manifest["tokenizer"]["sha256"] != ours:
        raise InputError(
            f"train.start: {start} was trained with another tokenizer than this run's, whose ids mean other text; leave "
            f'[tokenizer] out, or set tokenizer.path = "{tokens / "tokenizer.json"}"'
        )
