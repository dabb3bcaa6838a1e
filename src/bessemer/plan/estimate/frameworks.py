"""Framework profiles: differences between training programs in memory, time and pipeline stages.

The values of each program are in frameworks.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from importlib import resources
from typing import Any, Literal

from bessemer.common.errors import InputError
from bessemer.distributed.shards import padding
from bessemer.distributed.stages import PipelineRank, blocks_per_stage, num_stages, ranks_with_blocks
from bessemer.distributed.step_flops import Selective
from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel


def hash_once(self: Any) -> int:
    """Return the hash of a frozen dataclass with many fields, computed once, since the caches of a plan look it up often."""
    if "_hash" not in self.__dict__:
        values = tuple(getattr(self, field.name) for field in fields(self) if field.compare)
        object.__setattr__(self, "_hash", hash(values))
    return int(self._hash)


@dataclass(frozen=True)
class Framework:
    """The profile of a training program: its numeric formats, memory use, kernels, communication and overlap.

    frameworks.toml explains each field under the same name and has the profiles of all programs.
    """

    name: str
    weight_bytes: float = 2.0
    master_bytes: float = 4.0
    gradient_bytes: float = 4.0
    moment_bytes: float = 8.0
    attention: Literal["unfused", "flash"] = "flash"
    logits: Literal["whole", "chunked"] = "whole"
    dropout: bool = False
    fused: bool = False
    launch: float = 36e-6  # fitted to the single-node A100 set, whose small cases wait for the host
    kernels: int = 30
    across: float = 0.0
    tangled: tuple[float, float] = (0.0, 0.0)
    flash: Literal[1, 2, 3] = 2
    fp8: Literal["tensor", "row"] = "tensor"
    fp8_sustained: bool = False
    selective: Selective = "attention"
    early_stop: bool = False
    accumulate: float = 0.0
    parallel_block: bool = False
    dispatch: Literal["expert", "node"] = "expert"
    expert_overlap: float = 0.0
    expert_kernels: int = 40
    imbalance: float = 1.1
    reads_counts: bool = False
    sequence_parallel: bool = True
    copies: bool = False
    tensor_overlap: float = 0.0
    paired: Literal["all", "torch"] = "all"
    data_overlap: float = 0.0
    sharded_overlap: float | None = None
    pipeline_overlap: float = 0.0
    context: Literal["ring", "gather", "exchange"] = "gather"
    repeats_keys: bool = False
    copies_keys: bool = False
    reduce_bytes: float = 4.0
    gather_bytes: float = 2.0
    scatter: Literal["micro-batch", "round", "step"] = "step"
    sums: Literal["scatter", "all"] = "scatter"
    bucket: float = 0.0
    gathers: int = 1
    scatters: int = 1
    regathers: bool = False
    listed: float = 0.0
    fully_sharded: bool = False
    cut: Cut = "even"
    fresh_bytes: float = 0.0
    copy_bytes: float = 0.0
    step_bytes: float = 0.0
    bucket_bytes: float = 0.0
    scratch_gradients: bool = False
    logit_bytes: float = 10.0
    split_logit_bytes: float = 0.0
    loss_chunk: int = 4096
    unfused_gate: bool = False
    gathered: float = 0.0
    gathers_context: bool = False
    pipes: Literal["plain", "deepspeed", "torch"] = "plain"
    base_bytes: float = 1.5e9
    slack: float = 0.05

    __hash__ = hash_once

    @property
    def stages_without_blocks(self) -> int:
        """Pipeline stages that may have no block: 2 if the embedding and the head count as blocks, else 0."""
        return 2 * (self.cut == "ends")


def _read() -> dict[str, Framework]:
    """Load the programs of frameworks.toml, by name."""
    text = resources.files(__package__).joinpath("frameworks.toml").read_text(encoding="utf-8")
    frameworks: dict[str, Framework] = {}
    for name, keys in tomllib.loads(text).items():
        like = frameworks[keys.pop("like")] if "like" in keys else Framework(name)
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in keys.items()
        }
        frameworks[name] = replace(like, name=name, **values)
    return frameworks


FRAMEWORKS = _read()


def find(name: str) -> Framework:
    """Return a framework by name. Raises InputError if the name is unknown."""
    if name not in FRAMEWORKS:
        raise InputError(f"framework {name!r}: not known; possible: {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]


Cut = Literal["balanced", "even", "ceiling", "middle", "cumulative", "ends"]


@lru_cache(maxsize=4096)
def ranks_by_cut(config: ModelConfig, layout: Parallel, cut: Cut) -> tuple[PipelineRank, ...]:
    """Return the blocks, embedding and head of each pipeline rank. Raises InputError for more stages than blocks."""
    outer = Framework("", cut=cut).stages_without_blocks
    return ranks_with_blocks(layout, blocks_of_stages(config, num_stages(config, layout, outer), cut))


@lru_cache(maxsize=4096)
def blocks_of_stages(config: ModelConfig, count: int, cut: Cut) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage."""
    layers, (least, extra) = config.layers, divmod(config.layers, count)
    if cut == "even":
        return tuple(least + (stage < extra) for stage in range(count))
    if cut == "ceiling":  # stages take the larger number of blocks until none are left
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
    """Return the blocks of each stage as nanotron assigns them.

    A new stage begins once the costs so far exceed the next equal part of the total. A block costs 4 h^2 + 3 h f and
    the head V h (nanotron's `get_block_compute_costs` and `build_model`).
    """
    attention = 4 * config.heads * config.head_dim * config.width
    block = attention + 3 * config.mlp_width * config.width
    head = config.vocabulary * config.width
    total, stage, layers = config.layers * block + head, 0, [0] * count
    for layer in range(config.layers):
        layers[stage] += 1
        if (layer + 1) * block > total * (stage + 1) / count and stage < count - 1:
            stage += 1
    return tuple(layers)


def shard_padding(framework: Framework, config: ModelConfig, tensor: int, num_shards: int) -> float:
    """Return the ratio of weight elements that a program gathers and stores to those that the model has.

    Bessemer shards each weight along one dimension (`distributed.shards`). Other programs shard a whole block as one
    flat tensor, or by rows of thousands, and need almost no padding.
    """
    return padding(config, tensor, num_shards) if framework.name == "bessemer" else 1.0
