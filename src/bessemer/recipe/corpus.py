"""[corpus] of the recipe: raw sources to clean documents."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from bessemer.recipe.contamination import Contamination
from bessemer.recipe.dedup import Dedup
from bessemer.recipe.extract import Extract
from bessemer.recipe.language import Language
from bessemer.recipe.parts import Part, parts_of
from bessemer.recipe.personal import PersonalData
from bessemer.recipe.quality import Quality
from bessemer.recipe.rules import Rules
from bessemer.recipe.section import Section
from bessemer.recipe.work import Work

Format = Literal["text", "code", "html", "warc", "mediawiki", "jsonl", "parquet", "descriptions"]


class Source(Section):
    """One source of raw text."""

    name: str = Field(
        description="Name of the source; used in shard names, metrics and reports.", pattern=r"^[a-z0-9][a-z0-9-]*$"
    )
    format: Format | None = Field(
        None,
        description="What the files are: text (one document a file), code (one document a file, licence header kept), "
        "html (main content extracted), warc (the HTML pages of a crawl), mediawiki (the articles of an XML dump), "
        "jsonl (one document a record of JSON lines, a JSON array or CSV), parquet (one document a row), "
        "descriptions (the long description in a Python package's METADATA file); left out: each file's by its ending.",
    )
    paths: tuple[str, ...] = Field(
        strict=False,
        min_length=1,
        description="Files, folders (read recursively) or globs, relative to the recipe's folder; s3://, gs:// and "
        "hf://datasets/ URLs; python://stdlib and python://site-packages name the folders of the running Python.",
    )
    suffixes: tuple[str, ...] | None = Field(
        None,
        strict=False,
        description="File endings taken from folders in the place of the format's own, e.g. ['.py'], in any case.",
    )
    exclude: tuple[str, ...] = Field(
        (),
        strict=False,
        description="Names of files and folders that are left out wherever they stand below `paths`, as patterns, e.g. "
        "['node_modules', 'vendor', '*.min.js'].",
    )
    anonymous: bool = Field(False, description="Read s3:// and gs:// URLs without credentials: public buckets.")
    endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/?#@\s]+$",
        description="Address of the object store for s3:// and gs:// URLs when it is not Amazon's or Google's, e.g. "
        "http://127.0.0.1:9000.",
    )
    text_key: str = Field(
        "text",
        description="Field or column that holds the text (jsonl, parquet); dots lead into nested ones, e.g. 'data.text'.",
    )
    encoding: str | None = Field(
        None,
        description="Encoding of what is not UTF-8, by Python's names: cp1252, cp850, koi8-r, shift_jis, ... What is UTF-8, and "
        "UTF-16 that shows itself as such, is read as that all the same.",
    )
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
    max_epochs: float | None = Field(
        None, gt=0, description="How often this source may be read over the whole run; wins over tokens.max_epochs."
    )
    max_bytes: int | None = Field(
        None,
        gt=0,
        description="Read about this many bytes and no more; which files are read is decided by the hash of "
        "their paths, so the same ones are chosen each time.",
    )

    @field_validator("encoding")
    @classmethod
    def _is_encoding(cls, name: str | None) -> str | None:
        try:
            if name is not None:
                bytes(4).decode(name)
        except (LookupError, ValueError):
            raise ValueError(
                f"{name!r} is no encoding of text that Python knows; common ones: cp1252 (Western Europe, Windows), cp850 (DOS), "
                "iso8859-2, koi8-r, cp1251, shift_jis, gb18030, utf-16-le"
            ) from None
        return name

    @model_validator(mode="after")
    def _encoding_of_text(self) -> Self:
        if self.encoding is not None and self.format in ("warc", "mediawiki", "descriptions"):
            raise ValueError(f"encoding: files of format {self.format} say or fix theirs; leave it out")
        return self

    @model_validator(mode="after")
    def _one_label(self) -> Self:
        if self.label is not None and self.label_key is not None:
            raise ValueError("label and label_key exclude each other: one class for the source, or one a record")
        if self.label_key is not None and self.format not in ("jsonl", "parquet", None):
            raise ValueError(f"label_key: files of format {self.format} have no fields; give label, one a source")
        return self


class Corpus(Work):
    """Raw sources to clean documents."""

    sources: tuple[Source, ...] = Field((), strict=False, description="The sources of raw text.")
    rules: Rules = Field(default_factory=Rules, description="Which documents are kept.")
    extract: Extract = Field(default_factory=Extract, description="How text is taken out of web pages.")
    language: Language = Field(
        default_factory=Language, description="Which languages are kept, and what differs by language."
    )
    personal: PersonalData = Field(
        default_factory=PersonalData, description="Personal data that is replaced by placeholders."
    )
    contamination: Contamination = Field(
        default_factory=Contamination, description="Text of evaluation sets that must not be trained on."
    )
    quality: Quality = Field(
        default_factory=Quality, description="A classifier of quality, and what its scores decide."
    )
    dedup: Dedup = Field(default_factory=Dedup, description="Removal of duplicates.")

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two sources are named {twice[0]!r}; give each source a name of its own")
        sets = [name for name, field in Rules.model_fields.items() if field.default is None]
        strange = [name for name in self.language.only_for if name not in sets]
        if strange:
            raise ValueError(
                f"language.only_for names {strange[0]!r}, which is no set of rules; there are: {', '.join(sets)}"
            )
        made = [part for source in self.sources for part in self.parts_of(source)]
        double = sorted({name for name in made if made.count(name) > 1})
        if double:
            raise ValueError(
                f"{double[0]!r} would be two things: a source, and a part of one (language.split, quality.use = 'weight'); "
                "rename the source"
            )
        weighted = [source.name for source in self.sources if source.weight is not None]
        if weighted and len(weighted) != len(names):
            missing = next(name for name in names if name not in weighted)
            raise ValueError(
                f"source {missing!r} has no weight but {weighted[0]!r} has one; give a weight to all or to none"
            )
        return self

    def parts_of(self, source: Source) -> dict[str, Part]:
        """The names under which documents of a source can be tokenised and mixed."""
        return parts_of(source.name, source.format, self.language, self.quality)
