"""The corpus stage: raw sources to clean documents, published as one folder.

    corpus/documents/part-00000.parquet ... clean documents (document.COLUMNS), sorted by source and identity
    corpus/rejected/part-00000.parquet ...  rejected documents with their reason (REJECTED_COLUMNS), sorted alike
    corpus/statistics.json                  the funnel: documents in, kept, and rejected by reason
    corpus/sources.json                     name, size and hash of every input file, by source
    corpus/stage.json                       the stage's inputs

With `corpus.storage` documents/ and rejected/ are there (storage.py); stage.json has the address and the sizes (`store`,
`stored`).

Steps: find files; plan units and partitions; clean partitions (clean.py); steps over the whole corpus (whole.py); publish by
bucket; assemble. Each step's output in the work folder (work.py)
survives a kill. The corpus is byte-identical for any order, number of workers and engine.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bessemer.corpus import engine, worker
from bessemer.corpus.clean import (
    BYTES,
    CONTAMINATED_DOCUMENTS,
    CONTAMINATED_ITEMS,
    HIDDEN,
    REJECTED,
    Tally,
    check_tally,
)  # fmt: skip
from bessemer.corpus.document import printable
from bessemer.corpus.files import Listing, contents
from bessemer.corpus.inputs import (
    CONTENTS,
    VERSION,
    Contents,
    digest_of_contents,
    digest_of_files,
    listings_of,
    of_each_source,
)
from bessemer.corpus.partition import Partition, buckets_of, cut, num_buckets, write_context
from bessemer.corpus.publish import FUNNEL, PublishBucket, assemble
from bessemer.corpus.statistics import BY_ENDING, Funnel, add_lines, advice_on, totals
from bessemer.corpus.storage import begin_publishing, close_work, end_publishing, require_storage
from bessemer.corpus.units import plan
from bessemer.corpus.webpage import check_engine
from bessemer.corpus.whole import QUALITY_REPORT, run_global_steps
from bessemer.corpus.work import build_once, open_work
from bessemer.errors import FileChanged, InputError
from bessemer.hashing import digest
from bessemer.recipe import Corpus, Recipe
from bessemer.run import RunFolder, mark_stage, staging, write_json
from bessemer.storage import Place
from bessemer.store_path import copy_folder
from bessemer.terminal import warn

UNITS = "units.pickle"  # the units of all partitions, in the folder of the plan
MAX_KEPT_FILES = 100_000  # of more it is not kept which there were: 10 MB
# the steps over the whole corpus, with the reasons for which they reject
GLOBAL_STEPS = (
    ("quality", ("low_quality",)),
    ("duplicates", ("exact_duplicate", "near_duplicate")),
    ("lines", ("only_repeats",)),
)
PUBLISHED_BYTES = 400  # for which publishing a document counts, when the start-up time of workers is weighed


def build(recipe: Recipe, run: RunFolder) -> dict[str, Any]:
    """Build the corpus of a run and publish it as `run.corpus`, replacing an older one at the end. Returns the totals
    of statistics.json, and the seconds of each step under `steps`.

    Finished work of an earlier build with the same inputs is reused. A file that changes while it is read is read again, once.
    Raises InputError for sources that are unusable or empty after cleaning, FileChanged, OSError for a full or read-only disk;
    `run.corpus` is then unchanged.
    """
    started = time.perf_counter()
    corpus = recipe.corpus
    check_engine(corpus.extract)
    worker.require_engine(corpus)
    if not corpus.sources:
        raise InputError("corpus.sources: the recipe names no source of text; add a [[corpus.sources]] table")
    require_storage(run.path, corpus.storage)
    with worker.kept_workers(run.path):
        try:
            summary = _build_from_files(recipe, run, started)
        except FileChanged as error:
            warn(f"{error}; reading it again")
            summary = _build_from_files(recipe, run, started)
    close_work(run.corpus)
    return summary


def _build_from_files(recipe: Recipe, run: RunFolder, started: float) -> dict[str, Any]:
    """Build the corpus of the files that there are now. Raises FileChanged for one that changes meanwhile."""
    listings = listings_of(recipe.corpus)
    inputs = digest_of_files(recipe.corpus, {name: files.read for name, files in listings.items()})
    work = open_work(run.corpus, inputs, recipe.corpus.storage)
    try:
        return _build(recipe, run, work, listings, inputs, started)
    except InputError:  # another recipe, which starts in another folder, has to be written
        close_work(run.corpus)
        raise


def _build(
    recipe: Recipe, run: RunFolder, work: Place, listings: dict[str, Listing], inputs: str, started: float
) -> dict[str, Any]:
    corpus = recipe.corpus
    files: Contents = {name: contents(found.read) for name, found in sorted(listings.items())}
    content = digest_of_contents(recipe, files)
    seconds = {"find": time.perf_counter() - started}
    with _timed(seconds, "plan"):
        partitions = engine.run(lambda: _plan(corpus, listings, work, inputs))
    with _timed(seconds, "clean"):
        cleaned, tallies = digest("cleaned", inputs), {source.name: Tally() for source in corpus.sources}
        receipts = list(worker.run_tasks("cleaning text", "B", partitions, 1, corpus))
        for done in receipts:
            tallies[done["source"]].merge(done["counts"])
            cleaned = digest(cleaned, done["outputs"])
    buckets = buckets_of(work, receipts)
    passed = sum(tally.passed for tally in tallies.values())
    rejected, duplicates = run_global_steps(corpus, work, buckets, cleaned, passed, partial(_timed, seconds))
    with _timed(seconds, "publish"):
        tasks = [PublishBucket(work, bucket, cleaned) for bucket in buckets]
        funnels, cut = _publish(corpus, partitions, tasks, tallies)
        add_lines(funnels, (unit for partition in partitions for unit in partition.units))
        _count_not_read(funnels, listings)
    _check_counts(rejected, funnels.values())
    _check_not_empty(funnels)
    total = totals(funnels.values())
    with _timed(seconds, "put_together"), staging(run.corpus) as staged:
        place = begin_publishing(run.corpus, inputs, corpus.storage)
        written = assemble(tasks, place or staged)
        statistics = {
            "version": VERSION,
            "sources": [funnels[name].to_json() for name in sorted(funnels)],
            "totals": total,
            "duplicates": duplicates,
        }
        if corpus.dedup.lines:
            statistics["lines"] = cut
        if corpus.contamination.sets:
            statistics["contamination"] = _contamination(corpus, tallies)
        if corpus.quality.on:
            copy_folder(work / "quality" / QUALITY_REPORT, staged)
        write_json(staged / "statistics.json", statistics)
        kept: dict[str, Any] = {"documents": total["documents_kept"], "bytes": total["bytes_kept"]}
        if sum(map(len, files.values())) <= MAX_KEPT_FILES:
            write_json(staged / CONTENTS, files)
        if place is not None:
            kept |= end_publishing(place, inputs, written)
        mark_stage(staged, inputs, content=content, version=VERSION, **kept)
    return total | {"steps": {name: round(value, 3) for name, value in seconds.items()}}


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started


def _plan(corpus: Corpus, listings: dict[str, Listing], work: Place, inputs: str) -> list[Partition]:
    """The partitions, planned once per build."""

    def plan_units(folder: Path) -> dict[str, Any]:
        planned = of_each_source(corpus, lambda source: plan(source, listings[source.name].read))
        sizes = {name: sum(unit.size for unit in units) for name, units in planned.items()}
        write_context(work, corpus, {source: num_buckets(size) for source, size in sizes.items()})
        units = [unit for some in planned.values() for unit in some]
        (folder / UNITS).write_bytes(pickle.dumps(units))
        return {}

    build_once(work / "plan", digest("plan 7", inputs), plan_units)
    return cut(pickle.loads((work / "plan" / UNITS).read_bytes()), work)


def _publish(
    corpus: Corpus, partitions: list[Partition], tasks: list[PublishBucket], tallies: dict[str, Tally]
) -> tuple[dict[str, Funnel], Counter[str]]:
    """Publish the buckets that are not finished; returns the funnel of each source, compared with what was cleaned, and the
    counts of the repeated lines that were cut out."""
    receipts = worker.run_tasks("publishing", "documents", tasks, PUBLISHED_BYTES, corpus)
    files: dict[str, set[str]] = {source.name: set() for source in corpus.sources}
    for one in partitions:
        files[one.source].update(piece.name for unit in one.units for piece in unit.pieces)
    funnels = {
        source.name: Funnel(source.name, source.format or BY_ENDING, files=len(files[source.name]))
        for source in corpus.sources
    }
    cut = Counter[str]()
    for task, done in zip(tasks, receipts, strict=True):
        funnels[task.bucket.source].add(task.load(FUNNEL))
        cut.update(done["lines"])
    for name, funnel in funnels.items():
        _check(funnel, tallies[name])
    return funnels, cut


def _count_not_read(funnels: dict[str, Funnel], listings: dict[str, Listing]) -> None:
    """Count the files of the sources' folders that none of the sources reads, each once."""
    if not any(files.other for files in listings.values()):
        return
    known = {os.path.realpath(file.path) for files in listings.values() for file in files.read}
    for name, files in listings.items():
        for file in files.other:
            if (place := os.path.realpath(file.path)) not in known:
                known.add(place)
                funnels[name].count_not_read(printable(file.name), file.size)


