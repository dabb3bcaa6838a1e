"""Which labelled documents the classifier learns from, which set its calibration, and which test it.

Everything hangs on the hash of identities, so the same documents are drawn whatever the order in which they come. The
identities are read first and the texts of the chosen ones after, so that memory holds the sample and nothing more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bessemer.corpus import engine
from bessemer.corpus.dedup import packed
from bessemer.corpus.quality import examples
from bessemer.corpus.quality.features import Texts
from bessemer.errors import InputError, Stopped
from bessemer.recipe import Quality

if TYPE_CHECKING:
    import pyarrow as pa

Tables = Callable[[tuple[str, ...]], "Iterable[pa.Table]"]
"""Gives the clean documents as tables with the asked columns (of identity, source and text), in any order. It is called
more than once."""

LEAST = 50
"""Documents a side must have after duplicates are gone: with fewer, a tenth of them tells nothing."""

TRAIN, CALIBRATE, TEST = 0, 1, 2


@dataclass(frozen=True)
class Labelled:
    """The sample, sorted by identity within each side, low documents first."""

    texts: list[bytes]
    """Of each the bytes that the classifier reads."""
    high: npt.NDArray[np.bool_]
    part: npt.NDArray[np.int8]
    """TRAIN, CALIBRATE or TEST."""
    there: dict[str, int]
    """Documents that each entry of high and low has."""
    duplicates: int
    """Documents left out because their text stands in the sample already, or on the other side too."""

    def rows(self, part: int) -> npt.NDArray[np.int64]:
        """The documents of a part."""
        return np.flatnonzero(self.part == part)


def uniforms(identities: npt.NDArray[np.bytes_], purpose: str, seed: int) -> npt.NDArray[np.float64]:
    """A number in (0, 1) for each identity (dtype S16): a pure function of identity, purpose and seed."""
    return ((keys(identities, purpose, seed) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def keys(identities: npt.NDArray[np.bytes_], purpose: str, seed: int) -> npt.NDArray[np.uint64]:
    """64 random bits for each identity: SplitMix64's finaliser over its two halves and the purpose (Steele et al. 2014)."""
    salt = int.from_bytes(hashlib.blake2b(f"quality {purpose} {seed}".encode(), digest_size=8).digest(), "little")
    halves = np.frombuffer(np.ascontiguousarray(identities).tobytes(), dtype="<u8").reshape(-1, 2)
    return _mixed(halves[:, 0] ^ _mixed(halves[:, 1] + np.uint64(salt)))


def draw(settings: Quality, sources: tuple[str, ...], tables: Tables) -> Labelled:
    """Draw as many documents of each side as `settings.documents` or the smaller side allows.

    Raises InputError when an entry is no source and no path, or a side has too few documents.
    """
    sides = {**dict.fromkeys(settings.low, False), **dict.fromkeys(settings.high, True)}
    outside = [entry for entry in sides if entry not in sources]
    smallest = {high: _Smallest(settings.documents) for high in (False, True)}
    there = dict.fromkeys(sides, 0)
    for entry, table in _labelled(sides, outside, tables, ("identity", "source")):
        found = packed(table["identity"].to_pylist())
        there[entry] += len(found)
        smallest[sides[entry]].add(keys(found, "sample", settings.seed), found)
    chosen = {high: of.identities() for high, of in smallest.items()}
    taken: dict[bool, dict[bytes, bytes]] = {False: {}, True: {}}
    for entry, table in _labelled(sides, outside, tables, ("identity", "source", "text")):
        found = packed(table["identity"].to_pylist())
        rows = np.flatnonzero(np.isin(found, chosen[sides[entry]]))
        if len(rows):
            texts = Texts.of_column(table["text"].take(rows))
            for place, row in enumerate(rows.tolist()):
                name = bytes(found[row]).ljust(16, b"\0")
                text = texts.text(place, settings.read_bytes)
                # Two files of examples may give one identity to two texts; the smaller one, whichever came first.
                taken[sides[entry]][name] = min(text, taken[sides[entry]].get(name, text))
    return _split(settings, taken, there)


