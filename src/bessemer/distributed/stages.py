"""Pipeline stages: the cut of a model into runs of consecutive blocks, and the parameters that each process then holds.

A pipeline is as fast as its slowest stage, so the cut minimises the cost of that stage. The head multiplies every token
with the full vocabulary, which in a small model costs as much as many blocks, so the last stage has fewer blocks. The
embedding is a lookup and costs almost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.model.flops import tokens_seen
from bessemer.recipe import Parallel
from bessemer.recipe.parallel import SCHEDULES

ROUNDING = 1e-12  # relative tolerance between sums of costs


@dataclass(frozen=True)
class PipelineRank:
    """The part of the model that one rank of the pipeline axis holds.

    Attributes:
        pipeline_rank: Rank on the pipeline axis, from 0.
        blocks: Number of blocks.
        has_embedding: True if the rank holds the first stage.
        has_head: True if the rank holds the last stage.
    """

    pipeline_rank: int
    blocks: int
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Costs:
    """The cost of each part of a model in one unit, such as FLOPs per token or seconds.

    Attributes:
        blocks: Cost of each block, from the first.
        embedding: Cost of the embedding lookup.
        head: Cost of the output matrix.
    """

    blocks: tuple[float, ...]
    embedding: float
    head: float

    @classmethod
    def from_config(cls, config: ModelConfig) -> Costs:
        """Return the FLOPs of forward and backward per token that the head sees too (`model.flops.flops_per_token`).

        An embedding lookup costs an addition forward and one backward per element. A classifier's head reads one row per
        text and counts as 0.
        """
        blocks = tuple(
            6.0 * config.block_active_parameters + config.score_flops(tokens_seen(config, layer))
            for layer in range(config.layers)
        )
        tables = 1 + (config.positions == "learned") + (config.token_types > 0)
        return cls(blocks, 2.0 * tables * config.width, 6.0 * config.head_matrix_parameters)

    @property
    def total(self) -> float:
        return sum(self.blocks) + self.embedding + self.head


def split_blocks(blocks: Sequence[float], embedding: float, head: float, stages: int) -> tuple[range, ...]:
    """Return the blocks of each stage, one or more, that minimise the cost of the most expensive stage.

    Among equal cuts it takes the one with the smallest sum of squares, and then the one whose later stages are larger,
    since in 1F1B earlier stages hold more activations. The method is dynamic programming over (stage, block), in stages x
    blocks^2 steps.

    Args:
        blocks: Cost of each block.
        embedding: Cost added to the first stage.
        head: Cost added to the last stage.
        stages: Number of stages.

    Raises:
        InputError: There are fewer blocks than stages.
    """
    number = len(blocks)
    if not 1 <= stages <= number:
        raise InputError(
            f"pipeline: {number} blocks cannot be divided into {stages} stages; use 1 to {number} stages (pipeline x virtual) "
            "or a deeper model"
        )
    before = [0.0, *accumulate(blocks)]

    def cost(stage: int, first: int, end: int) -> float:
        extra = (embedding if stage == 0 else 0.0) + (head if stage == stages - 1 else 0.0)
        return before[end] - before[first] + extra

    def best(limit: float, *, squares: bool) -> tuple[float, tuple[range, ...]]:
        """Return (value, cut): the smallest maximum of the stages' costs, or with `squares` the smallest sum of their squares.

        No stage of the cut costs more than `limit`.
        """
        value = [0.0 if end == 0 else inf for end in range(number + 1)]  # the first `end` blocks in `stage` stages
        starts: list[list[int]] = []
        for stage in range(stages):
            now, start = [inf] * (number + 1), [0] * (number + 1)
            for end in range(number + 1):
                for first in range(end):
                    one = cost(stage, first, end)
                    if one > limit * (1 + ROUNDING) or value[first] == inf:
                        continue
                    total = value[first] + one * one if squares else max(value[first], one)
                    if total * (1 + ROUNDING) < now[end]:  # the first of equal cuts, whose later stages are larger
                        now[end], start[end] = total, first
            value = now
            starts.append(start)
        cut, end = [], number
        for start in reversed(starts):
            cut.append(range(start[end], end))
            end = start[end]
        return value[number], tuple(reversed(cut))

    largest, _ = best(inf, squares=False)
    return best(largest, squares=True)[1]


@lru_cache(maxsize=4096)
def blocks_per_stage(config: ModelConfig, count: int) -> tuple[int, ...]:
    """Return the number of blocks of each of `count` stages, cut by `split_blocks`."""
    costs = Costs.from_config(config)
    if min(costs.blocks) == max(costs.blocks):
        return _split_alike_blocks(config.layers, costs.blocks[0], costs.embedding, costs.head, count)
    return tuple(len(span) for span in split_blocks(costs.blocks, costs.embedding, costs.head, count))


def _split_alike_blocks(layers: int, block: float, embedding: float, head: float, count: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage as `split_blocks` cuts them, for blocks of equal cost, in linear time.

    For each size of the last stage the other stages are as even as possible, with the extra blocks in the later ones.
    """
    if count == 1:
        return (layers,)
    best: tuple[float, float, int] | None = None
    for last in range(1, layers - count + 2):
        least, extra = divmod(layers - last, count - 1)
        first = least * block + embedding  # extra blocks go to later stages, never to the embedding's
        rest = (least + (extra > 0)) * block
        largest = max(first, rest if count > 2 else 0.0, last * block + head)
        squares = first**2 + (count - 2 - extra) * (least * block) ** 2 + extra * rest**2 + (last * block + head) ** 2
        # Among cuts that are equal except for rounding, take the one whose later stages are larger, as in `split_blocks`.
        if (
            best is None
            or largest < best[0] * (1 - ROUNDING)
            or (largest <= best[0] * (1 + ROUNDING) and squares <= best[1] * (1 + ROUNDING))
        ):
            best = (largest, squares, last)
    assert best is not None, "there are as many blocks as stages"
    least, extra = divmod(layers - best[2], count - 1)
    return (*(least + (stage >= count - 1 - extra) for stage in range(count - 1)), best[2])


