"""Tokenising as tasks of the corpus's engine.

    WORK/counted/000012/            bytes of text by source in some row groups of a part file of the corpus
    WORK/sampled/000012/            texts.parquet: the texts among them that the tokenizer is trained on
    WORK/context.pickle             what all tasks need
    WORK/documents/, stage.json     the part files of the corpus, and which they are, where WORK is in a store
    WORK/encoded/000012/            some row groups of a part file of the corpus: a shard of any length for each source and split
    WORK/shards/SOURCE-SPLIT/00003/ a shard as it is published: ranges of documents of those

The driver reads the lengths of the documents in between, by which the shards are cut as `ShardWriter` cuts them. So the files do
not depend on the tasks.

WORK is in the run directory, or in `corpus.storage` where the documents are there.
"""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bessemer.common.hashing import digest
from bessemer.recipe import Recipe, Work
from bessemer.run.directory import RunDirectory
from bessemer.run_tasks import engine
from bessemer.run_tasks import run as worker
from bessemer.run_tasks.task import CorpusTask, open_work
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_files, each, open_parquet, write_file
from bessemer.tokens import documents
from bessemer.tokens.documents import StoredDocument, is_held_out
from bessemer.tokens.encode import EncodedBatch, EncodedCounts, Encoder, batches
from bessemer.tokens.shards.shard import COUNTS, NO_LABEL, SPLITS, Shard, ShardWriter, token_dtype
from bessemer.tokens.tokenizer import Tokenizer

CONTEXT = "context.pickle"
TASK_BYTES = 64 << 20  # of row groups in a task, about
TEXTS = "texts.parquet"
READING = 10  # to read a text takes so much less time than to encode it
COPYING = 20  # a shard is copied and hashed in so much less time than its text takes to encode
Writers = dict[tuple[str, str], ShardWriter]
Span = tuple[int, int, int]  # number of the encoded row groups, first document in them, end


def engine_of(recipe: Recipe) -> Work:
    """Where the tasks are done; on one machine by tokens.workers processes."""
    return recipe.corpus if recipe.corpus.engine != "local" else recipe.corpus.changed(workers=recipe.tokens.workers)


def exchange_of(recipe: Recipe, run: RunDirectory, inputs: str, corpus: AnyPath, work: Path) -> tuple[AnyPath, AnyPath]:
    """The documents as the tasks see them, and where these exchange files. work: where the tokens are while they are made."""
    if recipe.corpus.storage is None or corpus.parent == run.corpus:
        return (corpus.absolute() if isinstance(corpus, Path) else corpus), work.absolute()
    return corpus, open_work(run.tokens, inputs, recipe.corpus.storage)


def new_writers(recipe: Recipe, folder: Path, tokenizer: Tokenizer, labelled: bool, shard_tokens: int) -> Writers:
    dtype, chats = token_dtype(tokenizer.vocabulary), recipe.chat_parts
    return {
        (name, split): ShardWriter(folder, f"{name}-{split}", dtype, shard_tokens, labelled, name in chats)
        for name in recipe.parts
        for split in SPLITS
    }


def add_batch(
    writers: Writers, batch: list[StoredDocument], made: EncodedBatch, recipe: Recipe, number_of: dict[str, int]
) -> None:
    """Append each document to the shards of its source and split. number_of: labels."""
    tokens = recipe.tokens
    for item, ids, num_bytes, mask in zip(batch, made.ids, made.num_bytes, made.is_trained, strict=True):
        if not len(ids):
            continue
        held_out, label = item.is_held_out, number_of.get(item.label, NO_LABEL)
        if held_out is None:
            held_out = is_held_out(item.identity, tokens.seed, tokens.held_out)
        elif not num_bytes:  # an empty part of a document too short to be cut
            continue
        writers[item.source, SPLITS[held_out]].add(item.identity, ids, num_bytes, label, mask)


def training_sample(recipe: Recipe, corpus: AnyPath, work: AnyPath) -> Iterator[str]:
    """Text to train a tokenizer on, none of it held out (`documents.sampled`).

    corpus, work: `exchange_of`. Raises what tasks raise (`worker.run_tasks`).
    """
    places, sizes = list(documents.row_groups(corpus, TASK_BYTES)), Counter[str]()
    counting = [CountTexts(work, number, *place) for number, place in enumerate(places)]
    for done in worker.run_tasks("counting text", "B", counting, 1 / READING, engine_of(recipe)):
        sizes.update(done["bytes"])
    shares = documents.sample_shares(recipe, sizes)
    sampling = [SampleTexts(work, number, *place, recipe, shares) for number, place in enumerate(places)]
    drawn = worker.run_tasks("drawing the tokenizer's sample", "B", sampling, 1 / READING, engine_of(recipe))
    for task, _ in zip(sampling, drawn, strict=True):
        with open_parquet(task.folder / TEXTS, f"rm -r {work}; bessemer tokens RECIPE") as file:
            for batch in file.iter_batches(batch_size=documents.BATCH_DOCUMENTS):
                yield from batch.column("text").to_pylist()


