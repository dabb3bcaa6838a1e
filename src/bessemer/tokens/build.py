"""The tokens stage: turn clean documents into token shards.

An interrupted build resumes after its last finished task: the work folder (`stage_storage.open_work`) keeps the trained
tokenizer and the results of tasks.
"""

from __future__ import annotations

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
from bessemer.run.stage import mark_stage, staging
from bessemer.run_tasks.run import SMALL_BYTES, keep_workers, require_engine
from bessemer.run_tasks.stage_storage import begin_publishing, close_work, end_publishing, open_work, require_storage
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy, copy_files, published_folder, write_file
from bessemer.tokens import documents, tasks
from bessemer.tokens.encode import EncodedCounts, Encoder
from bessemer.tokens.packing import add_packs
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import COUNTS, SPLITS, token_dtype
from bessemer.tokens.shards.store import require_equal_tokenizers
from bessemer.tokens.tasks import EncodingContext, Splits
from bessemer.tokens.tokenizer import Tokenizer, choice
from bessemer.tokens.tokenizer.chat import CHATML_TOKENS, ChatTemplate
from bessemer.tokens.tokenizer.files import CHAT_TEMPLATE, tokenizer_file

FORMAT = 3  # increased when the shard format changes, so that older shards are built again
# gigatoken and the tokenizer.json are compared on a few documents from each of several row groups across the corpus.
SAMPLE_GROUPS, SAMPLE_EACH = 16, 8
BYTES_TOLERANCE = 1e-3  # above this relative difference of token bytes and text bytes, bits per byte are not reported
MIN_ROUND_TRIP_SHARE = 0.99  # share of the sampled documents that must survive encoding and decoding


def inputs_digest(recipe: Recipe, run: RunDirectory, by_content: bool = False) -> str:
    """Return the digest of everything that the shards depend on: the corpus, tokenizer files and recipe keys.

    With `by_content`, the corpus and the tokenizer are identified by their content instead of by path and modification
    time.
    """
    corpus = stage_facts(run.corpus).get("content" if by_content else "inputs")
    options, tokens = recipe.tokenizer, recipe.tokens
    path = None if options.path is None else tokenizer_file(options.path)
    files = [*([path] if path else []), *choice.files_to_copy(recipe)]
    if missing := next((file for file in files if not file.exists()), None):
        raise InputError(f"tokenizer.path: {missing}: no such file; correct the path")
    shape = tokens.model_dump(include={"held_out", "held_out_from", "shard_tokens", "seed"})
    if tokens.packing != "concatenate":  # concatenated, any length is read from the same shards
        shape |= {"packing": tokens.packing, "sequence_length": tokens.sequence_length}
    return digest(
        FORMAT,
        corpus,
        without_folders(recipe).tokenizer if by_content else options,
        [file_sha256(file) for file in files],
        [shape, choice.mask_token(recipe)],
        mixed_by(recipe) if options.sample == "mixture" else None,
        choice.template_source(recipe) if recipe.chat_parts else None,
        None if path is None else choice.framing_of(recipe, choice.load_tokenizer(recipe)),
    )


def mixed_by(recipe: Recipe) -> Any:
    """Return a list of the recipe values that the tokenizer's training sample depends on if `tokenizer.sample` is "mixture"."""
    phases = [phase.model_dump() for phase in recipe.tokens.schedule]
    decay = recipe.train.schedule.decay_share if any(phase["from_"] == "decay" for phase in phases) else None
    return [recipe.source_weights, recipe.tokens.temperature, phases, decay]


def storage_of(recipe: Recipe) -> str | None:
    """Return `corpus.storage` if training reads tokens from it; None for packed and labelled tokens, which stay in the run."""
    is_read_from_there = recipe.tokens.packing == "concatenate" and recipe.train.objective != "classify"
    return recipe.corpus.storage if is_read_from_there else None


