"""The fit of a ladder on runs drawn from published laws: its intervals contain the truth as often as they claim."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar
from scipy.special import huber

from bessemer.common.errors import InputError
from bessemer.ladder.design import (
    FEWEST_STEPS,
    LARGEST_SHARE,
    Budget,
    Design,
    Planned,
    Rung,
    batch_tokens,
    design_rungs,
    learning_rate,
    parse_budget,
    size_of,
    smaller_sizes,
)
from bessemer.ladder.fit import HUBER_DELTA, Array, fit, predicted
from bessemer.ladder.law import BATCH_EFFECT, Point, fit_law, left_out, optimum
from bessemer.model.flops import flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import Recipe, load
from tests.benchmark_files import program, results
from tests.ladder.laws import Law

LAW = Law(1.8172, (482.01, 2085.43), (0.3478, 0.3658))  # Besiroglu et al. 2024, table 1


def ratio_points(count: int, noise: float, seed: int, law: Law = LAW) -> tuple[Point, ...]:
    """Return points with 20 tokens per parameter, with compute doubling twice from rung to rung."""
    chance = np.random.default_rng(seed)
    sizes = np.sqrt(1e18 * 4.0 ** np.arange(count) / 120)
    losses = law.loss(sizes, 20 * sizes) * np.exp(noise * chance.standard_normal(count))
    rows = zip(sizes, losses, strict=True)
    return tuple(Point(f"r{n}", n, size, 20 * size, 120 * size**2, float(loss)) for n, (size, loss) in enumerate(rows))


def isoflop_points(count: int, levels: int, noise: float, seed: int) -> tuple[Point, ...]:
    """Return points of `count` sizes over a factor of 9 at each of several amounts of compute, a factor of 3 apart."""
    chance, found = np.random.default_rng(seed), []
    for level in range(levels):
        compute = 1e19 * 3.0**level
        for size in np.sqrt(compute / 120) * np.geomspace(1 / 3, 3, count):
            tokens = compute / 6 / size
            loss = float(LAW.loss(size, tokens)) * float(np.exp(noise * chance.standard_normal()))
            found.append(Point(f"i{level}-{size:.0f}", level, size, tokens, compute, loss))
    return tuple(found)


@pytest.mark.long
def test_the_interval_of_a_short_ladder_contains_the_truth_as_often_as_it_claims() -> None:
    """Six rungs, three constants: 80% intervals over 24 ladders. A binomial of 24 and 0.8 is below 13 once in 1,000."""
    held = covered = 0
    for seed in range(24):
        found = fit_law("ratio", ratio_points(6, 0.004, seed), seed)
        size = float(np.sqrt(4.0**6.5 * 1e18 / 120))
        said = found.loss(size, 20 * size, 120 * size**2, of_a_run=False)
        held += said.covers(float(LAW.loss(size, 20 * size)))
        out = left_out("ratio", ratio_points(6, 0.004, seed), seed)
        assert out is not None
        covered += out["covered"]
    assert held >= 13, held
    assert covered >= 13, covered


def test_intervals_of_many_rungs_are_narrow_and_contain_the_law() -> None:
    found = fit_law("isoflop", isoflop_points(7, 4, 0.002, 0))
    assert Law.of(found.best).exponents == pytest.approx(LAW.exponents, abs=0.1)
    said = found.loss(4e9, 8e10, 6 * 4e9 * 8e10, of_a_run=False)
    assert said.covers(float(LAW.loss(4e9, 8e10)))
    assert (said.high - said.low) / said.value < 0.16, "most of it the drift"


def test_the_best_size_is_where_the_law_is_lowest() -> None:
    """The reference is a search along C = 6 N D."""
    points = isoflop_points(7, 4, 0.0, 0)
    found = fit_law("isoflop", points)
    compute = 5e21
    best = optimum(found, compute, 6.0)
    searched = minimize_scalar(lambda log_n: float(LAW.loss(np.exp(log_n), compute / 6 / np.exp(log_n))),
                               bounds=(15, 30), method="bounded", options={"xatol": 1e-9})  # fmt: skip
    assert best["parameters"]["value"] == pytest.approx(float(np.exp(searched.x)), rel=1e-3)
    assert best["exponent"]["value"] == pytest.approx(0.3658 / (0.3658 + 0.3478), rel=1e-4)
    assert best["loss"]["low"] < searched.fun < best["loss"]["high"]
    assert best["loss"]["value"] == pytest.approx(searched.fun, rel=0.02), "the median of what five numbers may be"


def test_the_largest_rung_is_predicted_from_the_others() -> None:
    points = ratio_points(7, 0.0, 0)
    worse = (*points[:-1], replace(points[-1], name="worse", loss=points[-1].loss * 1.1))
    good, bad = left_out("ratio", points), left_out("ratio", worse)
    assert good is not None and bad is not None
    assert good["name"] == "r6" and good["from_rungs"] == 6
    assert abs(good["error"]) < 0.01 and good["covered"]
    assert good["beyond"] == pytest.approx(4.0)
    assert bad["error"] == pytest.approx(1 / 1.1 - 1, abs=0.01) and not bad["covered"]


def test_the_effect_of_a_rounded_batch_is_removed() -> None:
    """Rungs whose losses contain the effect of rounded batches give the same law as others, and a
    prediction for a rounded batch includes it.
    """
    points = ratio_points(6, 0.0, 0)
    excess = (0.13, -0.16, 0.01, 0.10, -0.07, 0.01)
    rounded = tuple(
        replace(point, loss=point.loss * float(np.exp(BATCH_EFFECT * by)), batch_excess=by)
        for point, by in zip(points, excess, strict=True)
    )
    size = (2e9, 4e10, 4.8e20)
    plain, found = fit_law("ratio", points), fit_law("ratio", rounded)
    assert found.loss(*size).value == pytest.approx(plain.loss(*size).value, rel=1e-6)
    more = found.loss(*size, batch_excess=0.2)
    assert more.value / found.loss(*size).value == pytest.approx(np.exp(0.2 * BATCH_EFFECT), rel=1e-9)
    out = left_out("ratio", rounded)
    assert out is not None
    without = left_out("ratio", points)
    assert without is not None and out["error"] == pytest.approx(without["error"], abs=1e-6)


def test_too_few_rungs_are_an_error() -> None:
    with pytest.raises(InputError, match="--rungs"):
        fit_law("ratio", ratio_points(3, 0.0, 0))
    assert left_out("ratio", ratio_points(4, 0.0, 0)) is None


# Hoffmann et al. 2022, equation 10; Besiroglu et al. 2024, table 1.
HOFFMANN = Law(1.69, (406.4, 410.7), (0.34, 0.28))
BESIROGLU = Law(1.8172, (482.01, 2085.43), (0.3478, 0.3658))
PUBLISHED = pytest.mark.parametrize("law", [HOFFMANN, BESIROGLU], ids=["hoffmann", "besiroglu"])


def runs(law: Law, noise: float = 0.0, seed: int = 0) -> tuple[Array, Array]:
    """Return 72 runs of nine amounts of compute, as chosen by Hoffmann et al.: (n, 2) sizes, (n,) losses."""
    compute = np.repeat([6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21], 8)
    parameters = np.sqrt(compute / 120) * np.tile(np.geomspace(0.2, 5.0, 8), 9)
    tokens = compute / 6 / parameters
    drawn = np.exp(noise * np.random.default_rng(seed).standard_normal(len(compute)))
    return np.stack([parameters, tokens], axis=1), law.loss(parameters, tokens) * drawn


@PUBLISHED
def test_a_law_without_noise_is_recovered(law: Law) -> None:
    found = Law.of(fit(*runs(law)))
    assert found.constant == pytest.approx(law.constant, rel=1e-9)
    assert found.coefficients == pytest.approx(law.coefficients, rel=1e-7)
    assert found.exponents == pytest.approx(law.exponents, rel=1e-9)


def test_no_other_optimiser_finds_a_lower_loss() -> None:
    sizes, losses = runs(BESIROGLU, noise=0.01, seed=1)
    found = fit(sizes, losses)
    x, y = np.log(sizes) - found.centre, np.log(losses)

    def objective(place: Array) -> float:
        return 1e5 * float(huber(HUBER_DELTA, predicted(place[None], x)[0][0] - y).sum())

    chance = np.random.default_rng(0)
    starts = [found.parameters * (1 + 0.3 * chance.standard_normal(5)) for _ in range(4)]
    others = [minimize(objective, start, method="BFGS", options={"gtol": 1e-9, "maxiter": 4000}) for start in starts]
    near = minimize(objective, found.parameters, method="Nelder-Mead", options={"maxfev": 4000, "fatol": 1e-12})
    lowest = min([near.fun, *(other.fun for other in others)])
    assert 1e5 * found.objective <= lowest * (1 + 1e-6)
    assert 1e5 * found.objective == pytest.approx(lowest, rel=1e-4), "and another comes as low: it is the minimum"


def test_one_outlier_changes_the_law_little() -> None:
    sizes, losses = runs(BESIROGLU, noise=0.002, seed=5)
    before = Law.of(fit(sizes, losses))
    losses[10] *= 1.3
    after = Law.of(fit(sizes, losses))
    at = (7e10, 1.4e12)
    assert float(after.loss(*at)) == pytest.approx(float(before.loss(*at)), rel=2e-3)


def test_a_line_is_recovered() -> None:
    compute = np.geomspace(1e15, 1e19, 9)
    law = Law(1.9, (2500.0,), (0.19,))
    found = Law.of(fit(compute[:, None], law.loss(compute)))
    assert (found.constant, *found.coefficients, *found.exponents) == pytest.approx((1.9, 2500.0, 0.19), rel=1e-6)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return results("ladder_coverage")


@pytest.mark.long
def test_the_rule_gives_the_published_intervals(result: dict[str, Any]) -> None:
    """Recompute three of the texts from the measured losses; another rule or prior would differ."""
    scored = program("ladder_coverage").scored
    for before in result["kinds"][::4]:
        now = scored(before["kind"], before)
        for old, new in zip(before["predictions"], now["predictions"], strict=True):
            assert (new["run"], new["from_rungs"]) == (old["run"], old["from_rungs"])
            assert [new["low"], new["predicted"], new["high"]] == pytest.approx(
                [old["low"], old["predicted"], old["high"]], rel=1e-3
            )


def test_the_summary_equals_the_published_intervals(result: dict[str, Any]) -> None:
    assert program("ladder_coverage").summary(result["kinds"]) == result["summary"]


def planned_of(name: str, *changes: str, vocabulary: int = 32_768) -> Planned:
    recipe = resolve(load(name, changes), vocabulary)
    steps, batch = recipe.train.steps, recipe.train.global_batch_tokens
    assert steps is not None and batch is not None
    return Planned(recipe, size_of(recipe, vocabulary), steps * batch)


@pytest.mark.parametrize("name", ["demo", "depth", "gpt2-124m", "llama-1b", "llama-70b-2048"])
def test_smaller_models_are_valid_and_keep_the_proportions(name: str) -> None:
    planned = planned_of(name, *(["train.steps=1000"] if name == "demo" else []))
    sizes = smaller_sizes(planned.recipe, 32_768)
    model = planned.recipe.model
    assert model.width and model.layers and model.mlp_width and model.heads and model.kv_heads
    assert len(sizes) >= 10
    for before, after in itertools.pairwise(sizes):
        assert before.parameters < after.parameters < planned.size.parameters
    for size in sizes:
        made: Recipe = planned.recipe.model_copy(update={"model": size.model})
        config = model_config(made, 32_768)  # which rejects invalid sizes
        assert config.layers >= 2 and config.heads % config.kv_heads == 0 and config.head_dim % 2 == 0
        # Manual count for blocks: queries and output, keys and values, the products of the MLP; and the output matrix.
        inner, pairs = config.heads * config.head_dim, config.kv_heads * config.head_dim
        block = config.width * (2 * inner + 2 * pairs + (3 if config.gated else 2) * config.mlp_width)
        assert size.parameters == config.layers * block + 32_768 * config.width
        assert size.flops == pytest.approx(flops_per_token(config))
        assert size.flops >= 6 * size.parameters
        assert config.mlp_width / config.width == pytest.approx(model.mlp_width / model.width, rel=0.25)
    large = [size for size in sizes if (size.model.layers or 0) > 4]
    for size in large:
        assert (size.model.width or 0) / (size.model.layers or 1) == pytest.approx(model.width / model.layers, rel=0.15)


def test_rate_and_batch_equal_the_recipes_at_its_compute() -> None:
    given = ("train.steps=4000", "train.global_batch_tokens=1024", "train.optimizer.learning_rate=0.01")
    planned = planned_of("demo", *given, vocabulary=2048)
    assert batch_tokens(planned.recipe, planned.flops, planned.flops) == 1024
    assert learning_rate(planned.recipe, planned.flops, planned.flops) == pytest.approx(0.01)
    # A fifth of the compute: 1024 x 0.2^0.3271 = 605 tokens, nearest to two sequences of 256; the rate is 0.01 x 0.2^-0.125,
    # times the root of 512 / 605. A hundredth: 227 tokens, but two sequences are the minimum.
    for share in (0.2, 0.01):
        assert batch_tokens(planned.recipe, planned.flops * share, planned.flops) == 512
        assert learning_rate(planned.recipe, planned.flops * share, planned.flops) == pytest.approx(
            0.01 * share**-0.125 * (512 / (1024 * share**0.3271)) ** 0.5, rel=1e-3
        )


def test_with_mup_the_rate_does_not_change() -> None:
    planned = planned_of("depth", "train.optimizer.base_width=64")
    rate = planned.recipe.train.optimizer.learning_rate
    assert rate is not None
    assert learning_rate(planned.recipe, planned.flops / 1000, planned.flops) == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(("design", "count"), [("ratio", 6), ("ratio", 9), ("isoflop", 9), ("isoflop", 12)])
@pytest.mark.parametrize("share", [0.02, 0.2, 5.0])
def test_a_ladder_stays_within_its_budget(design: Design, count: int, share: float) -> None:
    planned = planned_of("gpt2-124m")
    sizes = smaller_sizes(planned.recipe, 32_768)
    made = design_rungs(design, planned, sizes, count, Budget(flops=share * planned.flops), planned.ratio, seconds)
    assert len(made) == count and len({rung.name for rung in made}) == count
    spent = sum(rung.flops for rung in made)
    assert spent <= share * planned.flops
    assert max(rung.flops for rung in made) <= LARGEST_SHARE * planned.flops * 1.02
    assert min(rung.steps for rung in made) >= FEWEST_STEPS
    if share < 1:
        assert spent > 0.6 * share * planned.flops, "and uses it"
    if design == "ratio":
        assert all(rung.tokens / rung.size.parameters == pytest.approx(planned.ratio, rel=0.01) for rung in made)
    again = [Rung.from_dict(rung.to_dict(), planned.recipe) for rung in made]
    assert again == made


def seconds(rung: Rung) -> float:
    return rung.flops / 1e12


def test_a_budget_of_time_is_kept_by_the_rates() -> None:
    planned = planned_of("gpt2-124m")
    sizes = smaller_sizes(planned.recipe, 32_768)
    made = design_rungs("ratio", planned, sizes, 6, Budget(seconds=36000.0), planned.ratio, seconds)
    assert 0.6 * 36000 < sum(map(seconds, made)) <= 36000
    with pytest.raises(InputError, match="--budget"):
        design_rungs("ratio", planned, sizes, 6, Budget(seconds=1e-3), planned.ratio, seconds)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("5", Budget(300.0)), ("90s", Budget(90.0)), ("1.5h", Budget(5400.0)), ("1e15", Budget(flops=1e15)),
     ("2e12 FLOPs", Budget(flops=2e12))],
)  # fmt: skip
def test_budgets_are_read(text: str, wanted: Budget) -> None:
    assert parse_budget(text) == wanted


@pytest.mark.parametrize("text", ["", "min", "0", "-5min", "5 apples", "nan", "inf"])
def test_an_invalid_budget_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match="--budget"):
        parse_budget(text)
