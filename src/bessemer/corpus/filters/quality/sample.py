"""Sampling of labelled documents and their split into training and test documents.

Draws depend only on the hash of identities, not on the order of documents. Memory holds only the sample. Labelled examples
are sources of this corpus, or files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
from bessemer.corpus.dedup.task import packed
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
SIDES = ("low", "high")


@dataclass(frozen=True)
class Labelled:
    """The sample of labelled documents: those of low quality, then those of high quality, each sorted by identity.

    Attributes:
        texts: The part of each document that the classifier reads.
        high: True for documents of high quality.
        is_test: True for test documents, false for training documents.
        num_documents: Number of documents in each entry of corpus.quality.high and .low, before sampling.
        duplicates: Number of documents that were dropped because another one, of either class, has the same text.
    """

    texts: list[str]
    high: Labels
    is_test: npt.NDArray[np.bool_]
    num_documents: dict[str, int]
    duplicates: int

    def subset(self, is_test: bool) -> tuple[list[str], Labels]:
        """Return the test texts or the training texts, and their labels."""
        rows = np.flatnonzero(self.is_test == is_test)
        return [self.texts[row] for row in rows.tolist()], self.high[rows]


def uniforms(identities: npt.NDArray[np.bytes_], purpose: str, seed: int) -> npt.NDArray[np.float64]:
    """Return a pseudorandom number in (0, 1) for each identity (dtype S16).

    It depends only on the identity, the seed and `purpose`, a name that makes the draws for different uses independent.
    """
    return ((keys(identities, purpose, seed) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def keys(identities: npt.NDArray[np.bytes_], purpose: str, seed: int) -> npt.NDArray[np.uint64]:
    """Return 64 pseudorandom bits for each identity (dtype S16), from SplitMix64's finaliser (Steele 2014).

    They depend only on the identity, the seed and `purpose`, a name that makes the draws for different uses
    independent.
    """
    salt = key_of(f"quality {purpose} {seed}")
    halves = np.frombuffer(np.ascontiguousarray(identities).tobytes(), dtype="<u8").reshape(-1, 2)
    return _mixed(halves[:, 0] ^ _mixed(halves[:, 1] + np.uint64(salt)))


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def draw(settings: Quality, sources: tuple[str, ...], tables: Tables) -> Labelled:
    """Draw equally many documents of low and of high quality from the entries of corpus.quality.low and .high.

    `sources` are the names of the sources, and `tables` is a function of columns and sources that yields tables of
    their clean documents. Raises InputError for an unknown entry or too few documents.
    """
    num_documents, num_drawn = Counter[str](), 0
    by_text = defaultdict[str, dict[str, bytes]](dict)  # text -> its smallest identity in each class

    def documents(entries: Sequence[str]) -> Iterator[tuple[int, bytes, str]]:
        for entry, table in _labelled(entries, sources, tables):
            num_documents[entry] += table.num_rows
            names = packed(table["identity"].to_pylist())
            texts = (text[: settings.read_bytes] for text in table["text"].to_pylist())
            yield from zip(keys(names, "sample", settings.seed).tolist(), names.tolist(), texts, strict=True)

    for side in SIDES:
        sample = dict[bytes, str]()
        for _, name, text in nsmallest(settings.documents, documents(getattr(settings, side))):
            # Two files of examples may have one identity for two texts. Take the smaller text, for any order of the files.
            sample.setdefault(name, prefix(text, settings.read_bytes))
        num_drawn += len(sample)
        for name, text in sorted(sample.items(), reverse=True):
            by_text[text][side] = name
    # A text of both classes is an example of neither.
    unique = {side: {one[side]: text for text, one in by_text.items() if [*one] == [side]} for side in SIDES}
    by_entry = {entry: num_documents[entry] for entry in (*settings.low, *settings.high)}
    return _split(settings, unique, by_entry, num_drawn - sum(map(len, unique.values())))


def _labelled(entries: Sequence[str], sources: tuple[str, ...], tables: Tables) -> Iterator[tuple[str, pa.Table]]:
    """Yield (entry, table of its documents) for the given entries of corpus.quality.high or .low.

    An entry is the name of a source, whose documents `tables` yields, or else the path of files.
    """
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


def _split(
    settings: Quality, texts_by_side: dict[str, dict[bytes, str]], num_documents: dict[str, int], duplicates: int
) -> Labelled:
    """Balance the classes, and split them into training and test documents.

    `texts_by_side` has the distinct texts of "low" and "high" by identity. `num_documents` (by entry of corpus.quality.high
    and .low) and `duplicates` become fields of the result.
    """
    for side, documents in texts_by_side.items():
        if len(documents) < MIN_DOCUMENTS:
            entries = ", ".join(f"{entry} {num_documents[entry]}" for entry in getattr(settings, side))
            raise InputError(
                f"corpus.quality.{side}: {len(documents)} different documents ({entries}) are too few to train a classifier; "
                f"name sources or files with at least {MIN_DOCUMENTS}"
            )
    count = min(map(len, texts_by_side.values()))
    texts: list[str] = []
    parts: list[npt.NDArray[np.bool_]] = []
    for documents in texts_by_side.values():
        names = np.array(sorted(documents), "S16")
        names = names[np.sort(np.argsort(keys(names, "sample", settings.seed), kind="stable")[:count])]
        texts += [documents[name] for name in names.tolist()]
        parts.append(uniforms(names, "part", settings.seed) < settings.held_out)
        if len(np.unique(parts[-1])) < 2:
            raise InputError(
                f"corpus.quality.held_out: {settings.held_out} of {count} documents leaves no training or no test documents; "
                "set another share, or name more sources or examples"
            )
    return Labelled(texts, np.repeat([False, True], count), np.concatenate(parts), num_documents, duplicates)


def example_files(entry: str) -> list[Path]:
    """Return the files of an entry of corpus.quality.high or .low, sorted. Raises InputError if there are none."""
    return [Path(file.path) for file in _find(entry)[1]]


def _find(entry: str) -> tuple[Source, list[File]]:
    """Return a source for the files of an entry of corpus.quality.high or .low, and these files.

    Their formats are guessed from file names. Raises InputError if there are none.
    """
    path = Path(entry).expanduser()
    source = Source(name="examples", paths=(str(path),))
    try:
        if (path / "corpus").is_dir():
            raise InputError("it is a run directory")
        return source, find(source)
    except InputError:
        raise InputError(
            f"corpus.quality: {entry}: this is neither a source of the corpus nor a file or folder of text; name a source of "
            "corpus.sources or a path, for a run RUN/corpus/documents"
        ) from None


def _examples(entry: str) -> Iterator[pa.Table]:
    """Yield tables (identity, text, source) of the documents in the files that an entry of corpus.quality names.

    The column `source` contains the entry. Identities are hashes of the path and the position in the file. Unreadable
    documents are skipped.
    """
    (source, files), root = _find(entry), Path(entry).expanduser().name
    try:
        parts = plan(source, files)
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
