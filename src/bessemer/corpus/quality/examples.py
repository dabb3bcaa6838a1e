"""Labelled examples that lie outside this corpus: run folders, and files as sources name them.

They come as pyarrow tables with identity, source (the recipe's entry) and text, as documents of the corpus do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.corpus import engine
from bessemer.corpus.document import identity
from bessemer.corpus.files import File, find
from bessemer.corpus.readers import read
from bessemer.corpus.units import plan
from bessemer.errors import InputError
from bessemer.recipe import Rules, Source

if TYPE_CHECKING:
    import pyarrow as pa

ROWS_AT_ONCE = 1000


def files(entry: str) -> list[Path]:
    """The files of an entry of corpus.quality.high or .low, sorted. Raises InputError when there is none."""
    return [Path(file.path) for file in _found(entry)]


def _found(entry: str) -> list[File]:
    try:
        return find(_source(entry))
    except InputError:
        raise InputError(
            f"corpus.quality: {entry}: neither a source of this corpus nor a run folder nor files of text; name sources as in "
            "corpus.sources, or a path that exists"
        ) from None


def tables(entry: str) -> Iterator[pa.Table]:
    """The examples of an entry. What cannot be read as a text is left out: an example that is missing costs one."""
    import pyarrow as pa

    found = _of_run(entry) if _documents(entry).is_dir() else _of_files(entry)
    while rows := list(islice(found, ROWS_AT_ONCE)):
        keys, texts = zip(*rows, strict=True)
        yield pa.table({"identity": keys, "source": [entry] * len(keys), "text": texts})


def _documents(entry: str) -> Path:
    return Path(entry).expanduser() / "corpus" / "documents"


def _source(entry: str) -> Source:
    """An entry as a source: what its files are, their endings tell."""
    path = _documents(entry) if _documents(entry).is_dir() else Path(entry).expanduser()
    return Source(name="examples", paths=(str(path),))


def _of_run(entry: str) -> Iterator[tuple[str, str]]:
    """The documents of a run, by their identities."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for path in files(entry):
        try:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(ROWS_AT_ONCE, columns=["identity", "text"]):
                    yield from zip(batch["identity"].to_pylist(), batch["text"].to_pylist(), strict=True)
        except pa.ArrowInvalid as error:
            raise InputError(f"corpus.quality: {path}: not readable as documents of a run: {error}") from None


def _of_files(entry: str) -> Iterator[tuple[str, str]]:
    """The texts of files, by where they stand."""
    source, found, root = _source(entry), _found(entry), Path(entry).expanduser().name
    with tempfile.TemporaryDirectory() as spool:
        try:
            units = plan(source, found, Path(spool), 0, engine.STOP)
        except InputError as error:
            reason = str(error).removeprefix(f"corpus.sources.{source.name}: ").partition("; set text_key")[0]
            raise InputError(f"corpus.quality: {entry}: {reason}") from None
        for unit in units:
            for piece, record in read(unit, Rules()):
                text = record.text.encode("utf-8", "replace").decode()  # half of a surrogate pair, written as an escape
                if record.reason is None and text:
                    yield identity(root, piece.name, record.key), text
