"""The goal of a plan: a recipe as a job of the planner, with its model, cluster and batch, and its layout where it gives one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.distributed.validity import indivisible_by_tensor
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.model.huggingface.config import model_config
from bessemer.model.scaling_rules import TOKENS_PER_PARAMETER, advised_batch
from bessemer.plan import devices, unplanned
from bessemer.plan.devices import PRECISIONS
from bessemer.plan.estimate import experts, frameworks
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import TRAIN, ClusterSpec, Job, Layout, Precision, Recompute
from bessemer.plan.mixture_of_experts import MixtureConfig
from bessemer.plan.scaling_laws import critical_batches
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.recipe.parallel import AXES


@dataclass(frozen=True)
class Goal:
    """A recipe as the planner sees it. recipe: resolved; job: its layout, or what is given of it where the planner chooses the
    rest; given: names of `Layout` that are not chosen; notes: how the request was understood, where a reader of the plan must
    know it; unplanned: what the recipe sets and the plan does not count; checkpoint_every: steps between
    checkpoints, where the recipe says so."""

    recipe: Recipe
    job: Job
    tokens: int
    chooses_layout: bool
    given: frozenset[str]
    notes: tuple[str, ...] = ()
    unplanned: tuple[str, ...] = ()
    checkpoint_every: int | None = None


def goal_of(
    recipe: Recipe, vocabulary: int, labels: int = 0, *, model: ModelConfig | None = None, is_open: bool = False
) -> Goal:
    """Return what a recipe asks for. model: in the place of the recipe's; is_open: there is no recipe yet, so that what it would
    leave to a run may be chosen. Raises InputError where the recipe names no device, or a device or a framework that is unknown,
    or sizes that do not go together."""
    device = devices.of_cluster(recipe.cluster)
    if device is None:
        raise InputError("cluster.device: which device? name one, as H100; `bessemer plan --devices` lists them")
    has_batch = recipe.train.global_batch_tokens is not None
    if isinstance(model, MixtureConfig):
        recipe = _of_mixture(recipe, model)
    resolved = recipe_defaults.resolve(recipe, vocabulary, labels=labels)
    config = model or model_config(resolved, vocabulary, labels)
    cluster, notes = _cluster(recipe, device), list[str]()
    framework = _framework(recipe, device, config, notes)
    not_counted = unplanned.for_catalogue(recipe, framework.name)
    if recipe.train.precision == "fp8-rowwise":
        framework = replace(framework, fp8="row")
    if recipe.parallel.auto and not has_batch:
        default = resolved.batches.full
        horizon = resolved.batches.tokens_before(resolved.train.steps) if recipe.is_pretraining else None
        sequences = proposed_batch(default, horizon, config, cluster, copies_keys=framework.copies_keys)
        if sequences != default:
            recipe = recipe.changed(train={"global_batch_tokens": sequences * resolved.tokens.sequence_length})
            resolved = recipe_defaults.resolve(recipe, vocabulary, labels=labels)
            notes.append(
                f"a batch of {counted(sequences, 'sequence')} is proposed, which {counted(cluster.devices, 'device')} divide; "
                f"the default is {default:,}"
            )
    batch = resolved.batches.full
    tokens = _whole_steps(recipe, resolved)
    layout = _layout(recipe, batch, framework.sequence_parallel)
    if framework.fully_sharded and (why := experts.refuse(config, layout, framework)):
        raise InputError(why)
    if isinstance(config, MixtureConfig) and "zero" not in recipe.parallel.model_fields_set:
        layout = replace(layout, zero=min(layout.zero, 1))
    precision = _precision(recipe, device, notes, is_open=is_open)
    job = Job(config, layout, cluster, batch, precision, framework)
    if framework.name == "bessemer":
        # With gradients and moments of all weights: no plan counts train.classify.frozen (unplanned.toml).
        train = resolved.train.model_copy(update={"classify": TRAIN.classify})
        job = replace(job, train=train, offload=resolved.parallel.offload)
    chosen, given = recipe.parallel.auto, set[str]()
    if chosen:
        given |= recipe.parallel.given_layout
        job = job.with_layout(zero=recipe.parallel.zero, virtual=recipe.parallel.virtual or 1)
    if recipe.train.micro_batch is not None:
        given.add("micro_batch")
    if "recompute" in recipe.train.model_fields_set and recipe.train.recompute != "budget":
        given.add("recompute")
    return Goal(resolved, job, tokens, chosen, frozenset(given), tuple(notes), not_counted, recipe.checkpoint.every)


ROUNDED_BATCH = 1.1
"""Times all tokens up to which a batch is one that was rounded to whole sequences."""


def _whole_steps(recipe: Recipe, resolved: ResolvedRecipe) -> int:
    """Return the tokens of the run's whole steps. Raises InputError for a batch of more tokens than the run has."""
    tokens = resolved.batches.tokens_before(resolved.train.steps)
    asked, batch = recipe.train.tokens, recipe.train.global_batch_tokens
    if asked is not None and batch is not None and batch > ROUNDED_BATCH * asked:
        raise InputError(
            f"train.global_batch_tokens = {batch:,} is more than all tokens of the run (train.tokens = {asked:,})"
        )
    return tokens


