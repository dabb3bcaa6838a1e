"""Facts about a run's tokens before it trains: vocabulary, classes, packing, repetition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from bessemer.common.console import warn
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.tokens.loader import open_loader
from bessemer.tokens.packing import facts, is_packed_as
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING
from bessemer.tokens.shards import TokenStore
from bessemer.tokens.tokenizer.choice import load_tokenizer


def packing_and_epochs(recipe: ResolvedRecipe, folder: Path) -> dict[str, Any]:
    """Return {"packing": result of `packing.facts`, "epochs": epochs of each source in the run} for a run's plan.

    A classifier has no packing. The result is empty if `folder` has no tokens for this recipe. Warns about sources that are
    repeated too often.
    """
    store = TokenStore.read_manifest(folder)
    if store is None or not store.sources or not set(store.sources) <= set(recipe.parts):
        return {}
    if recipe.tokens.packing != "concatenate" and not is_packed_as(store, recipe):
        return {}
    epochs = open_loader(recipe, store).mixture.epochs(recipe.batches.before(recipe.train.steps))
    expected = max(REPEATS_WORTH_A_WARNING, math.ceil(recipe.train.max_epochs or 0))
    for name, turns in epochs.items():
        if turns > expected:
            warn(
                f"source {name!r} will be read {turns:.1f} times, and repeats help little after {REPEATS_WORTH_A_WARNING} times "
                "(Muennighoff et al. 2023); lower its weight, set max_epochs, add text, or train for fewer steps"
            )
    packing = {} if recipe.train.objective == "classify" else {"packing": facts(store, recipe)}
    return {**packing, "epochs": epochs}


def vocabulary_size(recipe: Recipe, folder: Path, is_planned: bool = False) -> int:
    """Return the number of ids of the tokenizer, whether or not the tokens have been written.

    Before that it is the size that the recipe sets. With `is_planned`, model.vocabulary limits the size of a tokenizer that
    is trained.
    """
    if (store := TokenStore.read_manifest(folder)) is not None:
        ids = store.vocabulary
    elif recipe.tokenizer.path is not None:
        return load_tokenizer(recipe).vocabulary
    else:
        ids = recipe.tokenizer.vocabulary or 32_768
    if is_planned and recipe.tokenizer.path is None:
        return min(ids, recipe.model.vocabulary or ids)
    return ids


def num_tokens(folder: Path) -> dict[str, int]:
    """Return {"unique_tokens": training tokens, "held_out_tokens": held-out tokens} of a tokens folder; {} if it has none."""
    if (store := TokenStore.read_manifest(folder)) is None:
        return {}
    return {"unique_tokens": store.num_tokens("train"), "held_out_tokens": store.num_tokens("heldout")}


def num_classes(recipe: Recipe, folder: Path) -> int:
    """Return the number of classes of a classifier, or 0 for other objectives.

    Before tokens exist it is the number of labels in the recipe, at least two.
    """
    if recipe.train.objective != "classify":
        return 0
    if (store := TokenStore.read_manifest(folder)) is not None:
        return len(store.labels)
    return max(len({source.label for source in recipe.corpus.sources if source.label is not None}), 2)
