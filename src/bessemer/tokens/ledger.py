"""From a training step or a token to its documents and their places in the raw files, and back.

Steps and sequences are arithmetic, since the order of the data is arithmetic; documents are found in the shards' indexes
and in the corpus's index by binary search, so that an answer takes milliseconds however large the corpus is.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.errors import InputError
from bessemer.recipe import Batches, Recipe
from bessemer.tokens.labelled import LabelledLoader
from bessemer.tokens.loader import Reader
from bessemer.tokens.packed import PackedLoader, sequence_loader
from bessemer.tokens.shards import Shard, TokenStore, token_dtype

SHOWN = ("source", "path", "place", "language", "label", "reason", "detail")
"""Columns of a document or reject that a trace gives."""

EXCERPT_CHARACTERS = 300


def step_documents(
    recipe: Recipe, store: TokenStore, corpus: Path, step: int, text: bool = False
) -> list[dict[str, Any]]:
    """The documents in the batch of step `step` (1-based): sample, source, document, path, place; text: how it begins."""
    batches, steps = Batches.of(recipe), recipe.train.steps or 0
    if not 1 <= step <= steps:
        raise InputError(f"--step: {step} is not a step of this run; it has steps 1 to {steps}")
    rows = reader(recipe, store).documents(batches.before(step - 1), batches.sequences(step - 1))
    names = [name for row in rows for name in row["documents"]]  # type: ignore[attr-defined]
    known = _known(corpus, names, text)
    return [
        {
            "sample": row["sample"],
            "source": row["source"],
            "document": name,
            **{key: known.get(name, {}).get(key, "") for key in ("path", "place")},
            **({"text": known.get(name, {}).get("text", "")} if text else {}),
        }
        for row in rows
        for name in row["documents"]  # type: ignore[attr-defined]
    ]


def document_steps(recipe: Recipe, store: TokenStore, corpus: Path, identity: str) -> list[dict[str, Any]]:
    """The steps whose batch held a document: step, sample, source, path, place."""
    loader = reader(recipe, store)
    source, sequences = _sequences_of(recipe, store, loader, identity)
    batches, steps = Batches.of(recipe), recipe.train.steps or 0
    number = loader.mixture.names.index(source)
    known = _known(corpus, [identity]).get(identity, {})
    place = {key: known.get(key, "") for key in ("path", "place")}
    return [
        {"step": batches.step_of(sample) + 1, "sample": sample, "source": source, **place}
        for sample in loader.mixture.slots_of(number, sequences, batches.before(steps)).tolist()
    ]


def document(store: TokenStore | None, corpus: Path, identity: str, text: bool = False) -> dict[str, Any]:
    """What is known of a document: its place in the raw file, its row in the corpus, its tokens' place in the shards.

    A rejected one comes with its reason. Raises InputError for an identity that neither corpus nor shards have.
    """
    wanted = _identity(identity)
    known = _known(corpus, [identity], text).get(identity, {})
    found: dict[str, Any] = {"document": identity, **known}
    for name, split, shard, number in _shards(store, wanted):
        start, end = int(shard.offsets[number]), int(shard.offsets[number + 1])
        found |= {"source": name, "split": split, "shard": shard.path.name, "first_token": start, "tokens": end - start}
        break
    if len(found) == 1:
        raise InputError(f"--document: {identity} is neither in this run's corpus nor in its shards")
    return found


def token(store: TokenStore, corpus: Path, place: str, text: bool = False) -> dict[str, Any]:
    """The document of one token: its place in the raw file, and which of the document's tokens it is (from 0).

    place: SHARD:OFFSET, as in prose-train-00000:12345; the offset counts tokens from 0. Raises InputError for a shard or
    an offset that is not there.
    """
    name, _, offset = place.rpartition(":")
    name = name.removesuffix(".bin")
    shards = sorted(file.removesuffix(".bin") for file in store.manifest["files"] if file.endswith(".bin"))
    if name not in shards or not offset.isdecimal():
        shown = ", ".join(shards[:4]) + (f" and {len(shards) - 4} more" if len(shards) > 4 else "")
        raise InputError(f"--token: {place!r} is not SHARD:OFFSET; the shards are {shown}")
    shard = Shard(store.folder / f"{name}.bin", token_dtype(store.vocabulary))
    if int(offset) >= len(shard.tokens):
        raise InputError(f"--token: {name} has the tokens 0 to {len(shard.tokens) - 1}; {offset} is not one of them")
    number = int(np.searchsorted(shard.offsets, int(offset), side="right")) - 1
    identity = shard.identities[number].tobytes().hex()
    first = int(shard.offsets[number])
    return {
        "token": int(shard.tokens[int(offset)]),
        "position": int(offset) - first,
        **document(store, corpus, identity, text),
        "shard": shard.path.name,
        "first_token": first,
    }


def reader(recipe: Recipe, store: TokenStore) -> Reader:
    """What gives a run's samples: sequences of text, concatenated or packed, or whole documents for a classifier."""
    return LabelledLoader.of(recipe, store) if recipe.train.objective == "classify" else sequence_loader(recipe, store)