def build(recipe: Recipe, run: RunDirectory, wanted: str | None = None) -> TokenStore:
    """Build a run's tokens: train or load the tokenizer, encode the corpus and write the shards of every source.

    `wanted` is the digest that the new tokens must have (`TokenStore.digest`), or None for any. If they have another,
    BessemerError is raised and the existing tokens stay in place.
    """
    inputs = inputs_digest(recipe, run)
    corpus = published_folder(run.corpus) / "documents"
    if not corpus.exists():
        raise InputError(f"{corpus}: there are no documents; build them with `bessemer corpus RECIPE`")
    statistics = documents.corpus_statistics(recipe, run)
    if statistics["totals"]["bytes_kept"] >= SMALL_BYTES:
        require_engine(recipe.corpus)
    facts_of_corpus = stage_facts(run.corpus)
    made_of = facts_of_corpus.get("stored", facts_of_corpus.get("outputs", {}))
    all_inputs = digest(inputs, {name: size for name, size in made_of.items() if name.startswith("documents/")})
    require_storage(run.path, recipe.corpus.storage)
    storage = begin_publishing(run.tokens, all_inputs, storage_of(recipe))
    work = open_work(run.tokens, all_inputs, None if corpus.parent == run.corpus else recipe.corpus.storage)
    with keep_workers(run.path), staging(run.tokens) as staged:
        tokenizer = _tokenizer(recipe, staged / "tokenizer.json", statistics, corpus, work)
        start = None if recipe.train.start is None or run.was_saved else Path(recipe.train.start)
        if start is not None and (start / "tokens" / "manifest.json").exists():
            require_equal_tokenizers(start, tokenizer.sha256)  # fails before the text is encoded
        sample = [one.text for one in documents.sample_documents(corpus, SAMPLE_GROUPS, SAMPLE_EACH)]
        tokenizer = tokenizer.accelerate(sample)
        encoder = Encoder(tokenizer, choice.framing_of(recipe, tokenizer), choice.load_template(recipe))
        if encoder.chats is not None:
            write_atomic(staged / CHAT_TEMPLATE, encoder.chats.source)
        labels = documents.list_values(corpus, "label")
        context = EncodingContext(recipe.tokens, tuple(recipe.parts), tuple(labels), encoder)
        counts, splits = tasks.encode_corpus(context, tasks.engine_of(recipe), corpus, work, staged, storage or staged)
        for path in choice.files_to_copy(recipe):
            shutil.copyfile(path, staged / path.name)
        np.save(staged / "token_bytes.npy", tokenizer.token_bytes())
        manifest = _manifest(recipe, encoder, splits, labels, counts)
        manifest["tokenizer"] |= _round_trip(tokenizer, counts, sample, warns=recipe.train.objective != "classify")
        require_usable(recipe, manifest)
        add_packs(TokenStore(staged, manifest), recipe)
        if recipe.chat_parts and (cut := manifest["packing"]["documents_cut"]):
            warn(f"tokens.sequence_length: {counted(cut, 'longer conversation')} will be cut; raise it")
        if wanted not in (None, TokenStore(staged, manifest).digest):
            raise BessemerError(
                f"{run.tokens}: the tokens made from {corpus} and the recipe differ from those that the checkpoints were "
                "trained on; restore the files of the tokens, or train under another name with --set run.name=NAME"
            )
        write_json(staged / "manifest.json", manifest)
        stored = {} if storage is None else _publish(staged, storage, inputs, manifest)
        content = inputs_digest(recipe, run, by_content=True)
        mark_stage(staged, inputs, known=manifest["files"], content=content, **stored)
    close_work(run.tokens)
    return TokenStore(run.tokens, manifest)


