"""[corpus.dedup] of the recipe: what stands in the corpus already, as a whole document or as a part of one."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bessemer.recipe.section import Positive, Section, Share

FalsePositives = Annotated[float, Field(gt=0.0, lt=1.0)]


class Paragraphs(Section):
    """Removal of duplicate paragraphs (lines), by a Bloom filter as in dolma and DCLM."""

    mode: Literal["off", "paragraph", "ngram"] = Field(
        "off",
        description="paragraph: remove a paragraph that is a duplicate as a whole (dolma); ngram: remove one when of its "
        "n-grams a share of `threshold` or more did (DCLM); off: remove none.",
    )
    ngram: Positive = Field(13, description="Words in an n-gram (ngram mode); 13 as in DCLM.")
    threshold: Share = Field(
        0.8, description="Share of a paragraph's n-grams that must be repeated for it to be removed (ngram mode)."
    )
    min_words: Positive = Field(
        13, description="Paragraphs of fewer words are left alone: headings, list items, closing brackets."
    )
    false_positive: FalsePositives = Field(
        0.01, description="Chance that the full filter takes a new paragraph or n-gram for a repeated one."
    )
    max_memory_mib: Positive = Field(
        1024, description="The filter's largest size in MiB; a corpus that needs a larger one is refused beforehand."
    )


class Substrings(Section):
    """Removal of long repeated spans, anywhere in a document (Lee et al. 2022, exact substring)."""

    unit: Literal["off", "words", "bytes"] = Field(
        "off", description="What a span is counted in: words (case folded) or bytes of UTF-8; off: remove none."
    )
    min_tokens: int = Field(50, ge=2, description="Shortest repeated span that is removed, in words or bytes.")
    max_memory_mib: Positive = Field(
        512, description="Memory in MiB for the tables; a corpus that needs more is worked on in several passes."
    )


class Dedup(Section):
    """Removal of documents that stand in the corpus already."""

    exact: bool = Field(
        True, description="Remove documents whose normalised text (case and white space folded) is equal."
    )
    minhash: bool = Field(True, description="Remove near duplicates by MinHash and locality-sensitive hashing.")
    bands: Positive = Field(
        20,
        description="Bands of the MinHash signature; 20 x 7 finds a Jaccard of 0.8 with 99.1%, 14 x 8 (FineWeb) with 92%.",
    )
    rows: Positive = Field(7, description="Hash values in a band.")
    shingle: Literal["words", "characters"] = Field("words", description="What a shingle is a run of.")
    shingle_words: Positive = Field(5, description="Words in a shingle.")
    shingle_characters: Positive = Field(
        24, description="Characters in a shingle when shingle = 'characters'; 24 as in NeMo Curator."
    )
    min_jaccard: Share = Field(
        0.8,
        description="Documents in one bucket are linked from this Jaccard on: the true one, or with verify = false one "
        "estimated from the signatures (of 140 values, to within 0.034).",
    )
    verify: bool = Field(
        True,
        description="Read the candidates' texts again and compute the Jaccard of their shingles; false: go by the "
        "estimate, which needs no second reading but errs on both sides of min_jaccard.",
    )
    keep: Literal["longest", "quality", "first-source"] = Field(
        "longest",
        description="Which of a group stays: the longest text, the one with the highest quality score, or the one whose "
        "source stands first in the recipe; then the longest, then the smallest identity.",
    )
    within_source: bool = Field(
        False, description="Compare documents of the same source only; what two sources share stays in both."
    )
    against: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Earlier corpora (run folders, or folders of documents), relative to the recipe's folder; what stands "
        "in them already is removed.",
    )
    memory_mib: Positive = Field(
        512,
        description="Memory in MiB for sorting and comparing; the columns of the documents come on top (docs/dedup.md).",
    )
    paragraphs: Paragraphs = Field(default_factory=Paragraphs, description="Removal of repeated paragraphs.")
    substrings: Substrings = Field(default_factory=Substrings, description="Removal of repeated long spans.")
