"""Read the clean documents of a corpus in order, choose the held-out ones, and sample text for the tokenizer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from bessemer.common.hashing import key_of
from bessemer.corpus.conversation import contents
from bessemer.corpus.readers.parts import in_groups
from bessemer.recipe import Recipe
from bessemer.recipe.tokens import Tokens
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json, verify_stage
from bessemer.storage.filesystem import AnyPath, StorePath
from bessemer.storage.path import each, open_parquet, stage_files
from bessemer.tokens.phases import RecipePhase, average_shares, within_caps

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_DOCUMENTS = 256
DOCUMENT_COLUMNS = ["identity", "source", "text", "label"]
LINE_REACH, WORD_REACH = 500, 100  # characters after a cut to search for the end of a line or a word
COUNTED_DOCUMENTS = 1_000_000  # above it, a share of the documents is assumed to hold the same share of the text
SAMPLE_CHARACTERS = 1_000_000  # taken from one document for the tokenizer's sample at most, to bound memory


@dataclass(frozen=True)
class StoredDocument:
    """A document of a published corpus, or the training or held-out part of one."""

    identity: str
    source: str
    text: str = ""
    label: str = ""
    is_held_out: bool = False


def is_held_out(identity: str, seed: int, share: float) -> bool:
    """Return True if a document is in the share that is held out, by the hash of its identity and the seed."""
    return _draw("held-out", seed, identity, share)


def _draw(purpose: str, seed: int, identity: str, share: float) -> bool:
    return key_of(purpose, seed, identity) < share * 2.0**64


def split_document(document: StoredDocument, tokens: Tokens) -> list[StoredDocument]:
    """Divide a document into its training and held-out parts, leaving out empty ones.

    With `held_out_from = "documents"` the result is the whole document. With "passages" it is the text before the
    held-out passage, the passage, and the text after it. The passage has about `held_out` of the characters, at a
    position given by the hash of the identity, and begins and ends after a line or word if one ends nearby.
    """
    text, share = document.text, tokens.held_out
    if tokens.held_out_from == "documents":
        return [replace(document, is_held_out=is_held_out(document.identity, tokens.seed, share))]
    length = max(round(share * len(text)), 1)
    room = max(len(text) - length, 0)
    start = _next_cut(text, room * (key_of("passage", tokens.seed, document.identity) >> 11) // (1 << 53))
    end = _next_cut(text, start + length)
    parts = ((text[:start], False), (text[start:end], True), (text[end:], False))
    return [replace(document, text=part, is_held_out=held_out) for part, held_out in parts if part]


def _next_cut(text: str, start: int) -> int:
    """Return the position, at or after `start`, to cut a text.

    It is after the next line end within LINE_REACH characters, else after the next space within WORD_REACH, else `start`.
    """
    for border, reach in (("\n", LINE_REACH), (" ", WORD_REACH)):
        if 0 < start < len(text) and (cut := text.find(border, start, start + reach)) >= 0:
            return cut + 1
    return min(start, len(text))


def held_out_share(
    corpus: AnyPath, seed: int, wanted_bytes: int, num_bytes: int, num_documents: int
) -> tuple[float, int, int]:
    """Return the smallest share of documents to hold out that has at least `wanted_bytes` of text.

    Also returns the number of these documents and their bytes. `num_bytes` and `num_documents` are the totals of the corpus.
    With more than COUNTED_DOCUMENTS documents the three values are estimates: the share is `wanted_bytes / num_bytes`, at
    most 0.5.
    """
    import pyarrow.compute as compute

    if num_documents > COUNTED_DOCUMENTS:
        share = min(wanted_bytes / max(num_bytes, 1), 0.5)
        return share, round(share * num_documents), wanted_bytes
    hashed: list[tuple[int, int]] = []
    for batch in read_rows(part_files(corpus), ["identity", "text"]):
        keys = [key_of("held-out", seed, identity) for identity in batch.column("identity").to_pylist()]
        hashed += zip(keys, compute.binary_length(batch.column("text")).to_pylist(), strict=True)
    held = 0
    for number, (key, length) in enumerate(sorted(hashed), start=1):
        held += length
        if held >= wanted_bytes:
            return math.nextafter((key + 1) / 2.0**64, 1.0), number, held
    return 1.0, len(hashed), held


def part_files(corpus: AnyPath) -> list[AnyPath]:
    """Return the Parquet files of the folder `corpus` of documents in order; it may be in an object store."""
    return [path for path in stage_files(corpus.parent, corpus.name) if path.suffix == ".parquet"]


def corpus_statistics(recipe: Recipe, run: RunDirectory) -> dict[str, Any]:
    """Verify the files of a run's corpus and return the content of its statistics.json.

    Raises DamagedFile for a file that has changed since it was written. With an engine other than "local", files of documents
    are not verified here, because the checksums of their Parquet pages are verified wherever they are read.
    """
    unread = ("rejected/", *(() if recipe.corpus.engine == "local" else ("documents/",)))
    verify_stage(run.corpus, run.command("corpus"), lambda name: not name.startswith(unread))
    return dict(read_json(run.corpus / "statistics.json"))


def _open(path: AnyPath) -> Any:
    """Open a Parquet file of documents; errors name the command that builds the corpus again."""
    stage = path.parent.parent
    # In a store the corpus stage checks only the receipt, so it builds damaged files again only after the folder is removed.
    if isinstance(stage, StorePath):
        return open_parquet(path, f"bessemer corpus RECIPE, after removing {stage}")
    return open_parquet(path, RunDirectory(stage.parent).command("corpus"))


def _metadata(path: AnyPath) -> Any:
    with _open(path) as file:
        return file.metadata


def row_groups(corpus: AnyPath, num_bytes: int) -> Iterator[tuple[AnyPath, int, int, int]]:
    """Yield (file, first row group, row group after the last, bytes of text) for batches of consecutive row groups.

    A batch is within one file and has at most `num_bytes` bytes, or is a single larger row group.
    """
    paths = part_files(corpus)
    for path, metadata in zip(paths, each(_metadata, paths), strict=True):
        sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
        for some in in_groups(range(len(sizes)), num_bytes, sizes.__getitem__):
            yield path, some[0], some[-1] + 1, sum(sizes[some[0] : some[-1] + 1])


def read_documents(paths: Iterable[AnyPath], groups: Sequence[int] | None = None) -> Iterator[StoredDocument]:
    """Yield the documents of Parquet files in order, from the row groups numbered `groups` of each file (default: all)."""
    for batch in read_rows(paths, DOCUMENT_COLUMNS, groups):
        for row in batch.to_pylist():
            yield StoredDocument(row["identity"], row["source"], row["text"], row["label"])


def read_rows(
    paths: Iterable[AnyPath], columns: list[str], groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield batches of rows of Parquet files in order, from the row groups numbered `groups` of each file (default: all)."""
    for path in paths:
        with _open(path) as file:
            yield from file.iter_batches(batch_size=BATCH_DOCUMENTS, row_groups=groups, columns=columns)


