"""Documents in, table by table: from Parquet files of the corpus stage, and from earlier corpora."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from bessemer.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

Tables: TypeAlias = "Callable[[Sequence[str]], Iterator[pa.Table]]"
"""Gives the documents anew at every call, in the same order, as tables with those of the named columns that exist."""


def parquet_tables(paths: Sequence[Path]) -> Tables:
    """The documents of Parquet files, row group by row group.

    Rows with a `reason` (rejected) or a `counted` (receipts) are left out. A `source` column that is missing is
    taken from a folder named source=NAME.
    """

    def read(columns: Sequence[str]) -> Iterator[pa.Table]:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        for path in paths:
            named = next((part.removeprefix("source=") for part in path.parts if part.startswith("source=")), None)
            with pq.ParquetFile(path) as file:
                there = set(file.schema_arrow.names)
                marks = [name for name in ("reason", "counted") if name in there]
                wanted = [name for name in columns if name in there]
                for number in range(file.num_row_groups):
                    table = file.read_row_group(number, columns=[*wanted, *(set(marks) - set(wanted))])
                    for name in marks:
                        table = table.filter(pc.is_null(table[name]))
                    if "source" in columns and "source" not in there and named is not None:
                        table = table.append_column("source", pa.array([named] * table.num_rows, pa.string()))
                    if table.num_rows:
                        yield table

    return read


def earlier_files(folder: str | Path) -> list[Path]:
    """The Parquet files of an earlier corpus: of a run folder, of its corpus folder, or of a folder of documents.

    Raises InputError when there is none. They belong to what the stage was made from.
    """
    root = Path(folder)
    for place in (root / "corpus" / "documents", root / "documents", root):
        found = sorted(place.glob("*.parquet"))
        if found:
            return found
    raise InputError(
        f"corpus.dedup.against: {root} holds no corpus: looked for corpus/documents/*.parquet, documents/*.parquet and "
        "*.parquet below it; name a run folder whose corpus is built, or a folder of Parquet files"
    )
