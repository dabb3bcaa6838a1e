"""What the metadata of a large corpus takes of the driver: CPU seconds and peak memory of each of its steps at 1, 10 and 100 TB.

Everything but the texts is real: sparse files named as a crawl's are found, looked into, cut into units and partitions; receipts
of partitions, merges and buckets are read from the disk and summed; buckets are published as far as the driver does it and put
together. A few hundred receipts of each kind stand for all. Indexes have no rows: the time for these is added, from the rate at
which rows of an index were copied. The rate of the merge is that of Python's library. Repeats are searched for in the mode that
takes most tasks (n-grams, in three rounds of bounds; spans of 50 words), and the quality classifier keeps a share, whose cut
takes ten rounds. The search for duplicates is not in here (dedup.py).

    python benchmarks/corpus_scale.py [--json FILE] [--terabytes 1 10 100]
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from machine import describe

from bessemer.corpus import index, partition, pipeline, publish, whole, worker
from bessemer.corpus.clean import STEPS, Tally
from bessemer.corpus.dedup import paragraphs, repeats, substrings
from bessemer.corpus.dedup.exchange import SplitWriter
from bessemer.corpus.dedup.task import MERGED, DedupTask, MergeFiles
from bessemer.corpus.files import listing
from bessemer.corpus.inputs import digest_of_contents
from bessemer.corpus.look import contents_by_source
from bessemer.corpus.merge import MergeRange, RangeCounts, file_name
from bessemer.corpus.partition import Bucket
from bessemer.corpus.publish import PublishBucket
from bessemer.corpus.quality.decide import (
    DIGIT_COUNTS,
    EXAMPLES_FILE,
    CountDigits,
    DecideDocuments,
    QualityTask,
    ScoreDocuments,
    decide,
)
from bessemer.corpus.statistics import Funnel
from bessemer.corpus.work import CorpusTask
from bessemer.plan.corpus import load_rates, plan
from bessemer.recipe import Corpus, parse
from bessemer.run import mark_stage

FILE_BYTES = 1 << 30  # of a file of Common Crawl
SAMPLE = 300  # receipts of partitions and of buckets on the disk
INDEX_ROWS = 1 << 20
PASSED_BYTES = 84_000  # of text that passed in a row group of a partition at 100 TB
NAME = (
    "crawl-data/CC-MAIN-2026-40/segments/1727944253{:03d}.99/warc/CC-MAIN-20261002205313-20261002235313-{:05d}.warc.gz"
)


GLOBAL = """
[corpus.dedup]
paragraphs.mode = "ngram"
substrings.unit = "words"
[corpus.quality]
model = "classifier"
use = "filter"
keep_share = 0.5
"""
WORDS = 650  # of a document that passed


class Steps:
    """CPU seconds, peak memory and memory afterwards of each step."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        started = process_time()
        yield
        seconds = process_time() - started
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        peak, after = (int(status[key].split()[0]) / 1e3 for key in ("VmHWM", "VmRSS"))
        row = {"step": name, "cpu_seconds": round(seconds, 2), "peak_megabytes": round(peak), "megabytes": round(after)}
        self.rows.append(row)
        print(row, file=sys.stderr, flush=True)


