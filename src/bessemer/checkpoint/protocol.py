"""The checkpoint protocol: after a kill at any instant, the last good checkpoint is whole and found.

    step-00001000/
      model.safetensors, optimizer.safetensors, ...   tensors; nothing is pickled
      manifest.json                                   written last: per file size and SHA-256, per tensor dtype and
                                                      shape, and the facts a resume needs
    latest                                            the name of the newest verified checkpoint

Saving: the state must be finite and the disk must hold 1.2 times its size; files go into step-N.tmp/, each synced;
the manifest last; then rename, sync of the folder, reread and verify; only then does `latest` move, and only then
are older checkpoints removed. Loading verifies every byte before anything is used, and falls back to the next older
checkpoint; when some exist and none is whole it refuses, rather than start from nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bessemer.errors import BessemerError
from bessemer.run import read_json, sync_folder, write_atomic

MANIFEST = "manifest.json"
LATEST = "latest"
SPACE_FACTOR = 1.2

Tensors = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint whose every byte has been verified."""

    folder: Path
    step: int
    facts: dict[str, Any]

    def tensors(self, part: str) -> dict[str, Tensor]:
        """The tensors of one part ("model", "optimizer", ...), on the CPU."""
        loaded: dict[str, Tensor] = load_file(self.folder / f"{part}.safetensors")
        return loaded


def save(folder: Path, step: int, tensors: Tensors, facts: dict[str, Any], keep: int) -> Checkpoint:
    """Write and publish a checkpoint of `step`.

    tensors: part -> name -> tensor; facts: plain values for the manifest; keep: verified checkpoints that remain.
    Raises BessemerError when the state is not finite, the disk is too full, or what was written does not verify;
    whatever happens, the checkpoints that were there before stay.
    """
    _require_finite(tensors)
    _require_space(folder, sum(tensor.nbytes for part in tensors.values() for tensor in part.values()))
    target = folder / f"step-{step:08d}"
    staged = folder / f"{target.name}.tmp"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        for part, named in tensors.items():
            whole = {name: tensor.detach().contiguous().cpu() for name, tensor in named.items()}
            save_file(whole, staged / f"{part}.safetensors")
            _sync_file(staged / f"{part}.safetensors")
        described = {
            part: {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in named.items()}
            for part, named in tensors.items()
        }
        files = {path.name: _fingerprint(path) for path in sorted(staged.iterdir())}
        manifest = {"format": 1, "step": step, "files": files, "tensors": described, "facts": facts}
        write_atomic(staged / MANIFEST, json.dumps(_signed(manifest), indent=1))
        sync_folder(staged)
        if target.exists():  # a resumed run saves a step again; the two are equal bit for bit
            shutil.rmtree(target)
        os.rename(staged, target)
        sync_folder(folder)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    checkpoint = verify(target)
    write_atomic(folder / LATEST, target.name)
    _retain(folder, step, keep)
    return checkpoint


def latest(folder: Path, on_damage: Any = None) -> Checkpoint | None:
    """The newest checkpoint that verifies; None when there is none at all.

    on_damage: called with a sentence for each checkpoint that is passed over. Raises BessemerError when checkpoints
    exist but none is whole.
    """
    steps = published(folder)
    for step in reversed(steps):
        try:
            return verify(folder / f"step-{step:08d}")
        except BessemerError as error:
            if on_damage is not None:
                on_damage(f"{error}; falling back to the next older checkpoint")
    if steps:
        raise BessemerError(
            f"{folder}: none of its {len(steps)} checkpoints is whole; restore one from a backup, or start over under "
            "another name with --set run.name=NAME"
        )
    return None


def verify(folder: Path) -> Checkpoint:
    """Read a checkpoint whole and compare it with its manifest. Raises BessemerError that names the file."""
    if not (folder / MANIFEST).exists():
        raise BessemerError(f"{folder}: no {MANIFEST}")
    manifest = read_json(folder / MANIFEST)
    if not isinstance(manifest, dict) or manifest != _signed({k: v for k, v in manifest.items() if k != "sha256"}):
        raise BessemerError(f"{folder / MANIFEST}: damaged: its own hash does not match")
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise BessemerError(f"{path}: missing")
        if _fingerprint(path) != expected:
            raise BessemerError(f"{path}: damaged: size or SHA-256 differ from the manifest")
    for part in manifest["tensors"]:
        _require_finite_file(folder / f"{part}.safetensors")
    return Checkpoint(folder, int(manifest["step"]), manifest["facts"])


def published(folder: Path) -> list[int]:
    """Steps of the published checkpoints, ascending; by number, since names sort wrongly past their padding."""
    if not folder.is_dir():
        return []
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(int(name[1]) for name in names if name)


def _retain(folder: Path, newest: int, keep: int) -> None:
    """Remove what is older than the `keep` newest; never the one just verified, nor half-written leftovers of others."""
    steps = [step for step in published(folder) if step <= newest]
    for step in steps[: max(len(steps) - keep, 0)]:
        shutil.rmtree(folder / f"step-{step:08d}")
    for leftover in folder.glob("step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)


def _signed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with a hash of its own content, so that a flipped bit in it is found like one in a file."""
    plain = json.loads(json.dumps(manifest))
    return {**plain, "sha256": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def _fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _require_finite(tensors: Tensors) -> None:
    for part, named in tensors.items():
        for name, tensor in named.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise BessemerError(f"checkpoint: {part} tensor {name} holds a value that is not finite; not saved")


def _require_finite_file(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (the handle is no dictionary)
            tensor = file.get_tensor(name)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise BessemerError(f"{path}: tensor {name} holds a value that is not finite")


def _require_space(folder: Path, needed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < SPACE_FACTOR * needed:
        raise BessemerError(
            f"checkpoint: {folder} has {free / 1e6:.0f} MB free, but {SPACE_FACTOR * needed / 1e6:.0f} MB are needed; free "
            "some space"
        )
