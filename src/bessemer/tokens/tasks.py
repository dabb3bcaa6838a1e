"""Tokenization as parallel tasks of `run_tasks`.

    WORK/sampled/000012/            texts.parquet: the texts in some row groups of a corpus file that the tokenizer is
                                    trained on
    WORK/tokenizer.json             the tokenizer, where it is trained
    WORK/context.json               the context of the tasks that encode
    WORK/documents/, stage.json     the files of the corpus and their receipt, where WORK is in a store
    WORK/encoded/000012/            some row groups of a corpus file: a shard of any length for each source and split
    WORK/shards/SOURCE-SPLIT/00003/ a shard as it is published: ranges of documents of the encoded shards

Between encoding and writing, the driver reads the lengths of the documents and cuts the shards as `ShardWriter` does.
So the files do not depend on how the work is divided into tasks.

WORK is in the run directory, or in `corpus.storage` where the documents are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
import numpy.typing as npt

from bessemer.corpus.readers.parts import in_groups
from bessemer.recipe import Recipe, Work
from bessemer.recipe.tokens import Tokens
from bessemer.run_tasks.run import run_tasks
from bessemer.run_tasks.task import Task, check_stop, from_plain, to_plain
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_files, each, open_parquet, write_file
from bessemer.tokens import documents
from bessemer.tokens.documents import StoredDocument, split_document
from bessemer.tokens.encode import EncodedCounts, Encoder
from bessemer.tokens.shards.shard import COUNTS, NO_LABEL, SPLITS, Shard, ShardWriter, token_dtype

CONTEXT = "context.json"
TASK_BYTES = 64 << 20  # row groups of about this size form a task
BATCH_CHARACTERS = 1 << 20  # characters of text that are encoded at a time
TEXTS = "texts.parquet"
READING = 10  # reading a text is this many times faster than encoding it
COPYING = 20  # copying and hashing a shard is this many times faster than encoding its text
GroupTask = TypeVar("GroupTask", bound="RowGroupTask")
Span = tuple[int, int, int]  # number of the task that encoded, first document in its shard, end
Splits = dict[str, dict[str, Any]]  # `ShardWriter.facts` by SOURCE/SPLIT


def engine_of(recipe: Recipe) -> Work:
    """Return the engine settings of [corpus], except that with the engine "local", `workers` is tokens.workers."""
    return recipe.corpus if recipe.corpus.engine != "local" else recipe.corpus.changed(workers=recipe.tokens.workers)


@dataclass(frozen=True)
class EncodingContext:
    """The settings that all encoding tasks share, stored in WORK/context.json, where WORK is the build's work folder.

    Attributes:
        tokens: The recipe's [tokens].
        names: Names under which the tokens of documents are stored: the sources and their parts by language.
        labels: The classes of the documents; empty if they have none.
        encoder: The encoder of documents.
    """

    tokens: Tokens
    names: tuple[str, ...]
    labels: tuple[str, ...]
    encoder: Encoder

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of ids in shards."""
        return token_dtype(self.encoder.tokenizer.vocabulary)

    def writer(self, folder: Path, name: str) -> ShardWriter:
        """Return a writer of shards of any length in `folder`, for the source and split that `name`, SOURCE/SPLIT, names."""
        template = self.encoder.template
        is_masked = template is not None and name.split("/")[0] in template.sources
        return ShardWriter(folder, name.replace("/", "-"), self.dtype, sys.maxsize, bool(self.labels), is_masked)


def read_context(work: AnyPath) -> EncodingContext:
    """Read the settings of a build's encoding tasks from its work folder; each process caches them."""
    return _read_context(work, (work / CONTEXT).stat().st_mtime_ns if isinstance(work, Path) else 0)


@lru_cache(maxsize=1)
def _read_context(work: AnyPath, modified_ns: int) -> EncodingContext:
    return cast("EncodingContext", from_plain(json.loads((work / CONTEXT).read_bytes()), EncodingContext))


@dataclass(frozen=True)
class RowGroupTask(Task):
    """Base of the tasks on some row groups of a Parquet file of the corpus. The size of a task is the bytes of their text.

    Attributes:
        number: Number of the task, which names the folder of its result.
        path: The file.
        first: The first row group.
        end: The row group after the last one.
    """

    number: int
    path: AnyPath
    first: int
    end: int

    stage = "tokens"
    kind: ClassVar[str]  # folder of the results in WORK

    @property
    def folder(self) -> AnyPath:
        return self.work / self.kind / f"{self.number:06d}"

    def __str__(self) -> str:
        return f"text of {self.path.name}, row groups {self.first} to {self.end - 1}"

    def documents(self) -> Iterator[StoredDocument]:
        return documents.read_documents([self.path], range(self.first, self.end))


