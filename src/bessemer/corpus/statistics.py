"""The funnel: documents in, kept, and rejected by reason, as counts that must add up and as lines for the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from textwrap import shorten
from typing import Any

from bessemer.common.console import counted, size
from bessemer.corpus.extract.webpage import DAMAGE, EXTRACTION
from bessemer.corpus.filters.chain import ADVICE, PASSED_OVER, REASONS, Tally
from bessemer.corpus.readers.files import ending

EXAMPLES = 4  # per reason; the first of each file by identity, so that every build has the same ones
EXAMPLE_KEYS = ("identity", "path", "place", "url", "excerpt", "detail")
MAX_LINES = 5  # lines of the funnel to show; the last one sums up the rest
EXAMPLE_CHARACTERS = 200  # maximum length of an example in a line of the funnel
DAMAGED = ("unreadable", "bad_record")  # always shown first
SUMS = ("documents_in", "bytes_in", "documents_kept", "bytes_kept")


@dataclass
class Funnel:
    """Counts of one source, of one of its buckets, or a sum of several."""

    source: str
    format: str
    files: int
    documents_in: int = 0
    bytes_in: int = 0  # input bytes of the documents: file sizes, JSONL lines, Parquet cells
    documents_kept: int = 0
    bytes_kept: int = 0  # bytes of clean text in UTF-8
    # {step, documents_in, rejected} of each filter and step
    steps: list[dict[str, Any]] = field(default_factory=list)
    # reason -> {documents, bytes, examples}; an example is {identity, path, place, url, excerpt, detail}
    rejected: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Kept documents by the exponent of the largest power of two in their length in characters
    lengths: Counter[int] = field(default_factory=Counter)
    # The same for rejected documents; for an unreadable one the length of its readable excerpt
    lengths_rejected: Counter[int] = field(default_factory=Counter)
    languages: Counter[str] = field(default_factory=Counter)  # kept documents by language; "" if not identified
    # Other counts of the filters, such as personal data by type and characters edited by filter
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    # Files in the source's folders that no source reads: ending -> {files, bytes, example}
    not_read: dict[str, dict[str, Any]] = field(default_factory=dict)

    def reject(self, reason: str, num_bytes: int, document: Mapping[str, str]) -> None:
        """Count one rejected document, which may become an example."""
        example = {name: document.get(name, "") for name in EXAMPLE_KEYS}
        self._add_rejected(reason, {"documents": 1, "bytes": num_bytes, "examples": [example]})

    def _add_rejected(self, reason: str, more: dict[str, Any]) -> None:
        """Add counts and examples of a reason. It keeps EXAMPLES examples, from as many different files as possible."""
        mine = self.rejected.setdefault(reason, {"documents": 0, "bytes": 0, "examples": []})
        every = mine["examples"] + more["examples"]
        turns = [sum(before["path"] == example["path"] for before in every[:at]) for at, example in enumerate(every)]
        mine["examples"] = [every[at] for at in sorted(range(len(every)), key=turns.__getitem__)[:EXAMPLES]]
        for name in ("documents", "bytes"):
            mine[name] += more[name]

    def add(self, other: Funnel) -> None:
        """Add the counts of another bucket, and its examples if there is room.

        Add buckets in ascending order of identities, so that the examples are the same in every build.
        """
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("lengths", "lengths_rejected", "languages"):
            getattr(self, name).update(getattr(other, name))
        for reason, theirs in other.rejected.items():
            self._add_rejected(reason, theirs)

    def count_not_read(self, name: str, num_bytes: int) -> None:
        """Count a file that no source reads."""
        entry = self.not_read.setdefault(ending(name), {"files": 0, "bytes": 0, "example": name})
        entry["files"] += 1
        entry["bytes"] += num_bytes

    def top_reasons(self) -> str:
        """Return the most common reasons with counts and the detail of an example, for an error message; "" for none."""
        shown = []
        for reason in self.commonest_reasons()[:3]:
            entry = self.rejected[reason]
            shown.append(f"{reason} {entry['documents']} ({where_and_why(entry['examples'][0])})")
        shown += [f"{count} {name} passed over" for name, count in self.tables.get(PASSED_OVER, {}).items()]
        return ", ".join(shown)

    def commonest_reasons(self) -> list[str]:
        """Return the reasons by the number of documents that they reject, largest first."""
        return commonest({reason: entry["documents"] for reason, entry in self.rejected.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the counts for statistics.json, with reasons in the order of REASONS."""
        plain = {name: getattr(self, name) for name in ("source", "format", "files", *SUMS, "steps")}
        return plain | {
            "rejected": {reason: self.rejected[reason] for reason in ordered(self.rejected)},
            "length_histogram": _histogram(self.lengths),
            "length_histogram_rejected": _histogram(self.lengths_rejected),
            "languages": {language: self.languages[language] for language in commonest(self.languages) if language},
            "tables": self.tables,
            "not_read": dict(sorted(self.not_read.items(), key=lambda item: (-item[1]["files"], item[0]))),
        }