@dataclass(frozen=True)
class StageSpan:
    """A pipeline stage, number `stage` of `count`, with the blocks [first, end).

    The first stage has the embeddings, the last one the final norm and the head.
    """

    stage: int
    count: int
    first: int
    end: int

    @property
    def has_embedding(self) -> bool:
        return self.stage == 0

    @property
    def has_head(self) -> bool:
        return self.stage == self.count - 1


def num_stages(config: ModelConfig, layout: Parallel, stages_without_blocks: int = 0) -> int:
    """Return the number of pipeline stages of a layout.

    Args:
        config: The model.
        layout: The parallel layout.
        stages_without_blocks: Number of stages that may have no block.

    Raises:
        InputError: The model has too few blocks.
    """
    count, max_stages = layout.pipeline * layout.stages_per_rank, config.layers + stages_without_blocks
    if count > max_stages:
        raise InputError(
            f"parallel.pipeline: {layout.pipeline} processes with {layout.stages_per_rank} stages each are {count} stages, but "
            f"the model has {config.layers} blocks; use at most {max_stages} stages"
        )
    return count


def stage_spans(config: ModelConfig, layout: Parallel) -> list[StageSpan]:
    """Return all stages of a layout, in order. Raises InputError when there are more stages than blocks."""
    count = num_stages(config, layout)
    ends = [0, *accumulate(blocks_per_stage(config, count))]
    return [StageSpan(stage, count, first, end) for stage, (first, end) in enumerate(pairwise(ends))]


def stage_ids_of_rank(schedule: str, rank: int, ranks: int, virtual: int) -> tuple[int, ...]:
    """Return the stages of a rank of the pipeline, `virtual` on each rank.

    In V-shaped schedules the second stage mirrors the first; in all others stage s is on rank s mod p (Narayanan et al.
    2021, section 2.2).
    """
    if SCHEDULES[schedule].is_v_shaped and ranks > 1:
        return (rank, 2 * ranks - 1 - rank)
    return tuple(range(rank, ranks * virtual, ranks))


