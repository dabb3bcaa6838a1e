import hashlib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bessemer.tokens.mixture import Mixture


def mixture(weights: tuple[float, ...], sequences: tuple[int, ...] | None = None, seed: int = 0) -> Mixture:
    names = tuple(f"s{number}" for number in range(len(weights)))
    return Mixture.from_weights(names, sequences or (1000,) * len(weights), weights, seed)


@pytest.mark.parametrize(
    ("weights", "sequences", "seed", "known"),
    [
        ((1.0,), (500,), 0, "626f9372766c45d2b35d8d13f590e5a1"),
        ((0.7, 0.3), (37, 91), 5, "636c3e65dddae387dc934242c8cec106"),
        ((3.0, 1.0, 0.5), (1000, 17, 250), 3, "57823c112c9711074585718a247ece4f"),
        ((0.123456789, 0.5, 0.000001), (10, 2000, 3), 1, "970d478b206d7ab852183869ae24a358"),
        ((123457.0, 89123.0, 777.0), (123457, 89123, 777), 11, "1d1a0a5ca9f4d6252d892d0fcca5ee01"),
    ],
)
def test_the_order_of_old_runs_is_kept(
    weights: tuple[float, ...], sequences: tuple[int, ...], seed: int, known: str
) -> None:
    """Hashes of what version 0.1 drew, before mixtures had phases."""
    assert digest(mixture(weights, sequences, seed)) == known


def test_the_order_of_phases_is_kept() -> None:
    spans = [(0, (0.3, 0.7, 0.0)), (777, (Fraction(1, 7), Fraction(5, 7), Fraction(1, 7))), (9000, (0.0, 0.0, 1.0))]
    assert digest(Mixture.from_phases(("a", "b", "c"), (50, 900, 31), spans, 3)) == "98663417655fe2e2a25b236bd61b912e"


def digest(mixed: Mixture) -> str:
    found = hashlib.sha256()
    for first, count in ((0, 20000), (1_000_003, 4097)):
        draw = mixed.draw(first, count)
        for part in (draw.source, draw.epoch, draw.sequence):
            found.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return found.hexdigest()[:32]


@st.composite
def changing(draw: st.DrawFn) -> tuple[Mixture, list[int], list[tuple[int, ...]]]:
    """A mixture of up to four phases, where they begin and their weights."""
    names = draw(st.integers(2, 6))
    lengths = draw(st.lists(st.integers(1, 3000), min_size=0, max_size=3))
    firsts = [0, *np.cumsum(lengths).tolist()]
    row = st.lists(st.integers(0, 50), min_size=names, max_size=names).filter(any)
    weights = [tuple(draw(row)) for _ in firsts]
    sequences = tuple(draw(st.lists(st.integers(1, 400), min_size=names, max_size=names)))
    spans = [(first, tuple(map(Fraction, part))) for first, part in zip(firsts, weights, strict=True)]
    labels = tuple(f"s{number}" for number in range(names))
    return Mixture.from_phases(labels, sequences, spans, draw(st.integers(0, 9))), firsts, weights


@settings(max_examples=40, deadline=None)
@given(changing())
def test_every_prefix_of_every_phase_has_its_shares_to_within_a_sequence(
    made: tuple[Mixture, list[int], list[tuple[int, ...]]],
) -> None:
    mixed, firsts, weights = made
    end = firsts[-1] + 4000
    source = mixed.draw(0, end).source
    for first, last, asked in zip(firsts, [*firsts[1:], end], weights, strict=True):
        counts = np.stack([np.cumsum(source[first:last] == number) for number in range(len(asked))])
        wanted = np.outer(np.array(asked) / sum(asked), np.arange(1, last - first + 1))
        assert np.abs(counts - wanted).max() < 1.0 + 1e-9
        assert not counts[np.array(asked) == 0].any()


@settings(max_examples=40, deadline=None)
@given(changing(), st.integers(0, 9000), st.integers(1, 5000))
def test_phases_change_nothing_about_epochs_and_random_access(
    made: tuple[Mixture, list[int], list[tuple[int, ...]]], first: int, count: int
) -> None:
    mixed, _, _ = made
    whole = mixed.draw(0, first + count)
    part = mixed.draw(first, count)
    for name in ("source", "epoch", "sequence"):
        assert np.array_equal(getattr(part, name), getattr(whole, name)[first:])
    for source, size in enumerate(mixed.sequences):
        read = whole.sequence[whole.source == source]
        assert mixed.drawn(first + count)[source] == len(read)
        assert np.array_equal(whole.epoch[whole.source == source], np.arange(len(read)) // size)
        for begin in range(0, len(read), size):  # no sequence twice before the epoch ends, across phases
            turn = read[begin : begin + size]
            assert len(set(turn.tolist())) == len(turn)


@settings(max_examples=60, deadline=None)
@given(changing(), st.integers(0, 14_000), st.data())
def test_every_sequence_is_found_in_the_slots_that_read_it(
    made: tuple[Mixture, list[int], list[tuple[int, ...]]], count: int, data: st.DataObject
) -> None:
    """Backwards, against a look at every slot: over epochs, phases, and phases without the source."""
    mixed, _, _ = made
    draw = mixed.draw(0, count)
    for source, size in enumerate(mixed.sequences):
        few = data.draw(st.lists(st.integers(0, size - 1), max_size=3))
        for wanted in (few, range(size)):
            held = (draw.source == source) & np.isin(draw.sequence, list(wanted))
            assert np.array_equal(mixed.slots_of(source, list(wanted), count), np.flatnonzero(held))
