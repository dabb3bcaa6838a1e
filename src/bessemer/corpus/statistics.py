"""The funnel: what came in, what stayed, and why the rest did not; the counts must add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bessemer.corpus.document import ADVICE, REASONS
from bessemer.errors import BessemerError
from bessemer.recipe.endings import ending
from bessemer.recipe.load import MIN_TEXT_BYTES
from bessemer.terminal import size

EXAMPLES = 4
"""Examples kept for each reason: the first of each file by identity, so that they are the same in every build."""

KEPT_EXAMPLES = 8
"""Examples kept of the documents that stay, likewise."""


def _of_many_files(examples: list[dict[str, str]]) -> list[dict[str, str]]:
    """EXAMPLES of them: one of each file before a second of one."""
    seen: Counter[str] = Counter()
    turns = []
    for example in examples:
        turns.append(seen[example["path"]])
        seen[example["path"]] += 1
    kept = sorted(range(len(examples)), key=lambda place: turns[place])[:EXAMPLES]
    return [examples[place] for place in kept]


@dataclass
class Rejected:
    """The documents of a source rejected for one reason."""

    documents: int = 0
    bytes: int = 0
    """Bytes of the input."""
    examples: list[dict[str, str]] = field(default_factory=list)
    """Each {identity, path, place, excerpt, detail}, and `line` where that could be counted."""


BY_ENDING = "by ending"  # what a source without a format has in its place


@dataclass
class Funnel:
    """The documents of one source on their way in; of one bucket of them, or of several put together."""

    source: str
    format: str
    files: int
    documents_in: int = 0
    bytes_in: int = 0
    """Bytes of the input that the documents took: file sizes, JSONL lines, Parquet cells."""
    documents_kept: int = 0
    bytes_kept: int = 0
    """Bytes of clean text in UTF-8."""
    rejected: dict[str, Rejected] = field(default_factory=dict)
    kept_examples: list[dict[str, str]] = field(default_factory=list)
    """Each {identity, path, excerpt}."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Kept documents by the power of two (rounded down) of their length in characters."""
    lengths_rejected: Counter[int] = field(default_factory=Counter)
    """Rejected documents alike; of those that a reader could not read, what it could show."""
    languages: Counter[str] = field(default_factory=Counter)
    """Kept documents by language; "" where none was looked for."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """{step, documents_in, rejected} of each step of the cleaning."""
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    """What the steps counted besides: personal data by type, characters edited by rule."""
    not_read: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Files of the source's folders that no source reads, by ending: {files, bytes, example}."""

    def reject(
        self, reason: str, num_bytes: int, path: str, excerpt: str, detail: str, identity: str = "", place: str = ""
    ) -> None:
        """Count one rejected document."""
        entry = self.rejected.setdefault(reason, Rejected())
        entry.documents += 1
        entry.bytes += num_bytes
        if len(entry.examples) < EXAMPLES or all(example["path"] != path for example in entry.examples):
            example = {"identity": identity, "path": path, "place": place, "excerpt": excerpt, "detail": detail}
            entry.examples = _of_many_files([*entry.examples, example])

    def add(self, other: Funnel) -> None:
        """Add a bucket with larger identities: its counts, and its examples where there is room."""
        self.documents_in += other.documents_in
        self.bytes_in += other.bytes_in
        self.documents_kept += other.documents_kept
        self.bytes_kept += other.bytes_kept
        self.lengths.update(other.lengths)
        self.lengths_rejected.update(other.lengths_rejected)
        self.languages.update(other.languages)
        self.kept_examples = (self.kept_examples + other.kept_examples)[:KEPT_EXAMPLES]
        for reason, theirs in other.rejected.items():
            entry = self.rejected.setdefault(reason, Rejected())
            entry.documents += theirs.documents
            entry.bytes += theirs.bytes
            entry.examples = _of_many_files(entry.examples + theirs.examples)

    def count_not_read(self, name: str, num_bytes: int) -> None:
        """Count a file that no source reads."""
        entry = self.not_read.setdefault(ending(name), {"files": 0, "bytes": 0, "example": name})
        entry["files"] += 1
        entry["bytes"] += num_bytes

    def check(self) -> None:
        """Documents in = kept + rejected for each reason, or a BessemerError: a document went missing."""
        rejected = sum(entry.documents for entry in self.rejected.values())
        if self.documents_in != self.documents_kept + rejected:
            raise BessemerError(
                f"corpus: the counts of source {self.source} do not add up: {self.documents_in} documents "
                f"in, {self.documents_kept} kept, {rejected} rejected; nothing was written; please report it"
            )

    def top_reasons(self) -> str:
        """The commonest reasons with their counts and an example's detail, for an error message."""
        common = sorted(self.rejected.items(), key=lambda item: (-item[1].documents, item[0]))[:3]
        shown = []
        for reason, entry in common:
            example = entry.examples[0]
            shown.append(
                f"{reason} {entry.documents} ({where(example)}{': ' * bool(example['detail'])}{example['detail']})"
            )
        return ", ".join(shown)

    def advice(self, total_bytes: int) -> str:
        """What to do about the commonest reason. total_bytes: of all sources, which may be too little however it is cleaned."""
        reason = min(self.rejected, key=lambda name: (-self.rejected[name].documents, name), default="empty")
        if reason == "too_short" and total_bytes < MIN_TEXT_BYTES:
            return f"and {size(total_bytes)} are too little to learn from: add text, {size(MIN_TEXT_BYTES)} or more"
        return ADVICE.get(reason, "see corpus.rules").format(source=self.source)

    def to_json(self) -> dict[str, Any]:
        """For statistics.json; reasons in the order of REASONS."""
        return {
            "source": self.source,
            "format": self.format,
            "files": self.files,
            "documents_in": self.documents_in,
            "bytes_in": self.bytes_in,
            "documents_kept": self.documents_kept,
            "bytes_kept": self.bytes_kept,
            "steps": self.steps,
            "rejected": {
                reason: {
                    "documents": self.rejected[reason].documents,
                    "bytes": self.rejected[reason].bytes,
                    "examples": self.rejected[reason].examples,
                }
                for reason in ordered(self.rejected)
            },
            "kept_examples": self.kept_examples,
            "length_histogram": _histogram(self.lengths),
            "length_histogram_rejected": _histogram(self.lengths_rejected),
            "languages": {language: self.languages[language] for language in _commonest(self.languages) if language},
            "tables": self.tables,
            "not_read": dict(sorted(self.not_read.items(), key=lambda item: (-item[1]["files"], item[0]))),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Funnel:
        """The inverse of `to_json`; documents without a language are counted from the rest."""
        funnel = Funnel(value["source"], value["format"], value["files"])
        for name in ("documents_in", "bytes_in", "documents_kept", "bytes_kept", "steps", "kept_examples", "tables"):
            setattr(funnel, name, value[name])
        for reason, entry in value["rejected"].items():
            funnel.rejected[reason] = Rejected(entry["documents"], entry["bytes"], entry["examples"])
        for mine, name in ((funnel.lengths, ""), (funnel.lengths_rejected, "_rejected")):
            rows = value[f"length_histogram{name}"]
            mine.update({row["from_characters"].bit_length() - 1: row["documents"] for row in rows})
        funnel.languages.update(value["languages"])
        return funnel


def where(example: dict[str, Any]) -> str:
    """Where an example lies, for a person: file, and line, row or byte."""
    path, place = example["path"], example.get("place", "")
    if "line" in example:
        return f"{path} line {example['line']}"
    group, _, row = place.partition(":")
    if group.isdecimal() and row.isdecimal():
        return f"{path} row {row}" + (f" of row group {group}" if group != "0" else "")
    if place.startswith("["):
        return f"{path} record {place.strip('[]')}"
    return f"{path} at byte {place}" if place.isdecimal() and place != "0" else path


def ordered(reasons_: Iterable[str]) -> list[str]:
    """Reasons in the order in which they are looked for; ones that the table does not know come last."""
    given = set(reasons_)
    return [reason for reason in REASONS if reason in given] + sorted(given - set(REASONS))


def _commonest(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda name: (-counts[name], name))


def _histogram(lengths: Counter[int]) -> list[dict[str, int]]:
    return [{"from_characters": 1 << power, "documents": lengths[power]} for power in sorted(lengths)]


def totals(funnels: Iterable[Funnel]) -> dict[str, Any]:
    """The sums over all sources."""
    every = list(funnels)
    languages: Counter[str] = Counter()
    tables: dict[str, Counter[str]] = {}
    for funnel in every:
        languages.update({name: count for name, count in funnel.languages.items() if name})
        for table, counts in funnel.tables.items():
            tables.setdefault(table, Counter()).update(counts)
    return {
        "files": sum(funnel.files for funnel in every),
        "documents_in": sum(funnel.documents_in for funnel in every),
        "bytes_in": sum(funnel.bytes_in for funnel in every),
        "documents_kept": sum(funnel.documents_kept for funnel in every),
        "bytes_kept": sum(funnel.bytes_kept for funnel in every),
        "rejected": reasons(every),
        "languages": {name: languages[name] for name in _commonest(languages)},
        "tables": {table: dict(sorted(tables[table].items())) for table in sorted(tables)},
        "files_not_read": sum(entry["files"] for funnel in every for entry in funnel.not_read.values()),
    }


def reasons(funnels: Iterable[Funnel]) -> dict[str, int]:
    """Rejected documents by reason, over all sources."""
    counts: Counter[str] = Counter()
    for funnel in funnels:
        counts.update({reason: entry.documents for reason, entry in funnel.rejected.items()})
    return {reason: counts[reason] for reason in ordered(counts)}
