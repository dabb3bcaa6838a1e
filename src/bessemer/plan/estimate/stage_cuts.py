"""How training programs cut a model into pipeline stages; which one cuts how: frameworks.toml."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from bessemer.layout.pipeline_stages import PipelineRank, blocks_per_stage, num_stages, ranks_with_blocks
from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel

Cut = Literal["balanced", "even", "ceiling", "middle", "cumulative", "ends"]


@lru_cache(maxsize=4096)
def ranks_by_cut(config: ModelConfig, layout: Parallel, cut: Cut) -> tuple[PipelineRank, ...]:
    """What each rank of the pipeline axis holds. Raises InputError when there are more stages than blocks."""
    outer = 2 * (cut == "ends")  # whose embedding and head may have a stage for themselves
    return ranks_with_blocks(layout, blocks_of_stages(config, num_stages(config, layout, outer), cut))


@lru_cache(maxsize=4096)
def blocks_of_stages(config: ModelConfig, count: int, cut: Cut) -> tuple[int, ...]:
    """Blocks of each of `count` stages."""
    layers, (least, extra) = config.layers, divmod(config.layers, count)
    if cut == "even":
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
    return blocks_per_stage(config, count)


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