@dataclass(frozen=True)
class RowGroupTask(CorpusTask):
    """A task on some row groups of a part file. num_bytes: of their text."""

    number: int
    path: AnyPath
    groups: range
    num_bytes: int

    stage = "tokens"
    kind: ClassVar[str]  # of the results, a folder of WORK

    @property
    def folder(self) -> AnyPath:
        return self.work / self.kind / f"{self.number:06d}"

    @property
    def inputs(self) -> str:
        return self.kind

    @property
    def size(self) -> int:
        return self.num_bytes

    def __str__(self) -> str:
        return f"text of {self.path.name}, row groups {self.groups.start} to {self.groups.stop - 1}"


class CountTexts(RowGroupTask):
    """Count the bytes of text of each source in some row groups of a part file."""

    kind = "counted"

    def make(self, folder: Path) -> dict[str, Any]:
        """Writes nothing but the receipt."""
        rows = documents.read_row_groups(self.path, self.groups, ["source", "text"])
        return {"bytes": documents.bytes_by_source(rows)}


@dataclass(frozen=True)
class SampleTexts(RowGroupTask):
    """Write the texts of some row groups that belong to the sample. shares: of each source's text."""

    recipe: Recipe
    shares: dict[str, float]

    kind = "sampled"

    @property
    def inputs(self) -> str:
        return digest("sample", self.shares)

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk."""
        import pyarrow as pa
        import pyarrow.parquet as parquet

        texts = list(documents.sample_texts(self.recipe, documents.read_documents(self.path, self.groups), self.shares))
        table = pa.table({"text": pa.array(texts, pa.large_string())})
        parquet.write_table(table, folder / TEXTS, write_page_checksum=True)
        return {}


@dataclass(frozen=True)
class EncodingContext:
    """What every task of a build needs, without a file of this machine."""

    recipe: Recipe
    labels: Sequence[str]
    encoder: Encoder

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the ids in shards."""
        return token_dtype(self.encoder.tokenizer.vocabulary)


def is_published(name: str) -> bool:
    """Whether a file of the tokens is one of those that `corpus.storage` holds: the ids that are trained on."""
    return name.endswith(".bin") and f"-{SPLITS[0]}-" in name


def encode_corpus(
    context: EncodingContext, corpus: AnyPath, work: AnyPath, writers: Writers, place: AnyPath
) -> EncodedCounts:
    """Encode all documents and write their shards to the folder of `writers`, and what is published to `place`.

    corpus, work: `exchange_of`. The counts of each source and split are added to its writer. Raises what tasks raise
    (`worker.run_tasks`).
    """
    recipe, counts = context.recipe, EncodedCounts()
    write_file(work / CONTEXT, pickle.dumps(context))
    places = documents.row_groups(corpus, TASK_BYTES)
    encoding = [EncodeRowGroups(work, number, *place) for number, place in enumerate(places)]
    states = {f"{name}/{split}": writer for (name, split), writer in writers.items()}
    cuts = {name: ShardCuts(recipe.tokens.shard_tokens) for name in states}
    filled: dict[str, list[int]] = {name: [] for name in cuts}  # by which tasks
    for task, done in zip(encoding, worker.run_tasks("encoding", "B", encoding, 1, engine_of(recipe)), strict=True):
        engine.check_stop()
        counts.add(EncodedCounts(**done["counts"]))
        for name, facts in done["splits"].items():
            state = states[name]
            for key in COUNTS:
                setattr(state, key, getattr(state, key) + facts[key])
            filled[name].append(task.number)

    def offsets(path: AnyPath) -> npt.NDArray[np.int64]:
        return Shard(path, context.dtype).offsets.astype(np.int64)

    for name, numbers in filled.items():
        paths = [encoded_shard(work, number, name, context.dtype).path for number in numbers]
        for number, here in zip(numbers, each(offsets, paths), strict=True):
            engine.check_stop()
            cuts[name].add(number, here)
    writing = [
        WriteShard(work, name, number, num_tokens, tuple(spans))
        for name, cut in cuts.items()
        for number, (num_tokens, spans) in enumerate(cut.shards)
    ]
    per_token = 4 / COPYING  # bytes of text that take as long
    written = worker.run_tasks("writing shards", "tokens", writing, per_token, engine_of(recipe))
    copies: list[tuple[AnyPath, AnyPath]] = []
    for shard, done in zip(writing, written, strict=True):
        state = states[shard.name]
        copies += [
            (shard.folder / file, (place if is_published(file) else state.folder) / file) for file in done["files"]
        ]
        state.files |= done["files"]
        state.shards += 1
    copy_files(copies)
    return counts


