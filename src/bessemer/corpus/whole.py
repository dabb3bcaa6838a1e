"""Steps over the whole corpus: quality classifier, duplicates, repeated paragraphs and spans.

Each runs once, in canonical order and bucket by bucket, on the documents kept so far, into a folder with a receipt:

    quality/{identities,scores,stays,band}.npy              one row a document, sorted by identity
    quality/report/                                         quality.json and the model, published with the corpus
    duplicates/{identities,verdict,keeper,similarity}.npy   one row a document, sorted by identity
    duplicates/keepers.arrow                                row and path of each document with duplicates
    repeats/texts.parquet                                   identity, text of edited documents; a row group a bucket
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bessemer.corpus import engine
from bessemer.corpus.dedup.verdicts import (
    EXACT,
    KEPT,
    Edit,
    EditStatistics,
    Verdicts,
    earlier_files,
    identity_of,
    parquet_tables,
    with_texts,
)  # fmt: skip
from bessemer.corpus.language import routed
from bessemer.corpus.work import made_once, partition_folder
from bessemer.errors import BessemerError
from bessemer.recipe import Corpus, Dedup, digest
from bessemer.recipe.corpus import band_part, is_banded
from bessemer.run import STAGE_FILE, read_json

if TYPE_CHECKING:
    from bessemer.corpus.quality.classify import QualityVerdicts

QUALITY_ARRAYS = ("identities", "scores", "stays", "band")
DUPLICATE_ARRAYS = ("identities", "verdict", "keeper", "similarity")
QUALITY_REPORT = "report"
EDITED_TEXTS = "texts.parquet"

TimedStep = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]  # runs a named step and records its seconds


def bucket_rows(work: Path, bucket: dict[str, Any], columns: Sequence[str]) -> pa.Table:
    """The rows of a bucket from all partitions, sorted by identity (a required column). Raises BessemerError for
    missing rows."""
    tables = []
    for partition, group, _ in bucket["pieces"]:
        engine.check_stop()
        with pq.ParquetFile(partition_folder(work, partition) / "rows.parquet") as file:
            present = [name for name in columns if name in file.schema_arrow.names]
            tables.append(file.read_row_group(group, columns=present))
    table = pa.concat_tables(tables)
    expected = sum(rows for _, _, rows in bucket["pieces"])
    if table.num_rows != expected:
        raise BessemerError(
            f"corpus: source {bucket['source']}, bucket {bucket['bucket']}: {expected} rows were written but "
            f"{table.num_rows} came back; nothing was written; please report this"
        )
    return table.sort_by("identity")


@dataclass(frozen=True)
class KeptDocuments:
    """The documents that all steps so far kept. A call with column names yields them as tables, by source and identity,
    each time in the same order. Column `quality` exists when the documents have scores."""

    work: Path
    # {source, bucket, pieces}, as work order of the published corpus; a piece is [partition, row group, rows]
    buckets: list[dict[str, Any]]
    quality: QualityVerdicts | None = None
    verdicts: Verdicts | None = None

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for _, table in self.by_bucket(columns):
            yield table

    def by_bucket(self, columns: Sequence[str]) -> Iterator[tuple[dict[str, Any], pa.Table]]:
        """Each bucket that has documents, with them."""
        for bucket in self.buckets:
            table = self.bucket(bucket, columns)
            if table.num_rows:
                yield bucket, table

    def bucket(self, bucket: dict[str, Any], columns: Sequence[str]) -> pa.Table:
        """The documents of one bucket."""
        table = bucket_rows(self.work, bucket, sorted({*columns, "identity", "reason"} - {"source", "quality"}))
        table = table.filter(pc.is_null(table["reason"]))
        if self.quality is not None:
            rows = self.quality.rows(table["identity"].to_pylist())
            stays = self.quality.stays[rows]
            table = table.append_column("quality", pa.array(self.quality.scores[rows])).filter(pa.array(stays))
        if self.verdicts is not None:
            kept = self.verdicts.verdict[self.verdicts.rows(table["identity"].to_pylist())] == KEPT
            table = table.filter(pa.array(kept))
        if "source" in columns:
            table = table.append_column("source", pa.array([bucket["source"]] * table.num_rows, pa.large_string()))
        return table.select([name for name in columns if name in table.column_names])


@dataclass(frozen=True)
class WholeReceipts:
    """The receipts of the steps, and the digest that everything after them depends on."""

    inputs: str
    quality: dict[str, Any] | None
    duplicates: dict[str, Any]
    repeats: dict[str, Any] | None

    def statistics(self) -> dict[str, Any]:
        """For statistics.json."""
        duplicates = self.duplicates["statistics"]
        removed = duplicates["removed"]
        values = {"duplicates": duplicates | {"exact": removed["exact"], "near": removed["near"]}}
        return values if self.repeats is None else values | {"repeats": self.repeats["counts"]}


def judge_whole(
    corpus: Corpus,
    work: Path,
    buckets: list[dict[str, Any]],
    receipts: list[dict[str, Any]],
    inputs: str,
    expected: int,
    timed: TimedStep,
) -> WholeReceipts:
    """Run the steps that are not finished. receipts: of all partitions; expected: documents that these kept."""
    documents = KeptDocuments(work, buckets)
    made_of = digest("whole", inputs, [partition["outputs"] for partition in receipts])
    names = [source.name for source in corpus.sources]
    quality = cut = None

    def step(name: str, make: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        return timed(name, lambda: made_once(work / name, digest(name, made_of), make))

    if corpus.quality.on:
        quality = step("quality", lambda staged: _score(corpus, names, documents, staged))
        expected -= quality["rejected"]
        documents = replace(documents, quality=load_quality(work))
    duplicates = step("duplicates", lambda staged: judge_all(documents, corpus.dedup, staged, expected, names))
    if cuts_repeats(corpus.dedup):
        documents = replace(documents, verdicts=load_verdicts(work))
        cut = step("repeats", lambda staged: _cut_repeats(documents, corpus.dedup, staged))
    return WholeReceipts(made_of, quality, duplicates, cut)


# --- Quality


def _score(corpus: Corpus, names: list[str], documents: KeptDocuments, staged: Path) -> dict[str, Any]:
    """Train or load the classifier and score every document."""
    from bessemer.corpus.quality.classify import classify

    (staged / QUALITY_REPORT).mkdir()
    judgement = classify(corpus.quality, names, documents, staged / QUALITY_REPORT)
    for name in QUALITY_ARRAYS:
        np.save(staged / f"{name}.npy", getattr(judgement, name))
    num_rejected = int((~judgement.stays).sum())
    return {"limit": judgement.limit, "documents": len(judgement.scores), "rejected": num_rejected}


def load_quality(work: Path) -> QualityVerdicts | None:
    """The classifier's results, mapped into memory; None when the step did not run."""
    from bessemer.corpus.quality.classify import QualityVerdicts

    folder = work / "quality"
    if not (folder / STAGE_FILE).exists():
        return None
    identities, scores, stays, band = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in QUALITY_ARRAYS)
    return QualityVerdicts(identities, scores, stays, band, read_json(folder / STAGE_FILE)["limit"])


