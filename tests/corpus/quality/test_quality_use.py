"""Decisions from scores, and the random draws of the sample."""

from __future__ import annotations

import numpy as np
import pytest

from bessemer.corpus.filters.quality import decide
from bessemer.corpus.filters.quality.sample import keys, uniforms
from bessemer.recipe import Quality

SIDES = {"high": ("a",), "low": ("b",)}


def names(count: int) -> np.ndarray:
    return np.sort(np.frombuffer(np.random.default_rng(0).bytes(16 * count), dtype="S16"))


def test_a_threshold_keeps_what_reaches_it() -> None:
    scores = np.array([0.1, 0.3, 0.299999, 0.9], dtype=np.float32)
    settings = Quality(use="filter", threshold=0.3, **SIDES)
    assert decide.stays(settings, scores, 0.3).tolist() == [False, True, False, True]
    assert decide.limit_in_words(settings, 0.3) == "threshold 0.3"
    assert decide.stays(Quality(use="report", **SIDES), scores, 0.5).all()


@pytest.mark.parametrize("share", [0.0001, 0.5, 1.0])
def test_a_share_keeps_the_best_and_equal_scores_together(share: float) -> None:
    scores = np.random.default_rng(0).random(1000, dtype=np.float32)
    settings = Quality(use="filter", keep_share=share, **SIDES)
    keep = decide.stays(settings, scores, decide.cut_of_share(scores, share))
    assert keep.sum() == max(round(share * 1000), 1) and scores[keep].min() > scores[~keep].max(initial=0.0)
    scores = np.array([0.5, 1.0, 0.5, 0.0], np.float32)
    assert (scores >= decide.cut_of_share(scores, 0.5)).tolist() == [True, True, True, False]
    assert decide.cut_of_share(np.zeros(0, np.float32), 0.5) == 0.0


def test_uniforms_are_uniform_and_independent_of_each_other() -> None:
    found = uniforms(names(100_000), "cut", 0)
    assert found.min() > 0 and found.max() < 1
    assert np.histogram(found, 20, (0, 1))[0] == pytest.approx(np.full(20, 5000), rel=0.08)
    other = uniforms(names(100_000), "part", 0)
    assert abs(np.corrcoef(found, other)[0, 1]) < 0.02
    # Identities that differ in one bit, or end in zero bytes, give independent draws.
    near = np.array([bytes([number]) + bytes(15) for number in range(256)], dtype="S16")
    assert len(set(keys(near, "sample", 0).tolist())) == 256
    assert abs(np.corrcoef(uniforms(near, "sample", 0)[:-1], uniforms(near, "sample", 0)[1:])[0, 1]) < 0.2
