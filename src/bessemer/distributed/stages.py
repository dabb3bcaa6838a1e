"""Where a model is cut into pipeline stages: consecutive blocks, minimising the cost of the slowest stage; and the parameters
that a process then holds.

A pipeline is as fast as its slowest stage. The head multiplies every token with the whole vocabulary, which in a small model
costs as much as many blocks, so the last stage has fewer; the embedding is looked up and costs next to nothing.
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

ROUNDING = 1e-12  # relative, of sums of costs


@dataclass(frozen=True)
class PipelineRank:
    """What a rank of the pipeline axis holds of the model. pipeline_rank: on that axis, from 0; blocks: their number."""

    pipeline_rank: int
    blocks: int
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class Costs:
    """What each part of a model costs, all in one unit: FLOPs a token, or seconds. blocks: from the first."""

    blocks: tuple[float, ...]
    embedding: float
    head: float

    @classmethod
    def of(cls, config: ModelConfig) -> Costs:
        """FLOPs of forward and backward of a token that goes through the head too, as in `model.flops.flops_per_token`. A
        classifier's head reads one row a text, and counts for nothing.

        The embeddings are looked up: an addition forward and one backward for each number.
        """
        blocks = tuple(
            6.0 * config.block_active_parameters + config.score_flops(tokens_seen(config, layer))
            for layer in range(config.layers)
        )
        tables = 1 + (config.positions == "learned") + (config.token_types > 0)
        return cls(blocks, 2.0 * tables * config.width, 0.0 if config.labels else 6.0 * config.head_matrix_parameters)

    @property
    def total(self) -> float:
        return sum(self.blocks) + self.embedding + self.head


def split_blocks(blocks: Sequence[float], embedding: float, head: float, stages: int) -> tuple[range, ...]:
    """The blocks of each stage, one or more, minimising the cost of the costliest stage.

    blocks: cost of each; embedding is added to the first stage and head to the last. Of the cuts that do this, one with the
    smallest sum of squares, and then the one whose later stages are larger, since in 1F1B the earlier ones hold more
    activations. Dynamic programming over (stage, block), stages x blocks^2. Raises InputError where there are too few blocks.
    """
    number = len(blocks)
    if not 1 <= stages <= number:
        raise InputError(
            f"pipeline: {number} blocks cannot be cut into {stages} stages; take 1 to {number} stages (pipeline x virtual), "
            "or a deeper model"
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
            now, start = [inf] * (number + 1), [0] * (number + 1)
            for end in range(number + 1):
                for first in range(end):
                    one = cost(stage, first, end)
                    if one > limit * (1 + ROUNDING) or value[first] == inf:
                        continue
                    total = value[first] + one * one if squares else max(value[first], one)
                    if total * (1 + ROUNDING) < now[end]:  # of equal ones the first, whose later stages are larger
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
    """Blocks of each of `count` stages, cut by `split_blocks`."""
    costs = Costs.of(config)
    if min(costs.blocks) == max(costs.blocks):
        return _split_alike_blocks(config.layers, costs.blocks[0], costs.embedding, costs.head, count)
    return tuple(len(span) for span in split_blocks(costs.blocks, costs.embedding, costs.head, count))


def _split_alike_blocks(layers: int, block: float, embedding: float, head: float, count: int) -> tuple[int, ...]:
    """`split_blocks` for blocks that all cost the same, in time of the number of blocks.

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
        # Of cuts that are equal but for rounding, the one whose later stages are larger, as in `split_blocks`.
        if (
            best is None
            or largest < best[0] * (1 - ROUNDING)
            or (largest <= best[0] * (1 + ROUNDING) and squares <= best[1] * (1 + ROUNDING))
        ):
            best = (largest, squares, last)
    assert best is not None, "there are as many blocks as stages"
    least, extra = divmod(layers - best[2], count - 1)
    return (*(least + (stage >= count - 1 - extra) for stage in range(count - 1)), best[2])


def stage_costs(costs: Costs, cut: Sequence[range]) -> tuple[float, ...]:
    """What each stage of a cut costs, in the unit of its parts."""
    totals = [sum(costs.blocks[block] for block in blocks) for blocks in cut]
    totals[0] += costs.embedding
    totals[-1] += costs.head
    return tuple(totals)


@dataclass(frozen=True)
class StageSpan:
    """One stage of `count`: the blocks first..end-1; the first stage has the embeddings, the last one norm and head."""

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
    """Return the pipeline stages of a layout. Raises InputError when the model has too few blocks for them.
    stages_without_blocks: stages that a cut may leave without any."""
    count, max_stages = layout.pipeline * layout.stages_per_rank, config.layers + stages_without_blocks
    if count > max_stages:
        raise InputError(
            f"parallel.pipeline: {layout.pipeline} processes with {layout.stages_per_rank} stages each are {count} stages, but "
            f"the model has {config.layers} blocks; take at most {max_stages} stages"
        )
    return count


