"""What scores decide: limits, Pareto's law, bands and their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.sample import keys, uniforms
from bessemer.corpus.quality.scores import DIGITS, RankQuery, digit_counts, find_cuts, keys_of
from bessemer.recipe import Quality

SIDES = {"high": ("a",), "low": ("b",)}


def names(count: int) -> np.ndarray:
    return np.sort(np.frombuffer(np.random.default_rng(0).bytes(16 * count), dtype="S16"))


def test_a_threshold_keeps_what_reaches_it() -> None:
    scores = np.array([0.1, 0.3, 0.299999, 0.9], dtype=np.float32)
    settings = Quality(use="filter", threshold=0.3, **SIDES)
    assert scoring.stays(settings, scores, names(4), None).tolist() == [False, True, False, True]
    assert scoring.limit(settings, 0.3) == "threshold 0.3"
    assert scoring.stays(Quality(use="filter", **SIDES), scores, names(4), None).tolist() == [False] * 3 + [True]


def cuts_of(settings: Quality, parts: list[tuple[str, np.ndarray, np.ndarray]]) -> list[tuple[str, bytes]]:
    """The cuts by counts over parts (source, scores, identities), and the source of each; the rounds are few."""
    judged: Counter[str] = Counter()
    for source, scores, _ in parts:
        judged[source] += len(scores)
    queries, rounds = scoring.queries(settings, dict(judged)), []

    def count(asked: Sequence[RankQuery]) -> list[np.ndarray]:
        rounds.append(len(asked))
        totals = [np.zeros(DIGITS, np.int64) for _ in asked]
        for source, scores, identities in parts:
            for query, total in zip(asked, totals, strict=True):
                if source in query.sources:
                    total += digit_counts(keys_of(scores, identities, query.best_first), query.known)
        return totals

    cuts = find_cuts(queries, count)
    assert len(rounds) <= 10
    return [(query.sources[0], cut) for query, cut in zip(queries, cuts, strict=True)]


KINDS_OF_SCORES = {
    "apart": lambda draw: draw.random(1000, dtype=np.float32),
    "few values": lambda draw: (draw.integers(0, 4, 1000) / 3).astype(np.float32),
    "all equal": lambda draw: np.ones(1000, np.float32),
    "tiny and zero": lambda draw: (draw.random(1000) * 1e-38 * draw.integers(-1, 2, 1000).clip(0)).astype(np.float32),
}


@pytest.mark.parametrize("kind", KINDS_OF_SCORES)
@pytest.mark.parametrize("share", [0.0001, 0.25, 0.5, 0.9995, 1.0])
def test_a_share_keeps_exactly_the_best_and_ties_go_by_identity(kind: str, share: float) -> None:
    """The same as sorting all documents, however they are cut into buckets."""
    scores, settings = KINDS_OF_SCORES[kind](np.random.default_rng(0)), Quality(use="filter", keep_share=share, **SIDES)
    identities = names(1000)[np.random.default_rng(1).permutation(1000)]
    order = np.lexsort((identities, -scores.astype(np.float64)))
    expected = np.zeros(1000, bool)
    expected[order[: max(round(share * 1000), 1)]] = True
    for size in (1000, 7):
        parts = [("b", scores[at : at + size], identities[at : at + size]) for at in range(0, 1000, size)]
        ((_, cut),) = cuts_of(settings, parts)
        kept = [scoring.stays(settings, *part[1:], cut) for part in parts]
        assert np.array_equal(np.concatenate(kept), expected)


@pytest.mark.parametrize("kind", KINDS_OF_SCORES)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_bands_are_equal_within_each_source_and_ties_go_by_identity(kind: str, count: int) -> None:
    scores, identities = KINDS_OF_SCORES[kind](np.random.default_rng(2)), names(1000)
    settings = Quality(use="weight", band_weights=(1.0,) * count, **SIDES)
    sizes = {"a": 500, "b": 496, "c": 4}
    starts = dict(zip(sizes, (0, 500, 996), strict=True))
    parts = []
    for source, size in sizes.items():
        for at in range(starts[source], starts[source] + size, 100):
            here = slice(at, min(at + 100, starts[source] + size))
            parts.append((source, scores[here], identities[here]))
    cuts = cuts_of(settings, parts)
    found = np.concatenate(
        [
            scoring.bands(some, some_names, [cut for name, cut in cuts if name == source])
            for source, some, some_names in parts
        ]
    )
    for source, size in sizes.items():
        here = slice(starts[source], starts[source] + size)
        order = np.lexsort((identities[here], scores[here]))
        expected = np.empty(size, int)
        expected[order] = np.arange(size) * count // size
        assert np.array_equal(found[here], expected)


def test_a_fixed_sum_is_the_same_in_any_order_and_cut() -> None:
    values = np.random.default_rng(0).random(10_000, dtype=np.float32)
    parts = sum(scoring.fixed_sum(part) for part in np.split(np.random.default_rng(1).permutation(values), 100))
    assert parts == scoring.fixed_sum(values) and parts / scoring.FIXED == pytest.approx(
        values.sum(dtype=float), rel=1e-9
    )


def test_report_and_weight_reject_nothing() -> None:
    for kind in ("report", "weight"):
        assert scoring.stays(Quality(use=kind, **SIDES), np.zeros(3, np.float32), names(3), None).all()


@pytest.mark.parametrize("alpha", [1.0, 3.0, 9.0])
@pytest.mark.parametrize("score", [0.0, 0.5, 0.9, 1.0])
def test_paretos_share_is_the_formulas_and_numpys(alpha: float, score: float) -> None:
    settings = Quality(use="pareto", alpha=alpha, **SIDES)
    count = 100_000
    keep = scoring.stays(settings, np.full(count, score, np.float32), names(count), None)
    expected = (2 - score) ** -alpha
    assert float(scoring.pareto_share(np.array([score]), alpha)[0]) == pytest.approx(expected)
    error = 4 * np.sqrt(expected * (1 - expected) / count)  # four standard deviations
    assert keep.mean() == pytest.approx(expected, abs=error + 1e-9)
    theirs = np.random.default_rng(0).pareto(alpha, count) > 1 - score  # the rule as GPT-3's paper writes it
    assert theirs.mean() == pytest.approx(expected, abs=error + 1e-9)


def test_pareto_draws_hang_on_identity_and_seed_alone() -> None:
    scores = np.full(1000, 0.8, np.float32)
    settings, order = Quality(use="pareto", **SIDES), np.random.default_rng(1).permutation(1000)
    keep = scoring.stays(settings, scores, names(1000), None)
    assert np.array_equal(scoring.stays(settings, scores, names(1000)[order], None), keep[order])
    other = scoring.stays(settings.model_copy(update={"seed": 1}), scores, names(1000), None)
    assert (other != keep).any()


def test_uniforms_are_uniform_and_independent_of_each_other() -> None:
    found = uniforms(names(100_000), "pareto", 0)
    assert found.min() > 0 and found.max() < 1
    assert np.histogram(found, 20, (0, 1))[0] == pytest.approx(np.full(20, 5000), rel=0.08)
    other = uniforms(names(100_000), "part", 0)
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.02
    # Identities that differ in one bit, or end in zero bytes, have nothing in common.
    near = np.array([bytes([number]) + bytes(15) for number in range(256)], dtype="S16")
    assert len(set(keys(near, "sample", 0).tolist())) == 256
    assert abs(np.corrcoef(uniforms(near, "sample", 0)[:-1], uniforms(near, "sample", 0)[1:])[0, 1]) < 0.2
