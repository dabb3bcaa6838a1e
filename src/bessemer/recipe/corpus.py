"""[corpus] of the recipe: sources, extraction, language, personal data, engine, and the parts of a source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from bessemer.common import extensions
from bessemer.recipe.cleaning import Contamination, Dedup, Quality
from bessemer.recipe.rules import Rules
from bessemer.recipe.section import Positive, SbatchOptions, Section, Share, StoreOrFolder, Words, first_duplicate
from bessemer.recipe.uses import Use, built_in_classes, names_extension, takes_settings


class Extract(Section):
    """Settings for extracting text from web pages (formats html and warc)."""

    engine: Literal["resiliparse", "trafilatura"] = "resiliparse"
    main_content: bool = True
    comments: bool = False
    max_list_link_share: Share = 0.5
    max_undecodable_share: Share = 0.01
    max_html_bytes: Positive = 8 << 20


Codes = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Language(Section):
    """Language identification, and filters and splits by language. Off until `identify` is true."""

    identify: bool = False
    skip_formats: Words = ("code",)
    model: str | None = Field(None, min_length=1)
    characters: Positive = 2000
    min_score: Share = 0.65
    allowed: Words = ()
    split: Words = ()
    only_for: dict[str, Codes] = Field(default_factory=dict)

    def looks_at(self, format_: str | None) -> bool:
        """Return True if documents of a source with this `format` have their language identified. Conversations never have."""
        return self.identify and format_ not in (*self.skip_formats, "chat")

    def _complaints(self) -> Iterator[str]:
        for code in (code for code in self.split if self.allowed and code not in self.allowed):
            yield f"split names {code!r}, which is not in allowed; add it to allowed or remove it from split"
        if not self.identify and (self.allowed or self.split or self.only_for):
            yield "identify is false, so the other keys of this table have no effect; set identify = true"


PERSONAL = ("email", "ip", "card", "iban", "phone")


class Placeholders(Section):
    """The placeholders that replace personal data."""

    email: str = "<EMAIL>"
    phone: str = "<PHONE>"
    ip: str = "<IP>"
    card: str = "<CARD>"
    iban: str = "<IBAN>"
    national: str = "<NATIONAL_ID>"


class PersonalData(Section):
    """Replacement of personal data by placeholders such as <EMAIL>. Off until `kinds` lists kinds of data."""

    kinds: Words = ()
    phone_region: str | None = Field(None, pattern=r"^[A-Z]{2}$")
    placeholders: Placeholders = Placeholders()

    @property
    def numbers(self) -> tuple[str, ...]:
        """The kinds that name a validator of the library python-stdnum for identity numbers, such as us.ssn."""
        return tuple(kind for kind in self.kinds if kind not in PERSONAL)

    def _complaints(self) -> Iterator[str]:
        for kind in self.numbers:
            try:
                known = hasattr(import_module(f"stdnum.{kind.removeprefix('stdnum.')}"), "is_valid")
            except ImportError:
                known = find_spec("stdnum") is None  # reported when the corpus is built
            if not known:
                yield f"kinds: {kind!r} is neither one of {', '.join(PERSONAL)} nor a validator of python-stdnum, as 'us.ssn'"


class SlurmArray(Section):
    """Settings of the Slurm job arrays that build the corpus with engine "slurm": one array per step, one core per job."""

    sbatch: SbatchOptions = ()
    time: str = Field("24:00:00", pattern=r"^([0-9]+-)?[0-9]{1,2}:[0-9]{2}:[0-9]{2}$")
    memory: str = Field("4G", pattern=r"^[0-9]+[KMGT]i?$")
    setup: Words = ()


class Work(Section):
    """Keys of [corpus] that determine how it is built: engine, workers and storage. Only `keep_rejected` changes the result."""

    engine: Literal["local", "ray", "slurm"] = "local"
    address: str | None = Field(None, min_length=1)
    slurm: SlurmArray = SlurmArray()
    workers: int | None = Field(None, ge=1)
    storage: StoreOrFolder = None
    keep_rejected: Literal["excerpt", "text", "none"] = "excerpt"


def language_part(name: str, code: str) -> str:
    """Return the name for the documents of a source in one language, such as web-eng-latn for web and eng_Latn."""
    return f"{name}-{code.lower().replace('_', '-')}"


def reader_class(format_: str) -> Any:
    """Return the reader class for a format, the name of an extension. Raises InputError if it cannot be used."""
    return extensions.find("readers", format_).target


def is_web(format_: str) -> bool:
    """Return True if documents of a format are web pages."""
    return getattr(built_in_classes("readers").get(format_), "is_web", False)


def is_data(path: Path) -> bool:
    """Return True if the ending of a file's name tells its format, such as .jsonl."""
    return any(reader.is_guessed and reader.matches(path.name) for reader in built_in_classes("readers").values())


FIELD = re.compile(r"\{([^{}]*)\}")  # a field in a template


