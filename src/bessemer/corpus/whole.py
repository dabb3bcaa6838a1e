"""The steps over the whole corpus, one after the other: quality, duplicates, repeated paragraphs and spans.

Each is done once, leaves a folder with a receipt in the work folder, and sees the documents that the ones before let
pass, in canonical order. What they decided is read again, mapped into memory, by whoever publishes a bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus import repeats, verdicts
from bessemer.corpus.dedup import EXACT, KEPT, Verdicts
from bessemer.corpus.language import routed
from bessemer.corpus.passed import Passed, buckets_of
from bessemer.recipe import Corpus, digest
from bessemer.recipe.parts import band_part, is_banded
from bessemer.run import STAGE_FILE, read_json

if TYPE_CHECKING:
    import pyarrow as pa

    from bessemer.corpus.quality.classify import Judgement

Timed = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]
"""Does a named step and takes its time."""


@dataclass(frozen=True)
class Found:
    """The receipts of the steps, and what everything after them depends on."""

    inputs: str
    quality: dict[str, Any] | None
    duplicates: dict[str, Any]
    repeats: dict[str, Any] | None

    def statistics(self) -> dict[str, Any]:
        """For statistics.json."""
        of = self.duplicates["statistics"]
        found: dict[str, Any] = {"duplicates": of | {"exact": of["removed"]["exact"], "near": of["removed"]["near"]}}
        if self.repeats is not None:
            found["repeats"] = self.repeats["counts"]
        return found


def judge_whole(
    corpus: Corpus, work: Path, receipts: list[dict[str, Any]], inputs: str, expected: int, timed: Timed
) -> Found:
    """Do the steps that are not done. receipts: of all partitions; expected: documents that they passed on."""
    documents = Passed(work, buckets_of(receipts))
    made_of = digest("whole", inputs, [given["outputs"] for given in receipts])
    quality = None
    if corpus.quality.on:
        from bessemer.corpus import scores

        quality = timed("quality", lambda: scores.score_all(corpus, documents, digest("quality", made_of)))
        expected -= quality["rejected"]
        documents = documents.after(quality=scores.load(work))
    names = [source.name for source in corpus.sources]
    duplicates = timed(
        "duplicates",
        lambda: verdicts.judge_all(documents, corpus.dedup, digest("duplicates", made_of), expected, names),
    )
    cut = None
    if repeats.wanted(corpus.dedup):
        kept = documents.after(verdicts=verdicts.load(work))
        cut = timed("repeats", lambda: repeats.cut_repeats(kept, corpus.dedup, digest("repeats", made_of)))
    return Found(made_of, quality, duplicates, cut)


@dataclass(frozen=True)
class Decided:
    """What the steps decided, as whoever publishes a bucket reads it."""

    work: Path
    quality: Judgement | None
    verdicts: Verdicts
    groups: dict[tuple[str, int], int]
    """Row group of each bucket of which documents lost repeats."""

    @classmethod
    def load(cls, work: Path, corpus: Corpus) -> Decided:
        """Map it into memory."""
        quality = None
        if corpus.quality.on:
            from bessemer.corpus import scores

            quality = scores.load(work)
        groups = {}
        if repeats.wanted(corpus.dedup):
            listed = read_json(work / "repeats" / STAGE_FILE)["groups"]
            groups = {(source, bucket): number for number, (source, bucket) in enumerate(listed)}
        return cls(work, quality, verdicts.load(work), groups)

    def new_texts(self, source: str, bucket: int) -> dict[str, str]:
        """Texts of the documents that lost repeats, by identity."""
        return repeats.read_group(self.work / "repeats" / repeats.TEXTS, self.groups.get((source, bucket)))

    def reasons(self, names: list[str], new: dict[str, str], min_characters: int) -> dict[int, tuple[str, str]]:
        """Reason and detail of each rejected document, by its place among `names`, which passed the steps before."""
        import numpy as np

        found: dict[int, tuple[str, str]] = {}
        places = np.arange(len(names))
        if self.quality is not None and names:
            rows = self.quality.rows(names)
            low = ~self.quality.stays[rows]
            found |= {place: ("low_quality", self.quality.detail(rows[place])) for place in places[low].tolist()}
            places = places[~low]
        if len(places):
            rows = self.verdicts.rows([names[place] for place in places.tolist()])
            gone = np.asarray(self.verdicts.verdict[rows]) != KEPT
            paths = verdicts.keeper_paths(
                self.work, sorted(set(self.verdicts.keeper[rows[gone]].tolist())), self.verdicts
            )
            for place, row in zip(places[gone].tolist(), rows[gone].tolist(), strict=True):
                found[place] = self._duplicate(row, paths)
        for place, name in enumerate(names):
            if name in new and len(new[name].strip()) < min_characters:
                found[place] = "only_repeats", f"{len(new[name].strip())} characters are left"
        return found

    def parts(self, corpus: Corpus, source: str, names: list[str], languages: list[str]) -> list[str]:
        """The part of its source that each kept document counts for."""
        found = [routed(source, code or None, corpus.language) for code in languages]
        if self.quality is not None and is_banded(source, corpus.quality) and names:
            bands = self.quality.band[self.quality.rows(names)].tolist()
            found = [band_part(name, band) for name, band in zip(found, bands, strict=True)]
        return found

    def _duplicate(self, row: int, paths: dict[int, str]) -> tuple[str, str]:
        keeper = int(self.verdicts.keeper[row])
        detail = f"kept instead: {self.verdicts.identities[keeper].ljust(16, bytes(1)).hex()} {paths[keeper]}"
        if self.verdicts.verdict[row] == EXACT:
            return "exact_duplicate", detail
        similarity = self.verdicts.similarity[row]
        return "near_duplicate", f"{detail} ({self.verdicts.statistics.jaccard_is} Jaccard {similarity:.2f})"


def with_new_texts(table: pa.Table, new: dict[str, str]) -> pa.Table:
    """A bucket's rows with the texts that lost repeats, and their lengths."""
    import pyarrow as pa

    if not new:
        return table
    table = repeats.with_new_texts(table, new)
    pairs = zip(table["identity"].to_pylist(), table["characters"].to_pylist(), strict=True)
    lengths = [len(new[name]) if name in new else length for name, length in pairs]
    return table.set_column(table.column_names.index("characters"), "characters", pa.array(lengths, pa.int64()))
