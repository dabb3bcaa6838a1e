"""Facts about a run's tokens before it trains: vocabulary, classes, packing, repetition."""

from __future__ import annotations

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
    """Return packing and epochs of each source for the plan of a resolved recipe.

    Warns about sources that are repeated too often. The result is empty until the tokens have been written for this
    recipe.
    """
    store = TokenStore.read_manifest(folder)
    if store is None or not store.sources or not set(store.sources) <= set(recipe.parts):
        return {}
    if recipe.tokens.packing != "concatenate" and not is_packed_as(store, recipe):
        return {}
    epochs = open_loader(recipe, store).mixture.epochs(recipe.batches.before(recipe.train.steps))
    for name, turns in epochs.items() if recipe.train.max_epochs is None else ():
        if turns > REPEATS_WORTH_A_WARNING:
            warn(
                f"source {name!r} will be read {turns:.1f} times, and repeats help little after {REPEATS_WORTH_A_WARNING} times "
                "(Muennighoff et al. 2023); lower its weight, set max_epochs, add text, or train for fewer steps"
            )
    packing = {} if recipe.train.objective == "classify" else {"packing": facts(store, recipe)}
    return {**packing, "epochs": epochs}


def vocabulary_size(recipe: Recipe, folder: Path, is_planned: bool = False) -> int:
    """Return the number of ids of the tokenizer, whether or not the tokens have been written.

    With `is_planned`, the recipe may have no corpus, and model.vocabulary then limits the number.
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
    """Return the numbers of training and held-out tokens, named as in model/recipe_defaults.py; empty before they exist."""
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