def rank_of_stage(schedule: str, stage: int, ranks: int) -> int:
    """Return the rank of the pipeline that holds a stage."""
    return 2 * ranks - 1 - stage if SCHEDULES[schedule].is_v_shaped and stage >= ranks else stage % ranks


def stages_at(layout: Parallel, pipeline_rank: int) -> tuple[int, ...]:
    """Return the stages that a rank of the pipeline axis holds in this layout."""
    return stage_ids_of_rank(layout.schedule, pipeline_rank, layout.pipeline, layout.stages_per_rank)


def recomputed_total(config: ModelConfig, layout: Parallel, per_rank: int) -> int:
    """Return the number of recomputed blocks in the model when each pipeline rank recomputes its first `per_rank` blocks."""
    return sum(min(rank.blocks, per_rank) for rank in pipeline_ranks(config, layout))


@lru_cache(maxsize=4096)
def pipeline_ranks(config: ModelConfig, layout: Parallel) -> tuple[PipelineRank, ...]:
    """Return the part of the model that each rank of the pipeline axis holds, over all of its stages."""
    return ranks_with_blocks(layout, blocks_per_stage(config, num_stages(config, layout)))


def ranks_with_blocks(layout: Parallel, blocks: Sequence[int]) -> tuple[PipelineRank, ...]:
    """Return the parts of the pipeline ranks for a given number of blocks per stage."""
    stages_by_rank = [stages_at(layout, rank) for rank in range(layout.pipeline)]
    return tuple(
        PipelineRank(rank, sum(blocks[stage] for stage in stages), 0 in stages, len(blocks) - 1 in stages)
        for rank, stages in enumerate(stages_by_rank)
    )


def rank_rows(num_rows: int, ranks: int) -> int:
    """Return the rows of the rank that has the most, when rows are cut as by DTensor's Shard(0).

    The last ranks may have fewer rows, or none.
    """
    return -(-num_rows // ranks)


@dataclass(frozen=True)
class PartParameters:
    """Parameter counts of a process's part of the model, after tensor and expert parallelism and before ZeRO.

    Attributes:
        block: Parameters of one block.
        root: Parameters outside of blocks.
        blocks: Number of blocks.
        experts: Parameters of one block's routed experts with expert parallelism, included in `block`; 0 without it.
    """

    block: int
    root: int
    blocks: int
    experts: int = 0

    @property
    def all(self) -> int:
        return self.blocks * self.block + self.root

    def shard_bytes(self, layout: Parallel, element_bytes: int) -> int:
        """Return the bytes of this process's shards."""
        experts = self.blocks * self.experts
        rest = element_bytes * (self.all - experts) // layout.state_shards
        return rest + element_bytes * experts // layout.expert_shards

    @classmethod
    @lru_cache(maxsize=4096)
    def count(cls, config: ModelConfig, rank: PipelineRank, tensor: int, expert: int = 1) -> PartParameters:
        """Return the counts of the largest rank of a tensor group.

        Ranks may differ in rows of the tables with a row per token id. Norms outside of blocks count with the head.
        """
        sharded = config.per_block(lambda parameter: parameter.tensor_dim is not None)
        table = rank_rows(config.vocabulary, tensor) * config.width
        root = config.tables(rank.has_embedding, rank.has_head) * table
        if rank.has_embedding:
            root += (config.position_rows + config.token_types) * config.width
        if rank.has_head:
            root += config.parameters - round(config.count_parameters()) - config.embedding_parameters
        block, routed = config.per_block() - sharded + sharded // tensor, 0
        if expert > 1:
            routed = config.expert_parameters // config.layers
            block, routed = block - routed + routed // expert, routed // expert
        return cls(block, root, rank.blocks, routed)
