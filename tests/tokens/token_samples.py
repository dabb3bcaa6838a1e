"""Small token stores of generated documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import Recipe, ResolvedRecipe, parse
from bessemer.tokens.packing import add_packs
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.shards.shard import NO_LABEL, SPLITS, ShardWriter

END, VOCABULARY = 0, 50


def documents(seed: int, count: int, longest: int = 60) -> list[list[int]]:
    """Return documents of 0 to `longest` tokens, without their end-of-text tokens."""
    draw = np.random.default_rng(seed)
    return [draw.integers(1, VOCABULARY, draw.integers(0, longest + 1)).tolist() for _ in range(count)]


def recipe_of(
    packing: str, length: int = 16, more: str = "", steps: int = 12, batch: int = 8, **sources: str
) -> ResolvedRecipe:
    """Return a recipe over the store's sources with `batch` sequences per step."""
    tables = "".join(
        f'[[corpus.sources]]\nname = "{name}"\nformat = "text"\npaths = ["x"]\n{keys}\n'
        for name, keys in (sources or {"a": "", "b": ""}).items()
    )
    text = (
        f'[run]\nname = "x"\nseed = 4\n{tables}[model]\nlayers = 2\nwidth = 32\nheads = 2\nmlp_width = 64\n[train]\n'
        f"steps = {steps}\nglobal_batch_tokens = {batch * length}\nmicro_batch = {batch // 2}\n[train.optimizer]\nlearning_rate = 0.01\nbetas = [0.9, 0.95]\n"
        f'[tokens]\nsequence_length = {length}\npacking = "{packing}"\n{more}'
    )
    return resolve(parse(text, "test"), VOCABULARY)


def store_of(
    folder: Path, recipe: Recipe, texts: dict[str, list[list[int]]], labels: str = "", shard_tokens: int = 100
) -> TokenStore:
    """Write shards packed as in the recipe; the held-out texts equal the training texts.

    An identity is two digits of the source and the document's number. Labels cycle by source and document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources, files = {}, {}
    for number, (name, found) in enumerate(texts.items()):
        splits = {}
        for split in SPLITS:
            writer = ShardWriter(folder, f"{name}-{split}", np.dtype("<u2"), shard_tokens, bool(labels))
            for place, ids in enumerate(found):
                label = (number + place) % len(labels) if labels else NO_LABEL
                writer.add(f"{number:02x}{place:030x}", [*ids, END], len(ids), label)
            writer.close()
            files |= writer.files
            splits[split] = {**writer.counts, "files": sorted(writer.files)}
        sources[name] = splits
    np.save(folder / "token_bytes.npy", np.array([0] + [1] * (VOCABULARY - 1)))
    manifest = {
        "sources": sources,
        "files": files,
        "labels": list(labels),
        "tokenizer": {"vocabulary": VOCABULARY, "end_of_text": END, "mask_token": VOCABULARY - 1, "sha256": "x"},
    }
    store = TokenStore(folder, manifest)
    add_packs(store, recipe)
    return store
