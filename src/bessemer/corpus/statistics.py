"""The funnel: what came in, what was kept, and why the rest was not; as counts that must add up, and as lines to read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bessemer.corpus import storage
from bessemer.corpus.document import ADVICE, REASONS
from bessemer.corpus.units import Unit
from bessemer.errors import BessemerError
from bessemer.recipe import Source
from bessemer.recipe.endings import ending
from bessemer.recipe.load import MIN_TEXT_BYTES
from bessemer.terminal import counted, size

EXAMPLES = 4
"""Examples kept for each reason: the first of each file by identity, so that they are the same in every build."""

KEPT_EXAMPLES = 8
"""Examples kept of the documents that stay, likewise."""

BY_ENDING = "by ending"
"""Stands for the format of a source that has none of its own."""

MAX_LINES = 5
"""Lines of the funnel shown at the most: the last of them sums up the rest."""

EXAMPLE_CHARACTERS = 100
FIXABLE = ("wrong_format", "no_text_key", "no_label")
"""Reasons that are a file's and that its user mends: each file may need something else."""

MAX_COUNTED_BYTES = 1 << 30
"""Line ends are counted in the beginning of a file, as far as this: less than a second."""

READ_BYTES = 1 << 20
TEXT_KEY = re.compile(r'; set text_key = "([^"]*)"$')


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
class RejectionCount:
    """The documents of a source rejected for one reason."""

    documents: int = 0
    bytes: int = 0
    """Bytes of the input."""
    examples: list[dict[str, str]] = field(default_factory=list)
    """Each {identity, path, place, excerpt, detail}, and `line` where that could be counted."""


