"""What a classifier goes by: its statistics, and the words and pairs of words that tell the most."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from bessemer.corpus.quality.features import STATISTICS, Features, Texts
from bessemer.corpus.quality.logistic import Fit, standardised

SHOWN = 30
"""Words and pairs of words listed for each side."""

LEAST_SHARE = 0.005
"""Buckets in fewer of the training documents are chance, however large their weight."""

SEARCHED = 4000
"""Documents searched for the words behind the buckets."""

PLACES = 4096
"""Places of told buckets looked at in one document."""


def telling(fit: Fit, features: Features, texts: Texts, high: npt.NDArray[np.bool_], read_bytes: int) -> dict[str, Any]:
    """For quality.json: `statistics`, all of them, and `high` and `low`, words that speak for either.

    An effect is in logits: of a statistic, what one standard deviation changes; of a word, its weight x the standard
    deviation over the training documents of its value, which is 0 or 1 / sqrt(distinct words and pairs of the text).
    """
    statistics = standardised(features.statistics, fit.centre, fit.spread)
    rows: list[dict[str, Any]] = [
        {
            "feature": name,
            "effect": float(weight),
            "high_mean": float(statistics[high, number].mean() * fit.spread[number] + fit.centre[number]),
            "low_mean": float(statistics[~high, number].mean() * fit.spread[number] + fit.centre[number]),
        }
        for number, (name, weight) in enumerate(zip(STATISTICS, fit.of_statistics, strict=True))
    ]
    num_texts, num_buckets = len(high), len(fit.of_buckets)
    sizes = np.diff(features.bounds)
    values = np.repeat(1.0 / np.sqrt(np.maximum(sizes, 1)), sizes)
    mean = np.bincount(features.buckets, values, num_buckets) / num_texts
    square = np.bincount(features.buckets, values**2, num_buckets) / num_texts
    owner = np.repeat(high, sizes)
    counts = {side: np.bincount(features.buckets[owner == side], minlength=num_buckets) for side in (False, True)}
    effect = fit.of_buckets * np.sqrt(np.maximum(square - mean**2, 0.0))
    effect[counts[False] + counts[True] < max(LEAST_SHARE * num_texts, 2)] = 0.0
    order = np.argsort(effect, kind="stable")
    chosen = {"high": order[::-1][:SHOWN], "low": order[:SHOWN]}
    names = _names(np.concatenate(list(chosen.values())), texts, read_bytes, num_buckets)
    shares = {side: of / max(int((high == side).sum()), 1) for side, of in counts.items()}
    words = {
        side: [
            {
                "words": names[at],
                "effect": float(effect[at]),
                "high_share": float(shares[True][at]),
                "low_share": float(shares[False][at]),
            }
            for at in of.tolist()
            if at in names and effect[at] != 0 and (effect[at] > 0) == (side == "high")
        ]
        for side, of in chosen.items()
    }
    return {"statistics": sorted(rows, key=lambda row: -abs(row["effect"])), **words}


def _names(buckets: npt.NDArray[np.int64], texts: Texts, read_bytes: int, num_buckets: int) -> dict[int, str]:
    """What stands in each bucket: the words that the searched texts put there most often."""
    from bessemer.corpus.quality import kernels

    wanted = np.zeros(num_buckets, dtype=np.bool_)
    wanted[buckets] = True
    longest = int(np.minimum(texts.ends - texts.starts, read_bytes).max(initial=0))
    hashes, spans = np.empty(longest + 1, dtype=np.uint64), np.empty((longest + 1, 2), dtype=np.int64)
    lines, found = np.zeros(1 << kernels.LINE_BITS, dtype=np.int32), np.empty((PLACES, 5), dtype=np.int64)
    seen: dict[int, Counter[str]] = {}
    for number in np.unique(np.linspace(0, len(texts) - 1, min(SEARCHED, len(texts))).astype(np.int64)).tolist():
        start = int(texts.starts[number])
        end = kernels.cut(texts.data, start, int(texts.ends[number]), read_bytes)
        bits = num_buckets.bit_length() - 1
        count = kernels.places(texts.data, start, end, bits, wanted, hashes, spans, lines, found)
        for at, *ends in found[:count].tolist():
            pieces = [texts.data[a:b].tobytes() for a, b in (ends[:2], ends[2:]) if a >= 0]
            seen.setdefault(at, Counter())[" ".join(map(_as_hashed, pieces))] += 1
    # Of words equally frequent the first by the alphabet.
    return {at: min(of.items(), key=lambda item: (-item[1], item[0]))[0] for at, of in seen.items()}


def _as_hashed(word: bytes) -> str:
    """A word as `kernels.scan` reads it: ASCII letters small, digits 0."""
    table = bytes(0x30 if 0x30 <= code <= 0x39 else code for code in range(256))
    return word.lower().translate(table).decode("utf-8", "replace")
