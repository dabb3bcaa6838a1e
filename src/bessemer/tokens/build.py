"""Clean documents, and tokens that others have written, to token shards: the tokens stage.

Killed at any point, it resumes after its last finished task: the work folder (`run.resume_staging`) keeps the tokenizer and the
results of tasks. Tokens that others have written are copied again.
"""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np

from bessemer.common.console import counted, warn
from bessemer.common.errors import BessemerError, InputError
from bessemer.common.hashing import digest, file_sha256
from bessemer.recipe import Recipe, without_folders
from bessemer.run.directory import RunDirectory
from bessemer.run.files import stage_facts, write_atomic, write_json
from bessemer.run.stage import OUT, mark_stage, resume_staging
from bessemer.run_tasks.engine import check_stop
from bessemer.run_tasks.run import SMALL_BYTES, kept_workers, require_engine
from bessemer.run_tasks.stage_storage import begin_publishing, close_work, end_publishing, require_storage
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_files, published_folder
from bessemer.tokens import documents, pretokenized, tasks
from bessemer.tokens.encode import EncodedCounts, Encoder, batches
from bessemer.tokens.packing import facts, pack_settings, write_packs
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import SPLITS, token_dtype
from bessemer.tokens.shards.store import require_equal_tokenizers
from bessemer.tokens.tasks import EncodingContext, Writers, add_batch, encode_corpus, new_writers
from bessemer.tokens.tokenizer import Tokenizer, choice
from bessemer.tokens.tokenizer.chat import ChatTemplate, report_rejected, template_source
from bessemer.tokens.tokenizer.choice import files_to_copy, framing_of, manifest_facts, mask_token
from bessemer.tokens.tokenizer.folder import CHAT_TEMPLATE, tokenizer_file
from bessemer.tokens.tokenizer.templates import CHATML_TOKENS

FORMAT = 3  # raised when shards are written differently, so that older ones are built again
# Documents on which gigatoken and the tokenizer.json are compared: from row groups all over the corpus, some from each.
SAMPLE_GROUPS, SAMPLE_EACH = 16, 8
BYTES_TOLERANCE = 1e-3  # relative difference of the bytes of tokens and of text up to which bits per byte are given
MIN_ROUND_TRIP_SHARE = 0.99  # share of the sampled documents that must survive encoding and decoding


def inputs_digest(recipe: Recipe, run: RunDirectory, by_content: bool = False) -> str:
    """What the shards depend on: the corpus as built, foreign tokens, and the keys that shape them. by_content: what the files
    hold in place of where they lie and of their time."""
    corpus = stage_facts(run.corpus).get("content" if by_content else "inputs")
    options, tokens = recipe.tokenizer, recipe.tokens
    path = None if options.path is None else tokenizer_file(options.path)
    files = [("path", file) for file in (*([path] if path else []), *files_to_copy(recipe))]
    hashes: list[str] = []
    for key, file in files:
        if not file.exists():
            raise InputError(f"tokenizer.{key}: {file}: no such file")
        hashes.append(file_sha256(file))
    shape = [tokens.held_out, tokens.shard_tokens, tokens.seed, mask_token(recipe)]
    if tokens.held_out_from != "documents":
        shape.append(tokens.held_out_from)
    mixed = mixed_by(recipe) if options.sample == "mixture" else None
    sources = [[source.name, source.format, pretokenized.facts(source, by_content)] for source in tokens.sources]
    more: list[Any] = []
    if tokens.packing != "concatenate":  # concatenated, any length is read from the same shards
        more.append([tokens.packing, tokens.sequence_length])
    more += [digest(template_source(recipe))] if recipe.chat_parts else []
    if path is not None and (framing := framing_of(recipe, choice.load_tokenizer(recipe))):
        more.append([list(framing.before), list(framing.after)])
    if by_content:
        options = without_folders(recipe).tokenizer
    return digest(FORMAT, corpus if recipe.corpus.sources else None, options, hashes, shape, mixed, sources, *more)