def described(parts: Iterable[Any], reasons: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the meaning and advice for reasons that belong to filters and global steps (`parts`) of the recipe."""
    of_name = {one.name: one for one in parts}
    found = {}
    for reason in dict.fromkeys(reasons):
        name, _, word = reason.partition(".")
        if reason not in REASONS and (one := of_name.get(name)) is not None:
            first = (type(one).__doc__ or "").strip().partition("\n")[0]
            found[reason] = {"meaning": one.reasons.get(word, first), "advice": one.advice}
    return found


def meaning(statistics: Mapping[str, Any], reason: str) -> str:
    """Return the meaning of a reason in these statistics."""
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
    place = re.sub(r"^(\d+):(\d+)$", r"row group \1, row \2", example.get("place", ""))
    place = re.sub(r"^(\d+)$", r"byte \1", place)
    return ", ".join(filter(None, (example["path"], place)))


def where_and_why(example: dict[str, Any]) -> str:
    """Describe the location of an example and the problem with it."""
    return ": ".join(filter(None, (where(example), example["detail"])))


def ordered(reasons: Iterable[str]) -> list[str]:
    """Sort reasons by the order of the checks."""
    known = {reason: place for place, reason in enumerate(REASONS)}
    before = known["contaminated"] - 0.5  # place of the recipe's filters
    return sorted(reasons, key=lambda reason: (known.get(reason, before), reason))


def commonest(counts: Mapping[str, int]) -> list[str]:
    """Sort names by their counts, largest first, and equal ones alphabetically."""
    return sorted(counts, key=lambda name: (-counts[name], name))


def _histogram(lengths: Counter[int]) -> list[dict[str, int]]:
    return [{"from_characters": 1 << power, "documents": lengths[power]} for power in sorted(lengths)]


def totals(funnels: Iterable[Funnel]) -> dict[str, Any]:
    """Return the sums over all sources."""
    every = list(funnels)
    tally, languages, rejected = Tally(), Counter[str](), Counter[str]()
    for funnel in every:
        tally.merge(funnel.tables)
        languages.update(funnel.languages)
        rejected.update({reason: entry["documents"] for reason, entry in funnel.rejected.items()})
    return {name: sum(getattr(funnel, name) for funnel in every) for name in ("files", *SUMS)} | {
        "rejected": {reason: rejected[reason] for reason in ordered(rejected)},
        "languages": {name: languages[name] for name in commonest(languages) if name},
        "tables": tally.to_json(),
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
        shown = ", ".join(f"{count:,} {name}" for name, count in files.most_common(4))
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
    every = chain(*(source["rejected"].get(reason, {}).get("examples", []) for source in statistics["sources"]))
    return shorten(f"e.g. {where_and_why(next(every))}", EXAMPLE_CHARACTERS, placeholder="...")
