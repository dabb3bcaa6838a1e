"""Models of the Hugging Face hub by name (ORG/NAME or ORG/NAME@REVISION), pinned to a commit and never as pickles.

Files are downloaded once, into the hub's own cache. Credentials are those of the hub's tools (HF_TOKEN, `hf auth login`).
Without a network, files already in the cache are used.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from bessemer.common.errors import InputError, require_import

SECONDS = 10.0  # timeout of requests to the hub
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[A-Za-z0-9][\w./-]*)?")
_SETTINGS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_WEIGHTS = "model*.safetensors"


def pinned(text: str, folder: Path) -> str:
    """Return ORG/NAME@COMMIT for a hub model `text`, ORG/NAME or ORG/NAME@REVISION, that was downloaded to `folder`."""
    return f"{text.partition('@')[0]}@{folder.name}"


def foreign_file(folder: Path, name: str) -> Path:
    """Return the path of the file `name` in an untrusted folder, such as a downloaded model; the file may be missing.

    Raises InputError if it is not a regular file, or is a link out of the folder, except a link from snapshots/ to blobs/ in
    the hub's cache.
    """
    path, root = folder / name, folder.resolve()
    target, blobs = path.resolve(), root.parent.parent / "blobs"
    of_cache = root.parent.name == "snapshots" and target.parent == blobs == blobs.resolve()
    if not (of_cache or target.is_relative_to(root)):
        raise InputError(f"{path}: links outside its folder, to {target}; if you trust that file, copy it here")
    if target.exists() and not target.is_file():
        raise InputError(f"{path}: not a regular file; replace it by one")
    return path


def link_files(folder: Path, target: Path, but: str = "") -> None:
    """Link the files of an untrusted folder into `target`, except the file named `but`; `foreign_file` checks each."""
    for path in folder.iterdir():
        if path.is_file() and path.name != but:
            (target / path.name).symlink_to(foreign_file(folder, path.name).resolve())


@contextmanager
def offline() -> Iterator[None]:
    """Keep huggingface_hub offline within the block, and hide torchao from transformers.

    The library reads the variable HF_HUB_OFFLINE only when it is imported, and torchao takes a second to load.
    """
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    hides_torchao = sys.modules.setdefault("torchao", None) is None  # type: ignore[arg-type]
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        if hides_torchao:
            sys.modules.pop("torchao", None)


def is_name(text: str, folder: Path = Path()) -> bool:
    """Return True if the text after `hf:` has the form of a hub name and is not a folder in `folder`."""
    return _NAME.fullmatch(text) is not None and not (folder / text).exists()


@cache
def fetch_model(text: str, weights: bool = True) -> Path:
    """Download the model that ORG/NAME or ORG/NAME@REVISION names, and return its folder, whose name is the commit.

    Without `weights`, only its settings and tokenizer are downloaded. Raises InputError, with advice, if the hub has no such
    model, denies access, or cannot be reached.
    """
    name, _, revision = text.partition("@")
    with require_import(f"hf:{text}: huggingface_hub is not installed; pip install huggingface_hub"):
        from huggingface_hub import HfApi, errors, snapshot_download
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    patterns = [*_SETTINGS, _WEIGHTS] if weights else _SETTINGS
    reachable = True
    try:
        try:  # snapshot_download would wait for a server that does not respond
            HfApi().model_info(name, revision=revision or None, timeout=SECONDS)
        except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError):
            raise
        except Exception:  # no network, a proxy, or a server that is down; cached files may be enough
            reachable = False
        folder = Path(
            snapshot_download(
                name, revision=revision or None, allow_patterns=patterns, ignore_patterns=["*/*"], etag_timeout=SECONDS,
                local_files_only=not reachable,
            )
        )  # fmt: skip
    except Exception as error:
        reasons = {  # subclasses come first; the last means that the hub was not reached and the cache lacks files
            errors.GatedRepoError: "a gated model; accept the terms on its page, then set HF_TOKEN",
            errors.RevisionNotFoundError: f"the model has no revision {revision!r}; give a branch, a tag or a commit",
            errors.RepositoryNotFoundError: "no such folder, and the hub has no model of this name; a private one needs HF_TOKEN",
            errors.LocalEntryNotFoundError: "no such folder, and the hub cannot be asked for a model of this name (no network, "
            "or HF_HUB_OFFLINE is set); give a folder, or run it once where there is a network",
        }
        reason = " ".join(str(error).split()) or type(error).__name__
        failed = f"the download failed: {reason[:300]}; the same command resumes it"
        why = next((why for kind, why in reasons.items() if isinstance(error, kind)), failed)
    else:
        if not weights or any(folder.glob(_WEIGHTS)):
            return folder
        why = "has no model.safetensors; pickles, which could run code, are not downloaded"
    raise InputError(f"hf:{text}: {why}")


def local_folder(source: str, weights: bool = True) -> Path:
    """Return the folder that `hf:FOLDER` or `hf:ORG/NAME` names; a hub model is downloaded."""
    text = source.removeprefix("hf:")
    return fetch_model(text, weights) if is_name(text) else Path(text)
