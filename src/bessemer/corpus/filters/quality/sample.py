"""Sampling of labelled documents and their split into training and test documents.

Draws depend only on the hash of identities, not on the order of documents. Memory holds only the sample. Labelled examples
are sources of this corpus, or files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bessemer.common.errors import InputError
from bessemer.common.hashing import key_of
from bessemer.corpus.dedup.task import identity_of, packed
from bessemer.corpus.document import identity
from bessemer.corpus.filters.quality.model import prefix
from bessemer.corpus.partition import read
from bessemer.corpus.readers.base import File
from bessemer.corpus.readers.files import find
from bessemer.corpus.readers.parts import plan
from bessemer.recipe import Corpus, Quality, Source
from bessemer.run_tasks.task import check_stop

# Called with columns and sources; yields tables of the clean documents of at least these sources, in any order
Tables = Callable[[tuple[str, ...], Sequence[str]], "Iterable[pa.Table]"]
Labels = npt.NDArray[np.bool_]  # True for documents of high quality
MIN_DOCUMENTS = 50  # required per class after deduplication; a fifth of fewer is too small a test set
ROWS_AT_ONCE = 1000
SAMPLE = pa.schema({"high": pa.bool_(), "identity": pa.string(), "text": pa.large_string()})


@dataclass(frozen=True)
class Labelled:
    """The sample of labelled documents: low ones, then high ones, each sorted by identity."""

    texts: list[str]  # the part of each document that the classifier reads
    high: Labels
    is_test: npt.NDArray[np.bool_]
    there: dict[str, int]  # number of documents in each entry of `high` and `low`
    duplicates: int  # documents dropped because another one, of either class, has the same text

    def of(self, is_test: bool) -> tuple[list[str], Labels]:
        """Return the test texts or the training texts, and their labels."""
        rows = np.flatnonzero(self.is_test == is_test)
        return [self.texts[row] for row in rows.tolist()], self.high[rows]


def uniforms(identities: npt.NDArray[np.bytes_], purpose: str, seed: int) -> npt.NDArray[np.float64]:
    """Return a number in (0, 1) for each identity (dtype S16), which depends only on identity, purpose and seed."""
    return ((keys(identities, purpose, seed) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def keys(identities: npt.NDArray[np.bytes_], purpose: str, seed: int) -> npt.NDArray[np.uint64]:
    """Return 64 pseudorandom bits for each identity.

    They are from SplitMix64's finaliser (Steele 2014) over the halves of the identity and the purpose.
    """
    salt = key_of(f"quality {purpose} {seed}")
    halves = np.frombuffer(np.ascontiguousarray(identities).tobytes(), dtype="<u8").reshape(-1, 2)
    return _mixed(halves[:, 0] ^ _mixed(halves[:, 1] + np.uint64(salt)))


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draw(settings: Quality, sources: tuple[str, ...], tables: Tables) -> Labelled:
    """Draw equally many documents of each class. Raises InputError for an unknown entry or too few documents."""
    num_documents, chosen = Counter[str](), [SAMPLE.empty_table()]

    def documents(entries: Sequence[str]) -> Iterator[tuple[int, bytes, str]]:
        for entry, table in _labelled(entries, sources, tables):
            num_documents[entry] += table.num_rows
            names = packed(table["identity"].to_pylist())
            texts = (text[: settings.read_bytes] for text in table["text"].to_pylist())
            yield from zip(keys(names, "sample", settings.seed).tolist(), names.tolist(), texts, strict=True)

    for high, entries in ((False, settings.low), (True, settings.high)):
        rows = nsmallest(settings.documents, documents(entries))
        names, texts = [name for _, name, _ in rows], [prefix(text, settings.read_bytes) for *_, text in rows]
        chosen.append(pa.table([[high] * len(rows), [*map(identity_of, names)], texts], schema=SAMPLE))
    return _split(
        settings, pa.concat_tables(chosen), {entry: num_documents[entry] for entry in (*settings.low, *settings.high)}
    )


def _labelled(entries: Sequence[str], sources: tuple[str, ...], tables: Tables) -> Iterator[tuple[str, pa.Table]]:
    """Yield (entry, table) with the documents of some entries of corpus.quality.high or .low."""
    inside = [entry for entry in entries if entry in sources]
    for table in tables(("identity", "source", "text"), inside) if inside else ():
        check_stop()
        for entry in pc.unique(table["source"]).to_pylist():
            if entry in inside:
                yield entry, table.filter(pc.equal(table["source"], entry))
    for entry in entries:
        for table in _examples(entry) if entry not in sources else ():
            check_stop()
            yield entry, table


def _split(settings: Quality, taken: pa.Table, there: dict[str, int]) -> Labelled:
    """Drop repeated texts, balance the classes, and split them into training and test documents."""
    # Two files of examples may have one identity for two texts. Take the smaller text, for any order of the files.
    every = taken.group_by(["high", "identity"]).aggregate([("text", "min")])
    # Keep the smallest identity of equal texts. A text with both labels is dropped.
    distinct = every.group_by("text_min").aggregate([("identity", "min"), ("high", "min"), ("high", "max")])
    distinct = distinct.filter(pc.equal(distinct["high_min"], distinct["high_max"])).sort_by("identity_min")
    sides = {name: distinct.filter(pc.equal(distinct["high_min"], name == "high")) for name in ("low", "high")}
    for name, side in sides.items():
        if side.num_rows < MIN_DOCUMENTS:
            entries = ", ".join(f"{entry} {there[entry]}" for entry in getattr(settings, name))
            raise InputError(
                f"corpus.quality.{name}: {side.num_rows} different documents to learn from ({entries}), and a "
                f"classifier needs {MIN_DOCUMENTS} of each side; name more sources or examples"
            )
    count = min(side.num_rows for side in sides.values())
    texts: list[str] = []
    parts: list[npt.NDArray[np.bool_]] = []
    for side in sides.values():
        names = packed(side["identity_min"].to_pylist())
        order = np.sort(np.argsort(keys(names, "sample", settings.seed), kind="stable")[:count])
        texts += side["text_min"].take(order).to_pylist()
        parts.append(uniforms(names[order], "part", settings.seed) < settings.held_out)
        if len(np.unique(parts[-1])) < 2:
            raise InputError(
                f"corpus.quality.held_out: {settings.held_out} of {count} documents a side leaves one part empty; "
                "name more sources or examples, or set another share"
            )
    duplicates = every.num_rows - distinct.num_rows
    return Labelled(texts, np.repeat([False, True], count), np.concatenate(parts), there, duplicates)


def example_files(entry: str) -> list[Path]:
    """Return the files of an entry of corpus.quality.high or .low, sorted. Raises InputError if there are none."""
    return [Path(file.path) for file in _find(entry)[1]]


def _find(entry: str) -> tuple[Source, list[File]]:
    """Return an entry as a source whose formats are guessed from file names, and its files."""
    path = Path(entry).expanduser()
    source = Source(name="examples", paths=(str(path),))
    try:
        if (path / "corpus").is_dir():
            raise InputError("a run directory")
        return source, find(source)
    except InputError:
        raise InputError(
            f"corpus.quality: {entry}: neither a source of this corpus nor files of text; name sources as in corpus.sources, "
            "or a path that exists, of a run RUN/corpus/documents"
        ) from None


def _examples(entry: str) -> Iterator[pa.Table]:
    """Yield tables (identity, text, source) of the examples in files. Unreadable texts are skipped.

    Identities are hashes of path and place.
    """
    (source, found), root = _find(entry), Path(entry).expanduser().name
    try:
        parts = plan(source, found)
    except InputError as error:
        reason = str(error).removeprefix(f"corpus.sources.{source.name}: ").partition("; set text_key")[0]
        raise InputError(f"corpus.quality: {entry}: {reason}") from None
    rows = (
        # Replace unpaired surrogates, which a JSON escape can produce.
        (identity(root, document.path, document.key), document.text.encode("utf-8", "replace").decode(), entry)
        for document in read(source, parts, Corpus())
        if document.reason is None and document.text
    )
    while some := list(islice(rows, ROWS_AT_ONCE)):
        yield pa.table(dict(zip(("identity", "text", "source"), zip(*some, strict=True), strict=True)))
