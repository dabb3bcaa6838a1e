"""Tokenising as tasks of `run_tasks`.

    WORK/sampled/000012/            texts.parquet: the texts in some row groups of a file of the corpus that the tokenizer is
                                    trained on
    WORK/tokenizer.json             the tokenizer, where it is trained
    WORK/context.json               what the tasks that encode need
    WORK/documents/, stage.json     the files of the corpus, and which they are, where WORK is in a store
    WORK/encoded/000012/            some row groups of a file of the corpus: a shard of any length for each source and split
    WORK/shards/SOURCE-SPLIT/00003/ a shard as it is published: ranges of documents of those

The driver reads the lengths of the documents in between, by which it cuts the shards as `ShardWriter` does. So the files do not
depend on the tasks.

WORK is in the run directory, or in `corpus.storage` where the documents are there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt

from bessemer.corpus.readers.parts import in_groups
from bessemer.recipe import Recipe, Work
from bessemer.recipe.tokens import Tokens
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks.run import run_tasks
from bessemer.run_tasks.stage_storage import open_work
from bessemer.run_tasks.task import Task, check_stop, from_plain, to_plain
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_files, each, open_parquet, write_file
from bessemer.tokens import documents
from bessemer.tokens.documents import StoredDocument, split_document
from bessemer.tokens.encode import EncodedCounts, Encoder
from bessemer.tokens.shards.shard import COUNTS, NO_LABEL, SPLITS, Shard, ShardWriter, token_dtype

CONTEXT = "context.json"
TASK_BYTES = 64 << 20  # of row groups in a task, about
BATCH_CHARACTERS = 1 << 20  # of text that is encoded at one time
TEXTS = "texts.parquet"
READING = 10  # to read a text takes so much less time than to encode it
COPYING = 20  # a shard is copied and hashed in so much less time than its text takes to encode
Span = tuple[int, int, int]  # number of the task that encoded, first document in its shard, end
Splits = dict[str, dict[str, Any]]  # by SOURCE/SPLIT: documents, tokens, bytes and files, as of `ShardWriter.facts`


def engine_of(recipe: Recipe) -> Work:
    """Where the tasks are done; on one machine by tokens.workers processes."""
    return recipe.corpus if recipe.corpus.engine != "local" else recipe.corpus.changed(workers=recipe.tokens.workers)


def work_folder(recipe: Recipe, run: RunDirectory, inputs: str, corpus: AnyPath) -> AnyPath:
    """Return WORK. inputs: what the tokens depend on."""
    return open_work(run.tokens, inputs, None if corpus.parent == run.corpus else recipe.corpus.storage)


@dataclass(frozen=True)
class EncodingContext:
    """What the tasks that encode need.

    Attributes:
        tokens: The recipe's [tokens].
        names: Names under which the tokens of documents are stored.
        labels: The classes of the documents; empty where they have none.
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
        """Return a writer of shards of SOURCE/SPLIT."""
        template = self.encoder.template
        is_masked = template is not None and name.split("/")[0] in template.sources
        return ShardWriter(folder, name.replace("/", "-"), self.dtype, sys.maxsize, bool(self.labels), is_masked)


def read_context(work: AnyPath) -> EncodingContext:
    """Return the context of a build; prepared once in a process."""
    return _read_context(work, (work / CONTEXT).stat().st_mtime_ns if isinstance(work, Path) else 0)


@lru_cache(maxsize=1)
def _read_context(work: AnyPath, modified_ns: int) -> EncodingContext:
    return cast("EncodingContext", from_plain(json.loads((work / CONTEXT).read_bytes()), EncodingContext))


@dataclass(frozen=True)
class RowGroupTask(Task):
    """A task on the row groups [first, end) of a file of the corpus. num_bytes: bytes of their text."""

    number: int
    path: AnyPath
    first: int
    end: int
    num_bytes: int

    stage, inputs = "tokens", "text"
    kind: ClassVar[str]  # folder of the results in WORK

    @property
    def folder(self) -> AnyPath:
        return self.work / self.kind / f"{self.number:06d}"

    @property
    def size(self) -> int:
        return self.num_bytes

    def __str__(self) -> str:
        return f"text of {self.path.name}, row groups {self.first} to {self.end - 1}"

    def documents(self) -> Iterator[StoredDocument]:
        return documents.read_documents([self.path], range(self.first, self.end))


@dataclass(frozen=True)
class SampleTexts(RowGroupTask):
    """Write the texts of some row groups that belong to the sample, see `documents.sample_texts`."""

    tokens: Tokens
    chats: tuple[str, ...]
    shares: dict[str, float]

    kind = "sampled"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        texts = list(documents.sample_texts(self.tokens, self.chats, self.documents(), self.shares))
        table = pa.table({"text": pa.array(texts, pa.large_string())})
        parquet.write_table(table, folder / TEXTS, write_page_checksum=True)
        return {}


