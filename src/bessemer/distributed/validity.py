"""Checks that a layout can train a model, shared by training, the planner and its search.

Every check raises an InputError that names values that work. The limits of the optimizer, the objective and torch are in
`train.parallelize.require_trainable`, and those of single keys in `recipe.parallel`.
"""

from __future__ import annotations

import math
from functools import lru_cache

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.distributed.schedules import nearest_that_fit
from bessemer.distributed.stages import num_stages, rank_rows
from bessemer.model.config import ModelConfig
from bessemer.recipe import Parallel
from bessemer.recipe.parallel import AXES, AxisSizes


def require_valid(
    config: ModelConfig, layout: Parallel, micro_batches: int, *, is_ours: bool = True, copies_keys: bool = False,
    stages_without_blocks: int = 0,
) -> None:  # fmt: skip
    """Raise InputError when a layout cannot train a model with this number of micro-batches per step.

    Args:
        config: The model.
        layout: The parallel layout.
        micro_batches: Micro-batches per step of each data-parallel rank.
        is_ours: True for training with Bessemer; other programs shard their weights in other ways.
        copies_keys: See `indivisible_by_tensor`.
        stages_without_blocks: See `num_stages`.

    Raises:
        InputError: The layout does not fit the model; the message names values that do.
    """
    require_tensor(config, layout, copies_keys=copies_keys)
    require_context(config, layout)
    if is_ours:
        require_shards(config, layout)
    require_experts(config, layout, shards_evenly=is_ours)
    num_stages(config, layout, stages_without_blocks)
    require_micro_batches(layout, micro_batches)


def require_devices(layout: AxisSizes, devices: int) -> None:
    """Raise InputError when the cluster has another number of devices than a layout has processes."""
    if layout.world != devices:
        has = f"the layout is of {counted(layout.world, 'device')} and the cluster has {devices:,}"
        raise InputError(f"parallel: {has}; make them the same")


def indivisible_by_tensor(
    config: ModelConfig, tensor: int, context: int = 1, *, copies_keys: bool = False
) -> str | None:
    """Return the recipe key, with its value, that `tensor` ranks cannot divide; None if the model divides.

    The vocabulary need not divide evenly: the last rank then has fewer ids.

    Args:
        config: The model.
        tensor: Ranks of the tensor group.
        context: Ranks of the context group.
        copies_keys: True for programs that copy a key/value head to several ranks when there are more ranks than heads.
    """
    vocabulary = config.vocabulary
    copied = copies_keys and tensor % config.kv_heads == 0 and config.heads % tensor == 0
    parts = (part for _, parts in config.kinds.values() for part in parts)
    units = [item for part in parts for item in part.tensor_units.items()]
    divides = {
        **{f"{key} = {number}": number % tensor == 0 or (copied and "heads" in key) for key, number in units},
        f"model.vocabulary = {vocabulary}": rank_rows(vocabulary, tensor) * (tensor - 1) < vocabulary,
        f"tokens.sequence_length = {config.sequence_length}": config.sequence_length % (context * tensor) == 0,
    }
    return next((key for key, does in divides.items() if not does), None)


def require_tensor(config: ModelConfig, layout: Parallel, *, copies_keys: bool = False) -> None:
    """Raise InputError, with the sizes that work, when a model does not divide by parallel.tensor."""
    if layout.tensor == 1:
        return
    key = indivisible_by_tensor(config, layout.tensor, layout.context, copies_keys=copies_keys)
    if key is not None:
        most = config.heads if copies_keys else config.kv_heads
        keys = {
            n: indivisible_by_tensor(config, n, layout.context, copies_keys=copies_keys) for n in range(1, most + 1)
        }
        sizes = [n for n, key in keys.items() if key is None]
        over = f" over parallel.context = {layout.context}" if "sequence" in key and layout.context > 1 else ""
        raise InputError(
            f"parallel.tensor: {key}{over} cannot be divided by {layout.tensor} processes; "
            f"possible for this model: {', '.join(map(str, sizes)) or 'none'}"
        )


def require_context(config: ModelConfig, layout: Parallel) -> None:
    """Raise InputError for a model that context parallelism cannot train.

    A classifier reads one token of a text, or the mean over it, and a rank holds only some of its tokens.
    """
    if layout.context == 1:
        return
    if config.labels:
        raise InputError(
            f"parallel.context: {layout.context} processes cannot divide the texts of a classifier; "
            "use parallel.replicate or parallel.shard instead"
        )
    if config.position_padding is not None:
        raise InputError(
            f"parallel.context: {layout.context} processes cannot divide a sequence whose learned positions skip "
            "padding (RoBERTa), since a process does not see the tokens before its own; use parallel.tensor instead"
        )
    require_length(layout.context, config.sequence_length)