# --- Duplicates


def judge_all(
    documents: KeptDocuments, settings: Dedup, staged: Path, expected: int, sources: list[str]
) -> dict[str, Any]:
    """Find the duplicates. `sources`: in the order of the recipe. Raises BessemerError when another number than
    `expected` arrives, or when a document was read twice."""
    from bessemer.corpus.dedup.judging import judge

    verdicts = judge(documents, settings, staged / "scratch", sources)
    if verdicts.num_documents != expected:
        raise BessemerError(
            f"corpus: {expected} documents passed the steps but {verdicts.num_documents} came to the search for "
            "duplicates; nothing was written; please report this"
        )
    for name in DUPLICATE_ARRAYS:
        np.save(staged / f"{name}.npy", getattr(verdicts, name))
    keepers = _keepers(documents, verdicts)
    with pa.OSFile(str(staged / "keepers.arrow"), "wb") as sink, pa.ipc.new_file(sink, keepers.schema) as writer:
        writer.write_table(keepers)
    return {"documents": expected, "statistics": verdicts.statistics}


def load_verdicts(work: Path) -> Verdicts:
    """The verdicts on duplicates, mapped into memory."""
    folder = work / "duplicates"
    identities, verdict, keeper, similarity = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in DUPLICATE_ARRAYS
    )
    facts = read_json(folder / STAGE_FILE)
    return Verdicts(identities, verdict, keeper, similarity, facts["documents"], {}, facts["statistics"])


