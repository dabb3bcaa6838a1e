"""Split of labelled documents into training and test.

Draws depend on the hash of identities only, not on the order of documents. Identities are read first and the texts of
the drawn ones after, so that memory holds only the sample. Labelled examples are sources of this corpus, or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bessemer.common.errors import InputError
from bessemer.common.hashing import key_of
from bessemer.corpus.dedup.task import packed
from bessemer.corpus.document import identity
from bessemer.corpus.filters.quality.model import prefix
from bessemer.corpus.partition import read
from bessemer.corpus.readers.base import File
from bessemer.corpus.readers.files import find
from bessemer.corpus.readers.parts import plan
from bessemer.recipe import Corpus, Quality, Source
from bessemer.run_tasks.task import check_stop

# yields the clean documents as tables with these columns (of identity, source, text), in any order; called repeatedly
Tables = Callable[[tuple[str, ...]], "Iterable[pa.Table]"]
Labels = npt.NDArray[np.bool_]  # which documents are high
MIN_DOCUMENTS = 50  # required per side after deduplication: a fifth of fewer is too small a test set
ROWS_AT_ONCE = 1000
SAMPLE = pa.schema({"high": pa.bool_(), "identity": pa.string(), "text": pa.large_string()})


@dataclass(frozen=True)
class Labelled:
    """The sample, sorted by identity within each side, low documents first."""

    texts: list[str]  # of each what the classifier reads
    high: Labels
    is_test: npt.NDArray[np.bool_]
    there: dict[str, int]  # documents that each entry of high and low has
    duplicates: int  # documents left out because their text is repeated in the sample or on the other side

    def of(self, is_test: bool) -> tuple[list[str], Labels]:
        """The texts to test on, or those to learn from, and which of them are high."""
        rows = np.flatnonzero(self.is_test == is_test)
        return [self.texts[row] for row in rows.tolist()], self.high[rows]


def uniforms(identities: npt.NDArray[np.bytes_], purpose: str, seed: int) -> npt.NDArray[np.float64]:
    """A number in (0, 1) for each identity (dtype S16): a pure function of identity, purpose and seed."""
    return ((keys(identities, purpose, seed) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def keys(identities: npt.NDArray[np.bytes_], purpose: str, seed: int) -> npt.NDArray[np.uint64]:
    """64 random bits for each identity: SplitMix64's finaliser over its halves and the purpose (Steele 2014)."""
    salt = key_of(f"quality {purpose} {seed}")
    halves = np.frombuffer(np.ascontiguousarray(identities).tobytes(), dtype="<u8").reshape(-1, 2)
    return _mixed(halves[:, 0] ^ _mixed(halves[:, 1] + np.uint64(salt)))


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draw(settings: Quality, sources: tuple[str, ...], tables: Tables) -> Labelled:
    """Draw equally many documents of each side. Raises InputError for an unknown entry, and too few documents."""
    sides = {**dict.fromkeys(settings.low, False), **dict.fromkeys(settings.high, True)}
    outside = [entry for entry in sides if entry not in sources]
    chosen = {high: np.zeros(0, dtype="S16") for high in (False, True)}
    there = dict.fromkeys(sides, 0)
    for entry, table in _labelled(sides, outside, tables, ("identity", "source")):
        there[entry] += table.num_rows
        names = np.concatenate([chosen[sides[entry]], packed(table["identity"].to_pylist())])
        order = np.lexsort((names, keys(names, "sample", settings.seed)))[: settings.documents]
        chosen[sides[entry]] = names[order]
    taken = [SAMPLE.empty_table()]
    for entry, table in _labelled(sides, outside, tables, ("identity", "source", "text")):
        rows = np.flatnonzero(np.isin(packed(table["identity"].to_pylist()), chosen[sides[entry]]))
        texts = [prefix(text, settings.read_bytes) for text in table["text"].take(rows).to_pylist()]
        names = table["identity"].take(rows).to_pylist()
        taken.append(pa.table([[sides[entry]] * len(texts), names, texts], schema=SAMPLE))
    return _split(settings, pa.concat_tables(taken), there)


def _labelled(
    sides: dict[str, bool], outside: list[str], tables: Tables, columns: tuple[str, ...]
) -> Iterator[tuple[str, pa.Table]]:
    """The labelled documents, each table of one entry."""
    inside = [entry for entry in sides if entry not in outside]
    for table in tables(columns) if inside else ():
        check_stop()
        for entry in pc.unique(table["source"]).to_pylist():
            if entry in inside:
                yield entry, table.filter(pc.equal(table["source"], entry))
    for entry in outside:
        for table in _examples(entry):
            check_stop()
            yield entry, table


def _split(settings: Quality, taken: pa.Table, there: dict[str, int]) -> Labelled:
    """Leave out texts that occur twice, make the sides equal, and part them."""
    # Two files of examples may give one identity to two texts; the smaller one, whichever came first.
    every = taken.group_by(["high", "identity"]).aggregate([("text", "min")])
    # Of equal texts the smallest identity stays; a text of both sides is an example of neither.
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
    """The files of an entry of corpus.quality.high or .low, sorted. Raises InputError when there is none."""
    return [Path(file.path) for file in _find(entry)[1]]


def _find(entry: str) -> tuple[Source, list[File]]:
    """An entry as a source, with formats by file ending."""
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
    """The examples of an entry that is no source (identity, text, source), without what cannot be read as a text; identities are
    by path and place."""
    (source, found), root = _find(entry), Path(entry).expanduser().name
    try:
        parts = plan(source, found)
    except InputError as error:
        reason = str(error).removeprefix(f"corpus.sources.{source.name}: ").partition("; set text_key")[0]
        raise InputError(f"corpus.quality: {entry}: {reason}") from None
    rows = (
        # Half of a surrogate pair, written as an escape, is replaced.
        (identity(root, document.path, document.key), document.text.encode("utf-8", "replace").decode(), entry)
        for document in read(source, parts, Corpus())
        if document.reason is None and document.text
    )
    while some := list(islice(rows, ROWS_AT_ONCE)):
        yield pa.table(dict(zip(("identity", "text", "source"), zip(*some, strict=True), strict=True)))
