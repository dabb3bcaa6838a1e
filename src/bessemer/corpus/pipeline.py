"""The corpus stage: build clean documents from raw sources and publish them as one folder.

    corpus/documents/part-00000.parquet ... clean documents (document.COLUMNS), sorted by source and identity
    corpus/rejected/part-00000.parquet ...  rejected documents with their reason (REJECTED_COLUMNS), in the same order
    corpus/statistics.json                  the funnel: documents in, kept, and rejected by reason
    corpus/sources.json                     name, size and hash of every input file, by source
    corpus/stage.json                       the inputs of the stage

With `corpus.storage`, documents/ and rejected/ are there (run_tasks/stage_storage.py), and stage.json has the address and the
sizes (`store`, `stored`).

The stage lists files, plans parts and partitions, cleans partitions (filters/chain.py), runs the steps over all documents
(global_steps.py), publishes bucket by bucket, and assembles the folder. The output of each step in the work folder
(run_tasks/task.py) survives a kill. The corpus is byte-identical for any order, number of workers and engine.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bessemer.common.console import warn
from bessemer.common.errors import FileChanged, InputError
from bessemer.common.hashing import digest
from bessemer.corpus import inputs
from bessemer.corpus.document import printable
from bessemer.corpus.filters import chain
from bessemer.corpus.filters.base import Filter
from bessemer.corpus.filters.chain import CONTAMINATED_DOCUMENTS, CONTAMINATED_ITEMS, filters_of
from bessemer.corpus.global_steps import list_steps, report_folder, run_global_steps
from bessemer.corpus.partition import Partition, buckets_of, cut, num_buckets, require, write_context
from bessemer.corpus.publish import PublishBucket, assemble
from bessemer.corpus.readers.base import Part
from bessemer.corpus.readers.files import Listing
from bessemer.corpus.readers.parts import plan
from bessemer.corpus.statistics import KEPT, Funnel, advice_on, commonest, described, funnels_of, totals
from bessemer.recipe import Corpus, Recipe
from bessemer.run.directory import RunDirectory
from bessemer.run.files import write_json
from bessemer.run.stage import mark_stage, staging
from bessemer.run_tasks import run as worker
from bessemer.run_tasks.local import run_in_thread
from bessemer.run_tasks.stage_storage import begin_publishing, close_work, end_publishing, open_work, require_storage
from bessemer.run_tasks.task import build_once
from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import copy_folder

PARTS = "parts.json"  # file in the plan's folder with the parts of all files by source
PLANNED = TypeAdapter(dict[str, list[Part]])
MAX_KEPT_FILES = 100_000  # sources.json, which then has 10 MB, is not written for more files
Steps = dict[str, dict[str, Any]]  # receipts of the global steps, by name
PUBLISHED_BYTES = 400  # cost of publishing a document in input bytes, to decide how many workers are worth starting


def build(recipe: Recipe, run: RunDirectory) -> dict[str, Any]:
    """Build the corpus of a run and publish it as `run.corpus`, which replaces an older one only at the end.

    Finished work of an earlier build with the same inputs is reused. If a file changes during the build, the build starts
    again once.

    Returns:
        The totals of statistics.json.

    Raises:
        InputError: A source is unusable, or empty after cleaning. `run.corpus` is unchanged after any error.
        FileChanged: A file changed again.
        OSError: The disk is full or read-only.
    """
    corpus = recipe.corpus
    worker.require_engine(corpus)
    if not corpus.sources:
        raise InputError("corpus.sources: the recipe has no source of text; add a [[corpus.sources]] table")
    require_storage(run.path, corpus.storage)
    list_steps(corpus)  # report unusable code and settings before anything is read
    with worker.keep_workers(run.path):
        try:
            summary = _build_from_files(recipe, run)
        except FileChanged as error:
            warn(f"{error}; the corpus is built again")
            summary = _build_from_files(recipe, run)
    close_work(run.corpus)
    return summary


def _build_from_files(recipe: Recipe, run: RunDirectory) -> dict[str, Any]:
    """Build the corpus from the current files and return the totals of statistics.json.

    Raises FileChanged if a file changes meanwhile.
    """
    listings = inputs.listings_of(recipe.corpus)
    made_of = inputs.digest_of_files(recipe.corpus, listings)
    work = open_work(run.corpus, made_of, recipe.corpus.storage)
    try:
        return _build(recipe, run, work, listings, made_of)
    except InputError:  # the fixed recipe will use another work folder
        close_work(run.corpus)
        raise


def _build(
    recipe: Recipe, run: RunDirectory, work: AnyPath, listings: dict[str, Listing], made_of: str
) -> dict[str, Any]:
    corpus = recipe.corpus
    files = inputs.contents_of(listings)
    content = inputs.digest_of_contents(recipe, files)
    partitions = run_in_thread(lambda: _plan(corpus, listings, work, made_of))
    cleaned, funnels = digest("cleaned", made_of), funnels_of(corpus, listings)
    receipts = list(worker.run_tasks("cleaning text", "B", partitions, 1, corpus))
    for done in receipts:
        funnels[done["source"]].cleaned.merge(done["counts"])
        cleaned = digest(cleaned, done["outputs"])
    buckets = buckets_of(work, receipts)
    passed = sum(funnel.cleaned.passed for funnel in funnels.values())
    buckets, steps = run_global_steps(corpus, work, buckets, cleaned, passed)
    tasks = [PublishBucket(work, digest("bucket 5", cleaned, bucket.size), bucket.size, bucket) for bucket in buckets]
    _publish(corpus, tasks, funnels, steps)
    _count_not_read(funnels, listings)
    total = totals(funnels.values())
    meanings = described([*filters_of(corpus), *list_steps(corpus)], total["rejected"])
    _check_not_empty(funnels, {"reasons": meanings})
    with staging(run.corpus) as staged:
        target = begin_publishing(run.corpus, made_of, corpus.storage)
        written = assemble(tasks, target or staged)
        statistics = {
            "version": inputs.VERSION,
            "sources": [funnels[name].to_json() for name in sorted(funnels)],
            "totals": total,
            **{name: done["statistics"] for name, done in steps.items() if done["statistics"] is not None},
        }
        if meanings:
            statistics["reasons"] = meanings
        if corpus.contamination.sets:
            statistics["contamination"] = _contamination(corpus, [funnel.cleaned for funnel in funnels.values()])
        for name in steps:
            copy_folder(report_folder(work, name), staged)
        write_json(staged / "statistics.json", statistics)
        kept: dict[str, Any] = {"documents": total["documents_kept"], "bytes": total["bytes_kept"]}
        if sum(map(len, files.values())) <= MAX_KEPT_FILES:
            write_json(staged / inputs.CONTENTS, files)
        if target is not None:
            kept |= end_publishing(target, made_of, written)
        mark_stage(staged, made_of, content=content, version=inputs.VERSION, **kept)
    return total


def _plan(corpus: Corpus, listings: dict[str, Listing], work: AnyPath, made_of: str) -> list[Partition]:
    """Return the tasks that clean the corpus.

    The parts of files that they read are planned once per build and stored in `work`. `made_of` is the digest of the
    inputs.
    """

    def plan_parts(folder: Path) -> dict[str, Any]:
        planned = inputs.of_each_source(corpus, lambda source: plan(source, listings[source.name].read))
        sizes = {name: sum(part.size for part in parts) for name, parts in planned.items()}
        write_context(work, corpus, {source: num_buckets(size) for source, size in sizes.items()})
        (folder / PARTS).write_text(json.dumps(PLANNED.dump_python(planned, mode="json")))
        return {}

    build_once(work / "plan", digest("plan 9", made_of), plan_parts)
    return cut(PLANNED.validate_python(json.loads((work / "plan" / PARTS).read_bytes())), work)


def _publish(corpus: Corpus, tasks: list[PublishBucket], funnels: dict[str, Funnel], steps: Steps) -> None:
    """Publish the buckets that are not finished and add their counts to `funnels`, the counts of each source.

    Raises BessemerError if the counts differ from those of the cleaning and of the global steps `steps`.
    """
    receipts = worker.run_tasks("publishing", "documents", tasks, PUBLISHED_BYTES, corpus)
    for task, done in zip(tasks, receipts, strict=True):
        funnels[task.bucket.source].add(done)
    filters, expected, published = filters_of(corpus), Counter[str](), Counter[str]()
    for funnel in funnels.values():
        _check(funnel, filters, steps)
        expected.update(funnel.cleaned[chain.REJECTED])
        published.update(funnel.published[chain.REJECTED])
    for done in steps.values():
        expected.update(done["rejected"])
    differ = (f"{expected[reason]} as {reason}, not {published[reason]}" for reason in expected | published)
    require(expected == published, f"the published rejections differ from those counted: {', '.join(differ)}")


def _count_not_read(funnels: dict[str, Funnel], listings: dict[str, Listing]) -> None:
    """Add the files in the sources' folders that no source reads to the funnels, each file once.

    A funnel has the counts of one source.
    """
    if not any(files.other for files in listings.values()):
        return
    known = {os.path.realpath(file.path) for files in listings.values() for file in files.read}
    for name, files in listings.items():
        for file in files.other:
            if (path := os.path.realpath(file.path)) not in known:
                known.add(path)
                funnels[name].count_not_read(printable(file.name), file.size)


def _check(funnel: Funnel, filters: Sequence[Filter], steps: Steps) -> None:
    """Check that a source's published counts equal those of the cleaning, and add the counts of the steps to its funnel.

    Raises BessemerError for a difference.
    """
    came, published = funnel.cleaned[chain.INPUT], funnel.published[chain.INPUT]
    require(came == published, f"source {funnel.source}: cleaned {dict(came)}, but published {dict(published)}")
    funnel.steps = chain.list_step_counts(funnel.cleaned, filters)
    left = funnel.cleaned.passed
    for name, done in steps.items():
        losses = sum(funnel.published[chain.REJECTED][reason] for reason in done["rejected"])
        funnel.steps.append({"step": name, "documents_in": left, "rejected": losses})
        left -= losses


def _contamination(corpus: Corpus, tallies: Sequence[chain.Tally]) -> list[dict[str, Any]]:
    """Return the rows of statistics.json on evaluation sets, from the counts of the filters for each source."""
    from bessemer.corpus.filters import contamination  # loads numba

    documents: Counter[str] = sum((tally[CONTAMINATED_DOCUMENTS] for tally in tallies), Counter())
    items = {item for tally in tallies for item in tally[CONTAMINATED_ITEMS]}
    return contamination.statistics(contamination.build(corpus.contamination), documents, items)


def _check_not_empty(funnels: dict[str, Funnel], statistics: dict[str, Any]) -> None:
    for name, funnel in funnels.items():
        if not funnel.published[KEPT][chain.DOCUMENTS]:
            reason = next(iter(commonest(funnel.published[chain.REJECTED])), "empty")
            why = f"{funnel.top_reasons() or 'its files hold none'}; {advice_on(reason, name, statistics)}"
            raise InputError(f"corpus.sources.{name}: no documents are left after cleaning: {why}")