@dataclass
class Funnel:
    """The counts of one source, of one bucket of it or of several added up."""

    source: str
    format: str
    files: int
    documents_in: int = 0
    bytes_in: int = 0
    """Bytes of the input that the documents took: file sizes, JSONL lines, Parquet cells."""
    documents_kept: int = 0
    bytes_kept: int = 0
    """Bytes of clean text in UTF-8."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """{step, documents_in, rejected} of each step of the cleaning."""
    rejected: dict[str, RejectionCount] = field(default_factory=dict)
    kept_examples: list[dict[str, str]] = field(default_factory=list)
    """Each {identity, path, excerpt}."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Kept documents by the power of two (rounded down) of their length in characters."""
    lengths_rejected: Counter[int] = field(default_factory=Counter)
    """Rejected documents likewise; of those that a reader could not read, the length of what it could show."""
    languages: Counter[str] = field(default_factory=Counter)
    """Kept documents by language; "" where none was identified."""
    tables: dict[str, dict[str, int]] = field(default_factory=dict)
    """What the steps counted besides: personal data by type, characters edited by rule."""
    not_read: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Files of the source's folders that no source reads, by ending: {files, bytes, example}."""

    def reject(
        self, reason: str, num_bytes: int, path: str, excerpt: str, detail: str, identity: str = "", place: str = ""
    ) -> None:
        """Count one rejected document."""
        entry = self.rejected.setdefault(reason, RejectionCount())
        entry.documents += 1
        entry.bytes += num_bytes
        if len(entry.examples) < EXAMPLES or all(example["path"] != path for example in entry.examples):
            example = {"identity": identity, "path": path, "place": place, "excerpt": excerpt, "detail": detail}
            entry.examples = _of_many_files([*entry.examples, example])

    def add(self, other: Funnel) -> None:
        """Add a bucket with larger identities: its counts, and its examples where there is room."""
        for name in ("documents_in", "bytes_in", "documents_kept", "bytes_kept"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("lengths", "lengths_rejected", "languages"):
            getattr(self, name).update(getattr(other, name))
        self.kept_examples = (self.kept_examples + other.kept_examples)[:KEPT_EXAMPLES]
        for reason, theirs in other.rejected.items():
            entry = self.rejected.setdefault(reason, RejectionCount())
            entry.documents += theirs.documents
            entry.bytes += theirs.bytes
            entry.examples = _of_many_files(entry.examples + theirs.examples)

    def count_not_read(self, name: str, num_bytes: int) -> None:
        """Count a file that no source reads."""
        entry = self.not_read.setdefault(ending(name), {"files": 0, "bytes": 0, "example": name})
        entry["files"] += 1
        entry["bytes"] += num_bytes

    def check(self) -> None:
        """Raise BessemerError unless documents in = kept + rejected for each reason."""
        rejected = sum(entry.documents for entry in self.rejected.values())
        if self.documents_in != self.documents_kept + rejected:
            raise BessemerError(
                f"corpus: the counts of source {self.source} do not add up: {self.documents_in} documents "
                f"in, {self.documents_kept} kept, {rejected} rejected; nothing was written; please report it"
            )

    def num_rejected(self, *reasons_: str) -> int:
        """Documents rejected for any of these reasons."""
        return sum(self.rejected[reason].documents for reason in reasons_ if reason in self.rejected)

    def top_reasons(self) -> str:
        """The commonest reasons with their counts and an example's detail, for an error message."""
        common = sorted(self.rejected.items(), key=lambda item: (-item[1].documents, item[0]))[:3]
        shown = []
        for reason, entry in common:
            example = entry.examples[0]
            colon = ": " if example["detail"] else ""
            shown.append(f"{reason} {entry.documents} ({where(example)}{colon}{example['detail']})")
        return ", ".join(shown)

    def advice(self, total_bytes: int) -> str:
        """What to do about the commonest reason. total_bytes: of all sources, which may be too little however it is
        cleaned."""
        reason = min(self.rejected, key=lambda name: (-self.rejected[name].documents, name), default="empty")
        if reason == "too_short" and total_bytes < MIN_TEXT_BYTES:
            return f"and {size(total_bytes)} are too little to learn from: add text, {size(MIN_TEXT_BYTES)} or more"
        return ADVICE.get(reason, "see corpus.rules").format(source=self.source)

    def to_json(self) -> dict[str, Any]:
        """For statistics.json; reasons in the order of REASONS."""
        plain = ("source", "format", "files", "documents_in", "bytes_in", "documents_kept", "bytes_kept", "steps")
        return {name: getattr(self, name) for name in plain} | {
            "rejected": {reason: vars(self.rejected[reason]) for reason in ordered(self.rejected)},
            "kept_examples": self.kept_examples,
            "length_histogram": _histogram(self.lengths),
            "length_histogram_rejected": _histogram(self.lengths_rejected),
            "languages": {language: self.languages[language] for language in _commonest(self.languages) if language},
            "tables": self.tables,
            "not_read": dict(sorted(self.not_read.items(), key=lambda item: (-item[1]["files"], item[0]))),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Funnel:
        """The inverse of `to_json`."""
        funnel = Funnel(value["source"], value["format"], value["files"])
        for name in ("documents_in", "bytes_in", "documents_kept", "bytes_kept", "steps", "kept_examples", "tables"):
            setattr(funnel, name, value[name])
        funnel.rejected = {reason: RejectionCount(**entry) for reason, entry in value["rejected"].items()}
        for lengths, name in ((funnel.lengths, ""), (funnel.lengths_rejected, "_rejected")):
            rows = value[f"length_histogram{name}"]
            lengths.update({row["from_characters"].bit_length() - 1: row["documents"] for row in rows})
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
    """Reasons in the order in which they are looked for; ones that REASONS does not have come last."""
    present = set(reasons_)
    return [reason for reason in REASONS if reason in present] + sorted(present - set(REASONS))


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
    sums = ("files", "documents_in", "bytes_in", "documents_kept", "bytes_kept")
    return {name: sum(getattr(funnel, name) for funnel in every) for name in sums} | {
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


# --- Line numbers of examples


def add_lines(funnels: dict[str, Funnel], units: Iterable[Unit]) -> None:
    """Give each example of a rejected JSONL line its line number, from 1, where the file lies on this machine."""
    wanted: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for funnel in funnels.values():
        for entry in funnel.rejected.values():
            for example in entry.examples:
                if example["place"].isdecimal():
                    wanted.setdefault((funnel.source, example["path"]), []).append(example)
    paths: dict[tuple[str, str], str] = {}
    for unit in units if wanted else ():
        for piece in unit.pieces if unit.format == "jsonl" else ():
            if not storage.is_remote(piece.path) and not piece.damage:
                paths.setdefault((unit.source.name, piece.name), piece.path)
    for key in wanted.keys() & paths.keys():
        _count_lines(wanted[key], [paths[key]])


def _count_lines(examples: list[dict[str, Any]], paths: list[str]) -> None:
    """Number the lines of one file, which may have been decompressed into several."""
    line, position, blocks = 1, 0, _blocks(paths)
    with suppress(OSError):
        block = b""
        for example in sorted(examples, key=lambda example: int(example["place"])):
            left = int(example["place"]) - position
            while left > len(block):
                line, left = line + block.count(b"\n"), left - len(block)
                block = next(blocks, b"")
                if not block:
                    return
            line, position, block = line + block.count(b"\n", 0, left), int(example["place"]), block[left:]
            example["line"] = line


def _blocks(paths: list[str]) -> Iterator[bytes]:
    """The first MAX_COUNTED_BYTES of the files, concatenated."""
    room = MAX_COUNTED_BYTES
    for path in paths:
        with open(path, "rb") as file:
            while block := file.read(min(READ_BYTES, room)):
                room -= len(block)
                yield block


# --- The funnel in the terminal, from statistics.json


def result_line(statistics: dict[str, Any], not_read: bool = False) -> str:
    """Documents kept of how many, of which sources; with `not_read` also the files of their folders that were not read."""
    sums = statistics["totals"]
    names = ", ".join(source["source"] for source in statistics["sources"])
    files = sums.get("files_not_read", 0) if not_read else 0
    ignored = f", {counted(files, 'file')} not read" if files else ""
    kept = f"{sums['documents_kept']:,} of {counted(sums['documents_in'], 'document')} kept"
    return f"{kept}, {size(sums['bytes_kept'])} ({names}){ignored}"


def funnel_lines(statistics: dict[str, Any]) -> list[str]:
    """Why documents were dropped and which files were not read, most first, in at most MAX_LINES lines."""
    came = statistics["totals"]["documents_in"]

    def line(name: str, count: int, text: str) -> str:
        return f"{name:<16} {count:>9,}  {percent(count, came):>6}  {text}"

    rows = [(reason, count) for reason, count in statistics["totals"]["rejected"].items() if count]
    rows.sort(key=lambda row: -row[1])
    ignored = _not_read_line(statistics)
    room = MAX_LINES - len(ignored)
    rest = rows[room - 1 :] if len(rows) > room else []
    lines = [
        line(reason, count, f"{REASONS.get(reason, '')}; {_example(statistics, reason)}")
        for reason, count in rows[: len(rows) - len(rest)]
    ]
    if rest:
        number = sum(count for _, count in rest)
        lines.append(line(f"{len(rest)} more", number, "all in statistics.json and the report"))
    return lines + ignored


def percent(part: int, whole: int) -> str:
    """A share that is not rounded to nothing or to all: 0.04%, 99.97%."""
    share = 100 * part / max(whole, 1)
    digits = 1
    while digits < 6 and 0 < part < whole and float(f"{share:.{digits}f}") in (0.0, 100.0):
        digits += 1
    return f"{share:.{digits}f}%"


def _example(statistics: dict[str, Any], reason: str) -> str:
    """The first example; for a fixable reason one of each of two files, as they may need two fixes."""
    found: dict[str, str] = {}
    for source in statistics["sources"]:
        for example in source["rejected"].get(reason, {"examples": []})["examples"]:
            detail = " ".join(example["detail"].split())
            if len(detail) > EXAMPLE_CHARACTERS:
                detail = detail[:EXAMPLE_CHARACTERS] + "..."
            found.setdefault(example["path"], where(example) + (f": {detail}" if detail else ""))
    shown = list(found.values())[: 2 if reason in FIXABLE else 1]
    return f"e.g. {'; '.join(shown)}" if shown else ""


def _not_read_line(statistics: dict[str, Any]) -> list[str]:
    """One line for the files that no source reads; none without such files."""
    total: dict[str, list[Any]] = {}
    for source in statistics["sources"]:
        for name, entry in source["not_read"].items():
            counts = total.setdefault(name, [0, 0, entry["example"]])
            counts[0] += entry["files"]
            counts[1] += entry["bytes"]
    if not total:
        return []
    common = sorted(total.items(), key=lambda item: (-item[1][0], item[0]))
    files = sum(counts[0] for counts in total.values())
    shown = ", ".join(f"{counts[0]:,} {name}" for name, counts in common[:4]) + (", ..." if len(common) > 4 else "")
    num_bytes = size(sum(counts[1] for counts in total.values()))
    return [f"{'files not read':<16} {files:>9,}  {'':>6}  {shown}; {num_bytes}; e.g. {common[0][1][2]}"]


# --- Sources of their own for files with another text_key


def separate_sources(sources: Sequence[Source], statistics: dict[str, Any]) -> list[str]:
    """Lines of a recipe that reads each file by its own text_key; none where one key is enough. The examples of
    `statistics` name the files and the keys that they have instead."""
    import tomli_w

    tables: list[dict[str, Any]] = []
    is_needed = False
    for source, counts in zip(sources, statistics["sources"], strict=True):
        keys: dict[str, list[str]] = {}
        for example in counts["rejected"].get("no_text_key", {"examples": []})["examples"]:
            if (found := TEXT_KEY.search(example["detail"])) and example["path"] not in keys.get(found[1], []):
                keys.setdefault(found[1], []).append(example["path"])
        is_needed |= len(keys) + bool(counts["documents_kept"]) > 1 and bool(keys)
        for key, names in keys.items():
            paths = [str(_on_disk(source, name)) for name in names]
            tables.append({"name": f"{source.name}-{len(tables) + 1}", "paths": paths, "text_key": key})
        own = source.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        own["exclude"] = [*source.exclude, *(Path(name).name for names in keys.values() for name in names)]
        if counts["documents_kept"]:
            tables.append({key: value for key, value in own.items() if value})
    return tomli_w.dumps({"corpus": {"sources": tables}}).strip().splitlines() if is_needed else []


def _on_disk(source: Source, name: str) -> Path:
    """Where a file of a source lies, by its name in the corpus."""
    places = [Path(path).parent / name for path in source.paths]
    return next((place for place in places if place.exists()), Path(name))
