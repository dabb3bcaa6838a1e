"""Trace a training step to its documents and their positions in the raw files, and back.

Steps and sequences are computed. Documents are looked up in the indexes of the shards, and in the corpus by the
statistics of its row groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bessemer.common.console import warn
from bessemer.common.errors import BessemerError, InputError
from bessemer.recipe import ResolvedRecipe, load_resolved
from bessemer.recipe.batches import Range
from bessemer.run.directory import RunDirectory
from bessemer.storage.path import published_folder
from bessemer.tokens.degenerate_text import DegenerateTextFilter
from bessemer.tokens.loader import Batch, open_loader
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import SPLITS, Shard

SHOWN = ("source", "path", "place", "url", "language", "label", "reason", "detail")  # columns of documents and rejects
EXCERPT_CHARACTERS = 300
NAMED = 5  # number of identities that an error for an ambiguous name lists
IDENTITY = re.compile("[0-9a-fA-F]{32}")


class StepBatch(NamedTuple):
    """The global batch of a step.

    Attributes:
        inputs: Token ids that the model reads, (sequences, sequence_length).
        targets: Token ids to predict, -1 for none; for a classifier, classes, (sequences, 1).
        sources: Name of the source of each sequence.
        documents: For each sequence, the identities of its documents.
        offsets: For each sequence, the positions at which its documents begin.
    """

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    sources: list[str]
    documents: list[list[str]]
    offsets: list[list[int]]


def step_batch(
    run: Path, step: int, omitted: Sequence[Range] = (), transforms: tuple[Callable[[Batch], Batch], ...] = ()
) -> StepBatch:
    """Return the global batch of a step of a run, without a device.

    Args:
        run: The run directory.
        step: The step, counted from 1.
        omitted: Ranges of samples that the run skipped.
        transforms: Functions that the objective applies to a batch, such as masking tokens for an encoder.

    Raises:
        InputError: When the step is not in the run, or the run or its tokens are missing.
    """
    directory = RunDirectory(run)
    recipe, store = load_resolved(directory.recipe), TokenStore.open(directory.tokens)
    transforms = ((DegenerateTextFilter.for_store(recipe, store).apply,) if recipe.tokens.gate else ()) + transforms
    loader, span = open_loader(recipe, store, transforms=transforms), _samples_of_step(recipe, step, omitted)
    batch, rows = loader.batch(*span), loader.documents(*span)
    sources, documents, offsets = ([row[key] for row in rows] for key in ("source", "documents", "offsets"))
    return StepBatch(batch.inputs, batch.targets, sources, documents, offsets)


def _samples_of_step(recipe: ResolvedRecipe, step: int, omitted: Sequence[Range]) -> tuple[int, int]:
    """Return the position of a step's first sample in the run's order, and its number of samples. Steps count from 1."""
    batches, steps = recipe.batches.without(omitted), recipe.train.steps
    if not 1 <= step <= steps:
        raise InputError(f"--step: the run has no step {step}; choose 1 to {steps}")
    return batches.first(step - 1), batches.sequences(step - 1)


def step_documents(
    recipe: ResolvedRecipe, store: TokenStore, corpus: Path, step: int, text: bool = False,
    omitted: Sequence[Range] = (),
) -> list[dict[str, Any]]:  # fmt: skip
    """List the documents in the batch of a step.

    Args:
        recipe: The resolved recipe of the run.
        store: The tokens.
        corpus: The corpus folder of the run.
        step: The step, counted from 1.
        text: Include the beginning of each document.
        omitted: Ranges of samples that the run skipped.

    Returns:
        A dictionary per document: `sample` (position in the run's order), `source`, `document` (its identity), `path`
            of the raw file, `place` in it, and `text` if requested.
    """
    rows = open_loader(recipe, store).documents(*_samples_of_step(recipe, step, omitted))
    known = describe_documents(corpus, [name for row in rows for name in row["documents"]], text)
    empty = dict.fromkeys(("path", "place", "text") if text else ("path", "place"), "")
    places = {name: empty | {key: facts[key] for key in empty if key in facts} for name, facts in known.items()}
    return [
        {"sample": row["sample"], "source": row["source"], "document": name, **places.get(name, empty)}
        for row in rows
        for name in row["documents"]
    ]


def document_steps(
    recipe: ResolvedRecipe, store: TokenStore, corpus: Path, identity: str, omitted: Sequence[Range] = ()
) -> list[dict[str, Any]]:
    """List the steps whose batch contained a document.

    Args:
        recipe: The resolved recipe of the run.
        store: The tokens.
        corpus: The corpus folder of the run.
        identity: The document's identity.
        omitted: Ranges of samples that the run skipped.

    Returns:
        A dictionary per sample with the document: `step` (from 1), `sample` (position in the run's order), `source`,
            `path` of the raw file and `place` in it.

    Raises:
        InputError: When no training shard contains the document.
    """
    stored = _in_shards(store, identity)
    if stored is None or stored[1] != "train":
        raise InputError(f"--document: {identity} is not in the training shards of this run; choose another")
    loader, (name, _, shard, number) = open_loader(recipe, store), stored
    split, source = store.split(name, "train"), store.sources.index(name)
    first = int(split.starts[[other.path for other in split.shards].index(shard.path)])
    samples = loader.sources[source].samples_in(*(first + int(edge) for edge in shard.offsets[number : number + 2]))
    batches, steps = recipe.batches.without(omitted), recipe.train.steps
    facts = describe_documents(corpus, [identity]).get(identity, {})
    origin = {key: facts.get(key, "") for key in ("path", "place")}
    return [
        {"step": reader + 1, "sample": sample, "source": name, **origin}
        for sample in loader.mixture.slots_of(source, samples, batches.after(steps)).tolist()
        if (reader := batches.reader_of(sample)) is not None
    ]


def find_document(store: TokenStore | None, corpus: Path, identity: str, text: bool = False) -> dict[str, Any]:
    """Describe a document: its position in the raw file and in the shards, and its columns of the corpus.

    The result has `document` (its identity) and, as far as known, `source`, `path` of the raw file, `place` in it, `reason`
    if it was rejected, and `split`, `shard`, `first_token` (position in the shard) and `tokens` if it was encoded.

    Args:
        store: The tokens; None: look in the corpus alone.
        corpus: The corpus folder of the run.
        identity: The document's identity, URL or path.
        text: Include the beginning of the document.

    Raises:
        InputError: When neither the corpus nor the shards contain the document, or several match.
    """
    identity = _named(corpus, identity)
    stored = None if store is None else _in_shards(store, identity)
    facts: dict[str, Any] = {"document": identity, **describe_documents(corpus, [identity], text).get(identity, {})}
    if stored is not None:
        name, split, shard, number = stored
        start, end = int(shard.offsets[number]), int(shard.offsets[number + 1])
        facts |= {"source": name, "split": split, "shard": shard.path.name, "first_token": start, "tokens": end - start}
    if len(facts) == 1:
        raise InputError(f"--document: {identity} is not in the corpus or shards of this run; choose another")
    return facts


def _named(corpus: Path, name: str) -> str:
    """Return the identity of the document whose identity, URL or path is `name`; `name` itself if there is none.

    Raises InputError if several match.
    """
    if IDENTITY.fullmatch(name):
        return name.lower()
    folder, names = published_folder(corpus), list[str]()
    with suppress(ImportError):  # only the training half is installed
        from bessemer.corpus.publish import identities_of

        names = identities_of(folder, name) if (folder / "documents").exists() else []
    if len(names) > 1:
        raise InputError(f"--document: {name!r} matches {len(names)} documents; choose one: {', '.join(names[:NAMED])}")
    return names[0] if names else name


def _in_shards(store: TokenStore, identity: str) -> tuple[str, str, Shard, int] | None:
    """Return the source, split and shard of a document, and its index in the shard; None if no shard contains it."""
    if not IDENTITY.fullmatch(identity):
        raise InputError(f"--document: {identity!r} is not in this corpus; give an identity, a URL or a path")
    wanted = np.frombuffer(bytes.fromhex(identity), dtype=np.uint8)
    for name, split in product(store.sources, SPLITS):
        for shard in store.split(name, split).shards:
            rows = np.flatnonzero((shard.identities == wanted).all(axis=1))
            if len(rows):
                return name, split, shard, int(rows[0])
    return None


def describe_place(document: dict[str, Any]) -> str:
    """Return the raw file of a document (`path`) and its position there (`place`) as text; empty if both are unknown."""
    path, position = str(document.get("path", "")), str(document.get("place", ""))
    unit = "byte " if position.isdecimal() and ".json" in path else ""
    return f"{path} {unit}{position}".strip()


def describe_documents(corpus: Path, identities: list[str], text: bool = False) -> dict[str, dict[str, Any]]:
    """Return for each identity a dict of the document's `path`, `place` (position in that file) and other corpus columns.

    The result is empty if the corpus no longer exists, or, with a warning, if its object store does not respond.

    Args:
        corpus: The corpus folder of the run.
        identities: Identities of the documents.
        text: Include the beginning of each document.
    """
    folder = published_folder(corpus)
    try:
        if not (folder / "documents").exists():
            return {}
        from bessemer.corpus.publish import look_up

        known = look_up(folder, identities, (*SHOWN, *(("text", "excerpt") if text else ())))
    except ImportError:  # only the training half is installed
        return {}
    except BessemerError as error:
        if isinstance(folder, Path):
            raise
        warn(f"{error}; continuing without facts about documents")
        return {}
    for row in known.values():
        row.pop("identity")
        if text:
            row["text"] = (row.pop("excerpt", "") or row["text"])[:EXCERPT_CHARACTERS]
    return known
