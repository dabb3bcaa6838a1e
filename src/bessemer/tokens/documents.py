"""What the tokens stage reads: the clean documents in their order, and which of them a tokenizer is trained on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.recipe import Recipe
from bessemer.tokens.order import key_of
from bessemer.tokens.phases import average_shares

BATCH_DOCUMENTS = 256
SAMPLE_CHARACTERS = 1_000_000  # of one document that a tokenizer is trained on: one giant must not fill the memory


@dataclass(frozen=True)
class Document:
    """What the tokens stage needs of a document. language: of its metadata; "" where nothing says it."""

    identity: str
    source: str
    text: str
    label: str = ""
    language: str = ""


def is_held_out(identity: str, seed: int, share: float) -> bool:
    """Whether a document is kept out of training: decided by its identity alone, so that it stays where it is when
    other documents come or go."""
    return key_of("held-out", seed, identity) < share * 2.0**64


def documents(corpus: Path, skip: int = 0) -> Iterator[Document]:
    """Stream the clean documents in their order, by source, then identity, from number `skip` on."""
    import pyarrow.parquet as parquet

    columns = ["identity", "source", "text", "label", "metadata"]
    for path in sorted(corpus.glob("*.parquet")):
        with parquet.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if skip >= rows:
                    skip -= rows
                    continue
                for batch in file.iter_batches(batch_size=BATCH_DOCUMENTS, row_groups=[group], columns=columns):
                    part = batch.slice(skip) if skip else batch
                    skip = max(skip - batch.num_rows, 0)
                    for row in part.to_pylist():
                        yield Document(
                            row["identity"], row["source"], row["text"], row["label"], _language(row["metadata"])
                        )


def spread(corpus: Path, groups: int, each: int) -> list[Document]:
    """A few documents from all over the corpus: the first `each` of so many row groups, evenly spaced."""
    import pyarrow.parquet as parquet

    first, starts = 0, []
    for path in sorted(corpus.glob("*.parquet")):
        metadata = parquet.read_metadata(path)
        for group in range(metadata.num_row_groups):
            starts.append(first)
            first += metadata.row_group(group).num_rows
    step = max(len(starts) // groups, 1)
    found: dict[str, Document] = {}
    for start in starts[::step]:
        found.update((document.identity, document) for document in itertools.islice(documents(corpus, start), each))
    return list(found.values())


def count(corpus: Path) -> int:
    """How many documents there are."""
    import pyarrow.parquet as parquet

    return sum(parquet.read_metadata(path).num_rows for path in corpus.glob("*.parquet"))


def labels(corpus: Path) -> list[str]:
    """The classes of all documents, sorted; none when no document has one."""
    import pyarrow.compute as compute

    found: set[str] = set()
    for batch in _batches(corpus, ["label"]):
        found.update(compute.unique(batch.column("label")).to_pylist())
    return sorted(found - {""})


def bytes_of_sources(corpus: Path) -> dict[str, int]:
    """Bytes of text by source."""
    import pyarrow.compute as compute

    found: dict[str, int] = {}
    for batch in _batches(corpus, ["source", "text"]):
        sizes = compute.binary_length(batch.column("text"))
        for source in compute.unique(batch.column("source")).to_pylist():
            here = compute.filter(sizes, compute.equal(batch.column("source"), source))
            found[source] = found.get(source, 0) + (compute.sum(here).as_py() or 0)
    return found


def training_sample(recipe: Recipe, corpus: Path) -> Iterator[str]:
    """Text to train a tokenizer on: documents chosen by the hash of their identity until the budget fits; no held-out one."""
    shares = sample_shares(recipe, bytes_of_sources(corpus))
    seed, held_out = recipe.tokens.seed, recipe.tokens.held_out
    for document in documents(corpus):
        if is_held_out(document.identity, seed, held_out):
            continue
        if key_of("bpe", seed, document.identity) < shares[document.source] * 2.0**64:
            yield document.text[:SAMPLE_CHARACTERS]


def sample_shares(recipe: Recipe, sizes: dict[str, int]) -> dict[str, float]:
    """The share of each source's documents in the sample. sizes: bytes of text by source.

    By the mixture, each source gives bytes in proportion to its share of the training, over all phases; what a small source
    cannot give, the others do.
    """
    budget, tokens = recipe.tokenizer.sample_bytes, recipe.tokens
    weighted = all(source.weight is not None for source in recipe.corpus.sources)
    if recipe.tokenizer.sample == "corpus" or not (weighted or tokens.schedule or tokens.temperature is not None):
        share = min(budget / max(sum(sizes.values()), 1), 1.0)
        return dict.fromkeys(sizes, share)
    weights = average_shares(recipe, sizes)
    shares: dict[str, float] = {}
    left = {name: weights[name] for name, size in sizes.items() if size and weights[name]}
    while left:
        rate = max(budget - sum(shares[name] * sizes[name] for name in shares), 0.0) / sum(left.values())
        spent = [name for name, weight in left.items() if weight * rate >= sizes[name]]
        if not spent:
            shares |= {name: weight * rate / sizes[name] for name, weight in left.items()}
            break
        for name in spent:
            shares[name] = 1.0
            del left[name]
    return {name: shares.get(name, 0.0) for name in sizes}


def _batches(corpus: Path, columns: list[str]) -> Iterator[Any]:
    import pyarrow.parquet as parquet

    for path in sorted(corpus.glob("*.parquet")):
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=BATCH_DOCUMENTS, columns=columns)


def _language(metadata: str | None) -> str:
    if not metadata or '"language"' not in metadata:
        return ""
    try:
        found = json.loads(metadata).get("language")
    except (ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else ""
