"""A checkpoint's manifest: which files it has, what they should hash to, and where each tensor's pieces lie.

format   2; format 1, of one process, says nothing of pieces: each tensor is whole in PART.safetensors
step     the step it was saved after
files    name -> bytes, sha256
tensors  part -> name -> [dtype, shape of the whole]
pieces   part -> name -> [[file, key, offset in the whole, shape], ...]
facts    what a resume needs besides tensors
sha256   of all the above
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bessemer.checkpoint.pieces import Contents, Source, Stored, require_cover
from bessemer.errors import BessemerError
from bessemer.run import read_json

MANIFEST = "manifest.json"
FORMAT = 2


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint should hold. files: name -> {"bytes", "sha256"}; sha256: the manifest's own."""

    step: int
    files: dict[str, dict[str, Any]]
    contents: Contents
    facts: dict[str, Any]
    sha256: str


def written(step: int, files: dict[str, dict[str, Any]], contents: Contents, facts: dict[str, Any]) -> str:
    """The text of a manifest."""
    tensors = {part: {name: [of.dtype, of.shape] for name, of in named.items()} for part, named in contents.items()}
    pieces = {
        part: {name: [[p.file, p.key, p.offset, p.shape] for p in of.pieces] for name, of in named.items()}
        for part, named in contents.items()
    }
    return json.dumps(
        _signed({"format": FORMAT, "step": step, "files": files, "tensors": tensors, "pieces": pieces, "facts": facts})
    )


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint, of any format, once it agrees with its own hash and its pieces with their wholes.

    Raises BessemerError that names the file.
    """
    path = folder / MANIFEST
    if not path.exists():
        raise BessemerError(f"{folder}: no {MANIFEST}")
    found = read_json(path)
    if not isinstance(found, dict) or found != _signed({key: found[key] for key in found if key != "sha256"}):
        raise BessemerError(f"{path}: damaged: its own hash does not match")
    if found.get("format") not in (1, FORMAT):
        raise BessemerError(f"{path}: of format {found.get('format')}; a newer Bessemer wrote it, update this one")
    try:
        pieces = found["pieces"] if found["format"] == FORMAT else None
        contents = {
            part: {name: _stored(part, name, of[0], of[1], pieces) for name, of in named.items()}
            for part, named in found["tensors"].items()
        }
        manifest = Manifest(int(found["step"]), found["files"], contents, found["facts"], found["sha256"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BessemerError(f"{path}: is no manifest of a checkpoint ({type(error).__name__}: {error})") from None
    for name in manifest.files:
        if Path(name).name != name:
            raise BessemerError(f"{path}: names a file outside of the checkpoint: {name}")
    for part, named in manifest.contents.items():
        for name, of in named.items():
            require_cover(f"{path}: {part} tensor {name}", of.shape, [(p.offset, p.shape) for p in of.pieces])
            for piece in of.pieces:
                if piece.file not in manifest.files:
                    raise BessemerError(f"{path}: {part} tensor {name} lies in {piece.file}, which has no hash")
    return manifest


def _stored(part: str, name: str, dtype: str, shape: list[int], pieces: dict[str, Any] | None) -> Stored:
    whole = tuple(shape)
    if pieces is None:
        file, listed = f"{part}.safetensors", [] if prod(whole) == 0 else [((0,) * len(whole), whole)]
        return Stored(dtype, whole, tuple(Source(file, name, offset, size) for offset, size in listed))
    sources = (Source(file, key, tuple(offset), tuple(size)) for file, key, offset, size in pieces[part][name])
    return Stored(dtype, whole, tuple(sources))


def _signed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a hash of its own content, so that a flipped bit in it is found like one in a file."""
    plain = json.loads(json.dumps(manifest))
    return {**plain, "sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}