def _publish(staged: Path, target: AnyPath, inputs: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """Move the ids of training shards from the folder `staged` to `target` in `corpus.storage`.

    `inputs` is the digest of the stage's inputs. Returns the entry of these files in the stage's receipt. Raises
    BessemerError if a file did not arrive complete.
    """
    files = [path for path in staged.iterdir() if tasks.is_published(path.name)]
    copy_files([(path, target / path.name) for path in files])
    wanted = {name: facts["bytes"] for name, facts in manifest["files"].items() if tasks.is_published(name)}
    done = end_publishing(target, inputs, wanted)
    for path in files:
        path.unlink()
    return done


def _tokenizer(recipe: Recipe, file: Path, statistics: dict[str, Any], corpus: AnyPath, work: AnyPath) -> Tokenizer:
    """Load the tokenizer at tokenizer.path, else train one on the corpus, and write it to `file`.

    `statistics` are those of the corpus. A trained tokenizer is kept in the folder `work`, where an interrupted build finds
    it again.
    """
    options = recipe.tokenizer
    if options.path is not None:
        tokenizer = choice.load_tokenizer(recipe)
        write_atomic(file, tokenizer.to_json())
        return tokenizer
    trained = work / file.name
    if not trained.exists():
        sample = tasks.training_sample(recipe, statistics, corpus, work)
        write_file(trained, choice.train_tokenizer(recipe, sample, options.vocabulary or 32_768).to_json().encode())
    copy(trained, file)
    return Tokenizer.load(file, options.end_of_text, choice.mask_token(recipe))


def _round_trip(tokenizer: Tokenizer, counts: EncodedCounts, sample: list[str], warns: bool) -> dict[str, Any]:
    """Measure whether the tokens represent all of the text, and return the results for the manifest's table `tokenizer`.

    The result `counts_bytes` is True if the tokens have as many bytes as the text, none of them is the unknown token, and
    nearly all texts in `sample` survive encoding and decoding. Otherwise the model would predict less than the text, so
    bits per byte would look too good and are not reported; with `warns` a warning says so.
    """
    decoded = [tokenizer.decode(tokenizer.encode(text)) for text in sample]
    same = [normalize("NFC", ours) == normalize("NFC", text) for ours, text in zip(decoded, sample, strict=True)]
    came_back = sum(same) / max(len(same), 1)
    close = abs(counts.counted - counts.text) <= BYTES_TOLERANCE * counts.text
    counts_bytes = close and counts.unknown == 0 and came_back >= MIN_ROUND_TRIP_SHARE
    if not counts_bytes and warns:  # a classifier has no bits per byte
        warn(
            f"tokenizer: its tokens encode {counts.counted:,} of {counts.text:,} bytes of text, {counts.unknown:,} tokens are "
            f"unknown, and {came_back:.0%} of the sampled documents decode to their text; bits per byte are not reported"
        )
    return {
        "encoder": tokenizer.encoder_name,
        "changes": tokenizer.changes,
        "text_prefix": tokenizer.text_prefix.decode(),
        "counts_bytes": counts_bytes,
        "came_back": came_back,
    }


def _manifest(
    recipe: Recipe, encoder: Encoder, splits: Splits, labels: list[str], counts: EncodedCounts
) -> dict[str, Any]:
    """Return the content of manifest.json without the packing, and warn about what the chat template rejected or ignored.

    `splits` has the counts and files of each SOURCE/SPLIT, `labels` the classes, and `counts` the counts over all documents.
    """
    tokenizer, empty = encoder.tokenizer, {**dict.fromkeys(COUNTS, 0), "files": {}}
    # A source that is divided into parts may have no documents under its own name, and some parts may be empty.
    num_parts, sources, files = Counter(recipe.parts.values()), dict[str, Any](), dict[str, Any]()
    for name, source in recipe.parts.items():
        rows = {split: splits.get(f"{name}/{split}", empty) for split in SPLITS}
        if num_parts[source] == 1 or any(facts["documents"] for facts in rows.values()):
            sources[name] = {split: {**facts, "files": sorted(facts["files"])} for split, facts in rows.items()}
        for split in SPLITS:
            files |= dict(sorted(rows[split]["files"].items()))
    text_bytes, num_documents, num_tokens = (
        sum(facts[key] for facts in splits.values()) for key in ("bytes", "documents", "tokens")
    )
    described = {
        "vocabulary": tokenizer.vocabulary,
        "end_of_text": tokenizer.end_of_text,
        "mask_token": tokenizer.mask_token,
        "sha256": tokenizer.sha256,
        "bytes_per_token": text_bytes / max(num_tokens - num_documents, 1),
        "trained": recipe.tokenizer.path is None,
        **choice.manifest_facts(recipe, tokenizer),
    }
    if encoder.chats is not None:
        total = sum(facts["documents"] for name, facts in splits.items() if name.split("/")[0] in recipe.chat_parts)
        described |= _chat_ends(recipe, encoder.chats, tokenizer, described, total, counts)
    return {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer.vocabulary).str,
        "tokenizer": described,
        "labels": labels,
        "sources": sources,
        "files": files,
        **counts.to_manifest(),
    }