def text_keys(text_key: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the record fields that a source's `text_key`, a name, a list of names or a template, refers to."""
    return text_key if isinstance(text_key, tuple) else tuple(FIELD.findall(text_key)) or (text_key,)


class Source(Section):
    """A source of raw text."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    format: Annotated[str, names_extension("readers")] | None = None
    reader: Annotated[dict[str, Any], takes_settings("readers", "format")] = Field({}, validate_default=True)
    paths: tuple[str, ...] = Field(strict=False, min_length=1)
    suffixes: tuple[str, ...] | None = Field(None, strict=False)
    exclude: tuple[str, ...] = Field((), strict=False)
    anonymous: bool = False
    endpoint: str | None = Field(None, pattern=r"^https?://[^/?#@\s]+$")
    text_key: str | Words = "text"
    pair_keys: tuple[str, ...] | None = Field(None, strict=False, min_length=2)
    encoding: str | None = None
    label: str | None = Field(None, min_length=1, max_length=200)
    label_key: str | None = Field(None, min_length=1)
    weight: float | None = Field(None, gt=0)
    max_epochs: float | None = Field(None, gt=0)
    max_bytes: int | None = Field(None, gt=0)

    @model_validator(mode="before")
    @classmethod
    def _messages_by_default(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("format") != "chat":
            return values
        pair = values.get("pair_keys")
        return {"text_key": pair[-1] if isinstance(pair, list | tuple) and pair else "messages", **values}

    @field_validator("text_key")
    @classmethod
    def _names_fields(cls, key: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not key or not all(text_keys(key)):
            raise ValueError("name a field, a list of fields, or a template as '{title}: {body}'")
        return key

    def _reader(self, fact: str) -> bool:
        """Return the boolean attribute `fact`, such as "has_fields", of the source's reader class.

        It is True if the format is not set, since files may have any format, and False for a user's reader.
        """
        return self.format is None or getattr(built_in_classes("readers").get(self.format), fact, False)

    @property
    def is_chat(self) -> bool:
        """True if the source's documents are conversations (format "chat")."""
        return self.format == "chat"

    @property
    def joins_fields(self) -> bool:
        """True if a document's text is joined from several fields of a record."""
        return text_keys(self.text_key) != (self.text_key,)

    @field_validator("encoding")
    @classmethod
    def _is_encoding(cls, name: str | None) -> str | None:
        try:
            if name is not None:
                bytes(4).decode(name)
        except (LookupError, ValueError):
            raise ValueError(f"{name!r} is not a text encoding of Python, such as cp1252 or shift_jis") from None
        return name

    def _complaints(self) -> Iterator[str]:
        if self.joins_fields and (self.is_chat or not self._reader("has_fields")):
            yield f"text_key: of files of format {self.format} fields cannot be joined; name one"
        if self.reader and self.format is None:
            yield "reader: these are settings of a format; name it by format"
        if self.encoding is not None and not self._reader("has_encoding"):
            yield f"encoding: files of format {self.format} say or fix theirs; leave it out"
        if self.pair_keys is not None and not self.is_chat:
            yield f"pair_keys: they make conversations, and the format is {self.format}; set format = 'chat'"
        if self.pair_keys is not None and self.text_key != self.pair_keys[-1]:
            yield "text_key and pair_keys exclude each other: a record has messages, or fields that make a pair"
        if self.label is not None and self.label_key is not None:
            yield "label and label_key exclude each other: one class for the source, or one a record"
        if self.label_key is not None and not self._reader("has_fields"):
            yield f"label_key: files of format {self.format} have no fields; set label, the same for the whole source"


class Corpus(Work):
    """Settings for turning raw sources into clean documents."""

    sources: tuple[Source, ...] = Field((), strict=False)
    rules: Rules = Rules()
    filters: tuple[Annotated[Use, takes_settings("filters")], ...] = Field((), strict=False)
    document_seconds: float = Field(300, gt=0)
    extract: Extract = Extract()
    language: Language = Language()
    personal: PersonalData = PersonalData()
    contamination: Contamination = Contamination()
    quality: Quality = Quality()
    dedup: Dedup = Dedup()
    steps: tuple[Annotated[Use, takes_settings("global_steps")], ...] = Field((), strict=False)

    def _complaints(self) -> Iterator[str]:
        sets = [name for name, field in Rules.model_fields.items() if field.default is None]
        for name in (name for name in self.language.only_for if name not in sets):
            yield f"language.only_for names {name!r}, which is not a set of rules; choose from: {', '.join(sets)}"
        if double := first_duplicate([part for source in self.sources for part in self.parts_of(source)]):
            yield f"{double!r} names two sources, or a source and a part of one (language.split); rename one"
        edits = {
            "dedup.lines": self.dedup.lines, "corpus.quality": self.quality.on,
            "contamination.action = mask": bool(self.contamination.sets) and self.contamination.action == "mask",
        }  # fmt: skip
        for edit in (key for key, is_on in edits.items() if is_on and self.chats):
            yield f"{edit} is for running text, and source {self.chats[0]!r} holds conversations (format = chat); turn it off"

    def rules_of(self, source: Source | None, format_: str) -> Rules:
        """Return the rules for documents of a source, or of an unknown source (None), that are read in this format."""
        is_labelled = source is not None and bool(source.label or source.label_key)
        return self.rules.of_source(is_web(format_), is_labelled)

    @property
    def chats(self) -> list[str]:
        """Names of the sources of conversations."""
        return [source.name for source in self.sources if source.is_chat]

    def parts_of(self, source: Source) -> list[str]:
        """Return the names under which documents of a source are tokenized and mixed.

        They are the source's name, and with language.split also a name such as web-de for each language that is split off.
        """
        codes = self.language.split if self.language.looks_at(source.format) else ()
        return [source.name, *(language_part(source.name, code) for code in codes)]
