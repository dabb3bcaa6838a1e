"""Hashes: of values, to see whether a result is current; of files, to see whether they are whole; keys of random numbers."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from pydantic import BaseModel

SAMPLE_BYTES = 256 << 10


def digest(*parts: Any) -> str:
    """SHA-256 of sections of a recipe or plain values, in hexadecimal: what stages compare to see whether they are current."""
    plain = [part.model_dump(mode="json", by_alias=True) if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def file_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's content, in hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_sha256(path: str | os.PathLike[str]) -> str:
    """SHA-256 of the beginning, the middle and the end of a file, `SAMPLE_BYTES` of each, and so of all of a short one; it
    notices a file that is another one, in a time that does not depend on its size. Raises OSError."""
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        places = (0, size // 2, size - SAMPLE_BYTES) if size > 3 * SAMPLE_BYTES else (0, SAMPLE_BYTES, 2 * SAMPLE_BYTES)
        for place in places:
            file.seek(place)
            hashed.update(file.read(SAMPLE_BYTES))
    return hashed.hexdigest()


def key_of(*parts: object) -> int:
    """A 64-bit key of a pseudo-random function from any values, equal on every machine and Python."""
    hashed = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little")
