"""The corpus stage: raw sources to clean documents, published as one folder.

    corpus/documents/part-00000.parquet ... clean documents (document.COLUMNS), sorted by source and identity
    corpus/rejected/part-00000.parquet ...  every other document with its reason (REJECTED_COLUMNS), sorted alike
    corpus/index/                           where each of them lies, by identity
    corpus/statistics.json                  the funnel: what came in, what stayed, why the rest did not
    corpus/stage.json                       what the stage was made from

Steps: find the files; plan units and partitions; clean the partitions (read, extract, the steps of clean.py,
sign); find duplicates; publish bucket by bucket; put together. What each leaves in the work folder (work.py)
survives a kill. The same input gives the same corpus byte for byte, in whatever order, on however many workers
and by whatever engine the work was done.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.corpus import contamination, engine, language, scores, tasks
from bessemer.corpus.clean import CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS, ENTERED, LEFT, check_tally
from bessemer.corpus.dedup import earlier_files
from bessemer.corpus.files import File, Listing, find, listing
from bessemer.corpus.lines import add_lines
from bessemer.corpus.partition import (
    Counts,
    Partition,
    cut,
    num_buckets,
    partition_receipt,
    plan_file,
    printable,
    write_context,
)
from bessemer.corpus.publish import assemble, bucket_receipt, bucket_tasks
from bessemer.corpus.statistics import BY_ENDING, Funnel, reasons, totals
from bessemer.corpus.units import Unit, plan
from bessemer.corpus.webpage import check_engine
from bessemer.corpus.whole import Found, judge_whole
from bessemer.corpus.work import close_work, made, open_work, receipt
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Corpus, Recipe, digest
from bessemer.run import RunFolder, mark_stage, read_json, staging, write_atomic, write_json
from bessemer.terminal import progress

VERSION = 4
"""Goes up when the same sources would give other documents, or the folder another layout."""


WHOLE = (
    ("quality", ("low_quality",)),
    ("duplicates", ("exact_duplicate", "near_duplicate")),
    ("repeats", ("only_repeats",)),
)
"""The steps over the whole corpus, with the reasons for which they reject."""

PUBLISHING = 8
"""Publishing takes about an eighth of the time that cleaning takes: what it reads counts for so much less when it is
weighed against the start of processes."""


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
    steps: dict[str, float]
    """Seconds of each step of the stage."""


def inputs_digest(recipe: Recipe) -> str:
    """What the corpus depends on, as one hash: [corpus], and path, size and time of every input file.

    Weights and max_epochs are left out, as they say how the documents are mixed later and not which there are, and so is
    where the work is done.
    """
    return _digest(recipe.corpus, {source.name: find(source) for source in recipe.corpus.sources})


def build(recipe: Recipe, run: RunFolder) -> CorpusSummary:
    """Make the corpus of a run and publish it as `run.corpus`; an older one is replaced, at the end.

    What an earlier build of the same inputs has finished is taken as it is. Raises InputError for sources that cannot
    be used or of which nothing is left, OSError for a full or read-only disk. Whatever is raised, `run.corpus` is as
    it was before.
    """
    started = time.perf_counter()
    corpus = recipe.corpus
    check_engine(corpus.extract)
    if not corpus.sources:
        raise InputError("corpus.sources: the recipe names no source of text; add a [[corpus.sources]] table")
    listings = {source.name: listing(source) for source in corpus.sources}
    inputs = _digest(corpus, {name: files.read for name, files in listings.items()})
    try:
        summary = _build(corpus, run, listings, inputs, started)
    except InputError:  # another recipe, which starts in another folder, has to be written
        close_work(run)
        raise
    close_work(run)
    return summary


def _build(corpus: Corpus, run: RunFolder, listings: dict[str, Listing], inputs: str, started: float) -> CorpusSummary:
    work = open_work(run, inputs)
    found = {name: files.read for name, files in listings.items()}
    seconds = {"find": time.perf_counter() - started}
    with _timed(seconds, "plan"):
        partitions = engine.run(lambda: _plan(corpus, found, work, inputs))
    with _timed(seconds, "clean"):
        receipts = _clean(corpus, partitions, work)
        counts = _counted(corpus, receipts)

    def step(name: str, work_of: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        with _timed(seconds, name):
            return engine.run(work_of)

    passed = sum(of_source.passed for of_source in counts.values())
    whole = judge_whole(corpus, work, receipts, inputs, passed, step)
    with _timed(seconds, "publish"):
        buckets = bucket_tasks(work, receipts, whole.inputs)
        funnels = _publish(corpus, partitions, counts, buckets)
        add_lines(funnels, partitions)
        _count_not_read(funnels, listings)
    _check_whole(funnels, whole)
    _check_left(funnels)
    total = totals(funnels.values())
    with _timed(seconds, "put_together"), staging(run.corpus) as staged:
        assemble(buckets, sorted(funnels), staged)
        sources = [funnels[name].to_json() for name in sorted(funnels)]
        statistics = {"version": VERSION, "sources": sources, "totals": total, **whole.statistics()}
        if corpus.contamination.sets:
            statistics["contamination"] = _contamination(corpus, counts)
        if whole.quality is not None:
            shutil.copytree(work / "quality" / scores.REPORT, staged, dirs_exist_ok=True)
        write_json(staged / "statistics.json", statistics)
        mark_stage(staged, inputs, version=VERSION, documents=total["documents_kept"], bytes=total["bytes_kept"])
    return CorpusSummary(
        documents_in=total["documents_in"],
        documents_kept=total["documents_kept"],
        bytes_in=total["bytes_in"],
        bytes_kept=total["bytes_kept"],
        seconds=time.perf_counter() - started,
        reasons=reasons(funnels.values()),
        sources=funnels,
        steps={step: round(value, 3) for step, value in seconds.items()},
    )


def _digest(corpus: Corpus, found: dict[str, list[File]]) -> str:
    files = {
        name: [(file.path, file.size, file.mtime_ns, file.etag) for file in files] for name, files in found.items()
    }
    section = corpus.model_dump(mode="json", exclude={"sources": {"__all__": {"weight", "max_epochs"}}})
    for key in ("engine", "address", "workers"):
        del section[key]
    return digest(section, f"corpus {VERSION}", files, *_read_besides(corpus))


def _read_besides(corpus: Corpus) -> list[Any]:
    """What the steps read besides the sources: models, evaluation sets, earlier corpora."""
    found: list[Any] = [_content(Path(path)) for path in corpus.rules.files()]
    if corpus.language.identify:
        found.append(_content(language.model_path(corpus.language.model)))
    if corpus.contamination.sets:
        found.append(contamination.fingerprint(corpus.contamination))
    if corpus.quality.on:
        from bessemer.corpus.quality import classify

        found.append(classify.inputs(corpus.quality, [source.name for source in corpus.sources]))
    for folder in corpus.dedup.against:
        found.append([(str(path), path.stat().st_size) for path in earlier_files(folder)])
    return found


def _content(path: Path) -> list[str]:
    """Hash of a file, or of each file in a folder; nothing where there is none, which is refused when it is read."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started


