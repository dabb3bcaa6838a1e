"""The sizes and the rungs of a ladder: shapes that exist, proportions kept, budgets kept."""

import itertools

import pytest

from bessemer.common.errors import InputError
from bessemer.ladder.design import (
    FEWEST_STEPS,
    LARGEST_SHARE,
    Budget,
    Design,
    Planned,
    Rung,
    batch_tokens,
    learning_rate,
    parse_budget,
    rungs_within,
    size_of,
    smaller,
)
from bessemer.model.flops import flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import Recipe, load


def planned_of(name: str, *changes: str, vocabulary: int = 32_768) -> Planned:
    recipe = resolve(load(name, changes), vocabulary)
    steps, batch = recipe.train.steps, recipe.train.global_batch_tokens
    assert steps is not None and batch is not None
    return Planned(recipe, size_of(recipe, vocabulary), steps * batch)


@pytest.mark.parametrize("name", ["demo", "depth", "gpt2-124m", "llama-1b", "llama-70b-2048"])
def test_smaller_models_are_models_and_keep_the_proportion(name: str) -> None:
    planned = planned_of(name, *(["train.steps=1000"] if name == "demo" else []))
    sizes = smaller(planned.recipe, 32_768)
    model = planned.recipe.model
    assert model.width and model.layers and model.mlp_width and model.heads and model.kv_heads
    assert len(sizes) >= 10
    for before, after in itertools.pairwise(sizes):
        assert before.parameters < after.parameters < planned.size.parameters
    for size in sizes:
        made: Recipe = planned.recipe.model_copy(update={"model": size.model})
        config = model_config(made, 32_768)  # which refuses what cannot be
        assert config.layers >= 2 and config.heads % config.kv_heads == 0 and config.head_dim % 2 == 0
        # Blocks by hand: queries and output, keys and values, and the products of the MLP; and the output matrix.
        inner, pairs = config.heads * config.head_dim, config.kv_heads * config.head_dim
        block = config.width * (2 * inner + 2 * pairs + (3 if config.gated else 2) * config.mlp_width)
        assert size.parameters == config.layers * block + 32_768 * config.width
        assert size.flops == pytest.approx(flops_per_token(config))
        assert size.flops >= 6 * size.parameters
        assert config.mlp_width / config.width == pytest.approx(model.mlp_width / model.width, rel=0.25)
    large = [size for size in sizes if (size.model.layers or 0) > 4]
    for size in large:
        assert (size.model.width or 0) / (size.model.layers or 1) == pytest.approx(model.width / model.layers, rel=0.15)


def test_rate_and_batch_are_the_recipes_at_its_own_compute() -> None:
    given = ("train.steps=4000", "train.global_batch_tokens=1024", "train.optimizer.learning_rate=0.01")
    planned = planned_of("demo", *given, vocabulary=2048)
    assert batch_tokens(planned.recipe, planned.flops, planned.flops) == 1024
    assert learning_rate(planned.recipe, planned.flops, planned.flops) == pytest.approx(0.01)
    # A fifth of the compute: 1024 x 0.2^0.3271 = 605 tokens, nearest to two sequences of 256; the rate 0.01 x 0.2^-0.125, by
    # the root of 512 / 605. A hundredth: 227 tokens, but two sequences are the fewest.
    for share in (0.2, 0.01):
        assert batch_tokens(planned.recipe, planned.flops * share, planned.flops) == 512
        assert learning_rate(planned.recipe, planned.flops * share, planned.flops) == pytest.approx(
            0.01 * share**-0.125 * (512 / (1024 * share**0.3271)) ** 0.5, rel=1e-3
        )


def test_with_mup_the_rate_stays() -> None:
    planned = planned_of("depth", "train.optimizer.base_width=64")
    rate = planned.recipe.train.optimizer.learning_rate
    assert rate is not None
    assert learning_rate(planned.recipe, planned.flops / 1000, planned.flops) == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize(("design", "count"), [("ratio", 6), ("ratio", 9), ("isoflop", 9), ("isoflop", 12)])
@pytest.mark.parametrize("share", [0.02, 0.2, 5.0])
def test_a_ladder_keeps_to_its_budget(design: Design, count: int, share: float) -> None:
    planned = planned_of("gpt2-124m")
    sizes = smaller(planned.recipe, 32_768)
    made = rungs_within(design, planned, sizes, count, Budget(flops=share * planned.flops), planned.ratio, seconds)
    assert len(made) == count and len({rung.name for rung in made}) == count
    spent = sum(rung.flops for rung in made)
    assert spent <= share * planned.flops
    assert max(rung.flops for rung in made) <= LARGEST_SHARE * planned.flops * 1.02
    assert min(rung.steps for rung in made) >= FEWEST_STEPS
    if share < 1:
        assert spent > 0.6 * share * planned.flops, "and uses it"
    if design == "ratio":
        assert all(rung.tokens / rung.size.parameters == pytest.approx(planned.ratio, rel=0.01) for rung in made)
    again = [Rung.of(rung.to_dict(), planned.recipe) for rung in made]
    assert again == made


def seconds(rung: Rung) -> float:
    return rung.flops / 1e12


def test_a_budget_of_time_is_kept_by_the_rates() -> None:
    planned = planned_of("gpt2-124m")
    sizes = smaller(planned.recipe, 32_768)
    made = rungs_within("ratio", planned, sizes, 6, Budget(seconds=36000.0), planned.ratio, seconds)
    assert 0.6 * 36000 < sum(map(seconds, made)) <= 36000
    with pytest.raises(InputError, match="too small"):
        rungs_within("ratio", planned, sizes, 6, Budget(seconds=1e-3), planned.ratio, seconds)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("5", Budget(300.0)), ("90s", Budget(90.0)), ("1.5h", Budget(5400.0)), ("1e15", Budget(flops=1e15)),
     ("2e12 FLOPs", Budget(flops=2e12))],
)  # fmt: skip
def test_budgets_are_read(text: str, wanted: Budget) -> None:
    assert parse_budget(text) == wanted


@pytest.mark.parametrize("text", ["", "min", "0", "-5min", "5 apples", "nan", "inf"])
def test_what_is_no_budget_is_told(text: str) -> None:
    with pytest.raises(InputError, match="5min or 2h"):
        parse_budget(text)
