"""What scores decide: limits, Pareto's law, bands and their weights."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.corpus.quality import scores as scoring
from bessemer.corpus.quality.sample import keys, uniforms
from bessemer.recipe import Quality

SIDES = {"high": ("a",), "low": ("b",)}


def names(count: int) -> np.ndarray:
    return np.sort(np.frombuffer(np.random.default_rng(0).bytes(16 * count), dtype="S16"))


def test_a_threshold_keeps_what_reaches_it() -> None:
    scores = np.array([0.1, 0.3, 0.299999, 0.9, 0.0], dtype=np.float32)
    judged = np.array([True, True, True, True, False])
    keep, limit = scoring.stays(Quality(use="filter", threshold=0.3, **SIDES), scores, names(5), judged)
    assert keep.tolist() == [False, True, False, True, True] and limit == "threshold 0.3"
    assert (
        scoring.stays(Quality(use="filter", **SIDES), scores, names(5), judged)[0].tolist() == [False] * 3 + [True] * 2
    )


def test_a_share_keeps_exactly_that_many_and_ties_go_by_identity() -> None:
    scores, judged = np.full(100, 0.5, dtype=np.float32), np.arange(100) >= 20
    scores[90:] = 0.8
    settings = Quality(use="filter", keep_share=0.25, **SIDES)
    keep, _ = scoring.stays(settings, scores, names(100), judged)
    assert np.flatnonzero(keep).tolist() == [*range(20), *range(20, 30), *range(90, 100)]
    order = np.random.default_rng(1).permutation(100)
    again, _ = scoring.stays(settings, scores[order], names(100)[order], judged[order])
    assert np.array_equal(again, keep[order])


def test_report_and_weight_reject_nothing() -> None:
    for kind in ("report", "weight"):
        assert scoring.stays(Quality(use=kind, **SIDES), np.zeros(3, np.float32), names(3), np.ones(3, bool))[0].all()


@pytest.mark.parametrize("alpha", [1.0, 3.0, 9.0])
@pytest.mark.parametrize("score", [0.0, 0.5, 0.9, 1.0])
def test_paretos_share_is_the_formulas_and_numpys(alpha: float, score: float) -> None:
    settings = Quality(use="pareto", alpha=alpha, **SIDES)
    count = 100_000
    keep, _ = scoring.stays(settings, np.full(count, score, np.float32), names(count), np.ones(count, bool))
    expected = (2 - score) ** -alpha
    assert float(scoring.pareto_share(np.array([score]), alpha)[0]) == pytest.approx(expected)
    error = 4 * np.sqrt(expected * (1 - expected) / count)  # four standard deviations
    assert keep.mean() == pytest.approx(expected, abs=error + 1e-9)
    theirs = np.random.default_rng(0).pareto(alpha, count) > 1 - score  # the rule as GPT-3's paper writes it
    assert theirs.mean() == pytest.approx(expected, abs=error + 1e-9)


def test_pareto_draws_hang_on_identity_and_seed_alone() -> None:
    scores = np.full(1000, 0.8, np.float32)
    settings, order = Quality(use="pareto", **SIDES), np.random.default_rng(1).permutation(1000)
    keep = scoring.stays(settings, scores, names(1000), np.ones(1000, bool))[0]
    assert np.array_equal(scoring.stays(settings, scores, names(1000)[order], np.ones(1000, bool))[0], keep[order])
    other = scoring.stays(settings.model_copy(update={"seed": 1}), scores, names(1000), np.ones(1000, bool))[0]
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


def test_bands_are_equal_within_each_source() -> None:
    draw = np.random.default_rng(0)
    scores, sources = draw.random(1000).astype(np.float32), np.repeat([0, 1, 2], [500, 301, 199]).astype(np.int16)
    judged = sources != 2
    found = scoring.bands(scores, names(1000), sources, judged, 3)
    assert (found[~judged] == -1).all()
    for source, count in ((0, 500), (1, 301)):
        here = sources == source
        sizes = np.bincount(found[here], minlength=3)
        assert sizes.sum() == count and sizes.max() - sizes.min() <= 1
        for low, high in ((0, 1), (1, 2)):
            assert scores[here & (found == low)].max() <= scores[here & (found == high)].min()
