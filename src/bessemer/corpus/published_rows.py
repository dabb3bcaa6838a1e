"""Rows of a published corpus, found by identity, URL or path.

Each source is sorted by identity, so the row-group statistics of Parquet name the few groups that can hold an identity.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from bessemer.storage.filesystem import AnyPath
from bessemer.storage.path import each, open_parquet, stage_files

KINDS = ("documents", "rejected")
COMMAND = "bessemer corpus RECIPE"  # writes them again


def look_up(corpus: AnyPath, identities: Iterable[str], columns: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Return {kind, part, row_group, row} and `columns` of documents and rejects by identity.

    Unknown identities are left out. Raises DamagedFile for a part that cannot be read.
    """
    wanted = sorted(set(identities))

    def rows_of(path: AnyPath) -> dict[str, dict[str, Any]]:
        result: dict[str, dict[str, Any]] = {}
        place: dict[str, Any] = {"kind": path.parent.name, "part": int(path.stem.removeprefix("part-"))}
        with open_parquet(path, COMMAND) as file:
            number = file.schema_arrow.names.index("identity")
            present = [name for name in columns if name in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                bounds = file.metadata.row_group(group).column(number).statistics
                some = wanted[bisect_left(wanted, bounds.min) : bisect_right(wanted, bounds.max)] if bounds else []
                if not some:
                    continue
                names = file.read_row_group(group, columns=["identity"])["identity"]
                rows = pc.index_in(pa.array(some, names.type), names).drop_null()
                if not rows:
                    continue
                table = file.read_row_group(group, columns=["identity", *present]).take(rows)
                for row, values in zip(rows.to_pylist(), table.to_pylist(), strict=True):
                    result[values["identity"]] = {**values, **place, "row_group": group, "row": row}
        return result

    parts = chain.from_iterable(stage_files(corpus, kind) for kind in KINDS)
    return {identity: row for rows in each(rows_of, parts) for identity, row in rows.items()}


def identities_of(corpus: AnyPath, name: str) -> list[str]:
    """Return the identities of documents and rejects with this URL, or this path in the corpus or on the disk.

    Scans one column. A path that is equal to the name comes before those that end as it does.
    """
    is_url, equal, alike = name.startswith(("http://", "https://")), list[str](), list[str]()
    key, shared = ("url", name) if is_url else ("path", Path(name).name)
    for part in chain.from_iterable(stage_files(corpus, kind) for kind in KINDS):
        with open_parquet(part, COMMAND) as file:
            for batch in file.iter_batches(columns=["identity", key]) if key in file.schema_arrow.names else ():
                for row in batch.filter(pc.ends_with(batch[key], shared)).to_pylist():
                    if row[key] == name:
                        equal.append(row["identity"])
                    elif not is_url and (f"/{name}".endswith(f"/{row[key]}") or row[key].endswith(f"/{name}")):
                        alike.append(row["identity"])
    return equal or alike
