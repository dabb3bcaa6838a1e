"""From a recipe to the jobs that the planner counts with: its model, its cluster, and its layout where it gives one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from bessemer.defaults import derived_keys
from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.layout.devices import PRECISIONS
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout, Precision, Recompute
from bessemer.recipe import Recipe
from bessemer.recipe.parallel import AXES, MODEL_AXES
from bessemer.terminal import counted

GB = 1e9


@dataclass(frozen=True)
class Goal:
    """A recipe as the planner sees it. recipe: resolved; job: its layout, or that of one device where the planner is to choose;
    free: what it chooses beyond the layout, where the recipe leaves it out."""

    recipe: Recipe
    job: Job
    tokens: int
    chooses_layout: bool
    free: frozenset[str]


def goal_of(recipe: Recipe, vocabulary: int, labels: int = 0, *, model: ModelConfig | None = None) -> Goal:
    """What a recipe asks for. model: in the place of the recipe's. Raises InputError where the recipe names no device, or a
    device or a framework that is unknown, or sizes that do not go together."""
    if recipe.cluster.device is None:
        raise InputError(
            "cluster.device: which device to plan for? name one, as H100; `bessemer plan --devices` lists them"
        )
    device = devices.find(recipe.cluster.device, Path(recipe.cluster.catalogue) if recipe.cluster.catalogue else None)
    resolved = derived_keys.resolve(recipe, vocabulary, labels=labels)
    classes = labels if resolved.train.objective == "classify" else 0
    config = model or model_config(resolved, vocabulary, labels=classes)
    cluster = _cluster(recipe, device)
    framework = frameworks.find(recipe.cluster.framework)
    batch = resolved.batches.full
    tokens = resolved.batches.tokens_before(resolved.train.steps or 0)
    layout = _layout(recipe, batch, framework.sequence_parallel)
    job = Job(config, layout, cluster, batch, _precision(recipe, device), framework)
    chosen = recipe.parallel.auto
    if not chosen and job.layout.devices != cluster.devices:
        raise InputError(_mismatch(recipe, cluster, job.layout.devices))
    free = {"micro_batch"} if recipe.train.micro_batch is None else set()
    if "recompute" not in recipe.train.model_fields_set or recipe.train.recompute == "budget":
        free.add("recompute")
    return Goal(resolved, job, tokens, chosen, frozenset(free))


def _cluster(recipe: Recipe, device: devices.DeviceSpec) -> ClusterSpec:
    """As many devices as [cluster] says, else as [parallel] has processes, or the nodes where the planner chooses the layout."""
    given, world = recipe.cluster, recipe.parallel.world
    counted = "nodes" in given.model_fields_set
    per_node = given.devices_per_node or device.per_node
    if counted and given.devices_per_node is None and not recipe.parallel.auto and world % given.nodes == 0:
        per_node = world // given.nodes
    count = given.devices or (given.nodes * per_node if counted or recipe.parallel.auto else world)
    return ClusterSpec(
        device=device,
        devices=count,
        per_node=min(per_node, count),
        intra_bandwidth=given.intra_bandwidth * GB if given.intra_bandwidth else device.intra_bandwidth,
        inter_bandwidth=given.inter_bandwidth * GB if given.inter_bandwidth else device.inter_bandwidth,
    )


def _layout(recipe: Recipe, batch: int, sequence_parallel: bool) -> Layout:
    given = recipe.parallel
    return Layout(
        **{way: getattr(given, way) for way in AXES},
        virtual=given.stages_per_rank,
        zero=given.zero if given.state_shards > 1 else 0,
        schedule=given.schedule,
        micro_batch=recipe.train.micro_batch
        or derived_keys.micro_batch_size(batch, recipe.tokens.sequence_length, derived_keys.MICRO_BATCH_TOKENS, given),
        sequence_parallel=sequence_parallel,
        recompute=recipe.train.recompute if recipe.train.recompute in get_args(Recompute) else "full",  # type: ignore[arg-type]
    )


def _precision(recipe: Recipe, device: devices.DeviceSpec) -> Precision:
    """The recipe's; auto: bf16 where the device has it. Raises InputError for one that the device does not have."""
    asked = recipe.train.precision
    precision = "fp8" if asked == "fp8-rowwise" else asked
    if precision == "auto":
        return "bf16" if "bf16" in device.flops else "fp32"
    if precision not in device.flops:
        lacks = f"{device.name} does not have it" if precision in PRECISIONS else "the planner has no rates for it"
        raise InputError(f"train.precision = {asked}: {lacks}; possible: {', '.join(device.flops)}")
    return precision  # type: ignore[return-value]


def _mismatch(recipe: Recipe, cluster: ClusterSpec, world: int) -> str:
    layout = recipe.parallel
    product = " x ".join(f"{getattr(layout, way)}" for way in AXES)
    rest = layout.ranks_per_part
    advice = (
        f"shard = {cluster.devices // rest} would fill them"
        if cluster.devices % rest == 0
        else f"{' x '.join(MODEL_AXES)} = {rest} does not divide them; take a divisor of {cluster.devices}"
    )
    return (
        f"parallel: replicate x shard x tensor x pipeline x context = {product} = {counted(world, 'process')}, but [cluster] "
        f"has {counted(cluster.devices, 'device')} ({counted(cluster.nodes, 'node')}); {advice}, "
        "or auto = true lets the planner choose"
    )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
