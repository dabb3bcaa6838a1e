"""[corpus.contamination], [corpus.dedup] and [corpus.quality] of the recipe: which documents and passages are removed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Share, Words, repeated


class EvaluationSet(Section):
    """One evaluation set to look for."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="Name of the set, in tables and metadata.")
    path: str = Field(min_length=1)
    """A .jsonl (also .gz, .zst), .parquet or .txt file (one item a line) with the set's items."""
    fields: Words = ()
    """Fields or columns whose text is looked for, each by itself, e.g. ['question', 'answer']; a list gives one text an
    entry. Needed for jsonl and parquet."""

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

    sets: tuple[EvaluationSet, ...] = Field((), strict=False, description="Evaluation sets to look for.")
    action: Literal["drop", "mask", "report"] = "drop"
    """What happens to a document that holds a set's text: drop (rejected as contaminated), mask (the text found is
    replaced) or report (counted only)."""
    ngram: int = Field(13, ge=2, le=64, description="Words in a row that match (GPT-3's 13; datatrove takes 12).")
    min_words: Positive = 8
    """A text shorter than ngram words is looked for as a whole, if it has this many words (GPT-3's least n is 8);
    shorter ones would be found everywhere and are left out, and counted."""
    min_share: Share = 0.0
    """Share of an item's n-grams that a document must hold for a match; 0: one n-gram is enough."""
    mask: str = Field("", description="What stands where text was masked (action mask).")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if twice := repeated([evaluation_set.name for evaluation_set in self.sets]):
            raise ValueError(f"two evaluation sets are named {twice!r}; give each a name of its own")
        if self.min_words > self.ngram:
            raise ValueError(
                f"min_words is {self.min_words} but ngram only {self.ngram}; no text could be too short for one"
            )
        return self


FalsePositives = Annotated[float, Field(gt=0.0, lt=1.0)]


class Paragraphs(Section):
    """Removal of duplicate paragraphs (lines), by a Bloom filter as in dolma and DCLM."""

    mode: Literal["off", "paragraph", "ngram"] = "off"
    """paragraph: remove a paragraph that is a duplicate as a whole (dolma); ngram: remove one when of its n-grams a
    share of `threshold` or more did (DCLM); off: remove none."""
    ngram: Positive = Field(13, description="Words in an n-gram (ngram mode); 13 as in DCLM.")
    threshold: Share = 0.8
    """Share of a paragraph's n-grams that must be repeated for it to be removed (ngram mode)."""
    min_words: Positive = Field(13, description="Shorter paragraphs are left alone: headings, list items, brackets.")
    false_positive: FalsePositives = 0.01
    """Chance that the full filter takes a new paragraph or n-gram for a repeated one."""
    max_memory_mib: Positive = 1024
    """The filter's largest size in MiB; a corpus that needs a larger one is refused beforehand."""


class Substrings(Section):
    """Removal of long repeated spans, anywhere in a document (Lee et al. 2022, exact substring)."""

    unit: Literal["off", "words", "bytes"] = "off"
    """What a span is counted in: words (case folded) or bytes of UTF-8; off: remove none."""
    min_tokens: int = Field(50, ge=2, description="Shortest repeated span that is removed, in words or bytes.")
    max_memory_mib: Positive = 512
    """Memory in MiB for the tables; a corpus that needs more is worked on in several passes."""


class Dedup(Section):
    """Removal of documents that stand in the corpus already."""

    exact: bool = Field(True, description="Remove documents whose text is equal but for case and white space.")
    minhash: bool = Field(True, description="Remove near duplicates by MinHash and locality-sensitive hashing.")
    bands: Positive = 20
    """Bands of the MinHash signature; 20 x 7 finds a Jaccard of 0.8 with 99.1%, 14 x 8 (FineWeb) with 92%."""
    rows: Positive = Field(7, description="Hash values in a band.")
    shingle: Literal["words", "characters"] = Field("words", description="What a shingle is a run of.")
    shingle_words: Positive = Field(5, description="Words in a shingle.")
    shingle_characters: Positive = Field(24, description="Characters in a shingle of characters; 24 as in NeMo.")
    min_jaccard: Share = 0.8
    """Documents in one bucket are linked from this Jaccard on: the true one, or with verify = false one estimated from
    the signatures (of 140 values, to within 0.034)."""
    verify: bool = True
    """Read the candidates' texts again and compute the Jaccard of their shingles; false: go by the estimate, which
    needs no second reading but errs on both sides of min_jaccard."""
    keep: Literal["longest", "quality", "first-source"] = "longest"
    """Which of a group stays: the longest text, the one with the highest quality score, or the one whose source stands
    first in the recipe; then the longest, then the smallest identity."""
    within_source: bool = Field(False, description="Compare documents of the same source only, not between sources.")
    against: tuple[str, ...] = Field((), strict=False)
    """Earlier corpora (run folders, or folders of documents) whose documents are removed from this one."""
    memory_mib: Positive = 512
    """Memory in MiB for sorting and comparing; the columns of the documents come on top (docs/dedup.md)."""
    paragraphs: Paragraphs = Field(Paragraphs(), description="Removal of repeated paragraphs.")
    substrings: Substrings = Field(Substrings(), description="Removal of repeated long spans.")


