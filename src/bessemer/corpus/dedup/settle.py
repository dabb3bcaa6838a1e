"""Repeated paragraphs whose n-grams lie in several ranges of the filter, decided by bounds.

Whether an n-gram is repeated depends on which paragraphs before it stay. So each range counts for each line the n-grams that
certainly are in the filter, and those that may be: from lines that stay, and from lines that are undecided too. Where both bounds
lie on one side of the threshold the line is decided, and another round knows more: the first undecided line is decided in each.

    BoundParagraphs  a range: both counts of each undecided line, by part
    DecideLines      a part: its lines that go, and those that stay undecided
    MissingBits      a range: the items of undecided lines, with the bits that the lines which stay do not set
    SettleLines      all: the lines that are left, one after the other, when they fit into memory
    CollectParagraphs  a part: the numbers of its repeated lines, whoever decided them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bessemer.corpus.dedup.exchange import SplitWriter, load_array, read_split, runs
from bessemer.corpus.dedup.paragraphs import (
    BLOCK_WORDS,
    LINES,
    JudgeParagraphs,
    ParagraphItems,
    RangedFilter,
    RangeItems,
)
from bessemer.corpus.dedup.task import PART_BITS, RepeatsTask, part_of, row_of

BOUNDS = np.dtype([("line", "<u4"), ("least", "<u4"), ("most", "<u4")])
STATE = np.dtype([("line", "<u4"), ("state", "u1")])  # of lines that do not certainly stay
OPEN = np.dtype([("line", "<u8"), ("item", "<u8"), ("block", "<u8"), ("missing", "<u4")])  # line: part and number
SETTLE_BYTES = 4 * OPEN.itemsize + BLOCK_WORDS * 8  # of memory for each item of a line that is left


@dataclass(frozen=True)
class BoundTask(RangeItems):
    """A pass over a range with both bounds of the filter. round: 0 the first, in which all own lines are undecided."""

    bloom: RangedFilter
    num_earlier: int
    round: int

    @property
    def folder(self) -> Path:
        return self.work / self.step / f"{self.round:03d}-{self.number:06d}"

    def bounds(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Of each run of a part: its bounds (BOUNDS), and the items of undecided lines (OPEN)."""
        from bessemer.corpus.dedup.repeat_kernels import STAYS, UNDECIDED, bound_seen

        lower, upper = (np.zeros(self.bloom.num_words(self.number), dtype=np.uint64) for _ in range(2))
        for part in range(self.plan.num_parts):
            known = np.empty(0, dtype=STATE)
            default = STAYS if self.round or part < self.num_earlier else UNDECIDED
            if self.round and part >= self.num_earlier:
                known = load_array(decided(self, part, self.round - 1) / "states.npy")
            listed, states = (np.ascontiguousarray(known[name]) for name in ("line", "state"))
            for items, lines, starts in self.items(part):
                out = np.empty((len(items), 3), dtype=np.uint32)
                found, missing = np.zeros(len(items), dtype=bool), np.zeros(len(items), dtype=np.uint32)
                number = bound_seen(
                    items,
                    lines,
                    starts,
                    listed,
                    states,
                    default,
                    lower,
                    upper,
                    self.bloom.num_bits,
                    out,
                    found,
                    missing,
                )
                left = np.empty(int(found.sum()), dtype=OPEN)
                left["line"] = lines[found].astype(np.uint64) + (np.uint64(part) << PART_BITS)
                left["item"], left["missing"] = items[found], missing[found]
                left["block"] = self.bloom.blocks(left["item"])
                yield part, out[:number].reshape(-1).view(BOUNDS), left


def decided(task: RepeatsTask, part: int, round_: int) -> Path:
    """The result of `DecideLines`."""
    return task.work / DecideLines.__name__ / f"{round_:03d}-{part:06d}"


class BoundParagraphs(BoundTask):
    """Both counts of the undecided lines, by part."""

    def make(self, folder: Path) -> dict[str, Any]:
        with SplitWriter(folder / "bounds", self.plan.num_parts) as file:
            for part, found, _ in self.bounds():
                file.write(np.full(len(found), part, dtype=np.uint32), found)
        return {}


class MissingBits(BoundTask):
    """The items of undecided lines."""

    def make(self, folder: Path) -> dict[str, Any]:
        with SplitWriter(folder / "open", 1) as file:
            for _, _, left in self.bounds():
                file.write(np.zeros(len(left), dtype=np.uint8), left)
        return {}