def _keepers(documents: KeptDocuments, verdicts: Verdicts) -> pa.Table:
    """Row and path of each document that others are duplicates of, those of earlier corpora included, by row."""
    kept = np.unique(np.asarray(verdicts.keeper)[np.asarray(verdicts.verdict) != KEPT])
    schema = pa.schema([("row", pa.int64()), ("path", pa.large_string())])
    earlier = sorted(verdicts.earlier)
    parts = [pa.table({"row": earlier, "path": [verdicts.earlier[row] for row in earlier]}, schema=schema)]
    for table in documents(["identity", "path"]) if len(kept) else ():
        rows = verdicts.rows(table["identity"].to_pylist())
        chosen = np.isin(rows, kept)
        if chosen.any():
            paths = table.filter(pa.array(chosen))["path"].cast(pa.large_string())
            parts.append(pa.table({"row": pa.array(rows[chosen], pa.int64()), "path": paths}, schema=schema))
    return pa.concat_tables(parts).sort_by("row").combine_chunks()


def _keeper_paths(work: Path, rows: list[int]) -> dict[int, str]:
    """Paths of documents that others are duplicates of, by their row in the verdicts."""
    if not rows:
        return {}
    with pa.memory_map(str(work / "duplicates" / "keepers.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
        # Only the paths that are wanted become Python strings; the rest stays in the mapped file.
        places = np.searchsorted(table["row"].to_numpy(), rows)
        return dict(zip(rows, table["path"].take(pa.array(places)).to_pylist(), strict=True))


# --- Repeated paragraphs and spans


def cuts_repeats(settings: Dedup) -> bool:
    """Whether the recipe removes repeated paragraphs or spans."""
    return settings.paragraphs.mode != "off" or settings.substrings.unit != "off"


def _cut_repeats(documents: KeptDocuments, settings: Dedup, staged: Path) -> dict[str, Any]:
    """Remove repeats from all documents."""
    counts: dict[str, Any] = {}
    texts: Any = documents
    groups: list[list[Any]] = []
    if settings.paragraphs.mode != "off":
        statistics = EditStatistics()
        groups = _write_edited(documents, _without_paragraphs(documents, settings), staged / EDITED_TEXTS, statistics)
        counts["paragraphs"] = vars(statistics)
        texts = _EditedDocuments(documents, EditedTexts.of(staged / EDITED_TEXTS, groups))
    if settings.substrings.unit != "off":
        from bessemer.corpus.dedup.substrings import remove_substrings

        statistics = EditStatistics()
        edited = remove_substrings(texts, settings.substrings, staged / "scratch", ("identity", "text"))
        second = staged / f"new-{EDITED_TEXTS}"
        before = texts.edited if texts is not documents else None
        groups = _write_edited(documents, edited, second, statistics, before)
        second.replace(staged / EDITED_TEXTS)
        counts["substrings"] = vars(statistics)
    return {"groups": groups, "counts": counts}


def _without_paragraphs(documents: KeptDocuments, settings: Dedup) -> Iterator[tuple[pa.Table, list[Edit]]]:
    from bessemer.corpus.dedup.paragraphs import insert_paragraphs, paragraph_filter, remove_paragraphs

    earlier = [parquet_tables(earlier_files(folder)) for folder in settings.against]
    words = sum(pc.sum(table["words"]).as_py() or 0 for table in documents(["words"]))
    for read in earlier:
        words += sum(text.count(" ") + 1 for table in read(["text"]) for text in table["text"].to_pylist())
    bloom = paragraph_filter(words, settings.paragraphs)
    for read in earlier:
        insert_paragraphs(read(["text"]), bloom, settings.paragraphs)
    yield from remove_paragraphs(documents(["identity", "text"]), bloom, settings.paragraphs)


@dataclass(frozen=True)
class EditedTexts:
    """Texts of the documents that lost repeats: a Parquet file with a row group for each bucket that has some."""

    path: Path
    groups: dict[tuple[str, int], int]  # row group by source and bucket

    @classmethod
    def of(cls, path: Path, groups: list[list[Any]]) -> EditedTexts:
        """groups: source and bucket of each row group."""
        return cls(path, {(source, bucket): number for number, (source, bucket) in enumerate(groups)})

    def __call__(self, source: str, bucket: int) -> dict[str, str]:
        """The edited texts of a bucket by identity."""
        group = self.groups.get((source, bucket))
        if group is None:
            return {}
        with pq.ParquetFile(self.path) as file:
            table = file.read_row_group(group)
        return dict(zip(table["identity"].to_pylist(), table["text"].to_pylist(), strict=True))


@dataclass(frozen=True)
class _EditedDocuments:
    """Documents with the texts that an earlier pass left them; called as KeptDocuments."""

    documents: KeptDocuments
    edited: EditedTexts

    def __call__(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        for bucket, table in self.documents.by_bucket(list({*columns, "identity"})):
            yield with_edited(table, self.edited(bucket["source"], bucket["bucket"])).select(list(columns))


def with_edited(table: pa.Table, edited: dict[str, str]) -> pa.Table:
    """The table (columns identity, text) with the edited texts by identity, and their lengths."""
    if not edited:
        return table
    columns = (table[name].to_pylist() for name in ("identity", "text"))
    return with_texts(table, [edited.get(name, old) for name, old in zip(*columns, strict=True)])


def _write_edited(
    documents: KeptDocuments,
    edited: Iterable[tuple[pa.Table, list[Edit]]],
    path: Path,
    statistics: EditStatistics,
    before: EditedTexts | None = None,
) -> list[list[Any]]:
    """Write the documents that lost something in this pass or the one before; returns [source, bucket] by row group."""
    schema = pa.schema([("identity", pa.string()), ("text", pa.large_string())])
    groups: list[list[Any]] = []
    with pq.ParquetWriter(path, schema, compression="zstd") as file:
        # One table comes for each bucket that has documents.
        for (bucket, _), (table, edits) in zip(documents.by_bucket(["identity"]), edited, strict=True):
            statistics.add(table, edits)
            new = before(bucket["source"], bucket["bucket"]) if before is not None else {}
            names, texts = table["identity"].to_pylist(), table["text"]
            new |= {names[edit.row]: texts[edit.row].as_py() for edit in edits}
            if new:
                chosen = sorted(new)
                file.write_table(pa.table({"identity": chosen, "text": [new[name] for name in chosen]}, schema=schema))
                groups.append([bucket["source"], bucket["bucket"]])
    return groups


# --- The results, for publishing


@dataclass(frozen=True)
class WholeResults:
    """What the steps decided about each document, mapped into memory."""

    work: Path
    quality: QualityVerdicts | None
    verdicts: Verdicts
    edited: EditedTexts  # texts of the documents that lost repeats, by source and bucket

    @classmethod
    def load(cls, work: Path, corpus: Corpus) -> WholeResults:
        """Read the folders of the steps that the recipe asks for."""
        quality = load_quality(work) if corpus.quality.on else None
        groups = read_json(work / "repeats" / STAGE_FILE)["groups"] if cuts_repeats(corpus.dedup) else []
        return cls(work, quality, load_verdicts(work), EditedTexts.of(work / "repeats" / EDITED_TEXTS, groups))

    def reasons(self, names: list[str], new: dict[str, str], min_characters: int) -> dict[int, tuple[str, str]]:
        """Reason and detail of each rejected document, by its place among `names`, which passed the steps before."""
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
            paths = _keeper_paths(self.work, sorted(set(self.verdicts.keeper[rows[gone]].tolist())))
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
        detail = f"kept instead: {identity_of(self.verdicts.identities[keeper])} {paths[keeper]}"
        if self.verdicts.verdict[row] == EXACT:
            return "exact_duplicate", detail
        similarity = self.verdicts.similarity[row]
        found = self.verdicts.statistics
        through = ", linked through others" if similarity < found["min_jaccard"] - 1e-6 else ""
        return "near_duplicate", f"{detail} ({found['jaccard_is']} Jaccard {similarity:.2f}{through})"