class Quality(Section):
    """A classifier that tells good text from raw text, learnt from labelled sources. Off until `high` and `low`, or
    `model`, are given."""

    high: tuple[str, ...] = Field((), strict=False)
    """What is good: names of sources of this corpus, or run folders and .parquet, .jsonl or .txt files of examples;
    paths are relative to the recipe's folder."""
    low: tuple[str, ...] = Field((), strict=False)
    """What is raw, named like `high`; as many documents are taken as from `high`."""
    kind: Literal["linear", "fasttext"] = "linear"
    """linear is trained here; fasttext scores with a trained fastText model, given by `model`."""
    model: str | None = Field(None, min_length=1)
    """A classifier to use instead of training one: a run folder, a saved linear one, or a fastText .bin or .ftz."""
    label: str = Field("__label__hq", min_length=1, description="fastText label that the score is of (DCLM's hq).")
    documents: Positive = Field(10_000, description="Documents the classifier learns from and is tested on, a side.")
    read_bytes: int = Field(20_000, ge=1_000, description="Bytes the classifier reads from a document's beginning.")
    hash_bits: int = Field(18, ge=8, le=24, description="Words and pairs of words are hashed into 2^hash_bits buckets.")
    l2: float = Field(1e-6, gt=0, description="Weight of the squared weights beside the mean loss of a document.")
    statistics_scale: float = Field(0.03, gt=0)
    """Standard deviation of document statistics beside a bag of words of length 1; small: words decide."""
    iterations: Positive = Field(300, description="Steps of L-BFGS at the most.")
    held_out: float = Field(0.2, gt=0.0, lt=0.9)
    """Share of the labelled documents kept out of training, half to calibrate on and half to test on."""
    seed: int = Field(0, ge=0, description="Names the draws: which documents are learnt from, what Pareto keeps.")
    use: Literal["report", "filter", "pareto", "weight"] = "report"
    """What the scores do: nothing but appear in the report, reject below a limit (low_quality), reject by chance the
    more the lower the score (GPT-3), or weigh bands of quality in the mixture."""
    sources: tuple[str, ...] = Field((), strict=False)
    """Sources to which `use` applies; none named: all but those of `high`."""
    threshold: Share | None = None
    """filter: documents with a lower score are rejected; left out without keep_share: 0.5."""
    keep_share: float | None = Field(None, gt=0, le=1)
    """filter: keep this share of the documents, those with the highest scores."""
    alpha: float = Field(9.0, gt=0)
    """pareto: a document stays when a Pareto variable with this shape exceeds 1 - score (GPT-3: 9)."""
    band_weights: tuple[float, ...] = Field((0.5, 1.0, 2.0), strict=False, min_length=2, max_length=9)
    """weight: each source is cut into as many bands of equally many documents, lowest scores first; a token of a band
    is drawn so often relative to one of another."""

    @property
    def on(self) -> bool:
        """Whether there is anything to score with."""
        return bool(self.model or self.high)

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if bool(self.high) != bool(self.low):
            missing = "low" if self.high else "high"
            raise ValueError(f"{missing} names nothing; a classifier needs examples of both, high and low")
        both = sorted(set(self.high) & set(self.low))
        if both:
            raise ValueError(f"{both[0]!r} stands in high and in low; a document is an example of one")
        if self.kind == "fasttext" and self.model is None:
            raise ValueError("kind fasttext scores with a trained model; name its .bin or .ftz file as model")
        if self.threshold is not None and self.keep_share is not None:
            raise ValueError("threshold and keep_share exclude each other: a limit on the score, or on the documents")
        if any(weight <= 0 for weight in self.band_weights):
            raise ValueError("band_weights are above 0; what is never to be drawn is rejected by use = 'filter'")
        return self