def _chat_ends(
    recipe: Recipe, chats: ChatTemplate, tokenizer: Tokenizer, facts: dict[str, Any], taken: int, counts: EncodedCounts
) -> dict[str, list[int]]:
    """Return {"ends": ids that end generation}, including the id that ends the assistant's turn.

    If a turn does not end with a special token, warns and returns {}. `facts` is the manifest's table `tokenizer` so far, and
    `taken` the number of conversations that the template accepted. Warns about rejected ones, and raises InputError if more
    than half were rejected.
    """
    if rejected := counts.refusals.total():
        total = counted(rejected + taken, "conversation")
        problem = f"tokens.chat_template: the template rejected {rejected:,} of {total}; the first: {counts.refusal}"
        if rejected > taken:
            raise InputError(f"{problem}; name a template that accepts them")
        warn(problem)
    if chats.turn_end in tokenizer.special:
        return {"ends": list(dict.fromkeys([*facts.get("ends", [tokenizer.end_of_text]), chats.turn_end]))}
    # A loaded tokenizer gets no special tokens, except that of model.from.
    can_add = recipe.tokenizer.path is None or recipe.model.from_ is not None
    add = f"add {' and '.join(CHATML_TOKENS)} to tokenizer.special_tokens, or " if can_add else ""
    warn(
        "tokens.chat_template: the assistant's turn does not end with a special token, so the model will not stop by itself; "
        f"{add}set tokens.chat_template to a file whose turns end with eos_token"
    )
    return {}


def require_usable(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Raise InputError if a source has too little text to train on, too little is held out, or a classifier lacks classes."""
    sources, length = manifest["sources"], recipe.tokens.sequence_length
    train, held = ({name: splits[split] for name, splits in sources.items()} for split in SPLITS)
    classifies, classes = recipe.train.objective == "classify", manifest["labels"]
    if classifies and len(classes) < 2:
        raise InputError(
            f"train.objective: classify needs at least two classes, but the corpus has "
            f"{f'only {classes[0]!r}' if classes else 'no labels'}; set corpus.sources.label or label_key"
        )
    # One document fills a packed or labelled sequence; concatenated documents need more tokens than one sequence has.
    by_document = classifies or recipe.tokens.packing != "concatenate"
    unit, least = ("documents", 0) if by_document else ("tokens", length)
    for name, facts in train.items():
        if facts[unit] <= least:
            raise InputError(
                f"tokens.sequence_length: {length} is too long: source {name!r} has only {facts[unit]} training {unit}; "
                "add text or shorten the sequence"
            )
    if sum(facts[unit] for facts in held.values()) <= least:
        passages = 'hold out a passage of each document (tokens.held_out_from = "passages"), '
        num_documents = sum(facts["documents"] for facts in (*train.values(), *held.values()))
        raise InputError(
            f"tokens.held_out: {recipe.tokens.held_out:.4g} of {counted(num_documents, 'document')} leaves at most {least} "
            f"{unit} held out; {'' if by_document else passages}raise the share, shorten the sequence or add documents"
        )