def _plan(corpus: Corpus, found: dict[str, list[File]], work: Path, inputs: str) -> list[Partition]:
    """The partitions, as planned before or now; compressed files are expanded on the way."""
    folder = work / "plan"
    done = receipt(folder, inputs) if folder.exists() else None
    if done is None:
        spool = work / "spool"
        shutil.rmtree(spool, ignore_errors=True)
        units: list[Unit] = []
        for source in corpus.sources:
            units += plan(source, found[source.name], spool, len(units), engine.STOP)
            engine.check_stop()
        sizes: Counter[str] = Counter({source.name: 0 for source in corpus.sources})
        for unit in units:
            sizes[unit.source] += unit.size
        write_context(work, corpus, {source: num_buckets(size) for source, size in sizes.items()})
        partitions = cut(units)
        facts = {"partitions": len(partitions)}
        with made(folder, inputs, facts) as staged:
            for partition in partitions:
                # As ASCII: file names that are not UTF-8 survive as escapes.
                write_atomic(staged / plan_file(work, partition.number).name, json.dumps(partition.to_json()))
        return partitions
    return [Partition.from_json(read_json(plan_file(work, number))) for number in range(done["partitions"])]


def _clean(corpus: Corpus, partitions: list[Partition], work: Path) -> list[dict[str, Any]]:
    """Clean the partitions that are not finished; gives the receipts of all, in their order."""
    missing = [one for one in partitions if partition_receipt(work, one.number) is None]
    given = [{"work": str(work), "number": one.number} for one in missing]
    size = sum(one.size for one in partitions)
    with progress("cleaning text", size, "B") as advance:
        to_do = sum(one.size for one in missing)
        advance(size - to_do)
        tasks.each("clean", given, to_do, corpus, lambda done: advance(done["size"]))
    receipts = []
    for one in partitions:
        found = partition_receipt(work, one.number)
        if found is None:
            raise BessemerError(
                f"corpus: partition {one.number} of source {one.source} ({one.files}) was cleaned but is not in {work}; "
                "do all workers see this folder under the same path?"
            )
        receipts.append(found)
    return receipts


def _counted(corpus: Corpus, receipts: list[dict[str, Any]]) -> dict[str, Counts]:
    """What the partitions of each source counted, all together."""
    counts = {source.name: Counts() for source in corpus.sources}
    for given in receipts:
        counts[given["source"]].merge(given["counts"])
    return counts


