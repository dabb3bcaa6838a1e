"""Evaluation sets as they lie in files: each item a list of texts to look for."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.recipe import EvaluationSet


def items(given: EvaluationSet) -> Iterator[list[str]]:
    """The texts of each item, in the order of the file.

    An evaluation set is the person's own and small: what is wrong with it is refused, not skipped, since an item
    that is not looked for is one that is trained on. Raises InputError that names file, line and field.
    """
    path = Path(given.path).expanduser()
    where = f"corpus.contamination.sets.{given.name}: {path}"
    number = 0
    try:
        rows = _parquet(path, given, where) if path.suffix.lower() == ".parquet" else _lines(path, given, where)
        for texts in rows:
            number += 1
            yield texts
    except FileNotFoundError:
        raise InputError(f"{where}: no such file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8: {error}") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:  # gzip, zstd and Parquet report damage with these
        raise InputError(f"{where}: cannot be read: {error}") from None
    if not number:
        raise InputError(f"{where}: holds no item; remove the set, or give its path")


def _lines(path: Path, given: EvaluationSet, where: str) -> Iterator[list[str]]:
    with _opened(path) as file:
        for number, raw in enumerate(file, 1):
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            if not line.strip():
                continue
            if path.suffix.lower() == ".txt":
                yield [line.strip()]
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: line {number} is not JSON: {error}") from None
            if not isinstance(value, dict):
                raise InputError(f"{where}: line {number} is not an object but {type(value).__name__}")
            yield _texts(value, given, f"{where}: line {number}")


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[bytes]]:
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            yield file
    elif path.suffix.lower() == ".zst":
        import pyarrow as pa

        with pa.input_stream(str(path), compression="zstd") as stream:
            yield io.BufferedReader(stream)
    else:
        with path.open("rb") as file:
            yield file


def _parquet(path: Path, given: EvaluationSet, where: str) -> Iterator[list[str]]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as parquet:
        columns = parquet.schema_arrow.names
        _known(given.fields, columns, where)
        for batch in parquet.iter_batches(columns=list(given.fields)):
            for row in batch.to_pylist():
                yield _texts(row, given, where)


def _texts(value: dict[str, Any], given: EvaluationSet, where: str) -> list[str]:
    _known(given.fields, list(value), where)
    found = [text for field in given.fields for text in _strings(value[field], f"{where}: field {field!r}")]
    return [text for text in found if text.strip()]


def _known(fields: tuple[str, ...], there: list[str], where: str) -> None:
    for field in fields:
        if field not in there:
            raise InputError(f"{where}: no field {field!r}; there are: {', '.join(there[:20]) or 'none'}")


def _strings(value: object, where: str) -> list[str]:
    """A field's texts: itself, or those in a list or a table (choices, answers), however deep; numbers say nothing."""
    if isinstance(value, str):
        return [value]
    if value is None or isinstance(value, int | float):
        return []
    if isinstance(value, list):
        return [text for entry in value for text in _strings(entry, where)]
    if isinstance(value, dict):
        return [text for entry in value.values() for text in _strings(entry, where)]
    raise InputError(f"{where} is {type(value).__name__}, not text")
