"""[corpus] of the recipe: raw sources to clean documents."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from bessemer.recipe.rules import Rules
from bessemer.recipe.section import Positive, Section

Format = Literal["text", "code", "html", "jsonl", "parquet", "descriptions"]


class Source(Section):
    """One source of raw text."""

    name: str = Field(
        description="Name of the source; used in shard names, metrics and reports.", pattern=r"^[a-z0-9][a-z0-9-]*$"
    )
    format: Format = Field(
        description="What the files are: text (one document a file), code (one document a file, licence header kept), "
        "html (main content extracted), jsonl or parquet (one document a record), "
        "descriptions (the long description in a Python package's METADATA file)."
    )
    paths: tuple[str, ...] = Field(
        strict=False,
        min_length=1,
        description="Files, folders (read recursively) or globs, relative to the recipe's folder; python://stdlib and "
        "python://site-packages name the folders of the running Python.",
    )
    suffixes: tuple[str, ...] | None = Field(
        None, strict=False, description="File endings taken from folders, e.g. ['.py']; each format has its default."
    )
    text_key: str = Field("text", description="Field or column that holds the text (jsonl, parquet).")
    label: str | None = Field(
        None, min_length=1, max_length=200, description="The class of every document of this source, for a classifier."
    )
    label_key: str | None = Field(
        None, min_length=1, description="Field or column that holds each document's class (jsonl, parquet)."
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="Relative share of the training tokens drawn from this source; give it for every source "
        "or for none (none: in proportion to the tokens each source has).",
    )
    max_bytes: int | None = Field(
        None,
        gt=0,
        description="Read about this many bytes and no more; which files are read is decided by the hash of "
        "their paths, so the same ones are chosen each time.",
    )

    @model_validator(mode="after")
    def _one_label(self) -> Self:
        if self.label is not None and self.label_key is not None:
            raise ValueError("label and label_key exclude each other: one class for the source, or one a record")
        if self.label_key is not None and self.format not in ("jsonl", "parquet"):
            raise ValueError(f"label_key: files of format {self.format} have no fields; give label, one a source")
        return self


class Dedup(Section):
    """Removal of documents that stand in the corpus already."""

    exact: bool = Field(
        True, description="Remove documents whose normalised text (case and white space folded) is equal."
    )
    minhash: bool = Field(True, description="Remove near duplicates by MinHash and locality-sensitive hashing.")
    bands: Positive = Field(
        14, description="Bands of the MinHash signature; 14 x 8 finds a Jaccard of 0.8 with 92% (FineWeb)."
    )
    rows: Positive = Field(8, description="Hash values in a band.")
    shingle_words: Positive = Field(5, description="Words in a shingle.")


class Corpus(Section):
    """Raw sources to clean documents."""

    sources: tuple[Source, ...] = Field((), strict=False, description="The sources of raw text.")
    rules: Rules = Field(default_factory=Rules, description="Which documents are kept.")
    dedup: Dedup = Field(default_factory=Dedup, description="Removal of duplicates.")

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are named {twice[0]!r}; give each source a name of its own")
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) != len(names):
            missing = next(name for name in names if name not in weighted)
            raise ValueError(
                f"source {missing!r} has no weight but {weighted[0]!r} has one; give a weight to all or to none"
            )
        return self
