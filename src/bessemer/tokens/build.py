"""Clean documents to token shards: the tokens stage."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from bessemer.errors import InputError
from bessemer.recipe import Recipe, digest
from bessemer.run import STAGE_FILE, RunFolder, mark_stage, read_json, staging, write_atomic, write_json
from bessemer.terminal import progress, warn
from bessemer.tokens.order import key_of
from bessemer.tokens.packing import facts, packed_for, write_packs
from bessemer.tokens.shards import NO_LABEL, ShardWriter, TokenStore, token_dtype
from bessemer.tokens.tokenizer import Tokenizer

FORMAT = 1  # raised when shards are written differently, so that older ones are built again
BATCH_DOCUMENTS = 256
AGREEMENT_SAMPLE = 64  # documents on which the fast encoder is compared with the tokenizer.json at every build


@dataclass(frozen=True)
class Document:
    """What the tokens stage needs of a document."""

    identity: str
    source: str
    text: str
    label: str


@dataclass(frozen=True)
class TokensSummary:
    """What the tokens stage made."""

    manifest: dict[str, Any]
    seconds: float

    @property
    def train_tokens(self) -> int:
        return sum(source["train"]["tokens"] for source in self.manifest["sources"].values())

    @property
    def held_out_tokens(self) -> int:
        return sum(source["heldout"]["tokens"] for source in self.manifest["sources"].values())


def inputs_digest(recipe: Recipe, run: RunFolder) -> str:
    """What the shards depend on: the corpus as built and the keys that shape them."""
    corpus = read_json(run.corpus / STAGE_FILE)["inputs"] if (run.corpus / STAGE_FILE).exists() else None
    loaded = recipe.tokenizer.path and Path(recipe.tokenizer.path)
    if loaded and not loaded.exists():
        raise InputError(f"tokenizer.path: {loaded}: no such file")
    shape = [recipe.tokens.held_out, recipe.tokens.shard_tokens, recipe.run.seed, mask_token(recipe)]
    tokens = recipe.tokens  # concatenated, any length is read from the same shards
    packing = [] if tokens.packing == "concatenate" else [[tokens.packing, tokens.sequence_length]]
    return digest(FORMAT, corpus, recipe.tokenizer, loaded.read_text() if loaded else None, shape, *packing)


def mask_token(recipe: Recipe) -> str | None:
    """The mask token that a recipe's tokenizer must have; None when nothing is masked."""
    return recipe.tokenizer.mask_token if recipe.train.objective == "masked" else None


def build(recipe: Recipe, run: RunFolder) -> TokensSummary:
    """Train or load the tokenizer and write the shards of every source, in the order of the documents' identities."""
    started = perf_counter()
    inputs = inputs_digest(recipe, run)
    corpus = run.corpus / "documents"
    if not corpus.is_dir():
        raise InputError(f"{corpus}: no documents here; build them with `bessemer corpus RECIPE`")
    with staging(run.tokens) as staged:
        tokenizer = _tokenizer(recipe, corpus)
        trained = perf_counter() - started
        sample = [document.text for document, _ in zip(_documents(corpus), range(AGREEMENT_SAMPLE), strict=False)]
        if not tokenizer.agrees(sample):
            warn("the fast encoder and the tokenizer.json disagree on this text; encoding through the tokenizer.json")
            tokenizer = tokenizer.slowed()
        labels = _labels(corpus)
        writers = _write_shards(recipe, corpus, staged, tokenizer, labels)
        write_atomic(staged / "tokenizer.json", tokenizer.to_json())
        np.save(staged / "token_bytes.npy", tokenizer.token_bytes())
        manifest = _manifest(recipe, tokenizer, writers, labels, perf_counter() - started, trained)
        _refuse_unusable(recipe, manifest)
        manifest["files"] |= write_packs(TokenStore(staged, manifest), recipe)
        manifest["packing"] = packed_for(recipe)
        manifest["packing"] = facts(TokenStore(staged, manifest), recipe)
        write_json(staged / "manifest.json", manifest)
        mark_stage(staged, inputs)
    return TokensSummary(manifest, perf_counter() - started)


