"""Under which names the documents of a source are tokenised, mixed and reported: its own, or those of its parts.

Two tables of [corpus] cut a source into parts: language.split (by language) and quality.use = "weight" (by band of
quality). Which parts there can be follows from the recipe alone; which there are, from the documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bessemer.recipe.corpus import Corpus, Source


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


def parts_of(corpus: Corpus, source: Source) -> dict[str, Part]:
    """Every part that a source can have, by name. Its own name stands for what falls into no other."""
    names = [source.name]
    if corpus.language.identify and source.format not in corpus.language.skip_formats:
        names += [language_part(source.name, code) for code in corpus.language.split]
    parts = {name: Part(source.name) for name in names}
    if is_banded(corpus, source.name):
        for name in names:
            for band, weight in enumerate(corpus.quality.band_weights):
                parts[band_part(name, band)] = Part(source.name, weight)
    return parts


def is_banded(corpus: Corpus, name: str) -> bool:
    """Whether the documents of a source are put into bands of quality."""
    of = corpus.quality
    judged = name in of.sources if of.sources else name not in of.high
    return of.on and of.use == "weight" and judged
