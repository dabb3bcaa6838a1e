"""The funnel: documents in, kept, and rejected by reason, as counts that must add up and as lines for the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, TypeAlias

from bessemer.common.console import counted, size
from bessemer.corpus.extract.webpage import DAMAGE, EXTRACTION
from bessemer.corpus.filters import chain
from bessemer.corpus.filters.chain import ADVICE, PASSED_OVER, REASONS, REJECTED, Tally
from bessemer.corpus.readers.files import Listing, ending
from bessemer.recipe import Corpus

EXAMPLES = 4  # per reason; the first of each file by identity, so that every build has the same ones
EXAMPLE_KEYS = ("identity", "path", "place", "url", "excerpt", "detail")
MAX_LINES = 5  # lines of the funnel to show; the last one sums up the rest
EXAMPLE_CHARACTERS = 200  # maximum length of an example in a line of the funnel
DAMAGED = ("unreadable", "bad_record")  # always shown first
# Tables of published rows: documents and bytes of clean text in UTF-8; bytes of rejected documents by reason; kept and rejected
# documents by the exponent of the largest power of two in their length in characters, for an unreadable document the length of
# its readable excerpt; kept documents by language, "" if not identified
KEPT, REJECTED_BYTES, LENGTHS, LENGTHS_REJECTED = "kept", "rejected_bytes", "lengths", "lengths_rejected"
LANGUAGES = "languages"
# reason -> {identity, path, place, url, excerpt, detail} of some rejected documents
Examples: TypeAlias = "dict[str, list[dict[str, str]]]"


@dataclass
class Funnel:
    """The counts of the documents of one source that are read, kept, and rejected by each filter and step.

    Attributes:
        source: Name of the source.
        format: Format of its files, as reports show it.
        files: Number of files that it reads.
        cleaned: Counts of the filters.
        published: Counts of what is published: the tables INPUT, KEPT, REJECTED, REJECTED_BYTES, LENGTHS,
            LENGTHS_REJECTED and LANGUAGES.
        examples: Some rejected documents by reason, each a dict with EXAMPLE_KEYS.
        steps: A dict {step, documents_in, rejected} for each filter and step.
        not_read: Files in the source's folders that no source reads: ending -> {files, bytes, example}.
    """

    source: str
    format: str
    files: int
    cleaned: Tally = field(default_factory=Tally)
    published: Tally = field(default_factory=Tally)
    examples: Examples = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    not_read: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, receipt: dict[str, Any]) -> None:
        """Add the counts of a published bucket, and its examples of rejected documents if there is room.

        `receipt` is the result dict of its `PublishBucket` task. Add buckets in ascending order of identities, so that
        the examples are the same in every build.
        """
        self.published.merge(receipt["counts"])
        add_examples(self.examples, receipt["examples"])

    def count_not_read(self, name: str, num_bytes: int) -> None:
        """Count a file, with its name and size in bytes, that no source reads."""
        entry = self.not_read.setdefault(ending(name), {"files": 0, "bytes": 0, "example": name})
        entry["files"] += 1
        entry["bytes"] += num_bytes

    def top_reasons(self) -> str:
        """Return the most common reasons with counts and the detail of an example, for an error message; "" for none."""
        rejected = self.published[REJECTED]
        shown = [
            f"{reason} {rejected[reason]} ({where_and_why(self.examples[reason][0])})"
            for reason in commonest(rejected)[:3]
        ]
        shown += [f"{count} {name} passed over" for name, count in self.cleaned[PASSED_OVER].items()]
        return ", ".join(shown)

    def to_json(self) -> dict[str, Any]:
        """Return the counts for statistics.json, with reasons in the order of REASONS."""
        counts = self.published
        rejected = {
            reason: {"documents": number, "bytes": counts[REJECTED_BYTES][reason], "examples": self.examples[reason]}
            for reason, number in ordered(counts[REJECTED]).items()
        }
        return {"source": self.source, "format": self.format, **totals([self])} | {
            "steps": self.steps,
            "rejected": rejected,
            "length_histogram": _histogram(counts[LENGTHS]),
            "length_histogram_rejected": _histogram(counts[LENGTHS_REJECTED]),
            "not_read": dict(sorted(self.not_read.items(), key=lambda item: (-item[1]["files"], item[0]))),
        }


def funnels_of(corpus: Corpus, listings: Mapping[str, Listing]) -> dict[str, Funnel]:
    """Return an empty `Funnel` (counts of a source's documents) for each source, by name."""
    formats = {one.name: (one.format or "by ending").rpartition("/")[2] for one in corpus.sources}  # without folders
    return {name: Funnel(name, shown, len(listings[name].read)) for name, shown in formats.items()}


def add_examples(examples: Examples, more: Examples) -> None:
    """Add the rejected documents in `more` to `examples`, by reason.

    At most EXAMPLES are kept per reason, from as many different files as possible.
    """
    for reason, some in more.items():
        every = [*examples.get(reason, ()), *some]
        turns = [sum(before["path"] == example["path"] for before in every[:at]) for at, example in enumerate(every)]
        examples[reason] = [every[at] for at in sorted(range(len(every)), key=turns.__getitem__)[:EXAMPLES]]


def described(parts: Iterable[Any], reasons: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return {reason: {meaning, advice}} for the reasons for rejection of filters and global steps that the recipe adds.

    `parts` are all filters and steps of the recipe. Reasons of built-in ones are left out.
    """
    of_name = {one.name: one for one in parts}
    result = {}
    for reason in dict.fromkeys(reasons):
        name, _, word = reason.partition(".")
        if reason not in REASONS and (one := of_name.get(name)) is not None:
            first = (type(one).__doc__ or "").strip().partition("\n")[0]
            result[reason] = {"meaning": one.reasons.get(word, first), "advice": one.advice}
    return result


def meaning(statistics: Mapping[str, Any], reason: str) -> str:
    """Return the meaning of a reason for rejection, a built-in one or one that statistics.json (`statistics`) describes."""
    return REASONS.get(reason) or str(statistics.get("reasons", {}).get(reason, {}).get("meaning", ""))


def advice_on(reason: str, source: str, statistics: Mapping[str, Any]) -> str:
    """Return advice on how to keep the documents that a source loses for a reason, such as the key to set."""
    name = reason.partition(".")[0]
    if reason in REASONS:
        return ADVICE.get(reason, f"see corpus.rules.{name}").format(source=source)
    return statistics.get("reasons", {}).get(reason, {}).get("advice") or f"see the settings of {name}"


def where(example: dict[str, Any]) -> str:
    """Describe the location of an example for a person: file, and row or byte."""
    if example.get("url"):
        return f"{example['url']} in {example['path']}"
    position = re.sub(r"^(\d+):(\d+)$", r"row group \1, row \2", example.get("place", ""))
    position = re.sub(r"^(\d+)$", r"byte \1", position)
    return ", ".join(filter(None, (example["path"], position)))


def where_and_why(example: dict[str, Any]) -> str:
    """Describe the location of an example of a rejected document, and why it was rejected."""
    return ": ".join(filter(None, (where(example), example["detail"])))


def ordered(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts by reason, sorted in the order in which filters and steps check for the reasons."""
    known = {reason: index for index, reason in enumerate(REASONS)}
    before = known["contaminated"] - 0.5  # place of the recipe's filters
    return {reason: counts[reason] for reason in sorted(counts, key=lambda reason: (known.get(reason, before), reason))}


def commonest(counts: Mapping[str, int]) -> list[str]:
    """Return the names sorted by their counts, largest first, and alphabetically where counts are equal."""
    return sorted(counts, key=lambda name: (-counts[name], name))


def _histogram(lengths: Counter[str]) -> list[dict[str, int]]:
    return [{"from_characters": 1 << int(power), "documents": lengths[power]} for power in sorted(lengths, key=int)]


def totals(funnels: Iterable[Funnel]) -> dict[str, Any]:
    """Return the sums of all counts over the sources, for `totals` of statistics.json."""
    counts, tables, files = Tally(), Tally(), 0
    for funnel in funnels:
        files += funnel.files
        counts.merge(funnel.published)
        tables.merge({name: table for name, table in funnel.cleaned.items() if name not in chain.HIDDEN})
    return {
        "files": files,
        **{f"{unit}_{table}": counts[table][unit] for table in (chain.INPUT, KEPT) for unit in ("documents", "bytes")},
        "rejected": ordered(counts[REJECTED]),
        "languages": {name: counts[LANGUAGES][name] for name in commonest(counts[LANGUAGES]) if name},
        "tables": tables.to_json(),
    }


# --- Lines for the terminal, from statistics.json


def result_line(statistics: dict[str, Any]) -> str:
    """Return a line with the numbers of documents kept and read, and the names of the sources."""
    sums = statistics["totals"]
    names = ", ".join(source["source"] for source in statistics["sources"])
    kept = f"{sums['documents_kept']:,} of {counted(sums['documents_in'], 'document')} kept"
    return f"{kept}, {size(sums['bytes_kept'])} ({names})"


def loss_warnings(statistics: dict[str, Any]) -> list[str]:
    """Return a warning for each source that lost more than half of its documents, with the most common reason and advice."""
    lines = []
    for row in statistics["sources"]:
        name, came, lost = row["source"], row["documents_in"], row["documents_in"] - row["documents_kept"]
        if 2 * lost > came:
            counts = {reason: entry["documents"] for reason, entry in row["rejected"].items()}
            reason = commonest(counts)[0]
            most = (
                f"{counts[reason]:,} as {reason} ({meaning(statistics, reason)}); {advice_on(reason, name, statistics)}"
            )
            lines.append(f"corpus.sources.{name} lost {lost:,} of {counted(came, 'document')}, {most}")
    return lines


def funnel_lines(statistics: dict[str, Any]) -> list[str]:
    """Return at most MAX_LINES lines on rejected documents and on files that were not read.

    Damage comes first, then the most common reasons.
    """
    came, tables = statistics["totals"]["documents_in"], statistics["totals"]["tables"]

    def line(name: str, count: int, text: str) -> str:
        return f"{name:<16} {count:>9,}  {percent(count, came):>6}  {text}"

    ignored, files = list[str](), Counter[str]()
    for table in (EXTRACTION, DAMAGE, PASSED_OVER):
        if counts := tables.get(table):
            ignored.append(line(table, sum(counts.values()), f"not dropped: {', '.join(counts)}"))
    for source in statistics["sources"]:
        files.update({name: entry["files"] for name, entry in source["not_read"].items()})
    if files:
        shown = ", ".join(f"{count:,} {name}" for name, count in files.most_common(4)) + ", ..." * (len(files) > 4)
        ignored.append(f"{'files not read':<16} {files.total():>9,}  {'':>6}  {shown}")
    rows = [(reason, count) for reason, count in statistics["totals"]["rejected"].items() if count]
    rows.sort(key=lambda row: (row[0] not in DAMAGED, -row[1]))  # a large damaged file counts as one document only
    room = MAX_LINES - len(ignored)
    rest = rows[room - 1 :] if len(rows) > room else []
    lines = [
        line(reason, count, f"{meaning(statistics, reason)}; {_example(statistics, reason)}")
        for reason, count in rows[: len(rows) - len(rest)]
    ]
    if rest:
        number = sum(count for _, count in rest)
        lines.append(line(f"{len(rest)} more", number, "all in statistics.json and the report"))
    return lines + ignored


def percent(part: int, whole: int) -> str:
    """Format a share with three digits, such as 0.0412%."""
    return f"{100 * part / max(whole, 1):.3g}%"


def _example(statistics: dict[str, Any], reason: str) -> str:
    """Describe the first example of a reason."""
    first = next(one["rejected"][reason]["examples"][0] for one in statistics["sources"] if reason in one["rejected"])
    return shorten(f"e.g. {where_and_why(first)}", EXAMPLE_CHARACTERS, placeholder="...")