def _of_mixture(recipe: Recipe, model: MixtureConfig) -> Recipe:
    """With the defaults that follow from a model's size taken from the parameters that a token meets: no law here was fitted to
    mixtures of experts."""
    train, active, length = recipe.train, model.active_parameters, recipe.tokens.sequence_length
    tokens = train.tokens or TOKENS_PER_PARAMETER * active
    if train.steps is None and train.tokens is None:
        recipe = recipe.changed(train={"tokens": tokens})
    if train.global_batch_tokens is None:
        advised = advised_batch(flops_per_token(model) * tokens, active, tokens)
        recipe = recipe.changed(train={"global_batch_tokens": length << max(round(math.log2(advised / length)), 0)})
    return recipe


def _framework(recipe: Recipe, device: devices.DeviceSpec, model: ModelConfig, notes: list[str]) -> Framework:
    """The recipe's; of a device or a model that Bessemer does not train, another program's, which is noted. Raises InputError."""
    name, other, what = recipe.cluster.framework, device.framework, f"on {device.name}"
    if isinstance(model, MixtureConfig):
        other, what = "megatron-core", "mixtures of experts"
    if other != "bessemer" and name == "bessemer":
        if "framework" in recipe.cluster.model_fields_set:
            raise InputError(f"cluster.framework = bessemer does not train {what}; leave it out to plan for {other}")
        notes.append(f"Bessemer does not train {what}: this is a plan for a program that does, {other}")
        name = other
    return frameworks.find(name)


MOST_DEVICES = 10_000_000


def _cluster(recipe: Recipe, device: devices.DeviceSpec) -> ClusterSpec:
    """As many devices as [cluster] says, else as [parallel] has processes, or the nodes where the planner chooses the layout."""
    given, world = recipe.cluster, recipe.parallel.world
    counted = "nodes" in given.model_fields_set
    per_node = given.devices_per_node or device.per_node
    if counted and given.devices_per_node is None and not recipe.parallel.auto and world % given.nodes == 0:
        per_node = world // given.nodes
    count = given.devices or (given.nodes * per_node if counted or recipe.parallel.auto else world)
    if count > MOST_DEVICES:
        raise InputError(f"cluster.devices: {count:,} is more than any cluster has; give at most {MOST_DEVICES:,}")
    cluster = ClusterSpec.of(device, count)
    if given.devices_per_node or per_node != device.per_node:
        cluster = replace(cluster, per_node=min(per_node, count), domain=0)
    return replace(cluster, inter_bandwidth=given.inter_bandwidth * 1e9) if given.inter_bandwidth else cluster


