"""Parameters that a process holds of a model: what tensor parallelism cuts of them, and what is left whole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from bessemer.layout.pipeline_stages import PipelineRank
from bessemer.model.config import ModelConfig


def rank_rows(num_rows: int, ranks: int) -> int:
    """Rows of the fullest rank where rows are cut as DTensor's Shard(0) cuts them: the last ranks may have fewer, or none."""
    return -(-num_rows // ranks)


def tensor_sharded_parameters(config: ModelConfig) -> int:
    """Parameters of a block that a tensor group divides; which they are by name: SHARDED in parallel/tensor.py."""
    return config.block_matrix_parameters + config.joint_bias_parameters


def replicated_parameters(config: ModelConfig) -> int:
    """Parameters of a model that every rank of a tensor group holds in full: all but `tensor_sharded_parameters` and the tables
    with a row for each token id."""
    tables = config.tables() * config.vocabulary * config.width
    return config.parameters - config.layers * tensor_sharded_parameters(config) - tables


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
        sharded = tensor_sharded_parameters(config)
        table = (
            config.vocabulary * config.width // tensor
            if is_mean
            else rank_rows(config.vocabulary, tensor) * config.width
        )
        root = config.tables(rank.has_embedding, rank.has_head) * table
        if rank.has_embedding:
            positions = config.position_rows if config.positions == "learned" else 0
            root += (positions + config.token_types) * config.width
        if rank.has_head:
            blocks = config.layers * config.block_parameters + config.expert_parameters
            root += config.parameters - blocks - config.embedding_parameters
        return cls(config.block_parameters - sharded + sharded // tensor, root, rank.blocks)
