"""Tokens for trials: those of the run where they are written, else of a sample of its text; and stores of a few documents."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

from bessemer import stages
from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.run import STAGE_FILE, RunFolder, stage_is_current, write_json
from bessemer.terminal import silent
from bessemer.tokens import build
from bessemer.tokens.packing import packed_for, write_packs
from bessemer.tokens.shards import ShardWriter, TokenStore, token_dtype
from bessemer.tokens.stream import NO_LABEL

SAMPLE_BYTES, BYTES_PER_ID = 1_500_000, 60  # of text: in all, and for each id of a vocabulary that is trained on it
HELD_OUT = 0.05  # of a sample, at the least


def sampled(asked: Recipe, resolved: Recipe, run: RunFolder, place: Path) -> RunFolder:
    """The run itself, where its tokens are written and those of this recipe; else a run in `place` with the tokens of a sample of
    its sources. Raises what the corpus and the tokens raise."""
    if _has_tokens(resolved, run):
        return run
    if not asked.corpus.sources:
        raise InputError(
            f"{run.path}: no tokens of this recipe here; write them with `bessemer tokens` first, then check"
        )
    size = max(SAMPLE_BYTES, BYTES_PER_ID * (resolved.tokenizer.vocabulary or 0)) // len(asked.corpus.sources)
    sources = tuple(
        one.model_copy(update={"max_bytes": min(one.max_bytes or size, size)}) for one in asked.corpus.sources
    )
    corpus: dict[str, Any] = {"sources": sources, "publish": None}
    if asked.corpus.engine == "local" and asked.corpus.work == asked.run.store:
        corpus["work"] = None  # where tasks of one machine need no store
    small = resolved.changed(
        run={"name": "sample", "dir": str(place), "store": None}, corpus=corpus, tokens={
            "publish": None, "held_out": max(resolved.tokens.held_out, HELD_OUT), "sources": (),
        })  # fmt: skip
    session = stages.Session(small, RunFolder(place / "sample"))
    session.run.path.mkdir()
    with silent():
        stages.corpus(session)
        stages.tokens(session)
    return session.run


def _has_tokens(resolved: Recipe, run: RunFolder) -> bool:
    if not (run.tokens / "manifest.json").exists():
        return False
    if resolved.corpus.sources and not run.corpus.exists():  # which is not needed once the tokens are written
        return True
    return stage_is_current(run.tokens, build.inputs_digest(resolved, run))


def beginning_of(store: TokenStore, recipe: Recipe, folder: Path, num_tokens: int) -> TokenStore:
    """A store of the first documents of every source, so many tokens together at the least, with the same held-out text."""
    folder.mkdir()
    dtype, lengths = token_dtype(store.vocabulary), store.token_bytes
    manifest: dict[str, Any] = {**store.manifest, "sources": {}, "files": {}}
    for path in store.folder.iterdir():
        if path.suffix in (".json", ".npy", ".jinja") and path.name != STAGE_FILE:  # which has where the shards are
            shutil.copyfile(path, folder / path.name)
    for name in store.sources:
        facts = store.manifest["sources"][name]
        writer = ShardWriter(folder, f"{name}-train", dtype, 1 << 40, bool(store.labels), store.is_masked(name))
        for shard in store.split(name, "train").shards:
            offsets = shard.offsets.astype(int).tolist()
            for number, (start, end) in enumerate(pairwise(offsets)):
                if writer.tokens * len(store.sources) > num_tokens:
                    break
                ids, label = shard.tokens[start:end], int(shard.labels[number]) if store.labels else NO_LABEL
                mask = None if shard.is_trained is None else shard.is_trained[start:end]
                writer.add(shard.identities[number].tobytes().hex(), ids, int(lengths[ids].sum()), label, mask)
        writer.close()
        held = {one: store.manifest["files"][one] for one in facts["heldout"]["files"]}
        for one in held:
            (folder / one).symlink_to((store.folder / one).resolve())
        manifest["sources"][name] = {"train": writer.facts(), "heldout": facts["heldout"]}
        manifest["files"] |= writer.files | held
    manifest["files"] |= write_packs(TokenStore(folder, manifest), recipe)
    manifest["packing"] = packed_for(recipe)
    write_json(folder / "manifest.json", manifest)
    return TokenStore.open(folder)