def mixed_by(recipe: Recipe) -> Any:
    """What the training sample of the tokenizer depends on, besides the texts, when it is drawn by the mixture."""
    tokens, weights = recipe.tokens, recipe.source_weights
    if tokens.temperature is None and not tokens.schedule:
        return weights
    phases = [phase.model_dump() for phase in tokens.schedule]
    decay = recipe.train.schedule.decay_share if any(phase.from_ == "decay" for phase in tokens.schedule) else None
    return [weights, tokens.temperature, phases, decay]


def build(recipe: Recipe, run: RunDirectory, wanted: str | None = None) -> TokenStore:
    """Train or load the tokenizer and write the shards of every source, in the order of the documents' identities.

    wanted: `digest` of the tokens that these are to be equal to; BessemerError, and the ones there stay, where they are not.
    """
    inputs = inputs_digest(recipe, run)
    corpus = published_folder(run.corpus) / "documents" if recipe.corpus.sources or not recipe.tokens.sources else None
    if corpus is not None and not corpus.exists():
        raise InputError(f"{corpus}: no documents here; build them with `bessemer corpus RECIPE`")
    totals = documents.corpus_totals(recipe, run) if corpus is not None else {}
    if int(totals.get("bytes_kept") or 0) >= SMALL_BYTES:
        require_engine(recipe.corpus)
    facts_of_corpus = stage_facts(run.corpus)
    made_of = facts_of_corpus.get("stored", facts_of_corpus.get("outputs", {}))
    kept = {name: size for name, size in made_of.items() if name.startswith("documents/")}
    all_inputs = digest(inputs, kept)
    require_storage(run.path, recipe.corpus.storage)
    storage = begin_publishing(run.tokens, all_inputs, recipe.storage_of_tokens)
    # Another place needs the shards again, which may have left this machine.
    work_inputs = all_inputs if storage is None else digest(all_inputs, str(storage))
    with kept_workers(run.path), resume_staging(run.tokens, work_inputs) as work:
        staged, exchange = work / OUT, None
        if corpus is not None:
            exchange = tasks.exchange_of(recipe, run, all_inputs, corpus, work)
        tokenizer = _tokenizer(recipe, work, exchange)
        start = None if recipe.train.start is None or run.was_saved else Path(recipe.train.start)
        if start is not None and (start / "tokens" / "manifest.json").exists():
            require_equal_tokenizers(start, tokenizer.sha256)  # before the text is encoded for nothing
        sample = [one.text for one in documents.sample_documents(corpus, SAMPLE_GROUPS, SAMPLE_EACH)] if corpus else []
        tokenizer = tokenizer.accelerate(sample)
        chats = ChatTemplate.of_recipe(recipe, tokenizer)
        labels = documents.list_labels(corpus) if corpus else []
        encoder = Encoder(tokenizer, framing_of(recipe, tokenizer), chats)
        writers = new_writers(recipe, staged, tokenizer, bool(labels), recipe.tokens.shard_tokens)
        done = EncodedCounts()
        if exchange is not None:
            done = encode_corpus(EncodingContext(recipe, labels, encoder), *exchange, writers, storage or staged)
        _add_foreign(recipe, writers, encoder, done)
        for path in files_to_copy(recipe):
            shutil.copyfile(path, staged / path.name)
        if chats is not None:
            write_atomic(staged / CHAT_TEMPLATE, chats.source)
        np.save(staged / "token_bytes.npy", tokenizer.token_bytes())
        manifest = _complete_manifest(recipe, staged, encoder, writers, labels, done, sample)
        if wanted not in (None, TokenStore(staged, manifest).digest):
            raise BessemerError(
                f"{run.tokens}: what {corpus or 'the sources'} and the recipe give now is not what the checkpoints were trained "
                "on. Put the files of the tokens back, or train under another name with --set run.name=NAME"
            )
        write_json(staged / "manifest.json", manifest)
        stored = {} if storage is None else _publish(staged, storage, inputs, manifest)
        content = inputs_digest(recipe, run, by_content=True)
        mark_stage(staged, inputs, known=manifest["files"], content=content, **stored)
    close_work(run.tokens)
    return TokenStore(run.tokens, manifest)


