"""[corpus.quality] of the recipe: a classifier of quality, and what its scores decide."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.section import Positive, Section, Share


class Quality(Section):
    """A classifier that tells good text from raw text, learnt from labelled sources. Off until `high` and `low`, or
    `model`, are given."""

    high: tuple[str, ...] = Field(
        (),
        strict=False,
        description="What is good: names of sources of this corpus, or run folders and .parquet, .jsonl or .txt files "
        "of examples; paths are relative to the recipe's folder.",
    )
    low: tuple[str, ...] = Field(
        (), strict=False, description="What is raw, named like `high`; as many documents are taken as from `high`."
    )
    kind: Literal["linear", "fasttext"] = Field(
        "linear",
        description="linear is trained here; fasttext scores with a trained fastText model, given by `model`.",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="A classifier to score with instead of training one: a run folder or the folder of a saved linear "
        "one, or a fastText .bin or .ftz file.",
    )
    label: str = Field(
        "__label__hq", min_length=1, description="The fastText label whose probability is the score (DCLM's model: hq)."
    )
    documents: Positive = Field(10_000, description="Documents the classifier learns from and is tested on, a side.")
    read_bytes: int = Field(
        20_000, ge=1_000, description="The classifier looks at so many bytes from the beginning of a document."
    )
    hash_bits: int = Field(
        18, ge=8, le=24, description="The bag of words and pairs of words is hashed into 2^hash_bits buckets."
    )
    l2: float = Field(1e-6, gt=0, description="Weight of the squared weights beside the mean loss of a document.")
    statistics_scale: float = Field(
        0.03,
        gt=0,
        description="Standard deviation of the document statistics beside a bag of words of length 1: the smaller, the "
        "more the words decide.",
    )
    iterations: Positive = Field(300, description="Steps of L-BFGS at the most.")
    held_out: float = Field(
        0.2,
        gt=0.0,
        lt=0.9,
        description="Share of the labelled documents kept out of training, by the hash of their identity: half of it "
        "sets the calibration, half of it tests.",
    )
    seed: int = Field(0, ge=0, description="Names the draws: which documents are learnt from, what Pareto keeps.")
    use: Literal["report", "filter", "pareto", "weight"] = Field(
        "report",
        description="What the scores do: nothing but appear in the report, reject below a limit (low_quality), reject "
        "by chance the more the lower the score (GPT-3), or weigh bands of quality in the mixture.",
    )
    sources: tuple[str, ...] = Field(
        (), strict=False, description="Sources to which `use` applies; none named: all but those of `high`."
    )
    threshold: Share | None = Field(
        None, description="filter: documents with a lower score are rejected; left out without keep_share: 0.5."
    )
    keep_share: float | None = Field(
        None, gt=0, le=1, description="filter: keep this share of the documents, those with the highest scores."
    )
    alpha: float = Field(
        9.0,
        gt=0,
        description="pareto: a document stays when a Pareto variable with this shape exceeds 1 - score (GPT-3: 9).",
    )
    band_weights: tuple[float, ...] = Field(
        (0.5, 1.0, 2.0),
        strict=False,
        min_length=2,
        max_length=9,
        description="weight: each source is cut into as many bands of equally many documents, lowest scores first; a "
        "token of a band is drawn so often relative to one of another.",
    )

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