def _check(funnel: Funnel, tally: Tally) -> None:
    """Raise BessemerError unless what was published is what was cleaned, reason by reason; adds the counts of the
    steps."""
    funnel.check()
    where = f"source {funnel.source}: "
    engine.require(
        (funnel.documents_in, funnel.bytes_in) == (tally.documents_in, tally.of(BYTES).total()),
        f"{where}{tally.documents_in} documents were cleaned but {funnel.documents_in} were published",
    )
    _check_counts(tally.of(REJECTED), [funnel], where)
    funnel.steps = check_tally(tally, funnel.documents_in, f"source {funnel.source}")
    left = tally.passed
    for step, reasons_of in GLOBAL_STEPS:
        gone = funnel.num_rejected(*reasons_of)
        funnel.steps.append({"step": step, "documents_in": left, "rejected": gone})
        left -= gone
    funnel.tables = {name: table for name, table in tally.to_json().items() if name not in HIDDEN}


def _check_counts(expected: Mapping[str, int], funnels: Collection[Funnel], where: str = "") -> None:
    """Raise BessemerError unless as many documents as expected were published as rejected, reason by reason."""
    for reason, count in expected.items():
        published = sum(funnel.num_rejected(reason) for funnel in funnels)
        problem = f"{where}{count} documents were rejected as {reason} but {published} were published as such"
        engine.require(published == count, problem)


def _contamination(corpus: Corpus, tallies: dict[str, Tally]) -> list[dict[str, Any]]:
    """The counts of the evaluation sets over the whole corpus."""
    from bessemer.corpus import contamination  # loads numba

    documents: Counter[str] = sum((tally.of(CONTAMINATED_DOCUMENTS) for tally in tallies.values()), Counter())
    items = {item for tally in tallies.values() for item in tally.of(CONTAMINATED_ITEMS)}
    return contamination.statistics(contamination.build(corpus.contamination), documents, items)


def _check_not_empty(funnels: dict[str, Funnel]) -> None:
    for name, funnel in funnels.items():
        if not funnel.documents_kept:
            reason = next(iter(funnel.commonest_reasons()), "empty")
            raise InputError(
                f"corpus.sources.{name}: none of its documents is left after cleaning: "
                f"{funnel.top_reasons() or 'its files hold none'}; {advice_on(reason, name)}"
                + ("; or remove the source" if len(funnels) > 1 else "")
            )