def _complete_manifest(
    recipe: Recipe, staged: Path, encoder: Encoder, writers: Writers, labels: list[str], done: EncodedCounts, sample: list[str]
) -> dict[str, Any]:  # fmt: skip
    """Return the manifest of shards that are written, and write their packs. Raises InputError for tokens of no use."""
    tokenizer = encoder.tokenizer
    manifest = _manifest(recipe, tokenizer, writers, labels)
    if encoder.chats is not None:
        _describe_chats(manifest, recipe, encoder.chats, tokenizer, writers, done)
    manifest |= done.to_manifest()
    manifest["tokenizer"] |= _round_trip(tokenizer, done, sample, warns=recipe.train.objective != "classify")
    require_usable(recipe, manifest)
    manifest["files"] |= write_packs(TokenStore(staged, manifest), recipe)
    manifest["packing"] = pack_settings(recipe)
    manifest["packing"] = facts(TokenStore(staged, manifest), recipe)
    return manifest


def _describe_chats(
    manifest: dict[str, Any], recipe: Recipe, chats: ChatTemplate, tokenizer: Tokenizer, writers: Writers, done: EncodedCounts
) -> None:  # fmt: skip
    """Say how many conversations are refused, and put into the manifest where a turn ends."""
    if done.refusals:
        taken = sum(writers[name, split].documents for name in recipe.chat_parts for split in SPLITS)
        report_rejected(done.refusals, taken, done.refusal)
    if chats.turn_end not in tokenizer.special:
        warn(
            "no special token ends the assistant's turn, so a model that is trained on these tokens does not stop by itself; "
            f"use a tokenizer with {' and '.join(CHATML_TOKENS)} (tokenizer.special_tokens), or a template that ends turns "
            "with eos_token"
        )
        return
    # Generation ends where the assistant's turn ends.
    ends = manifest["tokenizer"].get("ends", [tokenizer.end_of_text])
    manifest["tokenizer"]["ends"] = list(dict.fromkeys([*ends, chats.turn_end]))


