"""The rules of the textbook exercise on quality filters: length, line breaks, distinct words, boilerplate phrases."""

from __future__ import annotations

from bessemer.corpus.rules.counts import Statistics
from bessemer.corpus.rules.findings import Finding, against
from bessemer.recipe.rules import Textbook


def judge(statistics: Statistics, settings: Textbook) -> Finding | None:
    """Words are what white space separates, without case."""
    text = statistics.text
    if len(text) < settings.min_characters:
        return Finding("textbook.characters", f"{against(len(text), settings.min_characters)} characters")
    share = text.count("\n") / max(len(text), 1)
    if share > settings.max_line_feeds_per_character:
        return Finding(
            "textbook.line_feeds", f"{against(share, settings.max_line_feeds_per_character)} line feeds per character"
        )
    small = text.lower()
    words = small.split()
    share = len(set(words)) / max(len(words), 1)
    if share < settings.min_distinct_word_share:
        return Finding(
            "textbook.distinct_words", f"{against(share, settings.min_distinct_word_share)} of the words are distinct"
        )
    phrases = [phrase for phrase in settings.boilerplate_phrases if phrase.lower() in small]
    if len(phrases) > settings.max_boilerplate_phrases:
        return Finding("textbook.boilerplate", ", ".join(phrases))
    return None