def _sequences_of(
    recipe: Recipe, store: TokenStore, loader: Reader, identity: str
) -> tuple[str, npt.NDArray[np.int64]]:
    """The source and the numbers of the training sequences that hold a document."""
    length = recipe.tokens.sequence_length
    for name, split, shard, number in _shards(store, _identity(identity)):
        if split != "train":
            continue
        whole = store.split(name, "train")
        before = next(place for place, other in enumerate(whole.shards) if other.path == shard.path)
        if recipe.train.objective == "classify":
            return name, np.array([sum(len(other.identities) for other in whole.shards[:before]) + number])
        start = int(whole.starts[before]) + int(shard.offsets[number])
        end = int(whole.starts[before]) + int(shard.offsets[number + 1]) - 1
        if isinstance(loader, PackedLoader):
            return name, loader.splits[list(store.sources).index(name)].pack.holding(start, end + 1)
        # A sequence also predicts the first token of the next one, so a document's first token may be the target of the
        # sequence before.
        last = min(end // length, whole.num_sequences(length) - 1)
        return name, np.arange(max(start - 1, 0) // length, last + 1)
    raise InputError(
        f"--document: {identity} is in no training shard of this run (held out, rejected, or another run's)"
    )


def _identity(identity: str) -> bytes:
    try:
        wanted = bytes.fromhex(identity)
    except ValueError:
        wanted = b""
    if len(wanted) != 16:
        raise InputError(f"--document: {identity!r} is not an identity (32 hexadecimal digits)")
    return wanted


def _shards(store: TokenStore | None, wanted: bytes) -> list[tuple[str, str, Shard, int]]:
    """Where a document's tokens stand: source, split, shard, and its number in the shard. At most one place."""
    for name in store.sources if store is not None else ():
        for split in ("train", "heldout"):
            for shard in _likely(store.split(name, split).shards, wanted) if store is not None else ():
                number = _row(shard.identities, wanted)
                if number is not None:
                    return [(name, split, shard, number)]
    return []


def _likely(shards: list[Shard], wanted: bytes) -> list[Shard]:
    """The shards that an identity can lie in: one where shards follow each other in the order of the identities, as a
    build writes them; else all."""
    low, high = 0, len(shards)
    while low < high:
        middle = (low + high) // 2
        names = shards[middle].identities
        if not len(names):
            return shards
        if names[0].tobytes() <= wanted:
            low = middle + 1
        else:
            high = middle
    probes = np.unique(np.linspace(0, max(len(shards) - 2, 0), 16).astype(np.int64)).tolist() if shards[1:] else []
    borders = [(shards[number].identities, shards[number + 1].identities) for number in probes]
    follow = all(len(one) and len(two) and one[-1].tobytes() < two[0].tobytes() for one, two in borders)
    return shards[max(low - 1, 0) : low] if follow else shards


def _row(identities: npt.NDArray[np.uint8], wanted: bytes) -> int | None:
    """The row of an identity: by binary search where the rows are in order, as a build writes them; else by a look at
    each, as in shards that another tool wrote."""
    low, high = 0, len(identities)
    while low < high:
        middle = (low + high) // 2
        if identities[middle].tobytes() < wanted:
            low = middle + 1
        else:
            high = middle
    if low < len(identities) and identities[low].tobytes() == wanted:
        return low
    if _in_order(identities):
        return None
    found = np.nonzero((identities == np.frombuffer(wanted, dtype=np.uint8)).all(axis=1))[0]
    return int(found[0]) if len(found) else None


def _in_order(identities: npt.NDArray[np.uint8]) -> bool:
    """Whether a sample of the rows is sorted: rows in another order would not pass it by chance."""
    if not len(identities):
        return True
    rows = np.unique(np.linspace(0, len(identities) - 1, 64).astype(np.int64))
    return all(one < other for one, other in pairwise(identities[row].tobytes() for row in rows))


def _known(corpus: Path, identities: list[str], text: bool = False) -> dict[str, dict[str, Any]]:
    """What the corpus says of documents, if it is still there and can be read."""
    if not (corpus / "index").is_dir():
        return {}
    try:
        from bessemer.corpus.index import look_up

        known = look_up(corpus, identities, (*SHOWN, *(("text", "excerpt") if text else ())))
    except ImportError:  # the training half alone: identities still say what they say
        return {}
    for row in known.values():
        row.pop("identity")
        if text:
            row["text"] = (row.pop("excerpt", "") or row["text"])[:EXCERPT_CHARACTERS]
    return known
