"""Shards of FSDP: how much larger uneven shards make a rank's part of each weight, and what is sharded."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from bessemer.distributed.stages import PartParameters
from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel
from bessemer.recipe.parallel import AxisSizes


def divides_state(layout: AxisSizes) -> bool:
    """Return True if `zero` divides the state of some weights: over `shard`, or over the processes with the same experts."""
    return layout.state_shards > 1 or (layout.expert > 1 and layout.expert_shards > 1)


def padded_elements(shape: tuple[int, ...], num_shards: int) -> int:
    """Return the elements of a weight after FSDP pads its shards (`data.shard_placement`).

    FSDP shards the first dimension that divides evenly. Without one it shards dimension 0, with each part as large as the
    largest.
    """
    if any(size % num_shards == 0 for size in shape):
        return math.prod(shape)
    return -(-shape[0] // num_shards) * num_shards * math.prod(shape[1:])


@lru_cache(maxsize=4096)
def padding(config: ModelConfig, tensor: int, num_shards: int) -> float:
    """Return the padded elements of a block's matrices divided by their unpadded elements; 1 if all divide evenly.

    With tensor parallelism all divide evenly (`validity.require_shards`).
    """
    if tensor > 1:
        return 1.0
    shapes = [parameter.shape for parameter in config.block_table.values() if parameter.is_matrix]
    return sum(padded_elements(shape, num_shards) for shape in shapes) / sum(map(math.prod, shapes))


def padded(params: PartParameters, config: ModelConfig, layout: Parallel) -> PartParameters:
    """Return the parameter counts of a rank's part including FSDP's padding."""
    more = padding(config, layout.tensor, layout.state_shards) - 1
    if not more:
        return params
    return replace(params, block=params.block + round(more * config.block_matrix_parameters))


NOTED_PADDING = 1.2
"""The ratio of padded to unpadded block weights from which `uneven_note` returns a warning."""


def uneven_note(config: ModelConfig, layout: AxisSizes) -> str | None:
    """Return a warning about shards that do not divide the weights, with the overhead; None if the overhead is small."""
    if (factor := padding(config, layout.tensor, layout.state_shards)) < NOTED_PADDING:
        return None
    with_context = f" x parallel.context = {layout.context}" if layout.context > 1 else ""
    return (
        f"parallel.shard = {layout.shard}{with_context} divides no dimension of some weights, so padding makes a block's "
        f"weights {factor:.3g} times as large in memory and communication; use a power of two, and parallel.replicate"
    )


def zero_stage(layout: Parallel) -> int:
    """Return the ZeRO stage that is used.

    It is 1 if the pipeline schedule splits the backward pass in two, because FSDP2 does not see the second part, and
    gradients are wrong if the weights are resharded after the forward pass (torch 2.13).
    """
    return 1 if layout.facts.splits_backward else layout.zero