def is_held_out(identity: str, seed: int, share: float) -> bool:
    """Whether a document is kept out of training: decided by its identity alone, so that it stays where it is when
    other documents come or go."""
    return key_of("held-out", seed, identity) < share * 2.0**64


def _documents(corpus: Path) -> Iterator[Document]:
    """Stream the clean documents in their order: by source, then identity."""
    import pyarrow.parquet as parquet

    for path in sorted(corpus.glob("*.parquet")):
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_DOCUMENTS, columns=["identity", "source", "text", "label"]):
                for row in batch.to_pylist():
                    yield Document(row["identity"], row["source"], row["text"], row["label"])


def _labels(corpus: Path) -> list[str]:
    """The classes of all documents, sorted; none when no document has one."""
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    found: set[str] = set()
    for path in sorted(corpus.glob("*.parquet")):
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["label"]):
                found.update(compute.unique(batch.column("label")).to_pylist())
    return sorted(found - {""})


def _tokenizer(recipe: Recipe, corpus: Path) -> Tokenizer:
    options = recipe.tokenizer
    if options.path is not None:
        tokenizer = Tokenizer.load(Path(options.path), options.end_of_text, mask_token(recipe))
        if not tokenizer.is_byte_level:
            raise InputError(f"tokenizer.path: {options.path} is not a byte-level tokenizer; only those are supported")
        return tokenizer
    text = _sample(recipe, corpus)
    return Tokenizer.train(text, options.vocabulary or 32_768, options.end_of_text, mask_token(recipe))


def _sample(recipe: Recipe, corpus: Path) -> Iterator[str]:
    """Training text for the BPE: documents chosen by the hash of their identity until the budget fits; no held-out one."""
    import pyarrow.compute as compute
    import pyarrow.parquet as parquet

    lengths = [
        compute.sum(compute.binary_length(batch.column("text"))).as_py() or 0
        for path in sorted(corpus.glob("*.parquet"))
        for batch in parquet.ParquetFile(path).iter_batches(columns=["text"])
    ]
    share = min(recipe.tokenizer.sample_bytes / max(sum(lengths), 1), 1.0)
    seed = recipe.run.seed
    for document in _documents(corpus):
        if is_held_out(document.identity, seed, recipe.tokens.held_out):
            continue
        if key_of("bpe", seed, document.identity) < share * 2.0**64:
            yield document.text


def _write_shards(
    recipe: Recipe, corpus: Path, folder: Path, tokenizer: Tokenizer, labels: list[str]
) -> dict[tuple[str, str], ShardWriter]:
    dtype = token_dtype(tokenizer.vocabulary)
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    number_of = {label: number for number, label in enumerate(labels)}
    size = recipe.tokens.shard_tokens
    writers = {
        (source.name, split): ShardWriter(folder, f"{source.name}-{split}", dtype, size, labelled=bool(labels))
        for source in recipe.corpus.sources
        for split in ("train", "heldout")
    }
    statistics = read_json(corpus.parent / "statistics.json")["totals"]
    with progress("encoding", statistics.get("bytes_kept"), "B") as advance:
        batch: list[Document] = []

        def encode() -> None:
            texts = [document.text for document in batch]
            for document, ids in zip(batch, tokenizer.encode_documents(texts, threads), strict=True):
                held_out = is_held_out(document.identity, recipe.run.seed, recipe.tokens.held_out)
                writer = writers[document.source, "heldout" if held_out else "train"]
                num_bytes = len(document.text.encode())
                writer.add(document.identity, ids, num_bytes, number_of.get(document.label, NO_LABEL))
                advance(num_bytes)
            batch.clear()

        for document in _documents(corpus):
            batch.append(document)
            if len(batch) == BATCH_DOCUMENTS:
                encode()
        encode()
    for writer in writers.values():
        writer.close()
    return writers


