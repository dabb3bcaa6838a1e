"""The order of the data: shuffles, mixtures, and the phases of a recipe."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bessemer.common.errors import InputError
from bessemer.common.hashing import key_of
from bessemer.recipe import ResolvedRecipe
from bessemer.tokens import order
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.phases import SourceSizes, mixture_of, recipe_phases
from tests.tokens.token_samples import recipe_of


def permute(key: int, positions: object, size: int) -> np.ndarray:
    positions = np.atleast_1d(positions)
    return order.permute([key], np.zeros(len(positions), np.intp), positions, size)


def positions_of(key: int, items: object, size: int) -> np.ndarray:
    items = np.atleast_1d(items)
    return order.permute([key], np.zeros(len(items), np.intp), items, size, is_inverse=True)


def test_keys_give_different_orders_that_look_random() -> None:
    size = 20_000
    first, second = permute(1, np.arange(size), size), permute(2, np.arange(size), size)
    assert not np.array_equal(first, second)
    for items in (first, second):
        # Neighbours in the order are not neighbours in the data, and positions do not follow the data.
        assert abs(np.corrcoef(np.arange(size), items.astype(float))[0, 1]) < 0.03
        assert np.mean(np.abs(np.diff(items.astype(np.int64))) < 10) < 0.005
    assert np.mean(first == second) < 0.001


def test_the_order_is_the_same_on_every_machine() -> None:
    """Recorded values: a change of the arithmetic would give a resumed run other data."""
    assert key_of("epoch", 0, "code", 0) == GOLDEN_KEY
    assert permute(GOLDEN_KEY, np.arange(8), 1000).tolist() == [895, 786, 569, 268, 42, 901, 820, 47]
    for function in (permute, positions_of):
        with pytest.raises(ValueError, match="outside"):
            function(0, [5], 5)


GOLDEN_KEY = 17617507302213195016


@given(st.integers(1, 2**60), st.integers(0, 2**64 - 1), st.lists(st.floats(0, 1, exclude_max=True), min_size=1))
@settings(max_examples=100, deadline=None)
def test_the_order_of_many_items_can_be_inverted(size: int, key: int, shares: list[float]) -> None:
    positions = np.array([min(int(share * size), size - 1) for share in shares], dtype=np.uint64)
    assert np.array_equal(positions_of(key, permute(key, positions, size), size), positions)
    assert np.array_equal(permute(key, positions_of(key, positions, size), size), positions)


def mixture(weights: tuple[float, ...], sequences: tuple[int, ...] | None = None, seed: int = 0) -> Mixture:
    names = tuple(f"s{number}" for number in range(len(weights)))
    return Mixture.from_weights(names, sequences or (1000,) * len(weights), weights, seed)


SPANS = [(0, (0.3, 0.7, 0.0)), (777, (Fraction(1, 7), Fraction(5, 7), Fraction(1, 7))), (9000, (0.0, 0.0, 1.0))]


@pytest.mark.parametrize(
    ("mixed", "known"),
    [
        (mixture((1.0,), (500,), 0), "626f9372766c45d2b35d8d13f590e5a1"),
        (mixture((0.7, 0.3), (37, 91), 5), "636c3e65dddae387dc934242c8cec106"),
        (mixture((3.0, 1.0, 0.5), (1000, 17, 250), 3), "57823c112c9711074585718a247ece4f"),
        (mixture((0.123456789, 0.5, 0.000001), (10, 2000, 3), 1), "970d478b206d7ab852183869ae24a358"),
        (mixture((123457.0, 89123.0, 777.0), (123457, 89123, 777), 11), "1d1a0a5ca9f4d6252d892d0fcca5ee01"),
        (Mixture.from_phases(("a", "b", "c"), (50, 900, 31), SPANS, 3), "98663417655fe2e2a25b236bd61b912e"),
    ],
)
def test_the_order_of_old_runs_is_kept(mixed: Mixture, known: str) -> None:
    """Hashes of what version 0.1 drew before mixtures had phases, and of phases."""
    assert digest(mixed) == known


def digest(mixed: Mixture) -> str:
    found = hashlib.sha256()
    for first, count in ((0, 20000), (1_000_003, 4097)):
        draw = mixed.draw(first, count)
        for part in (draw.source, draw.epoch, draw.sequence):
            found.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
    return found.hexdigest()[:32]


@st.composite
def changing(draw: st.DrawFn) -> tuple[Mixture, list[int], list[tuple[int, ...]]]:
    """Draw a mixture of up to four phases with their starts and weights."""
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
def test_every_prefix_of_a_phase_has_its_shares_within_one_sequence(
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
def test_phases_keep_epochs_and_random_access(
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
        for begin in range(0, len(read), size):  # no sequence occurs twice within an epoch, across phases
            turn = read[begin : begin + size]
            assert len(set(turn.tolist())) == len(turn)


@settings(max_examples=60, deadline=None)
@given(changing(), st.integers(0, 14_000), st.data())
def test_every_sequence_is_found_in_the_slots_that_read_it(
    made: tuple[Mixture, list[int], list[tuple[int, ...]]], count: int, data: st.DataObject
) -> None:
    """Check the inverse against every slot: over epochs, phases, and phases without the source."""
    mixed, _, _ = made
    draw = mixed.draw(0, count)
    for source, size in enumerate(mixed.sequences):
        few = data.draw(st.lists(st.integers(0, size - 1), max_size=3))
        for wanted in (few, range(size)):
            held = (draw.source == source) & np.isin(draw.sequence, list(wanted))
            assert np.array_equal(mixed.slots_of(source, list(wanted), count), np.flatnonzero(held))


def recipe(
    tokens: str = "", sources: dict[str, str] | None = None, steps: int = 100, packing: str = "concatenate"
) -> ResolvedRecipe:
    """Return a recipe of three sources with 10 samples per step."""
    return recipe_of(packing, 32, tokens, steps, 10, **(sources or {"web": "", "code": "", "wiki": ""}))


def samples_in(*sequences: int) -> SourceSizes:
    return SourceSizes(("web", "code", "wiki")[: len(sequences)], sequences, tuple(32 * count for count in sequences))


def counts(mixture: Mixture, samples: int) -> list[int]:
    return np.bincount(mixture.draw(0, samples).source, minlength=len(mixture.names)).tolist()


def test_without_phases_the_mixture_is_unchanged() -> None:
    for keys in ({"web": "", "code": "", "wiki": ""}, {"web": "weight=5", "code": "weight=0.5", "wiki": "weight=1"}):
        weights = (5.0, 0.5, 1.0) if keys["web"] else (900.0, 70.0, 31.0)
        old = Mixture.from_weights(("web", "code", "wiki"), (900, 70, 31), weights, 4)
        assert mixture_of(recipe(sources=keys), samples_in(900, 70, 31)) == old


@pytest.mark.parametrize("temperature", [1.0, 1 / 0.7, 1 / 0.3, 100.0])
def test_temperature_turns_shares_into_powers(temperature: float) -> None:
    held, samples = samples_in(100_000, 2_000, 31), 100_000
    mixture = mixture_of(recipe(f"temperature = {temperature}", steps=samples // 10), held)
    powers = np.array(held.tokens, dtype=float) ** (1 / temperature)
    found = np.array(counts(mixture, samples)) / samples
    assert np.abs(found - powers / powers.sum()).max() <= 2 / 65536


SCHEDULE = """
[[tokens.schedule]]
from = 0.25
weights = {web = 2, code = 1, wiki = 1}
[[tokens.schedule]]
from = "decay"
weights = {web = 0, code = 3, wiki = 1}
"""


def test_phases_start_where_the_recipe_says() -> None:
    wsd = '[train.schedule]\nkind = "wsd"\nwarmup_steps = 2\ndecay_share = 0.2\n'
    mixture = mixture_of(recipe(SCHEDULE + wsd), samples_in(600, 300, 100))
    assert [phase.first for phase in mixture.phases] == [0, 250, 800]
    source = mixture.draw(0, 1000).source
    assert np.bincount(source[:250]).tolist() == [150, 75, 25]
    assert np.bincount(source[250:800]).tolist() in ([275, 138, 137], [275, 137, 138])
    assert np.bincount(source[800:]).tolist() == [0, 150, 50]
    assert [phase.recipe for phase in mixture.shares] == [(0.6, 0.3, 0.1), (0.5, 0.25, 0.25), (0.0, 0.75, 0.25)]


def test_the_decay_phase_begins_with_the_decay_of_the_learning_rate() -> None:
    from bessemer.train.schedule import learning_rate_share

    for steps in (7, 50, 333):
        wsd = '[train.schedule]\nkind = "wsd"\nwarmup_steps = 2\ndecay_share = 0.3\n'
        made = recipe(SCHEDULE.replace("0.25", "0.01") + wsd, steps=steps)
        rates = [learning_rate_share(made.train.schedule, step, steps) for step in range(steps)]
        falls = next(step for step in range(3, steps) if rates[step] < 1.0)
        assert recipe_phases(made, samples_in(6, 3, 1))[-1].first == 10 * falls


def test_a_cap_keeps_the_proportions_of_the_schedule() -> None:
    schedule = (
        "[[tokens.schedule]]\nfrom=0\nweights={web=9,code=1}\n[[tokens.schedule]]\nfrom=0.8\nweights={web=1,code=1}\n"
    )
    sources = {"web": "", "code": "max_epochs=2"}
    mixture = mixture_of(recipe(schedule, sources), samples_in(1000, 45))
    early, late = (np.bincount(mixture.draw(a, n).source, minlength=2)[1] for a, n in ((0, 800), (800, 200)))
    assert (early, late) == (40, 50)  # requested 80 and 100, both halved
    assert sum(counts(mixture, 1000)) == 1000


def test_caps_that_leave_too_little_text_are_errors_that_state_the_gap() -> None:
    with pytest.raises(InputError, match=r"max_epochs: .* 700 .* 1000 "):
        mixture_of(recipe("max_epochs = 3"), samples_in(60, 30, 10))
    assert counts(mixture_of(recipe("max_epochs = 10"), samples_in(60, 30, 10)), 1000) == [600, 300, 100]


@st.composite
def asked(draw: st.DrawFn) -> tuple[ResolvedRecipe, SourceSizes, list[Fraction | None]]:
    """Draw recipes with phases and caps, and enough or too little text for them."""
    steps = draw(st.integers(5, 60))
    froms = sorted(draw(st.sets(st.integers(0, 9), max_size=3)))
    sources: dict[str, str] = {}
    caps: list[Fraction | None] = []
    for name in ("web", "code", "wiki"):
        cap = draw(st.none() | st.integers(1, 40))
        caps.append(None if cap is None else Fraction(cap, 8))
        sources[name] = "" if cap is None else f"max_epochs = {cap / 8}"
    text = ""
    for start in froms:
        weights = draw(st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any))
        text += "[[tokens.schedule]]\nfrom = {}\nweights = {{web = {}, code = {}, wiki = {}}}\n".format(
            start / 10, *weights
        )
    made = recipe(text, sources, steps)
    return made, samples_in(*(draw(st.integers(1, 500)) for _ in range(3))), caps


@settings(max_examples=40, deadline=None)
@given(asked())
def test_no_source_is_read_more_often_than_its_cap(
    made: tuple[ResolvedRecipe, SourceSizes, list[Fraction | None]],
) -> None:
    given_recipe, held, caps = made
    samples = 10 * given_recipe.train.steps
    try:
        mixture = mixture_of(given_recipe, held)
    except InputError as error:
        assert "max_epochs" in str(error)  # noqa: PT017
        assume(False)
        raise
    found = counts(mixture, samples)
    assert tuple(found) == mixture.drawn(samples)
    for count, sequences, cap in zip(found, held.sequences, caps, strict=True):
        assert cap is None or count <= cap * sequences
    if mixture.phases[-1].by_deadline and not any(caps):
        for number, phase in enumerate(recipe_phases(given_recipe, held)):
            here = np.bincount(mixture.draw(phase.first, phase.samples).source, minlength=3)
            wanted = np.array([float(share * phase.samples) for share in phase.shares])
            assert np.abs(here - wanted).max() <= 1.0 + phase.samples * 3 / 65536, number


def test_shares_count_tokens_without_padding() -> None:
    """A source whose sequences are half padding has twice as many of them for the same number of tokens."""
    held = SourceSizes(("web", "code"), (100, 100), (3200, 1600))
    made = recipe("", {"web": "weight = 1", "code": "weight = 1"}, packing="best-fit")
    mixture = mixture_of(made, held)
    assert counts(mixture, 900) == [300, 600]
    assert mixture.shares[0].planned == (0.5, 0.5)


ROW = "[[tokens.schedule]]\nfrom={}\nweights={{{}}}\n"
EVEN = "web=1,code=1,wiki=1"


@pytest.mark.parametrize(
    ("tokens", "sources", "said"),
    [
        ("temperature = 2", {"web": "weight=1", "code": "weight=1"}, "tokens.temperature"),
        (ROW.format(0.5, "web=1"), None, "lacks source 'code'"),
        (ROW.format(0.5, "web=1,cod=1"), None, "'cod'"),
        (ROW.format(1.5, "web=1"), None, "from = 1.5"),
        (ROW.format(0.5, "web=-1"), None, "schedule.weights.web: input should be"),
        (ROW.format(0.5, "web=0"), None, "weights"),
        (ROW.format(0.5, EVEN) + ROW.format(0.2, EVEN), None, "sort them"),
        (SCHEDULE, None, "wsd"),
    ],
)
def test_contradictory_mixtures_are_errors(tokens: str, sources: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        recipe(tokens, sources)


def test_a_decay_phase_before_an_earlier_phase_is_an_error() -> None:
    wsd = '[train.schedule]\nkind = "wsd"\nwarmup_steps = 2\n'
    with pytest.raises(InputError, match="tokens.schedule: .* 800 of 1000"):
        mixture_of(recipe(ROW.format(0.9, EVEN) + ROW.format('"decay"', EVEN) + wsd), samples_in(6, 3, 1))
