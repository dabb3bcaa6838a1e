"""The mixture that was trained on, counted from the batches, against the requested and the planned shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bessemer.distributed.mesh import ProcessMesh
from bessemer.recipe.batches import Range
from bessemer.tokens.loader import Batch
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING

CountTable = tuple[tuple[int, ...], ...]  # by phase of the recipe, then by source


@dataclass(frozen=True)
class MixtureCounts:
    """Sequences read so far, and their tokens without padding. Part of checkpoints, so that counts survive a stop."""

    sequences: CountTable = ()
    tokens: CountTable = ()

    @classmethod
    def zero(cls, mixture: Mixture) -> MixtureCounts:
        """Before the first batch."""
        zeros = ((0,) * len(mixture.names),) * (mixture.phases[-1].recipe_phase + 1)
        return cls(zeros, zeros)

    def plus(self, batch: Batch, mixture: Mixture) -> MixtureCounts:
        """With one more batch of this process."""
        spans = np.array([(phase.first, phase.recipe_phase) for phase in mixture.phases])
        phase = spans[np.searchsorted(spans[:, 0], batch.samples, side="right") - 1, 1]
        real = np.full(*batch.inputs.shape) if batch.real_lengths is None else batch.real_lengths
        sequences, tokens = np.array(self.sequences, dtype=np.int64), np.array(self.tokens, dtype=np.int64)
        np.add.at(sequences, (phase, batch.source), 1)
        np.add.at(tokens, (phase, batch.source), real)
        return MixtureCounts(_table(sequences), _table(tokens))

    def summed(self, mesh: ProcessMesh) -> MixtureCounts:
        """The sum over data-parallel ranks, on every process."""
        if mesh.is_single:
            return self
        counts = np.array([self.sequences, self.tokens], dtype=np.int64)
        return MixtureCounts(*(_table(table) for table in mesh.sum_over_data(torch.from_numpy(counts)).numpy()))

    def on_rank_zero(self, mesh: ProcessMesh) -> MixtureCounts:
        """The inverse of `summed`: all counts on data rank 0, zeros elsewhere."""
        if mesh.data_rank == 0:
            return self
        return MixtureCounts(*(tuple((0,) * len(row) for row in table) for table in (self.sequences, self.tokens)))

    def to_dict(self) -> dict[str, Any]:
        return {"sequences": self.sequences, "tokens": self.tokens}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> MixtureCounts:
        """From a checkpoint's facts; empty for an older checkpoint without counts."""
        return cls(*(tuple(tuple(row) for row in facts.get(key, ())) for key in ("sequences", "tokens")))


def mixture_audit(mixture: Mixture, counts: MixtureCounts, samples: int, gaps: Sequence[Range] = ()) -> dict[str, Any]:
    """Requested, planned and drawn token shares and epochs of each source after `samples` samples, in total and by phase.

    gaps: samples before that which were skipped. target_share: the requested share after the caps on epochs.
    """
    tokens, sequences = np.array(counts.tokens), np.array(counts.sequences)
    asked, planned = np.array(mixture.shares[: len(tokens)]).swapaxes(0, 1)
    weight = tokens.sum(axis=1) / max(int(tokens.sum()), 1)
    if not weight.any():
        weight = np.eye(len(tokens))[0]
    drawn = sequences.sum(axis=0)
    rows = _rows(mixture, weight @ asked, weight @ planned, drawn, tokens.sum(axis=0))
    for row, epochs in zip(rows.values(), (drawn / np.array(mixture.sequences)).tolist(), strict=True):
        row |= {"epochs": epochs, "repeated_often": epochs > REPEATS_WORTH_A_WARNING}
    phases = []
    starts = [next(p.first for p in mixture.phases if p.recipe_phase == number) for number in range(len(tokens))]
    for number, (start, next_start) in enumerate(zip(starts, [*starts[1:], samples], strict=True)):
        end = min(next_start, samples)
        if end > start:
            of_phase = _rows(mixture, asked[number], planned[number], sequences[number], tokens[number])
            phases.append({"from": start, "to": end, "sources": of_phase, "largest_deviation": _deviation(of_phase)})
    in_order = np.array(mixture.drawn(samples))
    for first, end in gaps:
        in_order -= np.array(mixture.drawn(end)) - np.array(mixture.drawn(first))
    return {
        "samples": samples, "block": mixture.phases[0].block, "sources": rows, "largest_deviation": _deviation(rows),
        "phases": phases, "skipped_samples": sum(end - first for first, end in gaps),
        "follows_the_order": bool((drawn == in_order).all()),
    }  # fmt: skip


def _rows(mixture: Mixture, asked: Any, planned: Any, sequences: Any, tokens: Any) -> dict[str, dict[str, Any]]:
    """A row for each source; the arguments are arrays by source."""
    keys = ("asked_share", "target_share", "drawn_share", "sequences", "tokens")
    columns = asked, planned, tokens / max(int(tokens.sum()), 1), sequences, tokens
    by_source = zip(mixture.names, *(column.tolist() for column in columns), strict=True)
    return {name: dict(zip(keys, values, strict=True)) for name, *values in by_source}


def _deviation(rows: dict[str, dict[str, Any]]) -> float:
    return float(max(abs(row["target_share"] - row["drawn_share"]) for row in rows.values()))


def _table(counts: Any) -> CountTable:
    return tuple(tuple(row) for row in counts.tolist())
