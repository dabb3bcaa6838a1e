"""Adult and toxic content: word lists by language, and a classifier.

The lists are not part of this project: the npm package naughty-words (CC-BY-4.0) has the List of Dirty, Naughty,
Obscene and Otherwise Bad Words in 28 languages, which C4 rejects by (Raffel et al. 2020, section 2.2).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from bessemer.corpus.rules.findings import Finding, against
from bessemer.corpus.rules.lists import entries, language_file
from bessemer.errors import InputError
from bessemer.recipe.rules import Flagged

WORD = re.compile(r"\w+")
UNSPACED = ("ja", "th", "zh")
"""Languages without spaces between words: entries are looked for anywhere."""
NOT_ALONE = {"ja": {"sm", "グロ", "女の子"}, "zh": {"性"}}
"""Entries that are part of common words; datatrove leaves out the same (c4_filters.py)."""
CLASSIFIED_CHARACTERS = 100_000
"""Characters of a text that a classifier reads: a model of bags of words has seen enough."""


def judge(text: str, name: str, settings: Flagged, language: str) -> Finding | None:
    """`name` is the set, adult or toxic; a language without a list is judged by the classifier alone."""
    if settings.path is not None:
        found = _judge_words(text, name, settings, settings.path, language)
        if found is not None:
            return found
    if settings.classifier is not None:
        score = _score(settings.classifier, settings.label or "", name, text)
        if score > settings.threshold:
            return Finding(f"{name}.classifier", f"score {against(score, settings.threshold)}")
    return None


def _judge_words(text: str, name: str, settings: Flagged, path: str, language: str) -> Finding | None:
    key = f"corpus.rules.{name}.path"
    file = language_file(path, language, key)
    if file is None:
        return None
    small = text.lower()
    if language in UNSPACED:
        listed = entries(file, key) - NOT_ALONE.get(language, set())
        number, of = sum(small.count(entry) for entry in listed), max(len(text), 1)
    else:
        words = WORD.findall(small)
        number, of = _count(words, _phrases(file, key)), max(len(words), 1)
    if number > settings.max_words and number / of > settings.max_share:
        return Finding(
            f"{name}.words", f"{number} flagged words, {against(number / of, settings.max_share, 4)} of the text"
        )
    return None


@cache
def _phrases(file: str, key: str) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Entries as words, by their first word, the longest first."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for entry in entries(file, key):
        words = tuple(WORD.findall(entry))
        if words:
            found.setdefault(words[0], []).append(words)
    return {
        first: tuple(sorted(set(phrases), key=lambda phrase: (-len(phrase), phrase)))
        for first, phrases in found.items()
    }


def _count(words: list[str], phrases: dict[str, tuple[tuple[str, ...], ...]]) -> int:
    """Entries that occur, each where it begins."""
    number = 0
    for first in phrases.keys() & set(words):
        longest = max(map(len, phrases[first]))
        if longest == 1:
            number += words.count(first)
            continue
        for at, word in enumerate(words):
            if word == first:
                here = words[at : at + longest]
                number += any(tuple(here[: len(phrase)]) == phrase for phrase in phrases[first])
    return number


@cache
def _model(path: str, name: str) -> Any:
    key = f"corpus.rules.{name}.classifier"
    try:
        import fasttext
    except ImportError:
        raise InputError(f"{key}: fastText is not installed; pip install 'bessemer[corpus]'") from None
    try:
        return fasttext.load_model(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"{key}: {path} cannot be loaded as a fastText model: {error}") from None


def _score(path: str, label: str, name: str, text: str) -> float:
    """The model's probability of the label; 0 when it does not give one."""
    line = " ".join(text[:CLASSIFIED_CHARACTERS].split())
    labels, scores = _model(path, name).predict(line, k=-1)
    wanted = {label, f"__label__{label}"}
    return float(sum(score for found, score in zip(labels, scores, strict=True) if found in wanted))
