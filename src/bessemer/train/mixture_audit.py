"""The audit of the mixture: token shares counted from the batches, compared with the requested and planned shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.recipe.batches import Range
from bessemer.tokens.loader import Batch
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.phases import REPEATS_WORTH_A_WARNING

Counts = npt.NDArray[np.int64]
"""Sequences read so far and their tokens without padding, (2, phases of the recipe, sources). Part of checkpoints."""


def no_counts(mixture: Mixture) -> Counts:
    """Return the counts of sequences and of tokens before the first batch: zeros, (2, phases, sources)."""
    return np.zeros((2, mixture.phases[-1].recipe_phase + 1, len(mixture.names)), dtype=np.int64)


def counts_after(counts: Counts, batch: Batch, mixture: Mixture) -> Counts:
    """Return a copy of the counts with the sequences and tokens of one more batch of this process."""
    spans = np.array([(phase.first, phase.recipe_phase) for phase in mixture.phases])
    phase = spans[np.searchsorted(spans[:, 0], batch.samples, side="right") - 1, 1]
    real = np.full(*batch.inputs.shape) if batch.real_lengths is None else batch.real_lengths
    sequences, tokens = after = counts.copy()
    np.add.at(sequences, (phase, batch.source), 1)
    np.add.at(tokens, (phase, batch.source), real)
    return after


def mixture_audit(mixture: Mixture, counts: Counts, samples: int, gaps: Sequence[Range] = ()) -> dict[str, Any]:
    """Return the requested, planned and consumed token shares and the epochs of each source, in total and by phase.

    Args:
        mixture: The planned mixture.
        counts: The counts of all processes.
        samples: The number of samples after which the audit is made.
        gaps: The ranges of samples before that which were skipped.

    Returns:
        The values for the report. `asked_share` is the share that the recipe requests, `target_share` the share after the caps
        on epochs, and `drawn_share` the consumed share.
    """
    sequences, tokens = counts
    requested, planned = np.array(mixture.shares[: len(tokens)]).swapaxes(0, 1)
    weight = tokens.sum(axis=1) / max(int(tokens.sum()), 1)
    if not weight.any():
        weight = np.eye(len(tokens))[0]
    actual = sequences.sum(axis=0)
    rows = _rows(mixture, weight @ requested, weight @ planned, actual, tokens.sum(axis=0))
    for row, epochs in zip(rows.values(), (actual / np.array(mixture.sequences)).tolist(), strict=True):
        row |= {"epochs": epochs, "repeated_often": epochs > REPEATS_WORTH_A_WARNING}
    phases = []
    starts = [next(p.first for p in mixture.phases if p.recipe_phase == number) for number in range(len(tokens))]
    for number, (start, next_start) in enumerate(zip(starts, [*starts[1:], samples], strict=True)):
        end = min(next_start, samples)
        if end > start:
            of_phase = _rows(mixture, requested[number], planned[number], sequences[number], tokens[number])
            phases.append({"from": start, "to": end, "sources": of_phase, "largest_deviation": _deviation(of_phase)})
    in_order = np.array(mixture.drawn(samples))
    for first, end in gaps:
        in_order -= np.array(mixture.drawn(end)) - np.array(mixture.drawn(first))
    return {
        "samples": samples, "block": mixture.phases[0].block, "sources": rows, "largest_deviation": _deviation(rows),
        "phases": phases, "skipped_samples": sum(end - first for first, end in gaps),
        "follows_the_order": bool((actual == in_order).all()),
    }  # fmt: skip


def _rows(mixture: Mixture, requested: Any, planned: Any, sequences: Any, tokens: Any) -> dict[str, dict[str, Any]]:
    """Return a dict for each source: its requested, planned and consumed token share, and its sequences and tokens so far.

    `requested` and `planned` are arrays of shares, and `sequences` and `tokens` arrays of counts, (sources,) each.
    """
    keys = ("asked_share", "target_share", "drawn_share", "sequences", "tokens")
    columns = requested, planned, tokens / max(int(tokens.sum()), 1), sequences, tokens
    by_source = zip(mixture.names, *(column.tolist() for column in columns), strict=True)
    return {name: dict(zip(keys, values, strict=True)) for name, *values in by_source}


def _deviation(rows: dict[str, dict[str, Any]]) -> float:
    return float(max(abs(row["target_share"] - row["drawn_share"]) for row in rows.values()))
