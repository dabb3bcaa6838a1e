import itertools
import random

import pytest

from bessemer.distributed.stages import Costs, _split_alike_blocks, blocks_per_stage, split_blocks, stage_costs
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.recipe import Recipe, load


def every_cut(number: int, stages: int) -> list[tuple[range, ...]]:
    """All ways to cut so many blocks, by trying them."""
    found = []
    for borders in itertools.combinations_with_replacement(range(number + 1), stages - 1):
        cut = tuple(itertools.starmap(range, itertools.pairwise((0, *borders, number))))
        if all(blocks for blocks in cut):
            found.append(cut)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_has_a_cheaper_largest_stage(seed: int) -> None:
    draw = random.Random(seed)
    number, stages = draw.randint(4, 9), draw.randint(1, 4)
    # whole numbers, so that sums are exact and ties happen
    of = Costs(tuple(float(draw.randint(1, 6)) for _ in range(number)), draw.randint(0, 2), draw.randint(0, 12))
    cut = split_blocks(of.blocks, of.embedding, of.head, stages)
    assert [block for blocks in cut for block in blocks] == list(range(number))
    assert len(cut) == stages and all(blocks for blocks in cut)

    def rank(cut: tuple[range, ...]) -> tuple[float, float]:
        found = stage_costs(of, cut)
        return max(found), sum(one * one for one in found)

    assert rank(cut) == min(map(rank, every_cut(number, stages)))


def resolved(name: str, vocabulary: int, *overrides: str) -> tuple[Recipe, ModelConfig]:
    recipe = recipe_defaults.resolve(load(name, list(overrides)), vocabulary)
    return recipe, model_config(recipe, vocabulary)


def test_the_parts_are_the_plans_flops() -> None:
    _, config = resolved("gpt2-124m", 50_257)
    parts = Costs.of(config)
    assert parts.total - parts.embedding == pytest.approx(flops_per_token(config), rel=1e-12)
    # two products for each of forward, input and weight: vocabulary x width, padded as the model pads it
    assert parts.head == 6 * config.head_matrix_parameters >= 6 * 50_257 * 768


def test_gpt2s_head_is_counted() -> None:
    """It costs as much as five of the twelve blocks: the last of two stages has 4 of them."""
    _, config = resolved("gpt2-124m", 50_257)
    parts = Costs.of(config)
    assert 4 < parts.head / parts.blocks[0] < 6
    cut = split_blocks(parts.blocks, parts.embedding, parts.head, 2)
    assert [len(blocks) for blocks in cut] == [8, 4]
    assert max(stage_costs(parts, cut)) / (parts.total / 2) < 1.06
    assert max(stage_costs(parts, (range(6), range(6, 12)))) / (parts.total / 2) > 1.28


def test_a_classifiers_head_takes_no_block_from_the_last_stage() -> None:
    """It reads one row a text, so that it is in the FLOPs of no token."""
    config = ModelConfig(
        vocabulary=512, layers=8, width=64, heads=4, kv_heads=4, head_dim=16, mlp_width=64, sequence_length=128, labels=2,
        head_transform=True, norm_position="residual", causal=False,
    )  # fmt: skip
    parts = Costs.of(config)
    assert parts.total - parts.embedding == pytest.approx(flops_per_token(config), rel=1e-12)
    assert blocks_per_stage(config, 2) == (4, 4)


@pytest.mark.parametrize("head", [0.0, 0.5, 1.7, 6.0])
@pytest.mark.parametrize("embedding", [0.0, 0.3])
def test_blocks_that_cost_the_same_are_cut_as_any_others(embedding: float, head: float) -> None:
    """Ties too: the later stages are larger."""
    for layers in range(2, 26):
        for stages in range(2, min(layers, 9) + 1):
            wanted = tuple(len(part) for part in split_blocks((1.0,) * layers, embedding, head, stages))
            assert _split_alike_blocks(layers, 1.0, embedding, head, stages) == wanted, (layers, stages)