def _layout(recipe: Recipe, batch: int, sequence_parallel: bool) -> Layout:
    given, length = recipe.parallel, recipe.tokens.sequence_length
    usual = recipe_defaults.micro_batch_size(batch, length, recipe_defaults.MICRO_BATCH_TOKENS, given)
    return Layout(
        **{way: getattr(given, way) for way in AXES},
        virtual=given.stages_per_rank,
        zero=given.zero if given.state_shards > 1 else 0,
        schedule=given.schedule,
        micro_batch=recipe.train.micro_batch or usual,
        sequence_parallel=sequence_parallel,
        recompute=recipe.train.recompute if recipe.train.recompute in get_args(Recompute) else "full",  # type: ignore[arg-type]
    )


def _precision(recipe: Recipe, device: devices.DeviceSpec, notes: list[str], *, is_open: bool) -> Precision:
    """The recipe's; auto: bf16 where the device has it. Where it has none a run of auto is in fp32, which is noted; is_open:
    nobody has written a recipe yet, so fp16 is planned. Raises InputError for one that the device does not have."""
    asked = recipe.train.precision
    precision = "fp8" if asked == "fp8-rowwise" else asked
    if precision == "auto":
        if "bf16" in device.flops:
            return "bf16"
        chosen: Precision = "fp16" if is_open and "fp16" in device.flops else "fp32"
        notes.append(f"{device.name} has no bf16: {chosen} is planned; train.precision sets another")
        return chosen
    if precision not in device.flops:
        lacks = f"{device.name} does not have it" if precision in PRECISIONS else "the planner has no rates for it"
        raise InputError(f"train.precision = {asked}: {lacks}; possible: {', '.join(device.flops)}")
    return precision  # type: ignore[return-value]


MORE_SEQUENCES = 1.25
"""Times the usual batch up to which devices are given a sequence each; where there are more of them, several share one."""


def dividing_batch(sequences: int, model: ModelConfig, cluster: ClusterSpec, *, copies_keys: bool = False) -> int:
    """The batch near `sequences` that the devices can divide: as it is where it divides over all of them, or over the tensor
    groups of the smallest size that brings their number down to it; else a multiple of the number of groups, with as many factors
    of two as lie within a quarter, for the micro-batches. A pipeline needs a micro-batch for each stage: it does not help."""
    tensors = divisors(math.gcd(cluster.near, cluster.devices))
    sizes = [each for each in tensors if indivisible_by_tensor(model, each, copies_keys=copies_keys) is None]
    size = next((each for each in sizes if cluster.devices // each <= MORE_SEQUENCES * sequences), sizes[-1])
    groups = cluster.devices // size
    if sequences % groups == 0:
        return sequences
    each = sequences / groups
    near = range(max(math.ceil(each / MORE_SEQUENCES), 1), math.floor(each * MORE_SEQUENCES) + 1)
    return groups * max(near, key=lambda n: (n & -n, -abs(n - each)), default=max(round(each), 1))


def proposed_batch(
    sequences: int, tokens: int | None, model: ModelConfig, cluster: ClusterSpec, *, copies_keys: bool = False
) -> int:
    """Return the usual batch of `sequences` as the devices divide it.

    Where that is beyond the critical batch of `tokens` by every law (None: no law applies), its first half, quarter, ... that is
    not, if any.
    """
    usual = smaller = dividing_batch(sequences, model, cluster, copies_keys=copies_keys)
    if tokens is None:
        return usual
    most = max(critical_batches(model.active_parameters, tokens).values())
    while sequences:
        smaller = dividing_batch(sequences, model, cluster, copies_keys=copies_keys)
        if smaller * model.sequence_length <= most:
            return smaller
        sequences //= 2
    return usual


MOST_SPARE = 0.1
"""Share of the devices that a plan may leave as spares where no layout divides all of them."""


def fewer_devices(devices: int, per_node: int) -> list[int]:
    """Numbers below a number of devices that more layouts divide: whole nodes by powers of two, the largest first."""
    units = [per_node << power for power in range(24)]
    return sorted(
        {each for unit in units if devices * (1 - MOST_SPARE) <= (each := devices - devices % unit) < devices}
    )[::-1]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