def make_files(folder: Path, num_bytes: int) -> None:
    """Sparse files of so many bytes together."""
    for number in range(max(num_bytes // FILE_BYTES, 1)):
        path = folder / NAME.format(number % 100, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(FILE_BYTES)


def write_receipts(work: Path, num_bytes: int, num_partitions: int, cut: partition.Cut) -> dict[str, int]:
    """Receipts with the counts that a partition, a range and a bucket of such a corpus would have; returns documents by kind."""
    flow = plan(num_bytes, load_rates())["documents"]
    documents, passed = round(flow["text"]), round(flow["passed"])
    each, ranges = documents // num_partitions, -(-cut.num_buckets // cut.range_size)
    tally = Tally()
    for step, _ in (("read", None), *STEPS):
        tally.count("entered", step, each)
    tally.count("rejected_in", "rules", each - passed // num_partitions)
    for number in range(40):
        tally.count("rejected", f"gopher_quality.rule_{number}", (each - passed // num_partitions) // 40)
        tally.count("personal_data", f"kind_{number}", 7)
    tally.count("bytes", "in", each * 4000)
    for number in range(min(SAMPLE, num_partitions)):
        folder = work / "partitions" / f"{number:06d}"
        folder.mkdir(parents=True)
        (folder / "rows.parquet").write_bytes(b"x")
        facts = {
            "ranges": [[part, -(-each // ranges)] for part in range(ranges)],
            "bytes": each * 4000,
            "counts": tally.to_json(),
        }
        mark_stage(folder, partition.Partition.inputs, source="crawl", partition=number, **facts)
    funnel = Funnel("crawl", "warc", files=0, documents_in=100, documents_kept=25)
    for number in range(40):
        for example in range(3):
            funnel.reject(f"gopher_quality.rule_{number}", 4000, NAME, "x" * 200, "detail", f"{example:032x}", "123456")
    for number in range(min(SAMPLE, cut.num_buckets)):
        folder = work / "published" / "crawl" / f"{number:06d}"
        for kind, columns in publish.WRITTEN_COLUMNS.items():
            (folder / kind).mkdir(parents=True)
            pq.write_table(publish.schema(columns).empty_table(), folder / kind / "part-00000.parquet")
            (folder / f"{kind}.idx").write_bytes(b"")
        (folder / publish.FUNNEL).write_bytes(pickle.dumps(funnel))
        mark_stage(folder, "bucket", repeats={})
    return {"documents": documents, "passed": passed}


def write_merged(task: MergeRange, cut: partition.Cut) -> None:
    """The receipt of a range, with an empty file for each of its buckets."""
    task.folder.mkdir(parents=True)
    mine = range(task.number * cut.range_size, min((task.number + 1) * cut.range_size, cut.num_buckets))
    for bucket in mine:
        (task.folder / file_name(bucket)).touch()
    mark_stage(task.folder, task.inputs, source="crawl", buckets=[[bucket, 96_000] for bucket in mine])


def simulate(terabytes: float, scratch: Path) -> dict[str, Any]:
    """The driver's steps for a crawl of this size."""
    num_bytes, work, steps = int(terabytes * 1e12), scratch / "work", Steps()
    make_files(scratch / "data", num_bytes)
    work.mkdir()
    source = f'[[corpus.sources]]\nname = "crawl"\nformat = "warc"\npaths = ["{scratch / "data"}"]\n'
    recipe = parse(f'[run]\nname = "t"\n[model]\ndepth = 2\n{source}{GLOBAL}', "scale")
    corpus: Corpus = recipe.corpus
    with steps("find the files"):
        listings = {"crawl": listing(corpus.sources[0])}
    contents_by_source(corpus, listings, work)  # by tasks, whose time is not the driver's
    with steps("read the tasks' hashes"):
        digest_of_contents(recipe, contents_by_source(corpus, listings, work))
    with steps("plan units and partitions"):
        partitions = pipeline._plan(corpus, listings, work, "inputs", [])  # the files looked at here, not by tasks
    cut = partition.cuts(work)["crawl"]
    documents = write_receipts(work, num_bytes, len(partitions), cut)
    partition_folder, receipt = partition.partition_folder, partition.Partition.receipt
    with (
        patch.object(partition, "partition_folder", lambda work, number: partition_folder(work, number % SAMPLE)),
        patch.object(partition.Partition, "receipt", lambda task: {**(receipt(task) or {}), "partition": task.number}),
        steps("read the partitions' receipts twice, sum them"),
    ):
        counts, tally, cleaned = RangeCounts(work), Tally(), ""
        for done in worker.run_tasks("cleaning text", "B", partitions, 1, corpus):
            tally.merge(done["counts"])
            cleaned = pipeline.digest(cleaned, done["outputs"])
            counts.add(done)
    with steps("make the merges"):
        merges = counts.merges(cleaned)
    for task in merges:
        write_merged(task, cut)
    with steps("read the merges' receipts, make the buckets"):
        buckets: list[Bucket] = pipeline._merge(corpus, partitions, counts, cleaned)
    decide_quality(steps, corpus, work, buckets, documents["passed"])
    search_repeats(steps, corpus, work, buckets, documents["passed"])
    tasks = [PublishBucket(work, bucket, cleaned) for bucket in buckets]
    published = property(lambda task: work / "published" / "crawl" / f"{task.bucket.number % SAMPLE:06d}")
    with patch.object(PublishBucket, "folder", published), patch.object(PublishBucket, "inputs", "bucket"):
        with steps("read the published buckets' receipts and counts"), patch.object(pipeline, "_check"):
            pipeline._publish(corpus, partitions, tasks, {"crawl": tally})
        with steps("put parts and indexes together, without rows"):
            staged = scratch / "staged"
            staged.mkdir()
            publish.assemble(tasks, ["crawl"], staged)
    ranges = -(-cut.num_buckets // cut.range_size)
    return {
        "terabytes": terabytes, "files": len(listings["crawl"].read),
        "units": sum(len(one.units) for one in partitions), "partitions": len(partitions), "buckets": len(buckets),
        "merged_ranges": len(merges), "row_groups": len(partitions) * ranges + len(buckets) * bool(merges),
        "documents": documents["documents"], "steps": steps.rows,
        "index_rows_cpu_seconds": round(documents["documents"] * index.RECORD.size / index_rate(scratch), 1),
        "cpu_seconds": round(sum(row["cpu_seconds"] for row in steps.rows), 1),
        "peak_megabytes": max(row["peak_megabytes"] for row in steps.rows),
    }  # fmt: skip


def search_repeats(steps: Steps, corpus: Corpus, work: Path, buckets: list[Bucket], passed: int) -> None:
    """The driver's part of the search for repeats, on receipts with the counts that each task would have."""
    each = passed // len(buckets)
    words, facts = WORDS * each, dict[type[DedupTask], dict[str, Any]]()
    facts[paragraphs.CountText] = {"words": words, "characters": 6 * words}
    facts[paragraphs.ParagraphItems] = {"lines": 20 * each, "items": words}
    facts[paragraphs.DecideLines] = {"lines": each, "items": words // 20}
    facts[substrings.SpanSamples] = {"tokens": words}
    facts[substrings.RepeatedSamples] = {"repeated": 100_000}
    facts[substrings.RepeatedWindows] = {"repeated": 100_000}
    for step in (
        paragraphs.BoundParagraphs,
        paragraphs.MissingBits,
        paragraphs.SettleLines,
        paragraphs.CollectParagraphs,
    ):
        facts[step] = {"lines": each}
    facts |= {substrings.SpanWindows: {}, substrings.CollectSpans: {}}
    for step, counts in facts.items():
        for name in (step.__name__, f"{step.__name__}{MERGED}"):
            (work / "made-up" / name).mkdir(parents=True)
            for file in step.exchanged:
                with SplitWriter(work / "made-up" / name / file, len(buckets)):
                    pass
            mark_stage(work / "made-up" / name, "made up", False, **counts)
    num_tasks = 0

    def perform(tasks: Sequence[CorpusTask]) -> list[dict[str, Any]]:
        nonlocal num_tasks
        num_tasks += len(tasks)
        done = list(worker.run_tasks("finding repeats", "documents", tasks, whole.REPEAT_BYTES, corpus))
        if isinstance(tasks[0], paragraphs.DecideLines):  # each round leaves a thousandth
            done = [{**one, "items": one["items"] // 1000 ** tasks[0].round} for one in done]
        return done

    place = property(lambda task: work / "made-up" / task.step)
    (work / "repeats").mkdir()
    with ExitStack() as patched:
        for kind in (DedupTask, MergeFiles, paragraphs.BoundTask, paragraphs.DecideLines):
            patched.enter_context(patch.object(kind, "folder", place))
        with steps("search for repeats: tasks and receipts"):
            parts = [whole.BucketPart((bucket,)) for bucket in buckets]
            repeats.find_repeats(parts, corpus.dedup, work / "repeats", "made up", perform)
    steps.rows[-1]["tasks"] = num_tasks


def decide_quality(steps: Steps, corpus: Corpus, work: Path, buckets: list[Bucket], passed: int) -> None:
    """The driver's part of the decisions by quality."""
    each, folder = passed // len(buckets), work / "made-up-quality"
    shown = {bin_: [(number, f"{number:032x}", "crawl", 0.5, "x" * 400) for number in range(3)] for bin_ in range(20)}
    facts = {
        "documents": each,
        "histogram": [each // 20] * 20,
        "kept": each // 2,
        "sum": each << 31,
        "least_kept": 0.5,
        "most_rejected": 0.5,
    }
    folder.mkdir()
    digits = np.column_stack([np.zeros(3000, int), np.arange(3000), np.full(3000, each // 3000 + 2)])
    np.save(folder / DIGIT_COUNTS, digits)
    (folder / EXAMPLES_FILE).write_bytes(pickle.dumps([shown]))
    mark_stage(folder, "made up", **facts)
    num_tasks = 0

    def perform(tasks: Sequence[QualityTask]) -> list[dict[str, Any]]:
        nonlocal num_tasks
        num_tasks += len(tasks)
        return list(worker.run_tasks("scoring quality", "documents", tasks, whole.DEDUP_BYTES, corpus))

    (work / "report").mkdir()
    with ExitStack() as patched:
        for kind in (QualityTask, CountDigits, DecideDocuments):
            patched.enter_context(patch.object(kind, "folder", property(lambda task: folder)))
            patched.enter_context(patch.object(kind, "inputs", "made up"))
        with steps("decide by quality: tasks, receipts and counts"):
            common = (corpus.quality, "crawl", "")
            scoring = [
                ScoreDocuments(work, one.place, one.size, *common, documents=whole.BucketPart((one,)), learned=work)
                for one in buckets
            ]
            decide(corpus.quality, ["crawl"], {"report": {}, "seconds": {}}, scoring, perform, 0.0, work / "report")
    steps.rows[-1]["tasks"] = num_tasks


def index_rate(scratch: Path) -> float:
    """Bytes a CPU-second at which `assemble` copies the rows of an index."""
    place = scratch / "rows.idx"
    place.write_bytes(bytes(INDEX_ROWS * index.RECORD.size))
    started = process_time()
    with open(scratch / "all.idx", "ab") as file:
        file.write(index.shifted(place.read_bytes(), 1))
    return INDEX_ROWS * index.RECORD.size / (process_time() - started)


def merge_rate(scratch: Path) -> float:
    """Bytes of text that passed which a merge reads and writes again in a CPU-second: Python's library in 64 buckets, and
    a part of it read from row groups of the size that they have at 100 TB."""
    work, library = scratch / "work", Path(json.__file__).parent.parent
    work.mkdir()
    source = f'[[corpus.sources]]\nname = "crawl"\nformat = "code"\npaths = ["{library}"]\n'
    corpus = parse(f'[run]\nname = "t"\n[model]\ndepth = 2\n{source}', "scale").corpus
    with patch.object(partition, "RANGES", 1), patch.object(pipeline, "num_buckets", lambda size: 64):
        partitions = pipeline._plan(corpus, {"crawl": listing(corpus.sources[0])}, work, "inputs", [])
    counts = RangeCounts(work)
    for one in partitions:
        one.run()
        counts.add(one.receipt() or {})
    (task,) = counts.merges("")
    started = process_time()
    task.run()
    spent = process_time() - started
    table = pa.concat_tables(pq.read_table(path) for path in sorted(task.folder.glob("*.parquet")))
    passed = text_that_passed(table)
    few = table.take(pa.array(range(0, len(table), max(passed // (partition.RANGES * PASSED_BYTES), 1))))
    folder = partition.partition_folder(work, len(partitions))
    folder.mkdir()
    ranges = partition._write([few], partition.Cut(partition.RANGES, 1), folder / "rows.parquet")
    started = process_time()
    for number, _ in ranges:
        list(partition.rows_of_range(work, range(len(partitions), len(partitions) + 1), number))
    read = process_time() - started
    return 1 / (spent / passed + read / text_that_passed(few))


def text_that_passed(table: pa.Table) -> int:
    """Bytes of the texts of rows without a reason."""
    kept = table.filter(pc.is_null(table["reason"]))
    return pc.sum(pc.binary_length(kept["text"])).as_py() or 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--terabytes", type=float, nargs="+", default=[1, 10, 100])
    parser.add_argument("--one", type=float, help=argparse.SUPPRESS)  # in a process of its own
    given = parser.parse_args()
    if given.one is not None:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(simulate(given.one, Path(scratch))))
        return
    results = []
    for terabytes in given.terabytes:
        command = [sys.executable, __file__, "--one", str(terabytes)]
        results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
    with tempfile.TemporaryDirectory() as scratch:
        rate = round(merge_rate(Path(scratch)) / 1e6, 1)
    facts = {"machine": describe(), "sizes": results, "merge_megabytes_per_cpu_second": rate}
    text = json.dumps(facts, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
