"""From a training step to its documents and back: by arithmetic, since the order of the data is arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.errors import InputError
from bessemer.recipe import Batches, Recipe
from bessemer.tokens.labelled import LabelledLoader
from bessemer.tokens.loader import Reader
from bessemer.tokens.packed import PackedLoader, sequence_loader
from bessemer.tokens.shards import TokenStore

SLOTS_AT_A_TIME = 1 << 16


def step_documents(recipe: Recipe, store: TokenStore, corpus: Path, step: int) -> list[dict[str, Any]]:
    """The documents in the batch of step `step` (1-based): sample, source, identity, path."""
    batches, steps = Batches.of(recipe), recipe.train.steps or 0
    if not 1 <= step <= steps:
        raise InputError(f"--step: {step} is not a step of this run; it has steps 1 to {steps}")
    rows = reader(recipe, store).documents(batches.before(step - 1), batches.sequences(step - 1))
    paths = _paths(corpus, {name for row in rows for name in row["documents"]})  # type: ignore[attr-defined]
    return [
        {"sample": row["sample"], "source": row["source"], "document": name, "path": paths.get(name, "")}
        for row in rows
        for name in row["documents"]  # type: ignore[attr-defined]
    ]


def document_steps(recipe: Recipe, store: TokenStore, corpus: Path, identity: str) -> list[dict[str, Any]]:
    """The steps whose batch held a document: step, sample, source, path."""
    loader = reader(recipe, store)
    source, sequences = _sequences_of(recipe, store, loader, identity)
    batches, steps = Batches.of(recipe), recipe.train.steps or 0
    number = loader.mixture.names.index(source)
    path = _paths(corpus, {identity}).get(identity, "")
    rows: list[dict[str, Any]] = []
    samples = batches.before(steps)
    for start in range(0, samples, SLOTS_AT_A_TIME):
        draw = loader.mixture.draw(start, min(SLOTS_AT_A_TIME, samples - start))
        held = (draw.source == number) & np.isin(draw.sequence, sequences)
        for slot in np.nonzero(held)[0]:
            sample = start + int(slot)
            rows.append({"step": batches.step_of(sample) + 1, "sample": sample, "source": source, "path": path})
    return rows


def reader(recipe: Recipe, store: TokenStore) -> Reader:
    """What gives a run's samples: sequences of text, concatenated or packed, or whole documents for a classifier."""
    return LabelledLoader.of(recipe, store) if recipe.train.objective == "classify" else sequence_loader(recipe, store)


def _sequences_of(
    recipe: Recipe, store: TokenStore, loader: Reader, identity: str
) -> tuple[str, npt.NDArray[np.int64]]:
    """The source and the numbers of the training sequences that hold a document."""
    length = recipe.tokens.sequence_length
    try:
        wanted = np.frombuffer(bytes.fromhex(identity), dtype=np.uint8)
    except ValueError:
        raise InputError(f"--document: {identity!r} is not an identity (32 hexadecimal digits)") from None
    if len(wanted) != 16:
        raise InputError(f"--document: {identity!r} is not an identity (32 hexadecimal digits)")
    for number, name in enumerate(store.sources):
        split = store.split(name, "train")
        documents = 0
        for shard, base in zip(split.shards, split.starts, strict=False):
            found = np.nonzero((shard.identities == wanted).all(axis=1))[0]
            if len(found) and recipe.train.objective == "classify":
                return name, np.array([documents + int(found[0])])
            documents += len(shard.identities)
            if len(found):
                start = int(base) + int(shard.offsets[found[0]])
                end = int(base) + int(shard.offsets[found[0] + 1]) - 1
                if isinstance(loader, PackedLoader):
                    return name, loader.splits[number].holding(start, end + 1)
                # A sequence also predicts the first token of the next one, so a document's first token may
                # be the target of the sequence before.
                last = min(end // length, split.num_sequences(length) - 1)
                return name, np.arange(max(start - 1, 0) // length, last + 1)
    raise InputError(
        f"--document: {identity} is in no training shard of this run (held out, rejected, or another run's)"
    )


def _paths(corpus: Path, identities: set[str]) -> dict[str, str]:
    """Where documents came from, if the corpus is still there and can be read."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:  # the training half alone: identities still say what they say
        return {}
    paths: dict[str, str] = {}
    for file in sorted((corpus / "documents").glob("*.parquet")):
        table = parquet.read_table(file, columns=["identity", "path"])
        for name, path in zip(table["identity"].to_pylist(), table["path"].to_pylist(), strict=True):
            if name in identities:
                paths[name] = path
    return paths
