"""What each device of a pipeline holds of a model: how many blocks, and whether the embedding and the head."""

from __future__ import annotations

from functools import lru_cache

from bessemer.errors import InputError
from bessemer.layout.stages import Costs, Part, balanced, stages_of
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.job import Layout
from bessemer.plan.estimate.keeps import Cut
from bessemer.recipe.parallel import stages_per_rank


def places(config: ModelConfig, layout: Layout, cut: Cut) -> tuple[Part, ...]:
    """Each place of the pipeline, all of its stages together. Raises InputError where there are more stages than blocks."""
    return _places(config, layout.pipeline, stages_each(layout), layout.schedule, cut)


def stages_each(layout: Layout) -> int:
    """Stages of one device; schedules that need several have two unless the layout says otherwise."""
    least = stages_per_rank(layout.schedule, layout.pipeline)
    return max(layout.virtual, 2) if least > 1 else 1


@lru_cache(maxsize=4096)
def _places(config: ModelConfig, pipeline: int, each: int, schedule: str, cut: Cut) -> tuple[Part, ...]:
    count = pipeline * each
    if count > config.layers + 2 * (cut == "ends"):
        raise InputError(
            f"layout.pipeline: {pipeline} devices with {each} stages each are {count} stages, but the model has "
            f"{config.layers} blocks; take at most {max(config.layers // each, 1)}"
        )
    blocks = blocks_of_stages(config, count, cut)
    found = []
    for place in range(pipeline):
        held = stages_of(schedule, place, pipeline, each)
        found.append(Part(place, sum(blocks[stage] for stage in held), 0 in held, count - 1 in held))
    return tuple(found)


def blocks_of_stages(config: ModelConfig, count: int, cut: Cut) -> tuple[int, ...]:
    """Blocks of each of `count` stages, as a program cuts them (see `keeps.Cut`)."""
    layers, (least, extra) = config.layers, divmod(config.layers, count)
    if cut == "even":  # what is left over goes to the first stages
        return tuple(least + (stage < extra) for stage in range(count))
    if cut == "ceiling":  # every stage takes the larger number while there are blocks
        most = -(-layers // count)
        return tuple(min(most, max(layers - stage * most, 0)) for stage in range(count))
    if cut == "ends":
        least, extra = divmod(layers + 2, count)
        return tuple(least + (stage < extra) - (stage == 0) - (stage == count - 1) for stage in range(count))
    if cut == "middle":
        return tuple(least + (0 < stage <= extra) for stage in range(count))
    if cut == "cumulative":
        return _cumulative(config, count)
    costs = Costs.of(config)
    if min(costs.blocks) == max(costs.blocks):
        return _balanced_alike(layers, costs.blocks[0], costs.embedding, costs.head, count)
    return tuple(len(part) for part in balanced(costs.blocks, costs.embedding, costs.head, count))


def _balanced_alike(layers: int, block: float, embedding: float, head: float, count: int) -> tuple[int, ...]:
    """`stage_cut.balanced` for blocks that all cost the same, in time of the number of blocks.

    Once the last stage's number is chosen the others are as even as can be; the extra ones lie late.
    """
    if count == 1:
        return (layers,)
    best: tuple[float, float, int] | None = None
    for last in range(1, layers - count + 2):
        least, extra = divmod(layers - last, count - 1)
        first = least * block + embedding  # the embedding's stage is never among the extra ones: they lie late
        rest = (least + (extra > 0)) * block
        largest = max(first, rest if count > 2 else 0.0, last * block + head)
        squares = first**2 + (count - 2 - extra) * (least * block) ** 2 + extra * rest**2 + (last * block + head) ** 2
        if best is None or (largest, squares) < best[:2]:
            best = (largest, squares, last)
    assert best is not None, "there are as many blocks as stages"
    least, extra = divmod(layers - best[2], count - 1)
    return (*(least + (stage >= count - 1 - extra) for stage in range(count - 1)), best[2])


def _cumulative(config: ModelConfig, count: int) -> tuple[int, ...]:
    """Blocks in order, a new stage once the costs so far have passed the next equal part of the whole; the head costs too.

    nanotron: costs of a block 4 h^2 + 3 h f and of the head V h (its `get_block_compute_costs` and `build_model`).
    """
    attention = 4 * config.heads * config.head_dim * config.width
    block = attention + 3 * config.mlp_width * config.width
    head = config.vocabulary * config.width
    total, so_far, stage = config.layers * block + head, 0.0, 0
    found = [0] * count
    for _ in range(config.layers):
        so_far += block
        found[stage] += 1
        if so_far > total * (stage + 1) / count and stage < count - 1:
            stage += 1
    return tuple(found)
