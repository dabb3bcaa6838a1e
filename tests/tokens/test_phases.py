"""Recipe to phases: temperature, schedule and caps, held against sums done another way."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bessemer.common.errors import InputError
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import ResolvedRecipe, parse
from bessemer.tokens.mixture import Mixture
from bessemer.tokens.phases import SourceSizes, mixture_of, recipe_phases


def recipe(
    tokens: str = "", sources: dict[str, str] | None = None, steps: int = 100, train: str = ""
) -> ResolvedRecipe:
    """Of three sources, 10 samples a step."""
    tables = "".join(
        f'[[corpus.sources]]\nname = "{name}"\nformat = "text"\npaths = ["x"]\n{keys}\n'
        for name, keys in (sources or {"web": "", "code": "", "wiki": ""}).items()
    )
    text = (
        f'[run]\nname = "x"\nseed = 4\n{tables}[model]\ndepth = 1\n[train]\nsteps = {steps}\nglobal_batch_tokens = 320\n'
        f"micro_batch = 10\n{train}\n[tokens]\nsequence_length = 32\n{tokens}"
    )
    return resolve(parse(text, "test"), 400)


def samples_in(*sequences: int) -> SourceSizes:
    return SourceSizes(("web", "code", "wiki")[: len(sequences)], sequences, tuple(32 * count for count in sequences))


def counts(mixture: Mixture, samples: int) -> list[int]:
    return np.bincount(mixture.draw(0, samples).source, minlength=len(mixture.names)).tolist()


def test_without_the_new_keys_the_mixture_is_the_old_one() -> None:
    for keys in ({"web": "", "code": "", "wiki": ""}, {"web": "weight=5", "code": "weight=0.5", "wiki": "weight=1"}):
        weights = (5.0, 0.5, 1.0) if keys["web"] else (900.0, 70.0, 31.0)
        old = Mixture.from_weights(("web", "code", "wiki"), (900, 70, 31), weights, 4)
        assert mixture_of(recipe(sources=keys), samples_in(900, 70, 31)) == old


@pytest.mark.parametrize("temperature", [1.0, 1 / 0.7, 1 / 0.3, 100.0])
def test_temperature_makes_shares_of_powers(temperature: float) -> None:
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


def test_phases_begin_where_the_recipe_says() -> None:
    wsd = '[train.schedule]\nkind = "wsd"\nwarmup_steps = 2\ndecay_share = 0.2\n'
    mixture = mixture_of(recipe(SCHEDULE, train=wsd), samples_in(600, 300, 100))
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
        made = recipe(SCHEDULE.replace("0.25", "0.01"), train=wsd, steps=steps)
        rates = [learning_rate_share(made.train.schedule, step, steps) for step in range(steps)]
        falls = next(step for step in range(3, steps) if rates[step] < 1.0)
        assert recipe_phases(made, samples_in(6, 3, 1))[-1].first == 10 * falls


def test_a_cap_keeps_the_schedule_s_proportions() -> None:
    schedule = (
        "[[tokens.schedule]]\nfrom=0\nweights={web=9,code=1}\n[[tokens.schedule]]\nfrom=0.8\nweights={web=1,code=1}\n"
    )
    sources = {"web": "", "code": "max_epochs=2"}
    mixture = mixture_of(recipe(schedule, sources), samples_in(1000, 45))
    early, late = (np.bincount(mixture.draw(a, n).source, minlength=2)[1] for a, n in ((0, 800), (800, 200)))
    assert (early, late) == (40, 50)  # asked for 80 and 100, halved alike
    assert sum(counts(mixture, 1000)) == 1000


def test_caps_that_leave_too_little_are_refused_with_what_is_lacking() -> None:
    with pytest.raises(InputError, match=r"max_epochs: .* lacks 700 of its 1000 samples"):
        mixture_of(recipe("max_epochs = 3"), samples_in(60, 30, 10))
    assert counts(mixture_of(recipe("max_epochs = 10"), samples_in(60, 30, 10)), 1000) == [600, 300, 100]


@st.composite
def asked(draw: st.DrawFn) -> tuple[ResolvedRecipe, SourceSizes, list[Fraction | None]]:
    """Recipes with phases and caps, and text enough or too little for them."""
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


def test_shares_are_of_tokens_where_sequences_are_padded() -> None:
    """A source whose sequences are half padding has twice as many of them for the same tokens."""
    held = SourceSizes(("web", "code"), (100, 100), (3200, 1600))
    made = recipe('packing = "best-fit"', {"web": "weight = 1", "code": "weight = 1"})
    mixture = mixture_of(made, held)
    assert counts(mixture, 900) == [300, 600]
    assert mixture.shares[0].planned == (0.5, 0.5)


@pytest.mark.parametrize(
    ("tokens", "sources", "said"),
    [
        ("temperature = 2", {"web": "weight=1", "code": "weight=1"}, "temperature says the shares"),
        ("[[tokens.schedule]]\nfrom=0.5\nweights={web=1}", None, "lacks source 'code'"),
        ("[[tokens.schedule]]\nfrom=0.5\nweights={web=1,cod=1}", None, "'cod', which is no source"),
        ("[[tokens.schedule]]\nfrom=1.5\nweights={web=1}", None, "lies in"),
        ("[[tokens.schedule]]\nfrom=0.5\nweights={web=-1}", None, "schedule.weights.web: input should be"),
        ("[[tokens.schedule]]\nfrom=0.5\nweights={web=0}", None, "no source has a share"),
        (SCHEDULE, None, "wsd"),
    ],
)
def test_what_makes_no_sense_is_refused(tokens: str, sources: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        recipe(tokens, sources)


def test_phases_out_of_order_are_refused() -> None:
    row = "[[tokens.schedule]]\nfrom={}\nweights={{web=1,code=1,wiki=1}}\n"
    with pytest.raises(InputError, match="sort them"):
        recipe(row.format(0.5) + row.format(0.2))
    wsd = '[train.schedule]\nkind = "wsd"\nwarmup_steps = 2\n'
    with pytest.raises(InputError, match="begins at sample 800 of 1000, which is before"):
        mixture_of(recipe(row.format(0.9) + row.format('"decay"'), train=wsd), samples_in(6, 3, 1))
