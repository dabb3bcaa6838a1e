"""The search for duplicates as a step with a receipt, its verdicts where every worker can map them.

duplicates/identities.npy, verdict.npy, keeper.npy, similarity.npy   one row a document, sorted by identity
duplicates/keepers.arrow                                             row, path of what stays instead
duplicates/stage.json                                                the receipt, with the statistics
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus.dedup import KEPT, DedupStatistics, Verdicts
from bessemer.corpus.passed import Passed
from bessemer.corpus.work import made, receipt
from bessemer.errors import BessemerError
from bessemer.recipe import Dedup
from bessemer.run import STAGE_FILE, read_json

if TYPE_CHECKING:
    import pyarrow as pa

ARRAYS = ("identities", "verdict", "keeper", "similarity")


def judge_all(passed: Passed, settings: Dedup, inputs: str, expected: int, sources: list[str]) -> dict[str, Any]:
    """Find the duplicates among the documents that passed, unless that is done; gives the receipt.

    expected: how many they are; sources: in the order of the recipe. Raises BessemerError when another number arrives,
    or when a document was read twice.
    """
    import numpy as np
    import pyarrow as pa

    folder = passed.work / "duplicates"
    done = receipt(folder, inputs) if folder.exists() else None
    if done is None:
        from bessemer.corpus.dedup.judging import judge

        facts: dict[str, Any] = {}
        with made(folder, inputs, facts) as staged:
            verdicts = judge(passed, settings, staged / "scratch", sources)
            if verdicts.num_documents != expected:
                raise BessemerError(
                    f"corpus: {expected} documents passed the steps but {verdicts.num_documents} came to the search for "
                    "duplicates; nothing was written; please report this"
                )
            for name in ARRAYS:
                np.save(staged / f"{name}.npy", getattr(verdicts, name))
            with pa.OSFile(str(staged / "keepers.arrow"), "wb") as sink:
                keepers = _keepers(passed, verdicts)
                with pa.ipc.new_file(sink, keepers.schema) as writer:
                    writer.write_table(keepers)
            facts |= {"documents": expected, "statistics": verdicts.statistics.to_json()}
        done = receipt(folder, inputs)
    assert done is not None
    return done


def load(work: Path) -> Verdicts:
    """The verdicts, mapped into memory."""
    import numpy as np

    folder = work / "duplicates"
    identities, verdict, keeper, similarity = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS)
    facts = read_json(folder / STAGE_FILE)
    statistics = DedupStatistics(jaccard_is=facts["statistics"]["jaccard_is"])
    return Verdicts(identities, verdict, keeper, similarity, facts["documents"], {}, statistics)


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


def _keepers(passed: Passed, verdicts: Verdicts) -> pa.Table:
    """Row and path of each document that others are duplicates of, by row; with those of earlier corpora."""
    import numpy as np
    import pyarrow as pa

    kept = np.unique(np.asarray(verdicts.keeper)[np.asarray(verdicts.verdict) != KEPT])
    schema = pa.schema([("row", pa.int64()), ("path", pa.large_string())])
    earlier = sorted(verdicts.earlier)
    places = [verdicts.earlier[row] for row in earlier]
    parts = [pa.table({"row": pa.array(earlier, pa.int64()), "path": pa.array(places, pa.large_string())})]
    for table in passed(["identity", "path"]) if len(kept) else ():
        rows = verdicts.rows(table["identity"].to_pylist())
        chosen = np.isin(rows, kept)
        if chosen.any():
            paths = table.filter(pa.array(chosen))["path"].cast(pa.large_string())
            parts.append(pa.table({"row": pa.array(rows[chosen], pa.int64()), "path": paths}, schema=schema))
    return pa.concat_tables(parts).sort_by("row").combine_chunks()
