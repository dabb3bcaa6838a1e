"""The mixture held against what was asked, counted from the batches that were really trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bessemer.parallel.team import Team
from bessemer.tokens.loader import Batch, Reader
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING

Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Given:
    """What the loader gave so far, by phase of the recipe and source. sequences: how many; tokens: in them, padding not
    counted. Kept in checkpoints, so that it is still what was counted after a stop."""

    sequences: Table = ()
    tokens: Table = ()

    @classmethod
    def nothing(cls, mixture: Mixture) -> Given:
        """Before the first batch."""
        zeros = ((0,) * len(mixture.names),) * (mixture.phases[-1].asked + 1)
        return cls(zeros, zeros)

    @classmethod
    def by_order(cls, mixture: Mixture, samples: int, length: int) -> Given:
        """What so many samples of the order come to: for a run that was begun before this was counted."""
        empty = cls.nothing(mixture)
        drawn = (mixture.drawn(samples), *empty.sequences[1:])
        return cls(drawn, tuple(tuple(count * length for count in row) for row in drawn))

    def plus(self, batch: Batch, reader: Reader) -> Given:
        """With one batch more, counted from its rows."""
        mixture = reader.mixture
        slots = batch.first + reader.rank + reader.world * np.arange(len(batch.source))
        phase = _asked_of(mixture, slots)
        real = np.full(len(slots), batch.inputs.shape[1]) if batch.real is None else batch.real
        shape = (len(self.sequences), len(mixture.names))
        sequences, tokens = np.array(self.sequences, dtype=np.int64), np.array(self.tokens, dtype=np.int64)
        place = phase * shape[1] + batch.source
        sequences += np.bincount(place, minlength=sequences.size).reshape(shape)
        np.add.at(tokens.reshape(-1), place, real)
        return Given(_table(sequences), _table(tokens))

    def of_all(self, team: Team) -> Given:
        """What all processes gave, each having counted its own part of the batches. Every process gets it."""
        if team.is_alone:
            return self
        counted = np.array([self.sequences, self.tokens], dtype=np.int64)
        summed = team.sum_of_parts(torch.from_numpy(counted)).numpy()
        return Given(_table(summed[0]), _table(summed[1]))

    def of_one(self, team: Team) -> Given:
        """What this process begins from, so that `of_all` is this: the first process has it all, the others nothing."""
        if team.data_rank == 0:
            return self
        return Given(*(tuple((0,) * len(row) for row in table) for table in (self.sequences, self.tokens)))

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint's facts."""
        return {"sequences": self.sequences, "tokens": self.tokens}

    @classmethod
    def from_dict(cls, facts: dict[str, Any]) -> Given:
        """From a checkpoint's facts; empty where they are of before this was counted."""
        return cls(*(tuple(tuple(row) for row in facts.get(key, ())) for key in ("sequences", "tokens")))


def mixture_audit(mixture: Mixture, given: Given, samples: int) -> dict[str, Any]:
    """Asked, planned and drawn shares of each source after `samples` sequences, over all and by phase, and how often each
    was repeated. Shares are of the tokens; target_share is what the caps leave of asked_share."""
    tokens, sequences = np.array(given.tokens), np.array(given.sequences)
    weight = tokens.sum(axis=1) / max(int(tokens.sum()), 1)
    asked, planned = (
        np.array([getattr(mixture.aims[number], side) for number in range(len(weight))])
        for side in ("asked", "planned")
    )
    used = weight if weight.any() else np.eye(len(weight))[0]
    drawn, available = sequences.sum(axis=0), np.array(mixture.sequences)
    rows = _rows(mixture, used @ asked, used @ planned, drawn, tokens.sum(axis=0))
    for row, turns in zip(rows.values(), (drawn / available).tolist(), strict=True):
        row["epochs"] = turns
        row["repeated_often"] = turns > REPEATS_WORTH_A_WARNING
    phases = []
    starts = [next(phase.first for phase in mixture.phases if phase.asked == number) for number in range(len(weight))]
    for number, start in enumerate(starts):
        end = min(starts[number + 1] if number + 1 < len(starts) else samples, samples)
        found = _rows(mixture, asked[number], planned[number], sequences[number], tokens[number])
        if end > start:
            phases.append({"from": start, "to": end, "sources": found, "largest_deviation": _deviation(found)})
    return {
        "samples": samples,
        "block": mixture.phases[0].block,
        "sources": rows,
        "largest_deviation": _deviation(rows),
        "phases": phases,
        "follows_the_order": tuple(drawn.tolist()) == mixture.drawn(samples),
    }


def _rows(mixture: Mixture, asked: Any, planned: Any, sequences: Any, tokens: Any) -> dict[str, dict[str, Any]]:
    """A row for each source. The arguments are arrays by source."""
    columns = asked.tolist(), planned.tolist(), sequences.tolist(), tokens.tolist()
    return {
        name: {
            "asked_share": wanted,
            "target_share": target,
            "drawn_share": held / max(int(tokens.sum()), 1),
            "sequences": count,
            "tokens": held,
        }
        for name, wanted, target, count, held in zip(mixture.names, *columns, strict=True)
    }


def _deviation(rows: dict[str, dict[str, Any]]) -> float:
    return float(max(abs(row["target_share"] - row["drawn_share"]) for row in rows.values()))


def _asked_of(mixture: Mixture, slots: Any) -> Any:
    """The recipe's phase of each slot."""
    firsts = np.array([phase.first for phase in mixture.phases])
    return np.array([phase.asked for phase in mixture.phases])[np.searchsorted(firsts, slots, side="right") - 1]


def _table(counts: Any) -> Table:
    return tuple(tuple(row) for row in counts.tolist())