def _manifest(
    recipe: Recipe,
    tokenizer: Tokenizer,
    writers: dict[tuple[str, str], ShardWriter],
    labels: list[str],
    seconds: float,
    trained: float,
) -> dict[str, Any]:
    sources = {
        source.name: {
            split: {
                "documents": writers[source.name, split].documents,
                "tokens": writers[source.name, split].tokens,
                "bytes": writers[source.name, split].bytes,
                "longest": writers[source.name, split].longest,
                "files": sorted(writers[source.name, split].files),
            }
            for split in ("train", "heldout")
        }
        for source in recipe.corpus.sources
    }
    text_bytes = sum(writer.bytes for writer in writers.values())
    text_tokens = sum(writer.tokens - writer.documents for writer in writers.values())
    return {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer.vocabulary).str,
        "tokenizer": {
            "vocabulary": tokenizer.vocabulary,
            "end_of_text": tokenizer.end_of_text,
            "mask_token": tokenizer.mask_token,
            "sha256": tokenizer.sha256,
            "bytes_per_token": text_bytes / max(text_tokens, 1),
            "trained": recipe.tokenizer.path is None,
        },
        "labels": labels,
        "sources": sources,
        "files": {name: facts for writer in writers.values() for name, facts in sorted(writer.files.items())},
        "seconds": {"tokenizer": round(trained, 3), "total": round(seconds, 3)},
    }


def _refuse_unusable(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Every source must give at least one training sequence, and the held-out part some text."""
    if recipe.train.objective == "classify":
        return _refuse_unusable_texts(recipe, manifest)
    if recipe.tokens.packing != "concatenate":
        return _refuse_unpackable(recipe, manifest)
    length = recipe.tokens.sequence_length
    for name, splits in manifest["sources"].items():
        tokens = splits["train"]["tokens"]
        if tokens <= length:
            raise InputError(
                f"tokens.sequence_length: {length}, but source {name!r} has only {tokens} training tokens in all; "
                "shorten the sequence or add text"
            )
    longest = max(splits[split]["longest"] for splits in manifest["sources"].values() for split in splits)
    if longest < length and not recipe.tokens.pack_short_documents:
        raise InputError(
            f"tokens.sequence_length: {length} is longer than every document (the longest has {longest} tokens); shorten "
            "it, or set tokens.pack_short_documents = true to put several documents into each sequence"
        )
    held_out = sum(splits["heldout"]["tokens"] for splits in manifest["sources"].values())
    if held_out <= length:
        documents = sum(splits[split]["documents"] for splits in manifest["sources"].values() for split in splits)
        raise InputError(
            f"tokens.held_out: {recipe.tokens.held_out} of {documents} documents leaves {held_out} held-out tokens, fewer "
            f"than one sequence of {length}; raise the share, shorten the sequence or add documents"
        )
    return None


def _refuse_unpackable(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Packed, a document of any length is a sequence's piece: every source needs one to train on, and one is held out."""
    for name, splits in manifest["sources"].items():
        if not splits["train"]["documents"]:
            raise InputError(f"tokens.held_out: source {name!r} has no document left to train on; add text")
    if not sum(splits["heldout"]["documents"] for splits in manifest["sources"].values()):
        raise InputError(
            f"tokens.held_out: {recipe.tokens.held_out} of the documents leaves none held out; raise the share or add "
            "documents"
        )


def _refuse_unusable_texts(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """A classifier needs two classes at least, and texts of every source to train on and some held out."""
    if len(manifest["labels"]) < 2:
        found = f"only {manifest['labels'][0]!r}" if manifest["labels"] else "no label"
        raise InputError(
            f"train.objective: classify needs documents of two classes or more, but the corpus has {found}; see "
            "corpus.sources.label and label_key"
        )
    documents = {
        split: sum(facts[split]["documents"] for facts in manifest["sources"].values())
        for split in ("train", "heldout")
    }
    bare = [name for name, facts in manifest["sources"].items() if not facts["train"]["documents"]]
    if bare:
        raise InputError(f"tokens.held_out: source {bare[0]!r} has no document left to train on; add text")
    if not documents["heldout"]:
        raise InputError(
            f"tokens.held_out: {recipe.tokens.held_out} of {documents['train']} documents leaves none held out; raise the "
            "share or add documents"
        )
