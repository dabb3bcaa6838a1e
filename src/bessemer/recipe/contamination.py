"""[corpus.contamination] of the recipe: text of evaluation sets that must not be trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Share, Words


class EvaluationSet(Section):
    """One evaluation set to look for."""

    name: str = Field(
        description="Name of the set, in the table and in metadata.", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
    )
    path: str = Field(
        min_length=1,
        description="A .jsonl (also .gz, .zst), .parquet or .txt file (one item a line) with the set's items.",
    )
    fields: tuple[str, ...] = Words(
        (), "Fields or columns whose text is looked for, each by itself, e.g. ['question', 'answer']; a list gives one text "
        "an entry. Needed for jsonl and parquet."
    )  # fmt: skip

    @model_validator(mode="after")
    def _readable(self) -> Self:
        name = Path(self.path).name.lower()
        if not name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")):
            raise ValueError(
                f"path: {self.path}: an evaluation set is a .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt file"
            )
        if name.endswith(".txt") and self.fields:
            raise ValueError("fields: a .txt file has none; remove the key")
        if not name.endswith(".txt") and not self.fields:
            raise ValueError("fields: say which fields of the file hold the text, e.g. fields = ['question']")
        return self


class Contamination(Section):
    """Text of evaluation sets in the corpus. Off until a set is given."""

    sets: tuple[EvaluationSet, ...] = Field(
        (), strict=False, description="The evaluation sets to look for; none: nothing."
    )
    action: Literal["drop", "mask", "report"] = Field(
        "drop",
        description="What happens to a document that holds a set's text: drop (rejected as contaminated), mask (the text "
        "found is replaced) or report (counted only).",
    )
    ngram: int = Field(
        13, ge=2, le=64, description="Words in a row that make a match (GPT-3's 13; datatrove takes 12)."
    )
    min_words: Positive = Field(
        8,
        description="A text shorter than ngram words is looked for as a whole, if it has this many words (GPT-3's least "
        "n is 8); shorter ones would be found everywhere and are left out, and counted.",
    )
    min_share: Share = Field(
        0.0,
        description="Share of an item's n-grams that a document must hold for a match; 0: one n-gram is enough.",
    )
    mask: str = Field("", description="What stands where text was masked (action mask).")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        names = [given.name for given in self.sets]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two evaluation sets are named {twice[0]!r}; give each a name of its own")
        if self.min_words > self.ngram:
            raise ValueError(
                f"min_words is {self.min_words} but ngram only {self.ngram}; no text could be too short for one"
            )
        return self