def _publish(
    corpus: Corpus, partitions: list[Partition], counts: dict[str, Counts], buckets: list[dict[str, Any]]
) -> dict[str, Funnel]:
    """Publish the buckets that are not finished; gives the funnel of each source, held against what was cleaned."""
    missing = [task for task in buckets if bucket_receipt(task) is None]
    rows = sum(piece[2] for task in buckets for piece in task["pieces"])
    to_do = sum(piece[2] for task in missing for piece in task["pieces"])
    size = sum(one.size for one in partitions) * to_do // max(rows, 1) // PUBLISHING
    with progress("publishing", rows, "documents") as advance:
        advance(rows - to_do)
        tasks.each("publish", missing, size, corpus, lambda done: advance(done["size"]))
    funnels: dict[str, Funnel] = {}
    for source in corpus.sources:
        mine = [one for one in partitions if one.source == source.name]
        files = {piece.name for one in mine for unit in one.units for piece in unit.pieces}
        funnel = funnels[source.name] = Funnel(source.name, source.format or BY_ENDING, files=len(files))
        for task in buckets:
            if task["source"] == source.name:
                found = bucket_receipt(task)
                if found is None:
                    raise BessemerError(
                        f"corpus: bucket {task['bucket']} of source {source.name} was published but is not in "
                        f"{task['work']}; do all workers see this folder under the same path?"
                    )
                funnel.add(Funnel.from_json(found["funnel"]))
        _check(funnel, counts[source.name])
    return funnels


def _count_not_read(funnels: dict[str, Funnel], listings: dict[str, Listing]) -> None:
    """Count the files of the sources' folders that none of the sources reads, each once."""
    known = {os.path.realpath(file.path) for files in listings.values() for file in files.read}
    for name, files in listings.items():
        for file in files.other:
            if (place := os.path.realpath(file.path)) not in known:
                known.add(place)
                funnels[name].count_not_read(printable(file.name), file.size)


def _check(funnel: Funnel, counts: Counts) -> None:
    """What was published is what was cleaned, reason by reason; the counts of the steps go into the funnel."""
    funnel.check()
    where = f"source {funnel.source}"
    if funnel.documents_in != counts.documents_in or funnel.bytes_in != counts.bytes_in:
        raise BessemerError(
            f"corpus: {where}: {counts.documents_in} documents were cleaned but {funnel.documents_in} were published; "
            "nothing was written; please report this"
        )
    for reason, count in counts.rejected.items():
        published = funnel.rejected[reason].documents if reason in funnel.rejected else 0
        if published != count:
            raise BessemerError(
                f"corpus: {where}: {count} documents were rejected as {reason} but {published} were published as such; "
                "nothing was written; please report this"
            )
    funnel.steps = check_tally(counts.tally, counts.documents_in, sum(counts.rejected.values()), where)
    left = counts.passed
    for step, reasons_of in WHOLE:
        gone = sum(funnel.rejected[reason].documents for reason in reasons_of if reason in funnel.rejected)
        funnel.steps.append({"step": step, "documents_in": left, "rejected": gone})
        left -= gone
    hidden = (ENTERED, LEFT, CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS)
    funnel.tables = {name: table for name, table in counts.tally.to_json().items() if name not in hidden}


def _check_whole(funnels: dict[str, Funnel], whole: Found) -> None:
    removed = whole.duplicates["statistics"]["removed"]
    expected = {"exact_duplicate": removed["exact"], "near_duplicate": removed["near"]}
    if whole.quality is not None:
        expected["low_quality"] = whole.quality["rejected"]
    for reason, count in expected.items():
        found = sum(funnel.rejected[reason].documents for funnel in funnels.values() if reason in funnel.rejected)
        if found != count:
            raise BessemerError(
                f"corpus: {count} documents were found to be {reason} but {found} were published as such; nothing was "
                "written; please report this"
            )


def _contamination(corpus: Corpus, counts: dict[str, Counts]) -> list[dict[str, Any]]:
    """The table of the evaluation sets over the whole corpus."""
    documents: Counter[str] = Counter()
    items: set[str] = set()
    for of_source in counts.values():
        documents.update(of_source.tally.tables.get(CONTAMINATED_DOCUMENTS, {}))
        items.update(of_source.tally.tables.get(CONTAMINATED_ITEMS, {}))
    return [vars(row) for row in contamination.table_of(contamination.build(corpus.contamination), documents, items)]


def _check_left(funnels: dict[str, Funnel]) -> None:
    total_bytes = sum(funnel.bytes_in for funnel in funnels.values())
    for name, funnel in funnels.items():
        if not funnel.documents_kept:
            raise InputError(
                f"corpus.sources.{name}: none of its documents is left after cleaning: "
                f"{funnel.top_reasons() or 'the files are empty'}; {funnel.advice(total_bytes)}"
                + ("; or remove the source" if len(funnels) > 1 else "")
            )
