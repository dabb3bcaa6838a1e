"""[corpus.contamination], [corpus.dedup] and [corpus.quality] of the recipe: removal of documents and passages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from bessemer.recipe.section import Positive, Section, Share, Words, first_duplicate


class EvaluationSet(Section):
    """An evaluation set, whose text is searched for in the corpus to find contamination."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    path: str = Field(min_length=1)
    fields: Words = ()

    def _complaints(self) -> Iterator[str]:
        name = Path(self.path).name.lower()
        if not name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".txt")):
            yield f"path: {self.path}: an evaluation set is a .jsonl, .jsonl.gz, .jsonl.zst, .parquet or .txt file"
        if name.endswith(".txt") and self.fields:
            yield "fields: a .txt file has no fields; remove the key"
        if not name.endswith(".txt") and not self.fields:
            yield "fields: not set; name the fields with the text, such as fields = ['question']"


class Contamination(Section):
    """Search for the text of evaluation sets in the corpus. Off until a set is listed."""

    sets: tuple[EvaluationSet, ...] = Field((), strict=False)
    action: Literal["drop", "mask", "report"] = "drop"
    ngram: int = Field(13, ge=2, le=64)
    min_words: Positive = 8
    min_share: Share = 0.0
    mask: str = ""

    def _complaints(self) -> Iterator[str]:
        if twice := first_duplicate([evaluation_set.name for evaluation_set in self.sets]):
            yield f"two evaluation sets are named {twice!r}; give each a different name"
        if self.min_words > self.ngram:
            yield f"min_words is {self.min_words} but ngram is {self.ngram}; set min_words to at most ngram"


class Dedup(Section):
    """Removal of duplicate documents and lines."""

    exact: bool = True
    minhash: bool = True
    bands: Positive = 20
    rows: Positive = 7
    shingle: Literal["script", "words", "characters"] = "script"
    shingle_words: Positive = 5
    shingle_characters: Positive = 24
    min_jaccard: Share = 0.8
    verify: bool = True
    keep: Literal["longest", "quality", "first-source"] = "longest"
    within: Literal["corpus", "source", "crawl"] = "corpus"
    against: tuple[str, ...] = Field((), strict=False)
    memory_mib: Positive = 512
    lines: bool = False
    line_words: Positive = 13


class Quality(Section):
    """A classifier of text quality, trained on labelled sources or loaded. Off until `high` and `low`, or `model`, are
    set."""

    high: tuple[str, ...] = Field((), strict=False)
    low: tuple[str, ...] = Field((), strict=False)
    kind: Literal["linear", "fasttext"] = "linear"
    model: str | None = Field(None, min_length=1)
    label: str = Field("__label__hq", min_length=1)
    documents: Positive = 10_000
    read_bytes: int = Field(20_000, ge=1_000)
    hash_bits: int = Field(18, ge=8, le=24)
    held_out: float = Field(0.2, gt=0.0, lt=0.9)
    seed: int = Field(0, ge=0)
    use: Literal["report", "filter"] = "report"
    sources: tuple[str, ...] = Field((), strict=False)
    threshold: Share | None = None
    keep_share: float | None = Field(None, gt=0, le=1)

    @property
    def on(self) -> bool:
        """True if the recipe sets up a quality classifier, so that documents get a score."""
        return bool(self.model or self.high)

    def _complaints(self) -> Iterator[str]:
        if bool(self.high) != bool(self.low):
            missing = "low" if self.high else "high"
            yield f"{missing} is empty; list examples under both high and low"
        both = sorted(set(self.high) & set(self.low))
        if both:
            yield f"{both[0]!r} is in both high and low; remove it from one"
        if self.kind == "fasttext" and self.model is None:
            yield "kind = fasttext needs a trained model; set model to its .bin or .ftz file"
        if self.threshold is not None and self.keep_share is not None:
            yield "threshold and keep_share exclude each other; remove one"
