"""The recipe's tables about what is predicted: [train.masking] and [train.classify]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bessemer.recipe.section import Section


class Masking(Section):
    """Which tokens are hidden, and behind what (objective masked)."""

    share: float = Field(
        0.15,
        gt=0,
        lt=1,
        description="Share of a sequence's tokens that are hidden and predicted; rounded, at least one.",
    )
    mode: Literal["bert", "all"] = Field(
        "bert",
        description="bert: of the hidden tokens 80% become the mask token, 10% a random token, 10% stay as they are; "
        "all: every one becomes the mask token (as ModernBERT does, with a share of 0.3).",
    )
    whole_words: bool = Field(
        False,
        description="Hide all tokens of a word or none. A word is a run of letters, digits and non-ASCII bytes, with the "
        "space or sign before it when that stands in the same token.",
    )


class Classify(Section):
    """How a classifier is trained (objective classify); the labels are those of the corpus."""

    frozen: bool = Field(
        False, description="Only the classifier's head is trained; the transformer keeps the weights it started with."
    )
    pooling: Literal["first", "last", "mean"] | None = Field(
        None,
        description="What the head reads of a text: its first token, its last, or the mean of all; left out: first in an "
        "encoder, last in a decoder.",
    )