def tasks_of_groups(kind: type[GroupTask], work: AnyPath, corpus: AnyPath, *more: Any) -> list[GroupTask]:
    """Return a task of class `kind` for each batch of row groups of a corpus; `more` are the further fields of the class."""
    groups = enumerate(documents.row_groups(corpus, TASK_BYTES))
    return [kind(work, "text", size, number, path, first, end, *more) for number, (path, first, end, size) in groups]


@dataclass(frozen=True)
class SampleTexts(RowGroupTask):
    """A task that selects the tokenizer's training texts in some row groups (`documents.sample_texts`) and writes them."""

    tokens: Tokens
    chats: tuple[str, ...]
    shares: dict[str, float]

    kind = "sampled"

    def make(self, folder: Path) -> dict[str, Any]:
        """Write the sampled texts to `folder`. Raises OSError if the disk is full."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        texts = list(documents.sample_texts(self.tokens, self.chats, self.documents(), self.shares))
        table = pa.table({"text": pa.array(texts, pa.large_string())})
        parquet.write_table(table, folder / TEXTS, write_page_checksum=True)
        return {}


def training_sample(recipe: Recipe, statistics: dict[str, Any], corpus: AnyPath, work: AnyPath) -> Iterator[str]:
    """Yield the texts that a tokenizer is trained on, none of them held out.

    `statistics` is the content of the corpus's statistics.json. Tasks draw the texts into the folder `work`. Raises the
    errors of `run_tasks`.
    """
    by_source = documents.sample_shares(recipe, {one["source"]: one["bytes_kept"] for one in statistics["sources"]})
    shares = {name: by_source[source] for name, source in recipe.parts.items() if source in by_source}
    chats = tuple(sorted(recipe.chat_parts))
    sampling = tasks_of_groups(SampleTexts, work, corpus, recipe.tokens, chats, shares)
    results = run_tasks("drawing the tokenizer's sample", "B", sampling, 1 / READING, engine_of(recipe))
    for task, _ in zip(sampling, results, strict=True):
        with open_parquet(task.folder / TEXTS, f"rm -r {work}; bessemer tokens RECIPE") as file:
            for batch in file.iter_batches(batch_size=documents.BATCH_DOCUMENTS):
                yield from batch.column("text").to_pylist()


class EncodeRowGroups(RowGroupTask):
    """A task that encodes the documents in some row groups to token shards, which `WriteShard` later combines."""

    kind = "encoded"

    def make(self, folder: Path) -> dict[str, Any]:
        """Write a shard per source and split to `folder`.

        Raises BessemerError if tokens do not account for the text, and OSError if the disk is full.
        """
        context, counts = read_context(self.work), EncodedCounts()
        names = (f"{name}/{split}" for name in context.names for split in SPLITS)
        writers = {name: context.writer(folder, name) for name in names}
        number_of = {label: number for number, label in enumerate(context.labels)}
        parts = (part for one in self.documents() for part in split_document(one, context.tokens))
        for batch in in_groups(parts, BATCH_CHARACTERS, lambda part: len(part.text)):
            check_stop()
            for one, encoded in zip(batch, context.encoder(batch, counts), strict=True):
                if len(encoded.ids):  # a rejected conversation has no ids
                    writer = writers[f"{one.source}/{SPLITS[one.is_held_out]}"]
                    label = number_of.get(one.label, NO_LABEL)
                    writer.add(one.identity, encoded.ids, encoded.num_bytes, label, encoded.is_trained)
        for writer in writers.values():
            writer.close()
        return {"counts": vars(counts), "splits": {name: one.facts() for name, one in writers.items() if one.files}}


def encode_corpus(
    context: EncodingContext, engine_settings: Work, corpus: AnyPath, work: AnyPath, folder: Path, published: AnyPath
) -> tuple[EncodedCounts, Splits]:
    """Encode all documents and write their shards.

    Returns the counts over all documents, and for each SOURCE/SPLIT the counts and files of its shards. Tasks run in the
    folder `work`. Then the ids of training shards are moved to `published` and all other files to `folder`. Raises the
    errors of `run_tasks`.
    """
    write_file(work / CONTEXT, json.dumps(to_plain(context)).encode())
    encoding = tasks_of_groups(EncodeRowGroups, work, corpus)
    counts, splits, numbers = EncodedCounts(), Splits(), dict[str, list[int]]()
    for task, done in zip(encoding, run_tasks("encoding", "B", encoding, 1, engine_settings), strict=True):
        check_stop()
        counts.add(EncodedCounts(**done["counts"]))
        for name, facts in done["splits"].items():
            split = splits.setdefault(name, {**dict.fromkeys(COUNTS, 0), "files": {}})
            split.update({key: split[key] + facts[key] for key in COUNTS})
            numbers.setdefault(name, []).append(task.number)

    def offsets(path: AnyPath) -> npt.NDArray[np.int64]:
        return Shard(path, context.dtype).offsets.astype(np.int64)

    writing: list[WriteShard] = []
    for name, some in numbers.items():
        paths = [encoded_shard(work, number, name, context.dtype).path for number in some]
        cuts = cut_shards(zip(some, each(offsets, paths), strict=True), context.tokens.shard_tokens)
        writing += [WriteShard(work, "shard", size, name, number, spans) for number, (size, spans) in enumerate(cuts)]
    per_token = 4 / COPYING  # bytes of text whose encoding takes as long as writing a token
    copies: list[tuple[AnyPath, AnyPath]] = []
    written = run_tasks("writing shards", "tokens", writing, per_token, engine_settings)
    for shard, done in zip(writing, written, strict=True):
        splits[shard.name]["files"] |= done["files"]
        for name in done["files"]:
            copies.append((shard.folder / name, (published if is_published(name) else folder) / name))
    copy_files(copies)
    return counts, splits


def is_published(name: str) -> bool:
    """Return True if the tokens file `name` has the ids of a training shard; only these are written to `corpus.storage`."""
    return name.endswith(".bin") and f"-{SPLITS[0]}-" in name


def encoded_shard(work: AnyPath, number: int, name: str, dtype: np.dtype[Any]) -> Shard:
    """Return the shard of the source and split `name`, SOURCE/SPLIT, that encoding task `number` wrote in the folder `work`."""
    return Shard(work / EncodeRowGroups.kind / f"{number:06d}" / f"{name.replace('/', '-')}-00000.bin", dtype)


def cut_shards(
    encoded: Iterable[tuple[int, npt.NDArray[np.int64]]], shard_tokens: int
) -> list[tuple[int, tuple[Span, ...]]]:
    """Divide the encoded documents of one source and split into shards of at most `shard_tokens` tokens.

    A document that does not fit into a shard begins the next one, as in `ShardWriter`. `encoded` has, in order, the number
    of each encoding task and the token offsets of the documents that it encoded, with the end of the last. Returns for each
    shard its number of tokens and the documents in it, as (number of the task, first document, end) tuples.
    """
    shards: list[tuple[int, tuple[Span, ...]]] = [(0, ())]
    for number, offsets in encoded:
        check_stop()
        first, last = 0, len(offsets) - 1
        while first < last:
            num_tokens, spans = shards.pop()
            room = int(offsets[first]) + shard_tokens - num_tokens
            end = int(np.searchsorted(offsets[1:], room, side="right"))
            if end > first or not num_tokens:  # a document longer than a shard gets a separate one
                end = max(end, first + 1)
                shards.append((num_tokens + int(offsets[end] - offsets[first]), (*spans, (number, first, end))))
                first = end
            else:
                shards += [(num_tokens, spans), (0, ())]
    return shards if shards[0][1] else []


@dataclass(frozen=True)
class WriteShard(Task):
    """A task that writes one final shard from documents that `EncodeRowGroups` tasks encoded. Its size is in tokens.

    Attributes:
        name: SOURCE/SPLIT of the shard.
        number: Number of the shard within it.
        spans: Documents of the shard, as (number of the encoding task, first document, end) tuples.
    """

    name: str
    number: int
    spans: tuple[Span, ...]

    stage = "tokens"

    @property
    def folder(self) -> AnyPath:
        return self.work / "shards" / self.name.replace("/", "-") / f"{self.number:05d}"

    def __str__(self) -> str:
        return f"shard {self.number} of {self.name}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Write the shard's files to `folder`. Raises OSError if the disk is full."""
        context = read_context(self.work)
        writer = context.writer(folder, self.name)
        writer.shards = self.number
        for number, first, end in self.spans:
            check_stop()
            shard = encoded_shard(self.work, number, self.name, context.dtype)
            offsets, trained = shard.offsets.astype(np.int64).tolist(), shard.is_trained
            for row in range(first, end):
                here = slice(offsets[row], offsets[row + 1])
                mask = None if trained is None else trained[here]
                writer.add(shard.identities[row].tobytes().hex(), shard.tokens[here], 0, int(shard.labels[row]), mask)
        writer.close()
        return {"files": writer.files}
