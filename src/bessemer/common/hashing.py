"""Digests of values and files, and keys for pseudo-random numbers."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from bessemer.common.errors import DamagedFile

SAMPLE_BYTES = 256 << 10


def digest(*parts: Any) -> str:
    """Return the SHA-256 of recipe sections or plain values, in hexadecimal. Stages compare it to see if they are current."""
    from pydantic import BaseModel

    plain = [part.model_dump(mode="json", by_alias=True) if isinstance(part, BaseModel) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()


def file_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_sha256(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of `SAMPLE_BYTES` each from the beginning, middle and end of a file; of all of a short file.

    It detects a replaced file in a time that does not depend on its size. Raises OSError.
    """
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        places = (0, size // 2, size - SAMPLE_BYTES) if size > 3 * SAMPLE_BYTES else (0, SAMPLE_BYTES, 2 * SAMPLE_BYTES)
        for offset in places:
            file.seek(offset)
            hashed.update(file.read(SAMPLE_BYTES))
    return hashed.hexdigest()


def key_of(*parts: object) -> int:
    """Return a 64-bit key of a pseudo-random function from any values, equal on every machine and Python version."""
    hashed = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little")


def fingerprint(path: Path) -> dict[str, Any]:
    """Return {"bytes": size, "sha256": hash in hexadecimal} of a file."""
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def fingerprints(folder: Path, known: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the result of `fingerprint` for every file below a folder, by path in the folder.

    `known` has the results for files that were hashed while they were written.
    """
    paths = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: (known or {}).get(name) or fingerprint(path) for name, path in paths.items()}


def verify_files(folder: Path, files: dict[str, Any], command: str) -> None:
    """Raise DamagedFile for the first file that is missing or differs from its recorded size and SHA-256.

    Files are hashed in parallel, each once per process.

    Args:
        folder: Folder of the files.
        files: Recorded "bytes" and, if known, "sha256" of each file, by name.
        command: Command that writes the files again.
    """
    pool = ThreadPoolExecutor()
    try:
        damages = pool.map(lambda name: _damage(folder / name, files[name]), files)
        if damage := next(filter(None, damages), None):
            raise DamagedFile(f"{damage}; write it again with `{command}`")
    finally:
        pool.shutdown(cancel_futures=True)


def _damage(path: Path, fingerprint: dict[str, Any]) -> str | None:
    try:
        there, wanted = path.stat(), fingerprint.get("sha256")
        version = there.st_size, there.st_mtime_ns, there.st_ctime_ns, there.st_ino
        if there.st_size == fingerprint["bytes"] and (wanted is None or _sha256(path, *version) == wanted):
            return None
    except OSError as error:
        return f"{path}: {'missing' if isinstance(error, FileNotFoundError) else error.strerror}"
    return f"{path}: damaged: not the {fingerprint['bytes']} bytes that were written"


@cache
def _sha256(path: Path, *version: int) -> str:
    """Return the hash of a file, cached until its size, times or inode change."""
    return file_sha256(path)