def divides_evenly(config: ModelConfig, tensor: int, num_shards: int) -> bool:
    """Return True if FSDP can shard every parameter along a dimension that tensor parallelism leaves whole.

    Embedding and output matrix (V, D) leave D. A block's parameters that tensor parallelism shards along dimension 0 must
    divide along one of their other dimensions (`data.shard_placement`).
    """
    sharded = [parameter.shape[1:] for parameter in config.block_table.values() if parameter.tensor_dim == 0]
    return tensor == 1 or all(any(size % num_shards == 0 for size in left) for left in [(config.width,), *sharded])


def require_shards(config: ModelConfig, layout: Parallel) -> None:
    """Raise InputError, with the numbers of shards that work, when FSDP and tensor parallelism cannot both shard a model."""
    num_shards = layout.state_shards
    if divides_evenly(config, layout.tensor, num_shards):
        return
    numbers = [n for n in range(1, 4 * num_shards) if divides_evenly(config, layout.tensor, n)]
    raise InputError(
        f"parallel.shard x parallel.context = {num_shards}: the weights, of width {config.width}, do not divide evenly with "
        f"parallel.tensor = {layout.tensor}; possible: {', '.join(map(str, numbers))}"
    )


def require_experts(config: ModelConfig, layout: Parallel, *, shards_evenly: bool = True) -> None:
    """Raise InputError, with the sizes that work, when parallel.expert cannot divide the experts of a model."""
    sizes = expert_sizes(config, layout.stage_ranks, shards_evenly=shards_evenly)
    if layout.expert in sizes:
        return
    if not config.experts:
        raise InputError(f"parallel.expert: {layout.expert} processes, but the model has no experts; remove it")
    raise InputError(
        f"parallel.expert: {layout.expert} processes cannot divide {config.experts} experts among the {layout.stage_ranks} "
        f"processes of a pipeline stage (replicate x shard x context x tensor); possible: {', '.join(map(str, sizes))}"
    )


@lru_cache(maxsize=1024)
def expert_sizes(config: ModelConfig, ranks: int, *, shards_evenly: bool = True) -> tuple[int, ...]:
    """Return the sizes of parallel.expert that divide the experts of a model and the ranks of a pipeline stage.

    With `shards_evenly`, ranks with the same experts shard their weights along another dimension, which they must divide.
    """
    shapes = [parameter.shape[1:] for parameter in config.block_table.values() if parameter.is_routed]

    both = math.gcd(config.experts, ranks) if config.experts else 1

    def is_even(shards: int) -> bool:
        return not shards_evenly or all(any(number % shards == 0 for number in shape) for shape in shapes)

    return tuple(size for size in range(1, both + 1) if size == 1 or (both % size == 0 and is_even(ranks // size)))


def require_length(num_ranks: int, length: int) -> None:
    """Raise InputError, with the nearest lengths that work, when sequences do not divide into 2 x num_ranks chunks."""
    unit = 2 * num_ranks
    if num_ranks == 1 or length % unit == 0:
        return
    raise InputError(
        f"tokens.sequence_length: {length} is not divisible by {unit}, as parallel.context = {num_ranks} needs; "
        f"use {' or '.join(nearest_that_fit(length, lambda n: n % unit == 0))}"
    )


def require_micro_batches(layout: Parallel, micro_batches: int) -> None:
    """Raise InputError, with the nearest numbers that fit, when a schedule cannot run this number of micro-batches per step."""
    if layout.fits_micro_batches(micro_batches):
        return
    numbers = " or ".join(nearest_that_fit(micro_batches, layout.fits_micro_batches))
    raise InputError(
        f"parallel.schedule: {layout.schedule} on {layout.pipeline} processes cannot run {micro_batches} micro-batches per step, "
        f"only {numbers}; change train.micro_batch or train.global_batch_tokens, or use gpipe"
    )


def describe_axes(layout: AxisSizes) -> str:
    """Return the parallel axes of size over 1 as text, such as "shard 2 x tensor 2, expert 4".

    Without any it is "one device".
    """
    sizes = [f"{axis} {getattr(layout, axis)}" for axis in AXES if axis != "expert" and getattr(layout, axis) > 1]
    return (" x ".join(sizes) or "one device") + (f", expert {layout.expert}" if layout.expert > 1 else "")
