"""Dry run of a recipe's rules on some documents of each source, in seconds and without a run directory.

The documents are drawn from all over the files by hash, so that a later dry run with other rules sees the same ones. They
pass all steps of the corpus stage. Duplicates are found only among them, so the whole corpus has more.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bessemer.common.console import counted, size
from bessemer.corpus.filters.chain import filters_of
from bessemer.corpus.global_steps import list_steps, run_global_steps
from bessemer.corpus.inputs import listings_of
from bessemer.corpus.partition import Partition, buckets_of, write_context
from bessemer.corpus.publish import PublishBucket
from bessemer.corpus.readers.files import Listing
from bessemer.corpus.readers.parts import plan
from bessemer.corpus.statistics import described, funnels_of, meaning, percent, totals, where_and_why
from bessemer.recipe import Corpus, Quality
from bessemer.run_tasks import run as worker

# Bytes to read per document, at most. Sources with longer documents give fewer than requested.
BYTES_EACH = 64 << 10
LEAST_BYTES = 4 << 20  # minimum to read of a source
EXCERPT_CHARACTERS = 160


def dry_run(corpus: Corpus, count: int) -> dict[str, Any]:
    """Pass about `count` documents, equally many of each source, through the corpus stage and return the results.

    Raises InputError like building the corpus.

    Returns:
        A dict with the numbers of `documents` read and `kept`, `sources` (rows as in statistics.json), `reasons`
            (reason -> its meaning and advice, for filters of the recipe), and `counts` (counts of the filters by table
            and key).
    """
    listings = listings_of(corpus)
    dedup = corpus.dedup.changed(against=(), keep="longest")
    changed = {"workers": 1, "engine": "local", "quality": Quality(), "dedup": dedup, "keep_rejected": "excerpt"}
    corpus = corpus.model_copy(update=changed)
    funnels = funnels_of(corpus, listings)
    with tempfile.TemporaryDirectory() as scratch, worker.keep_workers(work := Path(scratch)):
        write_context(work, corpus, dict.fromkeys(funnels, 1))
        partitions = _partitions(corpus, listings, count, work)
        receipts = list(worker.run_tasks("sampling", "documents", partitions, 1, corpus))
        for done in receipts:
            funnels[done["source"]].cleaned.merge(done["counts"])
        passed = sum(funnel.cleaned.passed for funnel in funnels.values())
        buckets, _ = run_global_steps(corpus, work, buckets_of(work, receipts), "sample", passed)
        for bucket in buckets:
            funnels[bucket.source].add(PublishBucket(work, "sample", bucket.size, bucket).run())
    total = totals(funnels.values())
    return {
        "documents": total["documents_in"],
        "kept": total["documents_kept"],
        "sources": [
            funnel.to_json() | {"bytes_in_all": sum(file.size for file in listings[name].read)}
            for name, funnel in funnels.items()
        ],
        "reasons": described([*filters_of(corpus), *list_steps(corpus)], total["rejected"]),
        "counts": total["tables"],
    }


def _partitions(corpus: Corpus, listings: dict[str, Listing], count: int, work: Path) -> list[Partition]:
    """Return one task per source that reads equally many documents from parts all over the source's files.

    `count` is the number of documents of all sources, and `work` the folder where the tasks write.
    """
    partitions, wanted = [], max(count // len(listings), 1)
    budget = max(wanted * BYTES_EACH, LEAST_BYTES)
    for number, source in enumerate(corpus.sources):
        limited = source.model_copy(update={"max_bytes": min(budget, source.max_bytes or budget)})
        parts = plan(limited, listings[source.name].read)
        parts = parts[:: max(len(parts) // wanted, 1)]
        partitions.append(Partition(work, "sample", wanted, number, source.name, tuple(parts), wanted))
    return partitions


def lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield lines for the terminal that show the result of `dry_run`."""
    yield f"{result['kept']:,} of {counted(result['documents'], 'document')} would be kept"
    for source in result["sources"]:
        num_read = source["documents_in"]
        share = f"{percent(source['bytes_in'], source['bytes_in_all'])} of {size(source['bytes_in_all'])}"
        yield ""
        yield f"{source['source']}: {source['documents_kept']:,} of {num_read:,}; read {size(source['bytes_in'])}, {share}"
        for reason, entry in source["rejected"].items():
            share = percent(entry["documents"], num_read)
            yield f"  {reason:<32} {entry['documents']:>7,}  {share:>6}  {meaning(result, reason)}"
            for example in entry["examples"][:2]:
                yield f"      {where_and_why(example)}"
                if excerpt := " ".join(example["excerpt"].split())[:EXCERPT_CHARACTERS]:
                    yield f"        {excerpt!r}"
    yield ""
    for table, counts in result["counts"].items():
        yield f"{table.replace('_', ' ')}: {', '.join(f'{name} {count:,}' for name, count in counts.items())}"
    yield "not tried on a sample: duplicates outside it, earlier corpora, the quality classifier"
