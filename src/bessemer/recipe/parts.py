"""Under which names the documents of a source are tokenised, mixed and reported: its own, or those of its parts.

Two tables of [corpus] cut a source into parts: language.split (by language) and quality.use = "weight" (by band of
quality). Which parts there can be follows from the recipe alone; which there are, from the documents.
"""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.recipe.language import Language
from bessemer.recipe.quality import Quality


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
