"""Writes token shards (their layout: `shards`): tokens go to disk as they come, and a writer can be taken up where it stood.

While a shard is open, NAME-00000.part beside its .bin holds a record a document: identity (16 bytes), int64 tokens, int32
label. It becomes the .idx, and the .lbl, when the shard is full; a kill at any point leaves enough to go on from the last
`state`: the .bin and the records of its documents.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from bessemer.errors import BessemerError
from bessemer.run import write_atomic
from bessemer.tokens.shards import IDENTITY_BYTES, MAGIC, NO_LABEL, Shard

RECORD = np.dtype([("identity", "V16"), ("tokens", "<i8"), ("label", "<i4")])
BUFFER = 1 << 20
COUNTS = ("documents", "tokens", "bytes", "longest", "shards")


class ShardWriter:
    """Writes the shards of one source and split, a new one when `shard_tokens` is reached; documents are never cut."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], shard_tokens: int, labelled: bool = False
    ) -> None:
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.files: dict[str, dict[str, Any]] = {}
        self.documents = self.tokens = self.bytes = self.longest = self.shards = 0
        self.labelled = labelled
        self._held = self._records = 0
        self._bin: BinaryIO | None = None
        self._part: BinaryIO | None = None
        self._hash = hashlib.sha256()

    def add(self, identity: str, ids: npt.ArrayLike, num_bytes: int, label: int = NO_LABEL) -> None:
        """Append a document. identity: 32 hexadecimal digits; ids: its tokens, end-of-text included; label: its number."""
        tokens = np.ascontiguousarray(ids, dtype=self.dtype)
        if self._held and self._held + len(tokens) > self.shard_tokens:
            self._finish()
        if self._bin is None or self._part is None:
            self._bin, self._part = self._open(".bin"), self._open(".part")
            self._hash = hashlib.sha256()
        self._bin.write(tokens.data)
        self._hash.update(tokens.data)
        self._part.write(np.array([(bytes.fromhex(identity), len(tokens), label)], dtype=RECORD).tobytes())
        self._held += len(tokens)
        self._records += 1
        self.documents += 1
        self.tokens += len(tokens)
        self.bytes += num_bytes
        self.longest = max(self.longest, len(tokens))

    def close(self) -> None:
        """Finish the open shard."""
        if self._records:
            self._finish()

    def state(self) -> dict[str, Any]:
        """What a later writer needs to go on from here, once all that was added is on the disk."""
        for file in (self._bin, self._part):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        counts = {name: getattr(self, name) for name in COUNTS}
        return {
            **counts,
            "files": {name: dict(facts) for name, facts in self.files.items()},
            "held": self._held,
            "records": self._records,
        }

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a state; what was written after it is removed. Raises BessemerError when something of it is gone."""
        for name in COUNTS:
            setattr(self, name, int(state[name]))
        self.files = {name: dict(facts) for name, facts in state["files"].items()}
        self._held, self._records = int(state["held"]), int(state["records"])
        stem = self._stem()
        place, part = self.folder / f"{stem}.bin", self.folder / f"{stem}.part"
        if self._records:
            write_atomic(part, self._kept_records(stem).tobytes())
        # Only now may the index that the records may have come from go.
        kept = {*self.files, *((place.name, part.name) if self._records else ())}
        for path in self.folder.iterdir():
            if path.name not in kept and re.fullmatch(rf"{re.escape(self.name)}-\d+\.[a-z]+", path.name):
                path.unlink()
        if not self._records:
            return
        size = self._held * self.dtype.itemsize
        if not place.exists() or place.stat().st_size < size:
            raise BessemerError(f"{place}: shorter than its record says")
        os.truncate(place, size)
        self._hash = hashlib.sha256()
        with open(place, "rb") as file:
            while data := file.read(BUFFER):
                self._hash.update(data)
        self._bin, self._part = self._open(".bin", "ab"), self._open(".part", "ab")

    def _kept_records(self, stem: str) -> npt.NDArray[Any]:
        """The first records of the open shard: from its .part, or from the index it had become."""
        part, index = self.folder / f"{stem}.part", self.folder / f"{stem}.idx"
        if part.exists() and part.stat().st_size >= self._records * RECORD.itemsize:
            return np.fromfile(part, dtype=RECORD, count=self._records)
        if not index.exists():
            raise BessemerError(f"{part}: missing or shorter than its record says")
        shard = Shard(self.folder / f"{stem}.bin", self.dtype)
        records = np.zeros(self._records, dtype=RECORD)
        records["identity"] = np.ascontiguousarray(shard.identities[: self._records]).view("V16")[:, 0]
        records["tokens"] = np.diff(shard.offsets.astype(np.int64))[: self._records]
        records["label"] = shard.labels[: self._records]
        return records

    def _finish(self) -> None:
        assert self._bin is not None and self._part is not None
        stem = self._stem()
        for file in (self._bin, self._part):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        part = self.folder / f"{stem}.part"
        records = np.fromfile(part, dtype=RECORD)
        offsets = np.zeros(len(records) + 1, dtype="<u8")
        np.cumsum(records["tokens"], out=offsets[1:])
        count = np.array([len(records)], dtype="<u8")
        size = self._held * self.dtype.itemsize
        self.files[f"{stem}.bin"] = {"bytes": size, "sha256": self._hash.hexdigest()}
        identities = np.ascontiguousarray(records["identity"]).tobytes()
        assert len(identities) == IDENTITY_BYTES * len(records)
        if self.labelled:
            self._whole(f"{stem}.lbl", np.ascontiguousarray(records["label"]).tobytes())
        self._whole(f"{stem}.idx", MAGIC + count.tobytes() + offsets.tobytes() + identities)
        part.unlink()
        self.shards += 1
        self._bin = self._part = None
        self._held = self._records = 0

    def _whole(self, name: str, data: bytes) -> None:
        write_atomic(self.folder / name, data)
        self.files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def _stem(self) -> str:
        return f"{self.name}-{self.shards:05d}"

    def _open(self, suffix: str, mode: str = "wb") -> BinaryIO:
        return open(self.folder / f"{self._stem()}{suffix}", mode, buffering=BUFFER)  # type: ignore[return-value]
