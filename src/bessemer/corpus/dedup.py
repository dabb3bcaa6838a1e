"""Which documents stand in the corpus already: exactly, or nearly.

Exact: documents whose text is equal with case and white space folded; the one with the smallest identity
stays.

Near: MinHash with locality-sensitive hashing (Broder 1997; the parameters are FineWeb's). Signatures are cut
into bands; documents that agree in a whole band share a bucket. Every member of a bucket is linked to the
bucket's smallest identity, so a bucket of n costs n links and not n squared; a link stays when the signatures
agree well enough. Of each connected component the longest text stays, then the smallest identity. Both rules
look at the documents alone, so the outcome does not depend on the order in which they were read.

Held in memory per document: identity, hash and lengths, about 60 bytes. Signatures lie in a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.corpus.engine import STOP
from bessemer.errors import Stopped
from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import numpy as np

MIN_ESTIMATED_JACCARD = 0.7
"""Links whose signatures agree in a smaller share of the places are dropped. By the binomial law over
112 hashes a pair with a Jaccard of 0.8 passes with 99.4%, while one at 0.5 that met by chance in a band of 8
(5% of such pairs do) passes once in 8,000."""

PAIRS_AT_ONCE = 1 << 15
"""Links whose signatures are compared at one time: 30 MB at 112 hashes."""

KEPT, EXACT, NEAR = 0, 1, 2


@dataclass(frozen=True)
class Verdicts:
    """What became of each document that passed the rules; rows are sorted by identity."""

    identities: np.ndarray
    """16-byte strings (dtype S16)."""
    verdict: np.ndarray
    """KEPT, EXACT or NEAR."""
    keeper: np.ndarray
    """Row of the document that stays instead; its own row for one that is kept."""
    similarity: np.ndarray
    """Estimated Jaccard to the keeper (near duplicates; else 1)."""

    def rows(self, identities: list[str]) -> np.ndarray:
        """Rows of documents by their identity in hexadecimal."""
        import numpy as np

        rows: np.ndarray = np.searchsorted(self.identities, packed(identities))
        return rows


def packed(identities: list[str]) -> np.ndarray:
    """Hexadecimal identities as 16-byte strings, whose order is the same."""
    import numpy as np

    return np.frombuffer(bytes.fromhex("".join(identities)), dtype="S16")


def find_duplicates(cleaned: list[Path], settings: Dedup, scratch: Path) -> Verdicts:
    """Judge all rows of the `cleaned` Parquet files that passed the rules; `scratch` is a file for the
    signatures."""
    import numpy as np

    num_hashes = settings.bands * settings.rows
    identities, exact, characters, words = [], [], [], []
    with open(scratch, "wb") as signatures_file:
        for table in _accepted(cleaned, settings.minhash):
            identities.append(packed(table["identity"].to_pylist()))
            exact.append(np.frombuffer(b"".join(table["exact"].to_pylist()), dtype="S16"))
            characters.append(table["characters"].to_numpy())
            words.append(table["words"].to_numpy())
            if settings.minhash:
                flat = table["signature"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                signatures_file.write(flat.astype(np.uint32).tobytes())
    if not identities:
        none = np.zeros(0, dtype=np.int64)
        return Verdicts(np.zeros(0, dtype="S16"), none, none, none.astype(np.float32))
    names = np.concatenate(identities)
    order = np.argsort(names, kind="stable")
    names, lengths = names[order], np.concatenate(characters)[order]
    verdict = np.zeros(len(names), dtype=np.uint8)
    keeper = np.arange(len(names))
    similarity = np.ones(len(names), dtype=np.float32)
    if settings.exact:
        first = _first_of_equal(np.concatenate(exact)[order])
        verdict[first != keeper] = EXACT
        keeper = first
    if settings.minhash:
        signatures = np.memmap(scratch, dtype=np.uint32, mode="r").reshape(-1, num_hashes)
        compared = np.flatnonzero((verdict == KEPT) & (np.concatenate(words)[order] >= settings.shingle_words))
        group = _components(signatures, order, compared, settings, len(names))
        best = _longest(group, lengths, compared)
        near = compared[best != compared]
        verdict[near] = NEAR
        stays = np.arange(len(names))
        stays[compared] = best
        keeper = stays[keeper]  # an exact duplicate of a near duplicate points to what stays in the end
        similarity[near] = _agreement(signatures, order[near], order[keeper[near]])
    return Verdicts(names, verdict, keeper, similarity)


def _accepted(cleaned: list[Path], with_signatures: bool) -> Iterator[Any]:
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    columns = ["identity", "exact", "characters", "words", "reason"] + ["signature"] * with_signatures
    for path in cleaned:
        with pq.ParquetFile(path) as file:
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=columns)
                table = table.filter(pc.is_null(table["reason"]))
                if table.num_rows:
                    yield table


def _first_of_equal(values: np.ndarray) -> np.ndarray:
    """For each row the smallest row with the same value."""
    import numpy as np

    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(values) else order
    lengths = np.diff(np.append(starts, len(values)))
    first = np.empty(len(values), dtype=np.int64)
    first[order] = np.repeat(order[starts], lengths)
    return first


def _components(
    signatures: np.ndarray, order: np.ndarray, compared: np.ndarray, settings: Dedup, num_documents: int
) -> np.ndarray:
    """The connected component of each document, from links within the bands."""
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    odd = np.random.default_rng(0).integers(1, 1 << 62, size=settings.rows, dtype=np.uint64) * np.uint64(2) + np.uint64(
        1
    )
    heads, members = [], []
    for band in range(settings.bands):
        values = np.asarray(signatures[:, band * settings.rows : (band + 1) * settings.rows])
        # Two different bands collide with 2 in 10^19; a false link would still have to pass the check below.
        keys = (values.astype(np.uint64) * odd).sum(axis=1, dtype=np.uint64)[order[compared]]
        head = _first_of_equal(keys)
        linked = np.flatnonzero(head != np.arange(len(head)))
        heads.append(compared[head[linked]])
        members.append(compared[linked])
        _check_stop()
    pairs = np.unique(np.stack([np.concatenate(heads), np.concatenate(members)], axis=1), axis=0)
    alike = _agreement(signatures, order[pairs[:, 0]], order[pairs[:, 1]]) >= MIN_ESTIMATED_JACCARD
    pairs = pairs[alike]
    graph = coo_array((np.ones(len(pairs), dtype=np.int8), (pairs[:, 0], pairs[:, 1])), shape=(num_documents,) * 2)
    labels: np.ndarray = connected_components(graph, directed=False)[1]
    return labels


def _longest(group: np.ndarray, lengths: np.ndarray, compared: np.ndarray) -> np.ndarray:
    """For each compared row the row of its group that is longest, then first."""
    import numpy as np

    order = compared[np.lexsort((compared, -lengths[compared], group[compared]))]
    groups = group[order]
    starts = np.concatenate([[True], groups[1:] != groups[:-1]]) if len(order) else np.zeros(0, dtype=bool)
    best_of_group = np.full(int(group.max(initial=-1)) + 1, -1, dtype=np.int64)
    best_of_group[groups[starts]] = order[starts]
    best: np.ndarray = best_of_group[group[compared]]
    return best


def _agreement(signatures: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Share of equal places in the signatures of pairs of rows: an unbiased estimate of the Jaccard
    similarity."""
    import numpy as np

    shares = np.empty(len(left), dtype=np.float32)
    for start in range(0, len(left), PAIRS_AT_ONCE):
        part = slice(start, start + PAIRS_AT_ONCE)
        shares[part] = (signatures[left[part]] == signatures[right[part]]).mean(axis=1)
        _check_stop()
    return shares


def _check_stop() -> None:
    if STOP.is_set():
        raise Stopped("corpus: stopped")