def stage_spans(config: ModelConfig, layout: Parallel) -> list[StageSpan]:
    """All stages of a layout, in order. Raises InputError when there are more stages than blocks."""
    count = num_stages(config, layout)
    ends = [0, *accumulate(blocks_per_stage(config, count))]
    return [StageSpan(stage, count, first, end) for stage, (first, end) in enumerate(pairwise(ends))]


def stage_ids_of_rank(schedule: str, rank: int, ranks: int, virtual: int) -> tuple[int, ...]:
    """The stages of a rank of the pipeline, `virtual` on each: in a V the second one is the first one's mirror image, with all
    other schedules stage s lies at s mod p (Narayanan et al. 2021, section 2.2)."""
    if SCHEDULES[schedule].is_v_shaped and ranks > 1:
        return (rank, 2 * ranks - 1 - rank)
    return tuple(range(rank, ranks * virtual, ranks))


def rank_of_stage(schedule: str, stage: int, ranks: int) -> int:
    """The rank of the pipeline that holds a stage."""
    return 2 * ranks - 1 - stage if SCHEDULES[schedule].is_v_shaped and stage >= ranks else stage % ranks


def stages_at(layout: Parallel, pipeline_rank: int) -> tuple[int, ...]:
    """The stages that a rank of the pipeline axis holds."""
    return stage_ids_of_rank(layout.schedule, pipeline_rank, layout.pipeline, layout.stages_per_rank)


def recomputed_total(config: ModelConfig, layout: Parallel, per_rank: int) -> int:
    """Blocks of the whole model that are recomputed where each rank of the pipeline recomputes its first `per_rank`."""
    return sum(min(rank.blocks, per_rank) for rank in pipeline_ranks(config, layout))


@lru_cache(maxsize=4096)
def pipeline_ranks(config: ModelConfig, layout: Parallel) -> tuple[PipelineRank, ...]:
    """What each rank of the pipeline axis holds, all of its stages together."""
    return ranks_with_blocks(layout, blocks_per_stage(config, num_stages(config, layout)))


def ranks_with_blocks(layout: Parallel, blocks: Sequence[int]) -> tuple[PipelineRank, ...]:
    """As `pipeline_ranks`, by the number of blocks of each stage."""
    stages_by_rank = [stages_at(layout, rank) for rank in range(layout.pipeline)]
    return tuple(
        PipelineRank(rank, sum(blocks[stage] for stage in stages), 0 in stages, len(blocks) - 1 in stages)
        for rank, stages in enumerate(stages_by_rank)
    )


def rank_rows(num_rows: int, ranks: int) -> int:
    """Rows of the fullest rank where rows are cut as DTensor's Shard(0) cuts them: the last ranks may have fewer, or none."""
    return -(-num_rows // ranks)


def replicated_parameters(config: ModelConfig) -> int:
    """Parameters of a model that every rank of a tensor group holds in full: all but `block_sharded_parameters` and the tables
    with a row for each token id."""
    tables = config.tables() * config.vocabulary * config.width
    return config.parameters - config.layers * config.block_sharded_parameters - tables


@dataclass(frozen=True)
class PartParameters:
    """Parameters of a process's part of the model, after tensor parallelism and before ZeRO, without routed experts. block: of
    one block; root: of all that lies in none."""

    block: int
    root: int
    blocks: int

    @property
    def all(self) -> int:
        return self.blocks * self.block + self.root

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, config: ModelConfig, rank: PipelineRank, tensor: int, *, is_mean: bool = False) -> PartParameters:
        """Of the fullest rank of a tensor group, or the mean over its ranks, which may differ in rows of the tables. Norms
        outside of blocks count with the head."""
        sharded = config.block_sharded_parameters
        fullest = rank_rows(config.vocabulary, tensor) * config.width
        table = config.vocabulary * config.width // tensor if is_mean else fullest
        root = config.tables(rank.has_embedding, rank.has_head) * table
        if rank.has_embedding:
            positions = config.position_rows if config.positions == "learned" else 0
            root += (positions + config.token_types) * config.width
        if rank.has_head:
            blocks = config.layers * config.block_parameters + config.expert_parameters
            root += config.parameters - blocks - config.embedding_parameters
        return cls(config.block_parameters - sharded + sharded // tensor, root, rank.blocks)
