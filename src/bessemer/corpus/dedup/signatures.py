"""MinHash signatures and shingle sets of folded texts, and their files while near duplicates are searched.

Value j of a signature is the minimum of a_j x + b_j mod 2^32 over the text's shingles x with a_j odd, a permutation of
the 32-bit numbers (Broder 1997; multiply-shift of Dietzfelbinger 1997). Two texts share a value with the probability of
their shingles' Jaccard similarity. Arithmetic modulo 2^32 vectorises to 8 or 16 lanes; the usual prime 2^61 - 1 does
not.

Files are read into bounded buffers and never mapped, so that resident memory is what docs/dedup.md says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from bessemer.recipe import Dedup

if TYPE_CHECKING:
    import pyarrow as pa

SEED = 0x5EED
JOINED_GAP = 1 << 14  # bytes that are read and thrown away rather than beginning another read


def num_hashes(settings: Dedup) -> int:
    """Values in a signature."""
    return settings.bands * settings.rows


def shingle_length(settings: Dedup) -> int:
    """Words or characters in a shingle."""
    return settings.shingle_words if settings.shingle == "words" else settings.shingle_characters


def signatures(folded: Sequence[str] | pa.Array, settings: Dedup) -> np.ndarray:
    """Signatures of texts folded by `extract.fold`: uint32 (texts, num_hashes).

    A text shorter than a shingle has 2^32 - 1 everywhere and is compared with nothing.
    """
    from bessemer.corpus.dedup.kernels import sign

    data, offsets = utf8(folded)
    signed = np.empty((len(offsets) - 1, num_hashes(settings)), dtype=np.uint32)
    factors, addends = _permutations(num_hashes(settings))
    buffer = np.empty(longest(offsets), dtype=np.uint64)
    by_words = settings.shingle == "words"
    sign(data, offsets, by_words, shingle_length(settings), factors, addends, buffer, signed)
    return signed


def shingle_set(text: np.ndarray, settings: Dedup, buffer: np.ndarray) -> np.ndarray:
    """The distinct hashes (sorted, uint64) of the shingles of one folded text in UTF-8."""
    from bessemer.corpus.dedup.kernels import shingles_of

    number = shingles_of(text, settings.shingle == "words", shingle_length(settings), buffer)
    return np.unique(buffer[:number])


def utf8(texts: Sequence[str] | pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Texts as one array of bytes and the places where each begins (int64, one more than texts)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array: Any = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.large_string())
    array = pc.fill_null(array.cast(pa.large_string()), "")
    if not len(array):
        return np.zeros(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    _, places, values = array.buffers()
    offsets = np.frombuffer(places, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(values or b"", dtype=np.uint8), offsets


def longest(offsets: np.ndarray) -> int:
    """Bytes of the longest text: as many tokens are the most it can have."""
    return int(np.diff(offsets).max(initial=0)) + 1


@cache
def _permutations(number: int) -> tuple[np.ndarray, np.ndarray]:
    from bessemer.corpus.text.hashing import splitmix

    values = splitmix(SEED, number)
    return (values >> np.uint64(32)).astype(np.uint32) | np.uint32(1), values.astype(np.uint32)


# --- Files


class Records:
    """Arrays of one type in a file, appended one after the other, read again by their number. `close` leaves the file."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._file = path.open("wb+")
        self.num_values = 0
        self.close = self._file.close

    def append(self, values: np.ndarray) -> None:
        """Write values at the end."""
        self.write(self.num_values, values)
        self.num_values += values.size

    def write(self, start: int, values: np.ndarray) -> None:
        """Write values from number `start` on."""
        self._file.seek(start * self.dtype.itemsize)
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).reshape(-1).view(np.uint8).data)

    def range(self, start: int, count: int) -> np.ndarray:
        """`count` values from number `start` on."""
        values = np.empty(count, dtype=self.dtype)
        self._file.seek(start * self.dtype.itemsize)
        if self._file.readinto(values.view(np.uint8).data) < values.nbytes:
            raise OSError(f"{self._file.name}: ends before value {start + count}; was it cut?")
        return values

    def gather(self, starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Several ranges (starts ascending), one after the other; those that lie close are read together."""
        if not len(starts):
            return np.empty(0, dtype=self.dtype)
        parts = []
        gaps = (starts[1:] - starts[:-1] - counts[:-1]) * self.dtype.itemsize
        breaks = np.concatenate([[0], np.flatnonzero(gaps > JOINED_GAP) + 1, [len(starts)]])
        for first, last in zip(breaks[:-1].tolist(), breaks[1:].tolist(), strict=True):
            begin, sizes = int(starts[first]), counts[first:last]
            block = self.range(begin, int((starts[first:last] + sizes).max()) - begin)
            parts.append(block if len(block) == sizes.sum() else block[_places(starts[first:last] - begin, sizes)])
        return np.concatenate(parts)

    def chunks(self, count: int) -> Iterator[np.ndarray]:
        """All values in order, at most `count` at one time."""
        for start in range(0, self.num_values, count):
            yield self.range(start, min(count, self.num_values - start))


def _places(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Numbers starts[i] .. starts[i] + counts[i] - 1 of all i."""
    ends = np.cumsum(counts)
    places: np.ndarray = np.arange(int(ends[-1])) + np.repeat(starts - ends + counts, counts)
    return places


class Signatures:
    """Signatures of all documents and the keys of their bands, by the order in which they arrived."""

    def __init__(self, folder: Path, bands: int, rows: int) -> None:
        self.bands, self.rows, self.num_hashes = bands, rows, bands * rows
        self.values = Records(folder / "signatures", np.uint32)
        self.keys = [Records(folder / f"keys-{band:03d}", np.uint64) for band in range(bands)]

    def append(self, signed: np.ndarray, salts: np.ndarray) -> None:
        """Documents' signatures; documents of different `salts` never share a bucket."""
        from bessemer.corpus.dedup.kernels import band_keys

        keys = np.empty((self.bands, len(signed)), dtype=np.uint64)
        band_keys(signed, self.rows, salts.astype(np.uint64), keys)
        self.values.append(signed)
        for band, records in enumerate(self.keys):
            records.append(keys[band])

    def of(self, places: np.ndarray) -> np.ndarray:
        """Signatures of documents (any order, any number of times)."""
        unique, inverse = np.unique(places, return_inverse=True)
        found = self.values.gather(unique.astype(np.int64) * self.num_hashes, np.full(len(unique), self.num_hashes))
        signed: np.ndarray = found.reshape(-1, self.num_hashes)[inverse]
        return signed

    def close(self) -> None:
        """Close the files; the caller removes the folder."""
        for records in (self.values, *self.keys):
            records.close()


class ShingleSets:
    """The shingle sets of some documents, by row."""

    def __init__(self, path: Path, num_rows: int) -> None:
        self.values = Records(path, np.uint64)
        self.starts = np.zeros(num_rows, dtype=np.int64)
        self.counts = np.zeros(num_rows, dtype=np.int32)
        self.close = self.values.close

    def put(self, row: int, shingles: np.ndarray) -> None:
        """Keep the set of a row."""
        self.starts[row], self.counts[row] = self.values.num_values, len(shingles)
        self.values.append(shingles)

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sets of rows (any order, any number of times) and where each begins, one more than rows."""
        unique, inverse = np.unique(rows, return_inverse=True)
        order = np.argsort(self.starts[unique], kind="stable")
        counts = self.counts[unique[order]].astype(np.int64)
        found = self.values.gather(self.starts[unique[order]], counts)
        begins = np.empty(len(unique), dtype=np.int64)
        begins[order] = np.cumsum(counts) - counts
        wanted = self.counts[rows].astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(wanted)])
        return (found[_places(begins[inverse], wanted)] if len(found) else found), starts
