"""Gopher's rules for quality and repetition: Rae et al. 2021, appendix A and its table A1.

Counted as datatrove counts (pipeline/filters/gopher_quality_filter.py, gopher_repetition_filter.py), with its word
splitting; the order of the rules is its order too, so that reasons can be compared.
"""

from __future__ import annotations

from bessemer.corpus.rules.counts import STOP_WORDS, Statistics
from bessemer.corpus.rules.findings import Finding, against
from bessemer.recipe.rules import GopherQuality, GopherRepetition


def quality(statistics: Statistics, settings: GopherQuality) -> Finding | None:
    """Length, mean word, symbols, bullets, ellipses, letters and stop words."""
    words = statistics.words if settings.stop_words == STOP_WORDS else statistics.words_with(settings.stop_words)
    if words.proper < settings.min_words:
        return Finding("gopher_quality.few_words", f"{against(words.proper, settings.min_words)} words")
    if words.proper > settings.max_words:
        return Finding("gopher_quality.many_words", f"{against(words.proper, settings.max_words)} words")
    mean = words.proper_characters / max(words.proper, 1)
    if mean < settings.min_mean_word_length:
        return Finding(
            "gopher_quality.short_words", f"mean word of {against(mean, settings.min_mean_word_length)} characters"
        )
    if mean > settings.max_mean_word_length:
        return Finding(
            "gopher_quality.long_words", f"mean word of {against(mean, settings.max_mean_word_length)} characters"
        )
    num_words = max(words.total, 1)
    characters = statistics.characters
    if characters.hashes / num_words > settings.max_hashes_per_word:
        return Finding(
            "gopher_quality.hashes",
            f"{against(characters.hashes / num_words, settings.max_hashes_per_word, 3)} signs # per word",
        )
    if characters.ellipses / num_words > settings.max_ellipses_per_word:
        return Finding(
            "gopher_quality.ellipses",
            f"{against(characters.ellipses / num_words, settings.max_ellipses_per_word, 3)} ellipses per word",
        )
    lines, bullets, ellipses = statistics.bullets_and_ellipses
    if bullets / max(lines, 1) > settings.max_bullet_line_share:
        return Finding(
            "gopher_quality.bullet_lines",
            f"{against(bullets / lines, settings.max_bullet_line_share)} of the lines begin with a bullet",
        )
    if ellipses / max(lines, 1) > settings.max_ellipsis_line_share:
        return Finding(
            "gopher_quality.ellipsis_lines",
            f"{against(ellipses / lines, settings.max_ellipsis_line_share)} of the lines end with an ellipsis",
        )
    alphabetic = words.alphabetic / (num_words if settings.marks_are_words else max(words.proper, 1))
    if alphabetic < settings.min_alphabetic_word_share:
        return Finding(
            "gopher_quality.alphabetic_words",
            f"{against(alphabetic, settings.min_alphabetic_word_share)} of the words have a letter",
        )
    if words.stop_words < settings.min_stop_words:
        return Finding(
            "gopher_quality.stop_words", f"{against(words.stop_words, settings.min_stop_words)} different stop words"
        )
    return None


def repetition(statistics: Statistics, settings: GopherRepetition) -> Finding | None:
    """Repeated paragraphs, lines and n-grams; shares are of all characters."""
    total = max(len(statistics.codes), 1)
    paragraphs = statistics.repeated_paragraphs
    lines = statistics.repeated_lines
    for name, share, limit in (
        ("paragraphs", paragraphs.duplicates / paragraphs.total, settings.max_duplicate_paragraph_share),
        (
            "paragraph_characters",
            paragraphs.duplicate_characters / total,
            settings.max_duplicate_paragraph_character_share,
        ),
        ("lines", lines.duplicates / lines.total, settings.max_duplicate_line_share),
        ("line_characters", lines.duplicate_characters / total, settings.max_duplicate_line_character_share),
    ):
        if share > limit:
            what = name.partition("_")[0]
            of = "characters stand in" if name.endswith("characters") else f"{what} are"
            return Finding(f"gopher_repetition.{name}", f"{against(share, limit)} of the {of} {what} that stood before")
    for n, limit in (
        (2, settings.max_top_2gram_share),
        (3, settings.max_top_3gram_share),
        (4, settings.max_top_4gram_share),
    ):
        share = statistics.top_ngram_characters(n) / total
        if share > limit:
            return Finding(
                f"gopher_repetition.top_{n}gram", f"{against(share, limit)} of the text is one run of {n} words"
            )
    for n, limit in (
        (5, settings.max_duplicate_5gram_share),
        (6, settings.max_duplicate_6gram_share),
        (7, settings.max_duplicate_7gram_share),
        (8, settings.max_duplicate_8gram_share),
        (9, settings.max_duplicate_9gram_share),
        (10, settings.max_duplicate_10gram_share),
    ):
        share = statistics.repeated_ngram_characters(n) / total
        if share > limit:
            return Finding(
                f"gopher_repetition.duplicate_{n}grams",
                f"{against(share, limit)} of the text in repeated runs of {n} words",
            )
    return None
