"""Labelled examples that lie outside this corpus: run folders, and Parquet, JSON-lines or text files.

They come as pyarrow tables with identity, source (the recipe's entry) and text, as documents of the corpus do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from bessemer.corpus.document import identity
from bessemer.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

SUFFIXES = (".parquet", ".jsonl", ".txt")

LONGEST_RECORD = 64 << 20
"""Bytes of a line of JSON or a text file; a longer one is no example."""

ROWS_AT_ONCE = 1000


def files(entry: str) -> list[Path]:
    """The files of an entry of corpus.quality.high or .low, sorted. Raises InputError when there is none."""
    root = Path(entry).expanduser()
    documents = root / "corpus" / "documents"
    if documents.is_dir():
        root = documents
    if root.is_dir():
        found = sorted(path for path in root.rglob("*") if path.is_file() and path.suffix in SUFFIXES)
    else:
        found = [root] if root.is_file() and root.suffix in SUFFIXES else []
    if not found:
        raise InputError(
            f"corpus.quality: {entry}: neither a source of this corpus nor a run folder nor examples in "
            f"{' '.join(SUFFIXES)} files; name sources as in corpus.sources, or a path that exists"
        )
    return found


def tables(entry: str) -> Iterator[pa.Table]:
    """The examples of an entry. What cannot be read as a text is left out: an example that is missing costs one."""
    import pyarrow as pa

    root = Path(entry).expanduser()
    for path in files(entry):
        name = path.relative_to(root).as_posix() if path != root else path.name
        rows: list[tuple[str, str]] = []
        for key, text in _parquet(path) if path.suffix == ".parquet" else _lines(path):
            # A document of another run keeps its identity; the rest is named by where it stands.
            rows.append((key if len(key) == 32 else identity(root.name, name, key), text))
            if len(rows) >= ROWS_AT_ONCE:
                yield _table(pa, rows, entry)
                rows = []
        if rows:
            yield _table(pa, rows, entry)


def _table(pa: type, rows: list[tuple[str, str]], entry: str) -> pa.Table:
    columns = {"identity": [key for key, _ in rows], "source": [entry] * len(rows), "text": [text for _, text in rows]}
    return pa.table(columns)  # type: ignore[attr-defined]


def _parquet(path: Path) -> Iterator[tuple[str, str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if "text" not in file.schema_arrow.names:
                raise InputError(f"corpus.quality: {path}: no column text; rename the column that holds it")
            named = [name for name in ("identity",) if name in file.schema_arrow.names]
            number = 0
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=["text", *named]):
                for row in batch.to_pylist():
                    key = row.get("identity")
                    if isinstance(row["text"], str):
                        yield key if _is_identity(key) else str(number), row["text"]
                    number += 1
    except pa.ArrowInvalid as error:
        raise InputError(f"corpus.quality: {path}: not readable as Parquet: {error}") from None


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """A JSON object with a text a line, or a whole file of text."""
    with open(path, "rb") as file:
        if path.suffix == ".txt":
            raw = file.read(LONGEST_RECORD + 1)
            if len(raw) <= LONGEST_RECORD:
                text = _decoded(raw)
                if text:
                    yield "", text
            return
        for number, line in enumerate(file):
            if len(line) > LONGEST_RECORD:
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            text = _decoded(row["text"].encode("utf-8", "replace")) if _has_text(row) else ""
            if text:
                yield str(number), text


def _has_text(row: object) -> bool:
    return isinstance(row, dict) and isinstance(row.get("text"), str)


def _decoded(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""


def _is_identity(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and all(sign in "0123456789abcdef" for sign in value)
