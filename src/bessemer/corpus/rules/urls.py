"""Rules for the URL of a document: lists of domains, URLs and words; RefinedWeb (Penedo et al. 2023, appendix).

The lists are files that the recipe names. datatrove's and DCLM's can be used as they are.
"""

from __future__ import annotations

import re
from functools import cache
from urllib.parse import urlsplit

from bessemer.corpus.rules.findings import Finding
from bessemer.corpus.rules.lists import entries
from bessemer.recipe.rules import RefinedWeb

LONGEST = 8192
"""Characters of a URL that are looked at."""
OTHERS = re.compile(r"[^a-z0-9]+")


def judge_url(url: str, settings: RefinedWeb) -> Finding | None:
    """Why a document of this URL is rejected; None when nothing speaks against it.

    A domain on the list stands for its subdomains. Words are what stands between other characters than a-z and 0-9,
    substrings are looked for with those removed, both without case: c-a-s-i-n-o hides nothing. Raises InputError for a
    list that cannot be read.
    """
    small = url[:LONGEST].lower()
    key = "corpus.rules.refinedweb"
    if settings.domains is not None:
        listed = entries(settings.domains, f"{key}.domains")
        labels = _host(small).split(".")
        for first in range(len(labels) - 1):
            if ".".join(labels[first:]) in listed:
                return Finding("refinedweb.domain", ".".join(labels[first:]))
    if settings.urls is not None:
        listed = entries(settings.urls, f"{key}.urls")
        if small in listed or small.rstrip("/") in listed or small.partition("://")[2].rstrip("/") in listed:
            return Finding("refinedweb.url", small)
    words = set(OTHERS.split(small))
    if settings.url_words is not None:
        hard = words & entries(settings.url_words, f"{key}.url_words")
        if hard:
            return Finding("refinedweb.url_word", min(hard))
    if settings.url_soft_words is not None:
        soft = words & entries(settings.url_soft_words, f"{key}.url_soft_words")
        if len(soft) >= settings.min_url_soft_words:
            return Finding("refinedweb.url_soft_words", ", ".join(sorted(soft)))
    if settings.url_substrings is not None:
        joined = OTHERS.sub("", small)
        found = next((part for part in _substrings(settings.url_substrings) if part in joined), None)
        if found:
            return Finding("refinedweb.url_substring", found)
    return None


def _host(url: str) -> str:
    try:
        return urlsplit(url if "://" in url else "//" + url).hostname or ""
    except ValueError:
        return ""


@cache
def _substrings(path: str) -> tuple[str, ...]:
    """The listed strings as they are looked for; sorted, so that the reason is the same in every run."""
    listed = entries(path, "corpus.rules.refinedweb.url_substrings")
    return tuple(sorted({OTHERS.sub("", entry) for entry in listed} - {""}))
