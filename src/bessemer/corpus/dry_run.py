"""Dry run of a recipe's rules on some documents of each source, in seconds and without a run directory.

The documents are drawn from all over the files by hash, so that a later dry run with other rules sees the same ones. They
pass all steps of the corpus stage. Duplicates are found only among them, so the whole corpus has more.
"""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from bessemer.common.console import counted, progress, size
from bessemer.corpus.document import Document
from bessemer.corpus.filters.chain import HIDDEN, Chain, Tally
from bessemer.corpus.global_steps import list_steps, run_global_steps
from bessemer.corpus.inputs import listings_of
from bessemer.corpus.partition import Bucket, partition_folder, read, row_of, rows_table, write_context, write_rows
from bessemer.corpus.publish import PublishBucket
from bessemer.corpus.readers.files import Listing
from bessemer.corpus.readers.parts import plan
from bessemer.corpus.statistics import Funnel, described, meaning, percent, totals, where, where_and_why
from bessemer.recipe import Corpus, Quality, Source
from bessemer.run_tasks.task import check_stop, from_plain

# Bytes to read per document, at most. Sources with longer documents give fewer than requested.
BYTES_EACH = 64 << 10
LEAST_BYTES = 4 << 20  # minimum to read of a source
MIN_SHARE = 0.3  # minimum number of documents of a source, relative to equal numbers for all
EDITS_SHOWN, CONTEXT_CHARACTERS = 3, 160
EDIT_WORDS = 4000  # search for edits only in these first words, to be quick

Row = dict[str, Any]


def dry_run(corpus: Corpus, count: int) -> dict[str, Any]:
    """Pass about `count` documents through the corpus stage.

    Returns the funnel of each source as in statistics.json, with examples of edits, and the counts of the filters. Raises
    InputError like building the corpus.
    """
    listings = listings_of(corpus)
    dedup = corpus.dedup.changed(against=(), keep="longest")
    here = {"workers": 1, "engine": "local", "quality": Quality(), "dedup": dedup, "keep_rejected": "excerpt"}
    corpus = corpus.model_copy(update=here)
    settings, tally, edits, buckets = Chain.of(corpus), Tally(), dict[str, list[Row]](), list[Bucket]()
    funnels = {
        source.name: Funnel(source.name, source.shown_format, len(listings[source.name].read))
        for source in corpus.sources
    }
    wanted = _shares(listings, count)
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        write_context(work, corpus, {})
        with progress("sampling"):
            for number, (name, source) in enumerate(settings.sources.items()):
                records = _records(source, listings[name], wanted[name], settings)
                rows, edits[name] = _clean(records, settings, tally)
                folder = partition_folder(work, number)
                assert isinstance(folder, Path), "it is in the scratch folder"
                folder.mkdir(parents=True)
                buckets += [Bucket(work, name, 0, len(rows), range(number, number + 1))] if rows else []
                write_rows(iter([rows_table(rows, settings)]), 1, folder / "rows.parquet")
        buckets, _ = run_global_steps(corpus, work, buckets, "sample", tally.passed)
        for bucket in buckets:
            published = PublishBucket(work, bucket, "sample").run()
            funnels[bucket.source].add(from_plain(published["funnel"], Funnel))
    total = totals(funnels.values())
    return {
        "documents": total["documents_in"],
        "kept": total["documents_kept"],
        "sources": [
            funnel.to_json() | {"edits": edits[name], "bytes_in_all": sum(file.size for file in listings[name].read)}
            for name, funnel in funnels.items()
        ],
        "reasons": described([*settings.filters, *list_steps(corpus)], total["rejected"]),
        "counts": {name: counts for name, counts in tally.to_json().items() if name not in HIDDEN},
    }


def _clean(records: Iterator[tuple[Document, str]], settings: Chain, tally: Tally) -> tuple[list[Row], list[Row]]:
    """Return the rows of cleaned documents, and some edits of their texts."""
    rows, edits = list[Row](), list[Row]()
    for record, before in records:
        check_stop()
        settings.clean(record, tally)
        rows.append(row := row_of(record, settings.corpus))
        if record.reason is None and len(edits) < EDITS_SHOWN and (edit := _edit(before, record.text)):
            edits.append({name: row[name] for name in ("path", "place", "url")} | edit)
    return rows, edits


def _shares(listings: dict[str, Listing], count: int) -> dict[str, int]:
    """Return the number of documents to draw from each source: proportional to its bytes, with a minimum."""
    sizes = {name: sum(file.size for file in found.read) for name, found in listings.items()}
    total, least = max(sum(sizes.values()), 1), MIN_SHARE * count / len(sizes)
    return {name: max(round(max(count * num_bytes / total, least)), 1) for name, num_bytes in sizes.items()}


def _records(source: Source, found: Listing, count: int, settings: Chain) -> Iterator[tuple[Document, str]]:
    """Yield documents of a source with their original text, equally many from parts all over its files."""
    budget = max(count * BYTES_EACH, LEAST_BYTES)
    limited = source.model_copy(update={"max_bytes": min(budget, source.max_bytes or budget)})
    parts = plan(limited, found.read)
    parts = parts[:: max(len(parts) // count, 1)]
    left = count
    for number, part in enumerate(parts):
        share = -(-left // (len(parts) - number))
        for document in islice(read(source, [part], settings.corpus), share):
            left -= 1
            yield document, document.text
        if left <= 0:
            return


def _edit(before: str, after: str) -> Row | None:
    """Return the first text that was removed or changed besides white space, and its replacement."""
    old, new = before.split()[:EDIT_WORDS], after.split()[:EDIT_WORDS]
    for tag, start, end, from_, to in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            removed, instead = " ".join(old[start:end]), " ".join(new[from_:to])
            return {"removed": removed[:CONTEXT_CHARACTERS], "instead": instead[:CONTEXT_CHARACTERS]}
    return None


def lines(found: dict[str, Any]) -> Iterator[str]:
    """Format the result as lines for the terminal."""
    yield f"{found['kept']:,} of {counted(found['documents'], 'document')} would stay"
    for source in found["sources"]:
        came = source["documents_in"]
        of = f"{percent(source['bytes_in'], source['bytes_in_all'])} of {size(source['bytes_in_all'])}"
        yield ""
        yield f"{source['source']}: {source['documents_kept']:,} of {came:,}; read {size(source['bytes_in'])}, {of}"
        for reason, entry in source["rejected"].items():
            share = percent(entry["documents"], came)
            yield f"  {reason:<32} {entry['documents']:>7,}  {share:>6}  {meaning(found, reason)}"
            for example in entry["examples"][:2]:
                yield f"      {where_and_why(example)}"
                if excerpt := " ".join(example["excerpt"].split())[:CONTEXT_CHARACTERS]:
                    yield f"        {excerpt!r}"
        for edit in source["edits"]:
            yield f"  edited, {where(edit)}: {edit['removed']!r} -> {edit['instead']!r}"
    yield ""
    for table, counts in found["counts"].items():
        yield f"{table.replace('_', ' ')}: {', '.join(f'{name} {count:,}' for name, count in counts.items())}"
    yield "not tried on a sample: duplicates outside it, earlier corpora, the quality classifier"
