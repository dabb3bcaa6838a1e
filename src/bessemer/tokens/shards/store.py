"""The tokens folder of a run: manifest.json and the shards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bessemer.common.errors import DamagedFile, InputError
from bessemer.common.hashing import digest, verify_files
from bessemer.run.files import read_json, recorded_files, stage_facts, verify_stage
from bessemer.storage.filesystem import AnyPath, StorePath
from bessemer.storage.path import map_array, published_folder, wrong_size
from bessemer.tokens.shards.shard import NO_LABEL, Shard, SplitTokens, token_dtype, tokens_command
from bessemer.tokens.tokenizer.description import Framing

MANIFEST = "manifest.json"
LARGE = (".bin", ".idx", ".lbl", ".msk", ".pack")  # verified when they are read; other files when a store is opened


@cache
def _largest_id(path: Path, dtype: np.dtype[Any], modified_ns: int) -> int:
    return int(map_array(path, dtype).max(initial=0))


class TokenDocument(NamedTuple):
    """A document of a token store.

    Attributes:
        identity: Its identity, 32 hexadecimal digits.
        source: Name of its source.
        ids: Token ids, end-of-text included.
        label: Its class; None without one.
    """

    identity: str
    source: str
    ids: npt.NDArray[np.unsignedinteger[Any]]
    label: str | None = None


class TokenStore:
    """The opened tokens folder of a run: the manifest and, for every source, the splits "train" and "heldout".

    Attributes:
        folder: The folder.
        manifest: The content of manifest.json.
        is_verified: True once all files have been verified, so that shards are read without checks.
        sources: Names of the sources, in the recipe's order.
        labels: Names of the classes; a document's label is an index in them.
        vocabulary: Number of ids.
        end_of_text: Id of the token after each document.
        mask_token: Id of the mask token; None without one.
        framing: Ids before and after a text: end-of-text before it, or those that an imported tokenizer adds.
        ends: Ids that end generation.
        special: Special tokens of the model that training starts from, by role such as bos; empty for a new model.
        counts_bytes: True if the tokens represent all bytes of the text, so that bits per byte are defined.
        text_prefix: Bytes that the tokenizer adds before every text; the bytes of a document's first token include
            them.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        tokenizer = manifest["tokenizer"]
        self.folder, self.manifest = folder, manifest
        self.is_verified = False
        self.sources: tuple[str, ...] = tuple(manifest.get("sources", ()))
        self.labels: tuple[str, ...] = tuple(manifest.get("labels", ()))
        self.vocabulary: int = tokenizer["vocabulary"]
        self.end_of_text: int = tokenizer["end_of_text"]
        self.mask_token: int | None = tokenizer.get("mask_token")
        self.framing = Framing(tuple(tokenizer.get("prefix", [self.end_of_text])), tuple(tokenizer.get("suffix", ())))
        self.ends: tuple[int, ...] = tuple(tokenizer.get("ends", (self.end_of_text,)))
        self.special: dict[str, str] = dict(tokenizer.get("special", {}))
        self.counts_bytes = bool(tokenizer.get("counts_bytes", True))
        self.text_prefix: bytes = tokenizer.get("text_prefix", "").encode()

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Open a tokens folder; the content of shards is verified when it is read.

        Raises InputError for a folder without tokens, and DamagedFile for a small file that has changed or a shard of
        the wrong size.
        """
        if not (folder / MANIFEST).exists():
            raise InputError(f"{folder}: there are no tokens; write them with `bessemer tokens RECIPE`")
        try:
            store = cls(folder, read_json(folder / MANIFEST))
        except (InputError, AttributeError, KeyError, TypeError) as error:
            why = f"damaged ({str(error).partition(';')[0]})"
            raise DamagedFile(f"{folder / MANIFEST}: {why}; write it again with `{tokens_command(folder)}`") from None
        store.verify(reads=False)
        return store

    @classmethod
    def read_manifest(cls, folder: Path) -> TokenStore | None:
        """Read a folder's manifest without checking the shards; None if there is no readable one."""
        try:
            verify_stage(folder, "", lambda name: name == MANIFEST)
            return cls(folder, read_json(folder / MANIFEST)) if (folder / MANIFEST).exists() else None
        except (InputError, AttributeError, KeyError, TypeError):  # the stage that builds it again reports the error
            return None

    def verify(self, reads: bool = True) -> None:
        """Verify all files. Raises DamagedFile for a file that has changed, or a shard with invalid ids or offsets.

        Args:
            reads: If true, hash every file, but compare files in an object store only by size. If false, hash only small
                files and compare the others by size.
        """
        again = tokens_command(self.folder)
        if reads and self._names_stored:
            stored = {name: self.manifest["files"][name] for name in self._names_stored}
            if isinstance(self._stored, Path):
                verify_files(self._stored, stored, again)
            elif damage := wrong_size(self._stored, {name: facts["bytes"] for name, facts in stored.items()}):
                raise DamagedFile(f"{damage}; write it again with `{again}`")
        sizes = {name: {"bytes": facts["bytes"]} for name, facts in self._written.items() if Path(name).suffix in LARGE}
        verify_files(self.folder, self._written if reads else self._written | sizes, again)
        for shard in (self.shard(name) for name in self.manifest["files"] if reads and name.endswith(".bin")):
            _ = shard.offsets, shard.tokens

    def check(self, path: AnyPath) -> None:
        """Verify a file of a shard before it is read, unless it is in an object store. Raises DamagedFile if it has changed."""
        facts = self._written.get(path.name) or self.manifest.get("files", {}).get(path.name)
        if self.is_verified or facts is None or isinstance(path, StorePath):
            return
        verify_files(path.parent, {path.name: facts}, tokens_command(self.folder))
        if path.suffix == ".bin":
            dtype = token_dtype(self.vocabulary)
            if (largest := _largest_id(path, dtype, path.stat().st_mtime_ns)) >= self.vocabulary:
                why = f"it has the id {largest}, but the vocabulary has {self.vocabulary} ids"
                raise DamagedFile(f"{path}: damaged: {why}; write it again with `{tokens_command(self.folder)}`")

    @cached_property
    def _written(self) -> dict[str, dict[str, Any]]:
        """Size and SHA-256 by name of the local files, as recorded in the stage's receipt, else in the manifest."""
        files = {**self.manifest.get("files", {}), **recorded_files(self.folder)}
        return {name: facts for name, facts in files.items() if name not in self._names_stored}

    @property
    def digest(self) -> str:
        """Digest that identifies the tokens: a hash of the hashes of all files and of the tokenizer."""
        return digest(self.manifest["files"], self.manifest["tokenizer"]["sha256"])

    def num_tokens(self, split: str) -> int:
        """Return the number of tokens of all sources in a split, "train" or "heldout"."""
        return sum(int(source[split]["tokens"]) for source in self.manifest["sources"].values())

    def documents(self, split: str = "train", *sources: str) -> Iterator[TokenDocument]:
        """Iterate over the documents of some sources.

        Args:
            split: "train" or "heldout".
            sources: Names of the sources (default: all).
        """
        for source in sources or self.sources:
            for shard in self.split(source, split).shards:
                yield from self.documents_in(source, shard)

    def documents_in(self, source: str, shard: Shard) -> Iterator[TokenDocument]:
        """Iterate over the documents of one shard of a source."""
        spans = pairwise(shard.offsets.tolist())
        for name, (start, end), label in zip(shard.identities, spans, shard.labels.tolist(), strict=True):
            label_name = None if label == NO_LABEL else self.labels[label]
            yield TokenDocument(name.tobytes().hex(), source, shard.tokens[start:end], label_name)

    def split(self, source: str, split: str) -> SplitTokens:
        """Return the tokens of one source in a split, "train" or "heldout"."""
        names = sorted(name for name in self.manifest["sources"][source][split]["files"] if name.endswith(".bin"))
        return SplitTokens([self.shard(name) for name in names])

    def shard(self, name: str) -> Shard:
        """Return a shard by the name of its .bin file."""
        dtype, facts = token_dtype(self.vocabulary), self.manifest["files"].get(name)
        length = None if facts is None else facts["bytes"] // dtype.itemsize
        stored = self._stored / name if name in self._names_stored else None
        return Shard(self.folder / name, dtype, stored, length, self.check)

    @cached_property
    def _stored(self) -> AnyPath:
        return published_folder(self.folder)

    @cached_property
    def _names_stored(self) -> frozenset[str]:
        """Names of the files that are in `corpus.storage` instead of this folder."""
        return frozenset(stage_facts(self.folder).get("stored", ()))

    @cached_property
    def token_bytes(self) -> npt.NDArray[np.int64]:
        """Number of bytes of text of each id; 0 for special tokens."""
        lengths: npt.NDArray[np.int64] = np.load(self.folder / "token_bytes.npy")
        return lengths


def require_equal_tokenizers(start: Path, ours: str) -> None:
    """Raise InputError if the run in the folder `start` used a tokenizer with another SHA-256 than `ours`."""
    tokens = start / "tokens"
    if TokenStore.open(tokens).manifest["tokenizer"]["sha256"] != ours:
        raise InputError(
            f"train.start: {start} was trained with another tokenizer; remove [tokenizer], or set "
            f'tokenizer.path = "{tokens / "tokenizer.json"}"'
        )
