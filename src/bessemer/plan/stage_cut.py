"""Where a model is cut into pipeline stages: consecutive blocks, the most expensive stage as cheap as can be.

A pipeline is as fast as its slowest stage. The head multiplies every token with the whole vocabulary, which in a small model
costs as much as many blocks, so the last stage has fewer; the embedding is looked up and costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from bessemer.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan.cost import recomputed_flops_per_token, tokens_seen
from bessemer.recipe import Recipe


@dataclass(frozen=True)
class Costs:
    """What each part of a model costs, all in one unit: FLOPs a token, or seconds. blocks: from the first."""

    blocks: tuple[float, ...]
    embedding: float
    head: float

    @property
    def total(self) -> float:
        return sum(self.blocks) + self.embedding + self.head


def costs(recipe: Recipe, config: ModelConfig, recomputed: int = 0) -> Costs:
    """FLOPs a token of forward and backward by part; together those of plan/cost.py.

    The head: 6 x vocabulary x width, for the hidden tokens only under a masked objective. recomputed: blocks, from the
    first, whose forward is done twice (train.recompute).
    """
    hidden = recipe.train.masking.share if recipe.train.objective == "masked" else 1.0
    blocks = []
    for layer in range(config.layers):
        flops = 6.0 * config.block_matrix_parameters + 12 * config.heads * config.head_dim * tokens_seen(config, layer)
        if layer < recomputed:
            flops += recomputed_flops_per_token(recipe, config, layer + 1)
            flops -= recomputed_flops_per_token(recipe, config, layer)
        blocks.append(flops)
    return Costs(tuple(blocks), 0.0, 6.0 * config.head_matrix_parameters * hidden)


def balanced(blocks: Sequence[float], embedding: float, head: float, stages: int, fewest: int = 1) -> tuple[range, ...]:
    """The blocks of each stage, so that the most expensive stage is as cheap as can be.

    blocks: cost of each; embedding is added to the first stage and head to the last; fewest: blocks that a stage has at
    least (0: one of only the head is allowed). Of the cuts that do this, one with the smallest sum of squares, and then
    the one whose later stages are larger, since in 1F1B the earlier ones hold more activations. Dynamic programming over
    (stage, block), stages x blocks^2. Raises InputError where there are too few blocks.
    """
    number = len(blocks)
    if stages < 1 or stages * fewest > number:
        raise InputError(
            f"pipeline: {number} blocks cannot be cut into {stages} stages of {fewest} or more; take 1 to "
            f"{number // max(fewest, 1)} stages (pipeline x virtual), or a deeper model"
        )
    before = [0.0, *accumulate(blocks)]

    def cost(stage: int, first: int, end: int) -> float:
        extra = (embedding if stage == 0 else 0.0) + (head if stage == stages - 1 else 0.0)
        return before[end] - before[first] + extra

    def best(limit: float, *, squares: bool) -> tuple[float, tuple[range, ...]]:
        """The smallest largest stage, or sum of squares with no stage above the limit, and its cut."""
        value = [0.0 if end == 0 else inf for end in range(number + 1)]  # of the first `end` blocks in `stage` stages
        starts: list[list[int]] = []
        for stage in range(stages):
            now, of = [inf] * (number + 1), [0] * (number + 1)
            for end in range(number + 1):
                for first in range(end - fewest + 1):
                    one = cost(stage, first, end)
                    if one > limit or value[first] == inf:
                        continue
                    total = value[first] + one * one if squares else max(value[first], one)
                    if total < now[end]:
                        now[end], of[end] = total, first
            value = now
            starts.append(of)
        cut, end = [], number
        for of in reversed(starts):
            cut.append(range(of[end], end))
            end = of[end]
        return value[number], tuple(reversed(cut))

    largest, _ = best(inf, squares=False)
    return best(largest, squares=True)[1]


def stage_costs(of: Costs, cut: Sequence[range]) -> tuple[float, ...]:
    """What each stage of a cut costs, in the unit of its parts."""
    totals = [sum(of.blocks[block] for block in blocks) for blocks in cut]
    totals[0] += of.embedding
    totals[-1] += of.head
    return tuple(totals)
