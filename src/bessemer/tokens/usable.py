"""Whether what the tokens stage made can be trained on."""

from __future__ import annotations

from typing import Any

from bessemer.errors import InputError
from bessemer.recipe import Recipe
from bessemer.terminal import counted

FEW_CLASSES = 10  # so many may have a text each, as in a first try


def refuse_unusable(recipe: Recipe, manifest: dict[str, Any]) -> None:
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
            f"tokens.held_out: {recipe.tokens.held_out:.4g} of {counted(documents, 'document')} leaves {held_out} held-out "
            f"tokens, fewer than one sequence of {length}; hold out a passage of each document (tokens.held_out_from = "
            '"passages"), raise the share, shorten the sequence or add documents'
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
            f"tokens.held_out: {recipe.tokens.held_out:.4g} of {counted(documents['train'], 'document')} leaves none held "
            "out; raise the share or add documents"
        )
    texts = sum(documents.values())
    if len(manifest["labels"]) > max(texts / 2, FEW_CLASSES):
        raise InputError(
            f"train.objective: {len(manifest['labels']):,} classes of {counted(texts, 'text')}: nearly every text has a class of "
            "its own, so label_key seems to name an id; name the field of the class with corpus.sources.NAME.label_key"
        )
