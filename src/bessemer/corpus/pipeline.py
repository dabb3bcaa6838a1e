"""The corpus stage: raw sources to clean documents, published as one folder.

    corpus/documents/part-00000.parquet ... identity, text, source, path, metadata, label; sorted by source, identity
    corpus/rejected/part-00000.parquet ...  identity, source, path, reason, excerpt, detail; sorted alike
    corpus/statistics.json                  the funnel: what came in, what stayed, why the rest did not
    corpus/stage.json                       what the stage was made from

Steps: find the files; cut the work into units; clean (read, extract, normalise, judge, sign: Daft); find
duplicates; publish. The same input gives the same documents byte for byte, in whatever order the engine
worked.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bessemer.corpus import engine
from bessemer.corpus.clean import METER, clean, num_buckets
from bessemer.corpus.dedup import find_duplicates
from bessemer.corpus.files import File, find
from bessemer.corpus.publish import cleaned_files, publish
from bessemer.corpus.statistics import Funnel, reasons, totals
from bessemer.corpus.units import Unit, expected_documents, plan
from bessemer.corpus.webpage import check_engine
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Corpus, Recipe, digest
from bessemer.run import RunFolder, mark_stage, staging, write_json
from bessemer.terminal import progress

VERSION = 2
"""Goes up when the same sources would give other documents, or the folder another layout."""


@dataclass(frozen=True)
class CorpusSummary:
    """What the stage did."""

    documents_in: int
    documents_kept: int
    bytes_in: int
    """Bytes of the input that the documents took."""
    bytes_kept: int
    """Bytes of clean text in UTF-8."""
    seconds: float
    reasons: dict[str, int]
    """Rejected documents by reason, in the order in which reasons are looked for."""
    sources: dict[str, Funnel]


def inputs_digest(recipe: Recipe) -> str:
    """What the corpus depends on, as one hash: [corpus], and path, size and time of every input file.

    Weights are left out: they say how the documents are mixed later, not which there are.
    """
    return _digest(recipe.corpus, {source.name: find(source) for source in recipe.corpus.sources})


def build(recipe: Recipe, run: RunFolder) -> CorpusSummary:
    """Make the corpus of a run and publish it as `run.corpus`; an older one is replaced, at the end.

    Raises InputError for sources that cannot be used or of which nothing is left, OSError for a full or
    read-only disk. Whatever is raised, `run.corpus` is as it was before.
    """
    started = time.perf_counter()
    corpus = recipe.corpus
    check_engine(corpus.extract)
    if not corpus.sources:
        raise InputError("corpus.sources: the recipe names no source of text; add a [[corpus.sources]] table")
    found = {source.name: find(source) for source in corpus.sources}
    inputs = _digest(corpus, found)
    with staging(run.corpus) as staged:
        work = staged / "work"
        work.mkdir()
        seconds: dict[str, float] = {"find": time.perf_counter() - started}
        with _timed(seconds, "plan"):
            units = engine.run(lambda: _plan(corpus, found, work / "spool"))
        with _timed(seconds, "clean"):
            _clean(corpus, units, work / "cleaned")
        with _timed(seconds, "deduplicate_and_publish"):
            funnels = engine.run(lambda: _finish(corpus, found, units, work, staged))
        _check_left(funnels)
        shutil.rmtree(work)
        elapsed = time.perf_counter() - started
        write_json(
            staged / "statistics.json",
            {
                "version": VERSION,
                "sources": [funnels[name].to_json() for name in sorted(funnels)],
                "totals": totals(funnels.values()),
                "seconds": {
                    **{step: round(value, 3) for step, value in seconds.items()},
                    "total": round(elapsed, 3),
                },
            },
        )
        total = totals(funnels.values())
        mark_stage(staged, inputs, version=VERSION, documents=total["documents_kept"], bytes=total["bytes_kept"])
    return CorpusSummary(
        documents_in=total["documents_in"],
        documents_kept=total["documents_kept"],
        bytes_in=total["bytes_in"],
        bytes_kept=total["bytes_kept"],
        seconds=time.perf_counter() - started,
        reasons=reasons(funnels.values()),
        sources=funnels,
    )


def _digest(corpus: Corpus, found: dict[str, list[File]]) -> str:
    files = {
        name: [(file.path, file.size, file.mtime_ns, file.etag) for file in files] for name, files in found.items()
    }
    section = corpus.model_dump(mode="json", exclude={"sources": {"__all__": {"weight"}}})
    return digest(section, f"corpus {VERSION}", files)


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started


def _plan(corpus: Corpus, found: dict[str, list[File]], spool: Path) -> list[Unit]:
    units: list[Unit] = []
    for source in corpus.sources:
        units += plan(source, found[source.name], spool, len(units), engine.STOP)
    return units


def _clean(corpus: Corpus, units: list[Unit], folder: Path) -> None:
    sizes: Counter[str] = Counter()
    for unit in units:
        sizes[unit.source] += unit.size
    buckets = {source: num_buckets(size) for source, size in sizes.items()}
    METER.num_bytes = shown = 0
    with progress("cleaning text", sum(sizes.values()), "B") as advance:

        def poll() -> None:
            nonlocal shown
            read = METER.num_bytes
            advance(read - shown)
            shown = read

        engine.run(lambda: clean(units, corpus, buckets, folder), poll)


def _finish(
    corpus: Corpus, found: dict[str, list[File]], units: list[Unit], work: Path, staged: Path
) -> dict[str, Funnel]:
    """Deduplicate, publish, count; the counts are compared with what was planned."""
    cleaned = work / "cleaned"
    files = [path for source in sorted(found) for bucket in cleaned_files(cleaned, source) for path in bucket]
    verdicts = find_duplicates(files, corpus.dedup, work / "signatures")
    read = {
        source: {piece.name for unit in units if unit.source == source for piece in unit.pieces} for source in found
    }
    funnels = {
        source.name: Funnel(source.name, source.format, files=len(read[source.name])) for source in corpus.sources
    }
    publish(cleaned, verdicts, funnels, Counter(unit.source for unit in units), staged)
    for name, funnel in funnels.items():
        expected = [expected_documents(unit) for unit in units if unit.source == name]
        known = [count for count in expected if count is not None]
        if len(known) == len(expected) and sum(known) != funnel.documents_in:
            raise BessemerError(
                f"corpus: source {name} has {sum(known)} files but {funnel.documents_in} documents came in; "
                "nothing was written; please report this"
            )
    return funnels


def _check_left(funnels: dict[str, Funnel]) -> None:
    for name, funnel in funnels.items():
        if not funnel.documents_kept:
            raise InputError(
                f"corpus.sources.{name}: none of its {funnel.documents_in} documents is left after cleaning: "
                f"{funnel.top_reasons() or 'the files are empty'}; see corpus.rules, or remove the source"
            )
