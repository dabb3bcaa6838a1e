"""What the rules of a recipe make of some documents of each source, in seconds and without a run: the funnel with examples.

The documents come from pieces all over the files, by hash, so that the same ones come again after a change of the rules. They go
through the steps of the corpus stage; duplicates are looked for among them alone, so there are more in the whole.
"""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bessemer.common.console import counted, progress, size
from bessemer.corpus.document import EXCERPT_CHARACTERS, Document, printable
from bessemer.corpus.filters.chain import HIDDEN, Chain, Tally
from bessemer.corpus.global_steps import CorpusDocuments, run_step
from bessemer.corpus.inputs import listings_of
from bessemer.corpus.partition import read, row_of
from bessemer.corpus.readers.files import Listing
from bessemer.corpus.readers.parts import plan
from bessemer.corpus.statistics import Funnel, described, meaning, percent, where, where_and_why
from bessemer.recipe import Corpus, Source
from bessemer.run_tasks.task import check_stop

# Read for a document at the most, from pieces chosen by hash: of longer ones there are fewer than were asked for
BYTES_EACH = 64 << 10
LEAST_BYTES = 4 << 20  # of a source
MIN_SHARE = 0.3  # of the documents that the smallest source gets, against an equal part
EDITS_SHOWN, CONTEXT_CHARACTERS = 3, 160
EDIT_WORDS = 4000  # in which an edit is looked for: quick

Row = dict[str, Any]


def dry_run(corpus: Corpus, count: int) -> dict[str, Any]:
    """Take about `count` documents through the rules. Returns the funnel of each source as in statistics.json, with edits; the
    counts of the steps; and the duplicates among the documents. Raises InputError as building the corpus does."""
    listings = listings_of(corpus)
    settings = Chain.of(corpus)
    sources, kept, tally = [], list[Row](), Tally()
    wanted = _shares(listings, count)
    with tempfile.TemporaryDirectory() as scratch, progress("sampling"):
        for source in corpus.sources:
            files, edits = listings[source.name].read, list[Row]()
            funnel = Funnel(source.name, source.shown_format, len(files))
            for record, before in _records(source, listings[source.name], wanted[source.name], settings):
                check_stop()
                settings.clean(record, tally)
                row = row_of(record, corpus) | {
                    "source": source.name,
                    "excerpt": printable(record.text[:EXCERPT_CHARACTERS]),
                }
                funnel.documents_in += 1
                funnel.bytes_in += record.num_bytes
                if record.reason is not None:
                    funnel.reject(record.reason, record.num_bytes, row)
                    continue
                funnel.documents_kept += 1
                kept.append(row)
                if len(edits) < EDITS_SHOWN and (edit := _edit(before, record.text)):
                    edits.append({name: row[name] for name in ("path", "place", "url")} | edit)
            sources.append(funnel.to_json() | {"edits": edits, "bytes_in_all": sum(file.size for file in files)})
        duplicates = _duplicates(kept, corpus, Path(scratch) / "dedup") if kept else {}
    return {
        "documents": sum(source["documents_in"] for source in sources),
        "kept": len(kept) - sum(duplicates.values()),
        "sources": sources,
        "duplicates": duplicates,
        "reasons": described(settings.filters, (name for source in sources for name in source["rejected"])),
        "counts": {name: counts for name, counts in tally.to_json().items() if name not in HIDDEN},
    }


def _shares(listings: dict[str, Listing], count: int) -> dict[str, int]:
    """Documents of each source: in proportion to its bytes, and some of each."""
    sizes = {name: sum(file.size for file in found.read) for name, found in listings.items()}
    total, least = max(sum(sizes.values()), 1), MIN_SHARE * count / len(sizes)
    return {name: max(round(max(count * num_bytes / total, least)), 1) for name, num_bytes in sizes.items()}


def _records(source: Source, found: Listing, count: int, settings: Chain) -> Iterator[tuple[Document, str]]:
    """Records of a source with their text: the same number of each of its parts, which lie all over its
    files."""
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


def _duplicates(kept: Sequence[Row], corpus: Corpus, scratch: Path) -> dict[str, int]:
    """Exact and near duplicates among the documents that stay."""
    from bessemer.corpus.dedup.search import DuplicateStep
    from bessemer.corpus.dedup.task import ParquetPart

    if not corpus.dedup.exact and not corpus.dedup.minhash:
        return {}
    scratch.mkdir()
    pq.write_table(pa.Table.from_pylist(list(kept)), scratch / "sample.parquet")
    step = DuplicateStep(**dict(corpus.dedup.changed(against=(), keep="longest")))
    sample = CorpusDocuments([ParquetPart(scratch / "sample.parquet")], scratch / step.name, "sample")
    return dict(run_step(step, sample)["statistics"]["removed"])


def _edit(before: str, after: str) -> Row | None:
    """The first place where a text lost or changed something besides white space: what stood there, and what stands there."""
    old, new = before.split()[:EDIT_WORDS], after.split()[:EDIT_WORDS]
    for tag, start, end, from_, to in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag != "equal":
            removed, instead = " ".join(old[start:end]), " ".join(new[from_:to])
            return {"removed": removed[:CONTEXT_CHARACTERS], "instead": instead[:CONTEXT_CHARACTERS]}
    return None


def lines(found: dict[str, Any]) -> Iterator[str]:
    """The result for a person."""
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
    for table, counts in (found["counts"] | {"duplicates among these": found["duplicates"]}).items():
        yield f"{table.replace('_', ' ')}: " + (
            ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
        )
    yield "not tried on a sample: duplicates outside it, earlier corpora, repeated lines, the quality classifier, corpus.steps"