@lru_cache(maxsize=1)
def _prepared(work: AnyPath, modified_ns: int) -> EncodingContext:
    context: EncodingContext = pickle.loads((work / CONTEXT).read_bytes())
    return context


def prepared(work: AnyPath) -> EncodingContext:
    """The context of a build; loaded once in a process."""
    return _prepared(work, (work / CONTEXT).stat().st_mtime_ns if isinstance(work, Path) else 0)


class EncodeRowGroups(RowGroupTask):
    """Encode the documents in some row groups of a part file."""

    kind = "encoded"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises BessemerError for tokens that do not account for the text, OSError for a full disk."""
        context, counts = prepared(self.work), EncodedCounts()
        recipe, encoder = context.recipe, context.encoder
        writers = new_writers(recipe, folder, encoder.tokenizer, bool(context.labels), sys.maxsize)
        number_of = {label: number for number, label in enumerate(context.labels)}
        for batch in batches(self._items(recipe)):
            engine.check_stop()
            made = encoder(batch)
            add_batch(writers, batch, made, recipe, number_of)
            counts.add(made.counts)
        for writer in writers.values():
            writer.close()
        facts = {f"{name}/{split}": writer.facts() for (name, split), writer in writers.items() if writer.documents}
        return {"counts": vars(counts), "splits": facts}

    def _items(self, recipe: Recipe) -> Iterator[StoredDocument]:
        tokens = recipe.tokens
        for document in documents.read_documents(self.path, self.groups):
            if tokens.held_out_from == "passages":
                yield from documents.cut_passage(document, tokens.seed, tokens.held_out)
            else:
                yield document


def encoded_shard(work: AnyPath, number: int, name: str, dtype: np.dtype[Any]) -> Shard:
    """The tokens that task `number` encoded for SOURCE/SPLIT."""
    return Shard(work / "encoded" / f"{number:06d}" / f"{name.replace('/', '-')}-00000.bin", dtype)


@dataclass
class ShardCuts:
    """The documents of each shard of one source and split, by the rule of `ShardWriter`: a document for which a shard has no room
    begins the next one."""

    shard_tokens: int
    shards: list[tuple[int, list[Span]]] = field(default_factory=list)  # tokens and documents of each

    def add(self, number: int, offsets: npt.NDArray[np.int64]) -> None:
        """The next documents: those that task `number` encoded, by where each begins and the last one ends."""
        ends = offsets[1:]
        first, before = 0, 0  # documents that are placed, and their tokens
        while first < len(ends):
            num_tokens, spans = self.shards.pop() if self.shards else (0, [])
            end = int(np.searchsorted(ends, before + self.shard_tokens - num_tokens, side="right"))
            if not num_tokens:
                end = max(end, first + 1)
            if end > first:
                spans.append((number, first, end))
                num_tokens += int(ends[end - 1]) - before
                first, before = end, int(ends[end - 1])
            self.shards.append((num_tokens, spans))
            if first < len(ends):
                self.shards.append((0, []))


@dataclass(frozen=True)
class WriteShard(CorpusTask):
    """Write a shard of SOURCE/SPLIT from what was encoded."""

    name: str
    number: int
    num_tokens: int
    spans: tuple[Span, ...]

    stage = "tokens"

    @property
    def folder(self) -> AnyPath:
        return self.work / "shards" / self.name.replace("/", "-") / f"{self.number:05d}"

    @property
    def inputs(self) -> str:
        return "shard"

    @property
    def size(self) -> int:
        return self.num_tokens

    def __str__(self) -> str:
        return f"shard {self.number} of {self.name}"

    def make(self, folder: Path) -> dict[str, Any]:
        """Raises OSError for a full disk."""
        context, source = prepared(self.work), self.name.split("/")[0]
        masked = source in context.recipe.chat_parts
        writer = ShardWriter(
            folder, self.name.replace("/", "-"), context.dtype, sys.maxsize, bool(context.labels), masked
        )
        writer.shards = self.number
        for number, first, end in self.spans:
            engine.check_stop()
            shard = encoded_shard(self.work, number, self.name, context.dtype)
            offsets, trained = shard.offsets.astype(np.int64).tolist(), shard.is_trained
            for row in range(first, end):
                here = slice(offsets[row], offsets[row + 1])
                mask = None if trained is None else trained[here]
                writer.add(shard.identities[row].tobytes().hex(), shard.tokens[here], 0, int(shard.labels[row]), mask)
        writer.close()
        return {"files": writer.files}
