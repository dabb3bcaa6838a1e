"""The step over all partitions: find the duplicates, and leave the verdicts where every worker can map them.

duplicates/identities.npy, verdict.npy, keeper.npy, similarity.npy   one row a document, sorted by identity
duplicates/keepers.arrow                                             identity, path of what stays instead
duplicates/stage.json                                                the receipt, with the clusters by size
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus import engine
from bessemer.corpus.dedup import EXACT, KEPT, NEAR, Verdicts, find_duplicates, packed
from bessemer.corpus.work import made, receipt
from bessemer.errors import BessemerError
from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import pyarrow as pa

ARRAYS = ("identities", "verdict", "keeper", "similarity")
KINDS = {"exact": EXACT, "near": NEAR}


def judge_all(work: Path, files: list[Path], settings: Dedup, inputs: str, expected: int) -> dict[str, Any]:
    """Find the duplicates among all cleaned rows, unless that is done; gives the receipt.

    expected: documents that the partitions passed on. Raises BessemerError when another number arrives.
    """
    import numpy as np
    import pyarrow as pa

    folder = work / "duplicates"
    done = receipt(folder, inputs) if folder.exists() else None
    if done is None:
        facts: dict[str, Any] = {}
        with made(folder, inputs, facts) as staged:
            verdicts = find_duplicates(files, settings, staged / "signatures")
            (staged / "signatures").unlink()
            if len(verdicts.identities) != expected:
                raise BessemerError(
                    f"corpus: {expected} documents passed the rules but {len(verdicts.identities)} came to the search for "
                    "duplicates; nothing was written; please report this"
                )
            _refuse_doubles(verdicts, files)
            for name in ARRAYS:
                np.save(staged / f"{name}.npy", getattr(verdicts, name))
            with pa.OSFile(str(staged / "keepers.arrow"), "wb") as sink:
                keepers = _keepers(files, verdicts)
                with pa.ipc.new_file(sink, keepers.schema) as writer:
                    writer.write_table(keepers)
            counts = {name: int((verdicts.verdict == kind).sum()) for name, kind in KINDS.items()}
            facts |= {"documents": expected, **counts, "clusters": clusters(verdicts)}
        done = receipt(folder, inputs)
    assert done is not None
    return done


def clusters(verdicts: Verdicts) -> list[dict[str, int]]:
    """How many groups of duplicates there are of each size, the one that stays included: {size, clusters}."""
    import numpy as np

    sizes = np.unique(verdicts.keeper, return_counts=True)[1]
    counted = Counter(sizes[sizes > 1].tolist())
    return [{"size": size, "clusters": counted[size]} for size in sorted(counted)]


def load(work: Path) -> Verdicts:
    """The verdicts, mapped into memory."""
    import numpy as np

    return Verdicts(*(np.load(work / "duplicates" / f"{name}.npy", mmap_mode="r") for name in ARRAYS))


def keeper_paths(work: Path, rows: list[int], verdicts: Verdicts) -> dict[int, str]:
    """Where documents stand that others are duplicates of, by their row in the verdicts."""
    import numpy as np
    import pyarrow as pa

    if not rows:
        return {}
    with pa.memory_map(str(work / "duplicates" / "keepers.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
        # Only the paths that are wanted become Python strings; the rest stays in the mapped file.
        wanted = np.searchsorted(table["row"].to_numpy(), rows)
        return dict(zip(rows, table["path"].take(pa.array(wanted)).to_pylist(), strict=True))


def _keepers(files: list[Path], verdicts: Verdicts) -> pa.Table:
    """Row and path of each document that others are duplicates of, by row."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    kept = np.unique(np.asarray(verdicts.keeper)[np.asarray(verdicts.verdict) != KEPT])
    names = verdicts.identities[kept]
    empty = pa.table({"row": pa.array([], pa.int64()), "path": pa.array([], pa.large_string())})
    parts = [empty]
    for path in files if len(kept) else []:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                engine.check_stop()
                table = file.read_row_group(number, columns=["identity", "path"])
                found = table.filter(np.isin(packed(table["identity"].to_pylist()), names))
                if found.num_rows:
                    rows = verdicts.rows(found["identity"].to_pylist())
                    parts.append(pa.table({"row": rows, "path": found["path"].cast(pa.large_string())}))
    return pa.concat_tables(parts).sort_by("row").combine_chunks()


def _refuse_doubles(verdicts: Verdicts, files: list[Path]) -> None:
    """Identities come from where a document stands, so two equal ones mean that it was read twice."""
    import numpy as np
    import pyarrow.parquet as pq

    names = verdicts.identities
    doubled = np.flatnonzero(names[1:] == names[:-1])
    if not len(doubled):
        return
    name = names[doubled[0]].ljust(16, bytes(1)).hex()
    paths = set()
    for path in files:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=["identity", "path"])
            paths |= {row["path"] for row in table.to_pylist() if row["identity"] == name}
    raise BessemerError(
        f"corpus: {len(doubled)} documents were read twice, for example {name} ({', '.join(sorted(paths))}); "
        "nothing was written; please report this"
    )