@dataclass(frozen=True)
class DecideLines(RepeatsTask):
    """What the bounds of a round decide of a part: `states.npy` (STATE), and all lines that go, in `repeated` for the part."""

    num_ranges: int
    round: int

    @property
    def folder(self) -> Path:
        return decided(self, self.number, self.round)

    def make(self, folder: Path) -> dict[str, Any]:
        from bessemer.corpus.dedup.repeat_kernels import GOES, UNDECIDED

        threshold = self.plan.settings.paragraphs.threshold
        names = [f"{self.round:03d}-{number:06d}" for number in range(self.num_ranges)]
        paths = [self.work / BoundParagraphs.__name__ / name / "bounds" for name in names]
        found = read_split(paths, self.number, BOUNDS)
        found = found[np.argsort(found["line"], kind="stable")]
        starts, _ = runs(found["line"])
        lines = found["line"][starts]
        least, most = (
            np.add.reduceat(found[name], starts) if len(starts) else found[name] for name in ("least", "most")
        )
        counts = np.frombuffer(
            self.result(ParagraphItems.__name__, self.number, "counts").read_bytes(), dtype=np.uint32
        )
        limits = threshold * counts[lines]
        goes, undecided = (least > 0) & (least >= limits), most >= limits
        states = np.empty(len(lines), dtype=STATE)
        states["line"], states["state"] = lines, np.where(goes, GOES, UNDECIDED)
        states = states[goes | undecided]
        if self.round:
            before = load_array(decided(self, self.number, self.round - 1) / "states.npy")
            states = np.concatenate([before[before["state"] == GOES], states])
            states = states[np.argsort(states["line"])]
        np.save(folder / "states.npy", states)
        left = states["line"][states["state"] == UNDECIDED]
        with SplitWriter(folder / "repeated", self.plan.num_parts) as file:
            gone = np.ascontiguousarray(states["line"][states["state"] == GOES])
            file.write(np.full(len(gone), self.number, dtype=np.uint32), gone)
        return {"lines": len(left), "items": int(counts[left].sum())}


@dataclass(frozen=True)
class SettleLines(RepeatsTask):
    """Decide the lines that are left, in their order: those that go, by part. round: of the last `MissingBits`."""

    bloom: RangedFilter
    round: int

    def make(self, folder: Path) -> dict[str, Any]:
        from bessemer.corpus.dedup.repeat_kernels import settle_lines

        names = [f"{self.round:03d}-{number:06d}" for number in range(self.bloom.num_ranges)]
        left = read_split([self.work / MissingBits.__name__ / name / "open" for name in names], None, OPEN)
        left = left[np.argsort(left["line"], kind="stable")]
        blocks, places = np.unique(left["block"], return_inverse=True)
        words, repeated = np.zeros(len(blocks) * BLOCK_WORDS, np.uint64), np.empty(len(left), np.uint64)
        items, lines, missing = (np.ascontiguousarray(left[name]) for name in ("item", "line", "missing"))
        starts = places.astype(np.uint64) * np.uint64(BLOCK_WORDS)
        threshold = self.plan.settings.paragraphs.threshold
        number = settle_lines(items, lines, starts, missing, words, self.bloom.num_bits, threshold, repeated)
        with SplitWriter(folder / "repeated", self.plan.num_parts) as file:
            file.write(part_of(repeated[:number]), row_of(repeated[:number]).astype(np.uint32))
        return {"repeated": number}


@dataclass(frozen=True)
class CollectParagraphs(RepeatsTask):
    """The numbers of a part's repeated lines, sorted, in LINES. round: the last of `DecideLines`; None where `JudgeParagraphs`
    decided in num_ranges ranges."""

    num_ranges: int
    round: int | None
    is_settled: bool  # `SettleLines` decided the rest

    def make(self, folder: Path) -> dict[str, Any]:
        paths = [self.result(JudgeParagraphs.__name__, number, "repeated") for number in range(self.num_ranges)]
        if self.round is not None:
            paths = [decided(self, self.number, self.round) / "repeated"]
            paths += [self.result(SettleLines.__name__, 0, "repeated")] if self.is_settled else []
        repeated = np.sort(read_split(paths, self.number, np.uint32))
        np.save(folder / LINES, repeated)
        return {"lines": len(repeated)}