def _publish(staged: Path, place: AnyPath, inputs: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Move the files to publish that are still here to their place; returns what the receipt of the stage says of it. Raises
    BessemerError where one is not there as a whole."""
    files = [path for path in staged.iterdir() if tasks.is_published(path.name)]
    copy_files([(path, place / path.name) for path in files])
    wanted = {name: facts["bytes"] for name, facts in manifest["files"].items() if tasks.is_published(name)}
    done = end_publishing(place, inputs, wanted)
    for path in files:
        path.unlink()
    return done


def _tokenizer(recipe: Recipe, work: Path, exchange: tuple[AnyPath, AnyPath] | None) -> Tokenizer:
    """The tokenizer: kept by an interrupted build, loaded, or trained; its file is written to what will be published. exchange:
    `tasks.exchange_of`; None without a corpus."""
    options, kept = recipe.tokenizer, work / OUT / "tokenizer.json"
    if kept.exists():
        return Tokenizer.load(kept, options.end_of_text, mask_token(recipe))
    if options.path is not None:
        tokenizer = choice.load_tokenizer(recipe)
    else:
        assert exchange is not None  # the recipe asks for a path where there is no corpus
        sample = tasks.training_sample(recipe, *exchange)
        tokenizer = choice.train_tokenizer(recipe, sample, options.vocabulary or 32_768)
    write_atomic(kept, tokenizer.to_json())
    return tokenizer


def _add_foreign(recipe: Recipe, writers: Writers, encoder: Encoder, done: EncodedCounts) -> None:
    """Append the documents that others have written to the shards of their sources, and count them."""
    tokenizer, sources = encoder.tokenizer, recipe.tokens.sources
    theirs = (pretokenized.documents(source, tokenizer.vocabulary, tokenizer.end_of_text) for source in sources)
    for batch in batches(itertools.chain.from_iterable(theirs)):
        check_stop()
        made = encoder(batch)
        add_batch(writers, batch, made, recipe, {})
        done.add(made.counts)
    for source, split in itertools.product(sources, SPLITS):
        writers[source.name, split].close()


def _round_trip(tokenizer: Tokenizer, done: EncodedCounts, sample: list[str], warns: bool) -> dict[str, Any]:
    """Whether the tokens account for the text: then, and only then, bits per byte are given.

    A tokenizer that changes the text, or has no token for some of it, predicts less than the text: its bits per byte
    would flatter it. Measured: the bytes its tokens stand for, tokens for unknown text, and whether text comes back.
    """
    decoded = [tokenizer.decode(tokenizer.encode(text)) for text in sample]
    same = [normalize("NFC", ours) == normalize("NFC", text) for ours, text in zip(decoded, sample, strict=True)]
    came_back = sum(same) / len(same) if same else float(tokenizer.kind == "byte-level" and not tokenizer.changes)
    close = abs(done.counted - done.text) <= BYTES_TOLERANCE * done.text
    counts = close and done.unknown == 0 and came_back >= MIN_ROUND_TRIP_SHARE
    if not counts and warns and done.text:  # a classifier has no bits per byte; tokens of others have no text
        warn(
            f"the tokenizer's tokens stand for {done.counted:,} bytes of {done.text:,}, {done.unknown:,} of them unknown, and "
            f"{came_back:.0%} of the text comes back from them: bits per byte are not given"
        )
    return {
        "encoder": tokenizer.encoder_name,
        "changes": tokenizer.changes,
        "text_prefix": tokenizer.text_prefix.decode(),
        "counts_bytes": counts,
        "came_back": came_back,
    }


def _manifest(recipe: Recipe, tokenizer: Tokenizer, writers: Writers, labels: list[str]) -> dict[str, Any]:
    # A source that is cut into parts may have nothing left under its own name, and not every part has documents.
    counts = Counter(recipe.parts.values())
    sources = {}
    for name, source in recipe.parts.items():
        if counts[source] == 1 or any(writers[name, split].documents for split in SPLITS):
            sources[name] = {split: writers[name, split].facts() for split in SPLITS}
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
            **manifest_facts(recipe, tokenizer),
        },
        "labels": labels,
        "sources": sources,
        "files": {name: facts for writer in writers.values() for name, facts in sorted(writer.files.items())},
    }


def require_usable(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Raise InputError unless every source has something to train on, and something is held out."""
    sources, length = manifest["sources"], recipe.tokens.sequence_length
    train, held = ({name: splits[split] for name, splits in sources.items()} for split in SPLITS)
    classifies, classes = recipe.train.objective == "classify", manifest["labels"]
    if classifies and len(classes) < 2:
        raise InputError(
            f"train.objective: classify needs documents of two classes or more, but the corpus has "
            f"{f'only {classes[0]!r}' if classes else 'no label'}; see corpus.sources.label and label_key"
        )
    # A document is enough where it has a sequence; of concatenated ones more than a sequence's tokens are needed.
    by_document = classifies or recipe.tokens.packing != "concatenate"
    unit, least = ("documents", 0) if by_document else ("tokens", length)
    for name, found in train.items():
        if found[unit] <= least:
            raise InputError(
                f"tokens.sequence_length: {length}, but source {name!r} has only {found[unit]} training {unit} in all; add text "
                "or shorten the sequence"
            )
    if sum(found[unit] for found in held.values()) <= least:
        passages = 'hold out a passage of each document (tokens.held_out_from = "passages"), '
        num_documents = sum(found["documents"] for found in (*train.values(), *held.values()))
        raise InputError(
            f"tokens.held_out: {recipe.tokens.held_out:.4g} of {counted(num_documents, 'document')} leaves at most {least} "
            f"{unit} held out; {'' if by_document else passages}raise the share, shorten the sequence or add documents"
        )