def sample_documents(corpus: AnyPath, num_groups: int, num_each: int) -> list[StoredDocument]:
    """Return a sample of documents from across the corpus.

    It has the first `num_each` documents of the first row group of each source, and of each of about `num_groups` evenly
    spaced row groups.
    """
    places: list[tuple[AnyPath, int]] = []
    first: dict[Any, int] = {}
    paths = part_files(corpus)
    for path, metadata in zip(paths, each(_metadata, paths), strict=True):
        column = metadata.schema.names.index("source")
        for group in range(metadata.num_row_groups):
            first.setdefault(metadata.row_group(group).column(column).statistics.min, len(places))
            places.append((path, group))
    chosen = {*first.values(), *range(0, len(places), max(len(places) // num_groups, 1))}
    groups = (read_documents([path], [group]) for path, group in (places[at] for at in sorted(chosen)))
    return [document for group in groups for document in itertools.islice(group, num_each)]


def list_values(corpus: AnyPath, column: str) -> list[str]:
    """Return the distinct non-empty values of a column over all documents, sorted."""
    import pyarrow.compute as compute

    values: set[str] = set()
    for batch in read_rows(part_files(corpus), [column]):
        values.update(compute.unique(batch.column(column)).to_pylist())
    return sorted(values - {""})


def sample_texts(
    tokens: Tokens, chats: Collection[str], candidates: Iterable[StoredDocument], shares: Mapping[str, float]
) -> Iterator[str]:
    """Yield the texts that a tokenizer is trained on, none of them held out.

    Args:
        tokens: The recipe's [tokens].
        chats: Names of the sources whose documents are conversations.
        candidates: Documents to sample from.
        shares: Share of each source's text to take, from 0 to 1.
    """
    for document in candidates:
        if document.source in chats:
            document = replace(document, text=contents(document.text))
        share = shares[document.source]
        for part in split_document(document, tokens):
            if tokens.held_out_from == "passages":
                length = math.ceil(share * len(part.text))
            else:
                length = len(part.text) * _draw("bpe", tokens.seed, part.identity, share)
            if length and not part.is_held_out:
                yield part.text[: min(SAMPLE_CHARACTERS, length)]


def sample_shares(recipe: Recipe, sizes: dict[str, int]) -> dict[str, float]:
    """Return which share of each source's documents, from 0 to 1, is in the tokenizer's training sample.

    With `tokenizer.sample = "mixture"`, a source's bytes in the sample are in proportion to its share of the training tokens
    over the run, and if a source has too little text, the others make up the difference. Otherwise all shares are equal.

    Args:
        recipe: The recipe.
        sizes: Bytes of text by source.
    """
    budget, tokens = recipe.tokenizer.sample_bytes, recipe.tokens
    weighted = all(source.weight is not None for source in recipe.corpus.sources)
    if recipe.tokenizer.sample == "corpus" or not (weighted or tokens.schedule or tokens.temperature is not None):
        share = min(budget / max(sum(sizes.values()), 1), 1.0)
        return dict.fromkeys(sizes, share)
    weights = average_shares(recipe, sizes)
    shares, num_bytes = tuple(map(Fraction, weights.values())), sum(sizes[name] for name in sizes if weights[name])
    training = RecipePhase(0, min(budget, num_bytes), shares, shares)
    [sampled] = within_caps([training], tuple(sizes.values()), tuple(sizes))
    return {name: float(amount / max(sizes[name], 1)) for name, amount in zip(sizes, sampled, strict=True)}
