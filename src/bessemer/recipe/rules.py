"""[corpus.rules] of the recipe: which documents are kept, by the basic rules and by published sets of rules.

A set is off until its table stands in the recipe; an empty table takes every threshold as its authors published it.
Sources of the defaults: docs/rules.md.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Share, Words


class GopherQuality(Section):
    """Rae et al. 2021 (Gopher), appendix A, as datatrove counts."""

    min_words: int = Field(50, ge=0, description="Fewest words, punctuation aside.")
    max_words: Positive = Field(100_000, description="Most words, punctuation aside.")
    min_mean_word_length: float = Field(3.0, ge=0, description="Smallest mean of characters in a word.")
    max_mean_word_length: float = Field(10.0, gt=0, description="Largest mean of characters in a word.")
    max_hashes_per_word: float = Field(0.1, ge=0, description="Most signs # per word.")
    max_ellipses_per_word: float = Field(0.1, ge=0, description="Most ellipses per word.")
    max_bullet_line_share: Share = Field(0.9, description="Largest share of lines that begin with a bullet.")
    max_ellipsis_line_share: Share = Field(0.3, description="Largest share of lines that end with an ellipsis.")
    min_alphabetic_word_share: Share = Field(0.8, description="Smallest share of words with a letter.")
    marks_are_words: bool = True
    """In that share, count a punctuation mark as a word without a letter, as datatrove does; false: only what has a
    letter or a digit is a word, which keeps much prose (docs/rules.md)."""
    min_stop_words: int = Field(2, ge=0, description="Fewest different stop words that must occur.")
    stop_words: Words = ("the", "be", "to", "of", "and", "that", "have", "with")
    """The stop words, at most 62; give those of your language for text that is not English."""

    @model_validator(mode="after")
    def _stop_words_fit(self) -> Self:
        if len(self.stop_words) > 62:
            raise ValueError(f"stop_words: {len(self.stop_words)} words; at most 62 can be looked for")
        return self


class GopherRepetition(Section):
    """Rae et al. 2021, table A1, as datatrove counts."""

    max_duplicate_line_share: Share = Field(0.3, description="Largest share of duplicate lines.")
    max_duplicate_paragraph_share: Share = Field(0.3, description="Largest share of duplicate paragraphs.")
    max_duplicate_line_character_share: Share = Field(0.2, description="The same of lines, by characters.")
    max_duplicate_paragraph_character_share: Share = Field(0.2, description="The same of paragraphs, by characters.")
    max_top_2gram_share: Share = Field(0.2, description="Largest share of characters in the most frequent word pair.")
    max_top_3gram_share: Share = Field(0.18, description="The same of three words.")
    max_top_4gram_share: Share = Field(0.16, description="The same of four words.")
    max_duplicate_5gram_share: Share = Field(0.15, description="Largest share of characters in repeated 5-grams.")
    max_duplicate_6gram_share: Share = Field(0.14, description="The same of 6-grams.")
    max_duplicate_7gram_share: Share = Field(0.13, description="The same of 7-grams.")
    max_duplicate_8gram_share: Share = Field(0.12, description="The same of 8-grams.")
    max_duplicate_9gram_share: Share = Field(0.11, description="The same of 9-grams.")
    max_duplicate_10gram_share: Share = Field(0.10, description="The same of 10-grams.")


class C4(Section):
    """Raffel et al. 2020, section 2.2; edits the text: lines are removed."""

    require_terminal: bool = True
    """Remove lines that do not end in . ! ? or a quotation mark; FineWeb leaves this off."""
    min_words_per_line: int = Field(3, ge=0, description="Remove lines of fewer words; DCLM takes 5.")
    max_word_characters: Positive = Field(1000, description="Remove lines with a longer word.")
    remove_citations: bool = Field(True, description="Remove [1], [edit] and [citation needed] from lines.")
    remove_javascript: bool = Field(True, description="Remove lines that speak of javascript.")
    remove_policy: bool = Field(True, description="Remove lines on cookies, privacy and terms of use.")
    reject_lorem_ipsum: bool = Field(True, description="Reject documents with lorem ipsum.")
    reject_curly_bracket: bool = Field(True, description="Reject documents with a {.")
    min_sentences: int = Field(5, ge=0, description="Fewest sentences in the lines that stay; DCLM takes 3.")
    min_long_lines: int = Field(0, ge=0, description="Fewest long lines; 0 asks for none, mC4 takes 3.")
    long_line_characters: Positive = Field(200, description="Characters of a long line (mC4).")


class FineWeb(Section):
    """Penedo et al. 2024, section 3.6, with the thresholds of datatrove (docs/rules.md says where they differ)."""

    min_terminal_line_share: Share = Field(0.12, description="Smallest share of lines that end in punctuation.")
    max_short_line_share: Share = Field(0.67, description="Largest share of short lines.")
    short_line_characters: Positive = Field(30, description="Characters of a short line, at most.")
    max_duplicate_character_share: Share = 0.01
    """Largest share of characters in duplicate lines; the paper has 0.1."""
    max_line_feeds_per_word: float = Field(0.3, ge=0, description="Most line feeds per word.")


class RefinedWeb(Section):
    """Penedo et al. 2023 (RefinedWeb), as DCLM rebuilt them; edits the text: lines are removed."""

    domains: str | None = Field(None, description="A file of domains, one a line, whose pages are rejected.")
    urls: str | None = Field(None, description="A file of URLs, one a line, that are rejected.")
    url_words: str | None = Field(None, description="A file of words, any of which rejects a URL.")
    url_soft_words: str | None = Field(None, description="A file of words of which several reject a URL.")
    min_url_soft_words: Positive = Field(2, description="How many different soft words reject a URL.")
    url_substrings: str | None = Field(None, description="A file of strings, any of which rejects a URL.")
    max_line_upper_share: Share = Field(0.5, description="Remove lines with a larger share of capital letters.")
    remove_numeric_lines: bool = Field(True, description="Remove lines of digits alone.")
    remove_counter_lines: bool = Field(True, description="Remove lines such as `3 likes`.")
    min_line_words: int = Field(2, ge=0, description="Remove lines of fewer words.")
    remove_phrases: bool = Field(True, description="Remove `sign-in`, `read more...`, `items in cart` in short lines.")
    max_removed_word_share: Share = 0.05
    """Reject documents that lose a larger share of their words by these corrections."""


class Nemo(Section):
    """The heuristic filters of NVIDIA NeMo Curator (its English pipeline) that other sets do not have."""

    max_non_alphanumeric_share: Share = 0.25
    """Largest share of characters but a-z, 0-9, ? ! , . and line feeds."""
    max_digit_share: Share = Field(0.15, description="Largest share of digits.")
    max_url_share: Share = Field(0.2, description="Largest share of characters in URLs.")
    max_white_space_share: Share = Field(0.25, description="Largest share of white space.")
    max_bracket_share: Share = Field(0.1, description="Largest share of brackets.")
    max_boilerplate_share: Share = Field(0.4, description="Largest share of paragraphs on cookies and policies.")
    max_unmarked_line_share: Share = Field(0.85, description="Largest share of lines without a closing mark.")
    min_distinct_line_share: Share = Field(0.7, description="Smallest share of distinct lines.")
    min_distinct_line_character_share: Share = Field(0.8, description="The same by characters.")
    min_distinct_paragraph_share: Share = Field(0.7, description="Smallest share of distinct paragraphs.")
    min_distinct_paragraph_character_share: Share = Field(0.8, description="The same by characters.")


class Textbook(Section):
    """The rules of the textbook exercise on quality filters."""

    min_characters: int = Field(200, ge=0, description="Fewest characters.")
    max_line_feeds_per_character: float = Field(0.3, ge=0, description="Most line feeds per character.")
    min_distinct_word_share: Share = Field(0.2, description="Smallest share of distinct words.")
    max_boilerplate_phrases: int = Field(2, ge=0, description="Most different boilerplate phrases.")
    boilerplate_phrases: Words = (
        "cookie",
        "privacy policy",
        "terms of service",
        "subscribe to our",
        "click here",
        "all rights reserved",
    )
    """The phrases, compared without case."""


class Code(Section):
    """The Stack and StarCoder (bigcode-project/bigcode-dataset), StarCoder2 (Lozhkov et al. 2024, section 2.1)."""

    max_lines: Positive = Field(100_000, description="Most lines.")
    max_line_length: Positive = Field(1000, description="Longest line in characters.")
    max_mean_line_length: float = Field(100.0, gt=0, description="Largest mean line in characters.")
    min_alphanumeric_share: Share = Field(0.25, description="Smallest share of letters and digits among characters.")
    min_alphabetic_share: Share = Field(0.25, description="Smallest share of letters among all characters.")
    reject_generated: bool = Field(True, description="Reject files whose first lines say that they are generated.")
    generated_markers: Words = (
        "auto-generated",
        "autogenerated",
        "automatically generated",
        "generated automatically",
        "this file is generated",
    )
    """What generated files say, compared without case."""
    generated_lines: Positive = Field(5, description="Lines in which the markers are looked for.")
    min_encoded_run: Positive = Field(64, description="Characters of base64 in a row that count as encoded data.")
    max_encoded_run: Positive = Field(1024, description="Longest run of encoded data in characters.")
    max_encoded_share: Share = Field(0.5, description="Largest share of characters in encoded data.")
    reject_xml: bool = Field(True, description="Reject XML by another name: <?xml version= in 100 characters.")
    strip_licence: bool = Field(False, description="Remove the comment at the top that names a licence or copyright.")


class Flagged(Section):
    """Words by language, and a classifier, for what is not wanted."""

    path: str | None = None
    """A file of words, one a line or a JSON list, or a folder of such files named by language (en, en.txt, en.json):
    the npm package naughty-words is one."""
    max_words: int = Field(0, ge=0, description="Flagged words that a document may have; C4 takes 0.")
    max_share: Share = Field(0.0, description="Share of flagged words that it may have; both must be exceeded.")
    classifier: str | None = Field(None, description="A fastText model (.bin or .ftz) that scores the text.")
    label: str | None = Field(None, min_length=1, description="The classifier's label for what is not wanted.")
    threshold: Share = Field(0.5, description="Documents that the classifier scores higher are rejected.")

    @model_validator(mode="after")
    def _something_to_go_by(self) -> Self:
        if self.path is None and self.classifier is None:
            raise ValueError("neither path (word lists) nor classifier is given; there is nothing to judge by")
        if (self.classifier is None) != (self.label is None):
            raise ValueError("classifier and label belong together: the model, and which of its labels is not wanted")
        return self


class Rules(Section):
    """Which documents are kept. A document that breaks a rule is rejected under that rule's name."""

    min_characters: int = Field(200, ge=0, description="Shorter documents are rejected (too_short).")
    max_characters: Positive = Field(1_000_000, description="Longer documents are rejected (too_long).")
    max_mean_line_length: float | None = Field(None, gt=0)
    """Longest mean line (else long_lines). Unset: 1,000 characters, for what looks like minified code or data only."""
    min_alphanumeric_share: Share = 0.25
    """Smallest share of letters and digits among the characters other than white space (else not_text)."""
    min_unique_line_share: Share = 0.2
    """Smallest share of distinct lines among those that are not empty (else repetitive)."""
    code: Code | None = Field(None, description="Rules for source code; on when the table is there.")
    textbook: Textbook | None = Field(None, description="The textbook's rules; on when the table is there.")
    gopher_quality: GopherQuality | None = Field(None, description="Gopher's quality rules; on with the table.")
    gopher_repetition: GopherRepetition | None = None
    """Gopher's repetition rules; on when the table is there."""
    nemo: Nemo | None = Field(None, description="NeMo Curator's rules; on when the table is there.")
    refinedweb: RefinedWeb | None = Field(None, description="RefinedWeb's rules for URLs and lines; on with the table.")
    c4: C4 | None = Field(None, description="C4's rules for lines and pages; on when the table is there.")
    fineweb: FineWeb | None = Field(None, description="FineWeb's rules; on when the table is there.")
    adult: Flagged | None = Field(None, description="Adult content; on when the table is there.")
    toxic: Flagged | None = Field(None, description="Toxic content; on when the table is there.")

    def files(self) -> list[str]:
        """Files and folders that the rules read: their content decides, so whoever hashes the rules hashes them too."""
        keys = ("domains", "urls", "url_words", "url_soft_words", "url_substrings", "path", "classifier")
        sections = (self.refinedweb, self.adult, self.toxic)
        return [path for section in sections for key in keys if (path := getattr(section, key, None))]