def _labelled(
    sides: dict[str, bool], outside: list[str], tables: Tables, columns: tuple[str, ...]
) -> Iterator[tuple[str, pa.Table]]:
    """The labelled documents, each table of one entry."""
    import pyarrow.compute as pc

    inside = [entry for entry in sides if entry not in outside]
    if inside:
        for table in tables(columns):
            check_stop()
            for entry in pc.unique(table["source"]).to_pylist():
                if entry in inside:
                    yield entry, table.filter(pc.equal(table["source"], entry))
    for entry in outside:
        for table in examples.tables(entry):
            check_stop()
            yield entry, table


def check_stop() -> None:
    """Raises Stopped when the person stopped the build."""
    if engine.STOP.is_set():
        raise Stopped("corpus: stopped")


def _split(settings: Quality, taken: dict[bool, dict[bytes, bytes]], there: dict[str, int]) -> Labelled:
    """Leave out texts that occur twice, make the sides equal, and part them."""
    kept, duplicates = _distinct(taken)
    for high, side in ((False, "low"), (True, "high")):
        if len(kept[high]) < LEAST:
            entries = ", ".join(f"{entry} {there[entry]}" for entry in getattr(settings, side))
            raise InputError(
                f"corpus.quality.{side}: {len(kept[high])} different documents to learn from ({entries}), and a "
                f"classifier needs {LEAST} of each side; name more sources or examples"
            )
    count = min(map(len, kept.values()))
    texts: list[bytes] = []
    parts: list[npt.NDArray[np.int8]] = []
    for high in (False, True):
        names = np.frombuffer(b"".join(kept[high]), dtype="S16")
        order = np.sort(np.argsort(keys(names, "sample", settings.seed), kind="stable")[:count])
        texts += [taken[high][kept[high][row]] for row in order.tolist()]
        place = uniforms(names[order], "part", settings.seed)
        parts.append(np.select([place < settings.held_out / 2, place < settings.held_out], [CALIBRATE, TEST], TRAIN))
        if len(np.unique(parts[-1])) < 3:
            raise InputError(
                f"corpus.quality.held_out: {settings.held_out} of {count} documents a side leaves one part empty; "
                "name more sources or examples, or set another share"
            )
    return Labelled(texts, np.repeat([False, True], count), np.concatenate(parts).astype(np.int8), there, duplicates)


def _distinct(taken: dict[bool, dict[bytes, bytes]]) -> tuple[dict[bool, list[bytes]], int]:
    """Identities, sorted, with each text once; a text of both sides is an example of neither."""
    digests = {
        high: {name: hashlib.blake2b(text, digest_size=16).digest() for name, text in of.items()}
        for high, of in taken.items()
    }
    both = set(digests[False].values()) & set(digests[True].values())
    kept: dict[bool, list[bytes]] = {}
    for high, of in digests.items():
        seen, kept[high] = set(both), []
        for name in sorted(of):
            if of[name] not in seen:
                seen.add(of[name])
                kept[high].append(name)
    return kept, sum(map(len, taken.values())) - sum(map(len, kept.values()))


class _Smallest:
    """The identities with the smallest keys of all that were added."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.keys = np.zeros(0, dtype=np.uint64)
        self.names = np.zeros(0, dtype="S16")

    def add(self, found: npt.NDArray[np.uint64], names: npt.NDArray[np.bytes_]) -> None:
        self.keys, self.names = np.concatenate([self.keys, found]), np.concatenate([self.names, names])
        if len(self.keys) > 4 * self.count:
            self._cut()

    def _cut(self) -> None:
        order = np.lexsort((self.names, self.keys))[: self.count]
        self.keys, self.names = self.keys[order], self.names[order]

    def identities(self) -> npt.NDArray[np.bytes_]:
        self._cut()
        return self.names


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