def training_sample(recipe: Recipe, statistics: dict[str, Any], corpus: AnyPath, work: AnyPath) -> Iterator[str]:
    """Return the texts that a tokenizer is trained on, none of them held out. statistics: of the corpus. Raises what `run_tasks`
    raises."""
    by_source = documents.sample_shares(recipe, {one["source"]: one["bytes_kept"] for one in statistics["sources"]})
    shares = {name: by_source[source] for name, source in recipe.parts.items() if source in by_source}
    groups, chats = documents.row_groups(corpus, TASK_BYTES), tuple(sorted(recipe.chat_parts))
    sampling = [SampleTexts(work, number, *some, recipe.tokens, chats, shares) for number, some in enumerate(groups)]
    drawn = run_tasks("drawing the tokenizer's sample", "B", sampling, 1 / READING, engine_of(recipe))
    for task, _ in zip(sampling, drawn, strict=True):
        with open_parquet(task.folder / TEXTS, f"rm -r {work}; bessemer tokens RECIPE") as file:
            for batch in file.iter_batches(batch_size=documents.BATCH_DOCUMENTS):
                yield from batch.column("text").to_pylist()


class EncodeRowGroups(RowGroupTask):
    """Encode the documents in some row groups."""

    kind = "encoded"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises BessemerError for tokens that do not account for the text, OSError for a full disk."""
        context, counts = read_context(self.work), EncodedCounts()
        names = (f"{name}/{split}" for name in context.names for split in SPLITS)
        writers = {name: context.writer(folder, name) for name in names}
        number_of = {label: number for number, label in enumerate(context.labels)}
        parts = (part for one in self.documents() for part in split_document(one, context.tokens))
        for batch in in_groups(parts, BATCH_CHARACTERS, lambda part: len(part.text)):
            check_stop()
            for one, encoded in zip(batch, context.encoder(batch, counts), strict=True):
                if len(encoded.ids):  # none of a rejected conversation
                    writer = writers[f"{one.source}/{SPLITS[one.is_held_out]}"]
                    label = number_of.get(one.label, NO_LABEL)
                    writer.add(one.identity, encoded.ids, encoded.num_bytes, label, encoded.is_trained)
        for writer in writers.values():
            writer.close()
        return {"counts": vars(counts), "splits": {name: one.facts() for name, one in writers.items() if one.files}}


def encode_corpus(
    context: EncodingContext, engine_settings: Work, corpus: AnyPath, work: AnyPath, folder: Path, published: AnyPath
) -> tuple[EncodedCounts, Splits]:
    """Encode all documents and write their shards to `folder`, and those that `corpus.storage` holds to `published`. Raises what
    `run_tasks` raises."""
    write_file(work / CONTEXT, json.dumps(to_plain(context)).encode())
    groups = documents.row_groups(corpus, TASK_BYTES)
    encoding = [EncodeRowGroups(work, number, *some) for number, some in enumerate(groups)]
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
        writing += [WriteShard(work, name, number, *cut) for number, cut in enumerate(cuts)]
    per_token = 4 / COPYING  # bytes of text that take as long
    copies: list[tuple[AnyPath, AnyPath]] = []
    written = run_tasks("writing shards", "tokens", writing, per_token, engine_settings)
    for shard, done in zip(writing, written, strict=True):
        splits[shard.name]["files"] |= done["files"]
        for name in done["files"]:
            copies.append((shard.folder / name, (published if is_published(name) else folder) / name))
    copy_files(copies)
    return counts, splits


def is_published(name: str) -> bool:
    """True for the files of the tokens that `corpus.storage` holds: the ids that are trained on."""
    return name.endswith(".bin") and f"-{SPLITS[0]}-" in name


def encoded_shard(work: AnyPath, number: int, name: str, dtype: np.dtype[Any]) -> Shard:
    """The tokens that task `number` encoded for SOURCE/SPLIT."""
    return Shard(work / EncodeRowGroups.kind / f"{number:06d}" / f"{name.replace('/', '-')}-00000.bin", dtype)


def cut_shards(
    encoded: Iterable[tuple[int, npt.NDArray[np.int64]]], shard_tokens: int
) -> list[tuple[int, tuple[Span, ...]]]:
    """Return the tokens and the documents of each shard of one source and split, by the rule of `ShardWriter`: a document for
    which a shard has no room begins the next one.

    encoded: tasks and the offsets of the documents that each encoded, in order.
    """
    shards: list[tuple[int, tuple[Span, ...]]] = [(0, ())]
    for number, offsets in encoded:
        check_stop()
        first, last = 0, len(offsets) - 1
        while first < last:
            num_tokens, spans = shards.pop()
            room = int(offsets[first]) + shard_tokens - num_tokens
            end = int(np.searchsorted(offsets[1:], room, side="right"))
            if end > first or not num_tokens:  # a longer document is a shard of its own
                end = max(end, first + 1)
                shards.append((num_tokens + int(offsets[end] - offsets[first]), (*spans, (number, first, end))))
                first = end
            else:
                shards += [(num_tokens, spans), (0, ())]
    return shards if shards[0][1] else []


@dataclass(frozen=True)
class WriteShard(Task):
    """Write a shard of SOURCE/SPLIT from what was encoded."""

    name: str
    number: int
    num_tokens: int
    spans: tuple[Span, ...]

    stage, inputs = "tokens", "shard"

    @property
    def folder(self) -> AnyPath:
        return self.work / "shards" / self.name.replace("/", "-") / f"{self.number:05d}"

    @property
    def size(self) -> int:
        return self.num_tokens

    def __str__(self) -> str:
        return f"shard {self.number} of {self.name}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk."""
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
