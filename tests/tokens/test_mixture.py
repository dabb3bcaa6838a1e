from collections import Counter

import numpy as np
import pytest

from bessemer.tokens.mixture import LARGEST_BLOCK, Mixture


def mixture(weights: tuple[float, ...], sequences: tuple[int, ...] | None = None, seed: int = 0) -> Mixture:
    names = tuple(f"s{number}" for number in range(len(weights)))
    return Mixture.of(names, sequences or (1000,) * len(weights), weights, seed)


@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.3), (0.5, 0.25, 0.25), (3.0, 1.0), (0.9, 0.09, 0.01)])
def test_shares_are_exact_after_every_block(weights: tuple[float, ...]) -> None:
    mixed = mixture(weights)
    for blocks in (1, 3):
        counts = Counter(mixed.draw(0, blocks * mixed.block).source.tolist())
        assert [counts[n] / (blocks * mixed.block) for n in range(len(weights))] == pytest.approx(
            [w / sum(weights) for w in weights], abs=1e-12
        )


@pytest.mark.parametrize("weights", [(0.7, 0.3), (0.9, 0.09, 0.01), (0.4, 0.3, 0.2, 0.1), (0.123456789, 0.876543211)])
def test_shares_hold_at_any_point_to_within_a_sequence(weights: tuple[float, ...]) -> None:
    mixed = mixture(weights)
    source = mixed.draw(0, mixed.block + 100).source
    counts = np.stack([np.cumsum(source == number) for number in range(len(weights))])
    wanted = np.outer(mixed.shares, np.arange(1, len(source) + 1))
    assert np.abs(counts - wanted).max() <= 1.0


def test_shares_that_no_block_makes_exact_are_rounded_finely() -> None:
    weights = (0.123456789, 0.5, 0.000001)
    mixed = mixture(weights)
    assert mixed.block == LARGEST_BLOCK
    assert min(mixed.slots) >= 1
    for share, weight in zip(mixed.shares, weights, strict=True):
        assert abs(share - weight / sum(weights)) <= 1 / LARGEST_BLOCK


def test_any_slot_is_the_same_whatever_was_asked_before() -> None:
    mixed = mixture((0.6, 0.4), (37, 91), seed=5)
    whole = mixed.draw(0, 5000)
    for first, count in ((0, 1), (17, 300), (1023, 2), (4000, 1000)):
        part = mixed.draw(first, count)
        for name in ("source", "epoch", "sequence"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[first : first + count])


def test_every_sequence_comes_once_an_epoch() -> None:
    mixed = mixture((0.5, 0.5), (100, 333))
    draw = mixed.draw(0, 4096)
    for source, size in enumerate((100, 333)):
        for epoch in range(3):
            here = draw.sequence[(draw.source == source) & (draw.epoch == epoch)]
            assert np.array_equal(np.sort(here), np.arange(size))


def test_epochs_are_shuffled_anew() -> None:
    draw = mixture((1.0,), (500,)).draw(0, 1000)
    assert not np.array_equal(draw.sequence[:500], draw.sequence[500:])


def test_drawn_counts_agree_with_the_order() -> None:
    mixed = mixture((0.8, 0.15, 0.05))
    for count in (0, 1, 999, 1024, 3333):
        counted = np.bincount(mixed.draw(0, count).source, minlength=3)
        assert mixed.drawn(count) == tuple(counted.tolist())


def test_the_seed_names_the_order() -> None:
    first, second = (mixture((0.5, 0.5), seed=seed).draw(0, 256) for seed in (0, 1))
    assert not np.array_equal(first.sequence, second.sequence)
