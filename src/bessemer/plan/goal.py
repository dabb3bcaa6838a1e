"""Planner input: a recipe translated to a model, cluster, batch and layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import get_args

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.distributed.shards import divides_state
from bessemer.distributed.validity import indivisible_by_tensor
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.model.huggingface.config import family_of, model_config
from bessemer.model.scaling_rules import TOKENS_PER_PARAMETER, advised_batch
from bessemer.plan import devices, unplanned
from bessemer.plan.devices import PRECISIONS
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import TRAIN, ClusterSpec, Job, Layout, Precision, Recompute
from bessemer.plan.latent_attention import latent_of
from bessemer.plan.scaling_laws import critical_batches
from bessemer.recipe import Recipe, ResolvedRecipe
from bessemer.recipe.parallel import AXES


@dataclass(frozen=True)
class Goal:
    """A planning goal: a resolved recipe with its job for the planner.

    Attributes:
        recipe: The resolved recipe.
        job: The job with the recipe's layout. If the planner chooses the layout, only the fields in `fixed` count.
        tokens: Training tokens of the run's whole steps.
        chooses_layout: True if the planner chooses the layout (`parallel.auto`).
        fixed: Names of the `Layout` fields that the recipe sets and the planner keeps.
        notes: Assumptions and changes that a reader of the plan must know.
        unplanned: One sentence for each recipe setting that the plan does not include.
        checkpoint_every: Steps between checkpoints, or None if the recipe does not set them.
    """

    recipe: Recipe
    job: Job
    tokens: int
    chooses_layout: bool
    fixed: frozenset[str]
    notes: tuple[str, ...] = ()
    unplanned: tuple[str, ...] = ()
    checkpoint_every: int | None = None


def goal_of(
    recipe: Recipe, vocabulary: int, labels: int = 0, *, model: ModelConfig | None = None, is_open: bool = False
) -> Goal:
    """Translate a recipe to a planning goal for the device that it names.

    Args:
        vocabulary: Number of tokens in the vocabulary.
        labels: Number of classes of a classifier; 0 for a language model.
        model: Model to plan instead of the recipe's.
        is_open: True if there is no recipe file; the planner may then choose settings that a run would choose.

    Raises:
        InputError: A device is missing or unknown, the framework is unknown, or sizes do not fit together.
    """
    device = devices.of_cluster(recipe.cluster)
    if device is None:
        raise InputError("cluster.device: not set; set a device such as H100 (`bessemer plan --devices` lists devices)")
    has_batch = recipe.train.global_batch_tokens is not None
    if model is not None and model.experts:
        recipe = _of_mixture(recipe, model)
    resolved = recipe_defaults.resolve(recipe, vocabulary, labels=labels)
    config = model or model_config(resolved, vocabulary, labels)
    cluster, notes = cluster_of(recipe, device), list[str]()
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
    precision = _precision(recipe, device, notes, is_open=is_open)
    if model is None and framework.name == "bessemer" and recipe.export.hf and (problem := export_problem(config)):
        notes.append(problem)
    job = Job(config, layout, cluster, batch, precision, framework)
    if framework.name == "bessemer":
        # No plan models train.classify.frozen (unplanned.toml), so all weights have gradients and moments.
        train = resolved.train.model_copy(update={"classify": TRAIN.classify})
        job = replace(job, train=train, offload=resolved.parallel.offload)
    chosen = recipe.parallel.auto
    if chosen:
        job = job.with_layout(zero=recipe.parallel.zero, virtual=recipe.parallel.virtual or 1)
    keys = _fixed_keys(recipe, has_own_experts=config.experts > 0 and model is None)
    return Goal(resolved, job, tokens, chosen, keys, tuple(notes), not_counted, recipe.checkpoint.every)


def export_problem(config: ModelConfig) -> str | None:
    """Return why a model cannot be exported and how to train it; None if a family of transformers expresses it."""
    try:
        family_of(config)
    except InputError as error:
        return (
            f"{error}. A run needs one of these, or export.hf = false, because the trained model could not be exported"
        )
    return None


def _fixed_keys(recipe: Recipe, has_own_experts: bool) -> frozenset[str]:
    """Return the fields of the layout that the recipe fixes. Experts of a published model are placed freely."""
    keys = set(recipe.parallel.given_layout) if recipe.parallel.auto else set[str]()
    if "expert" in recipe.parallel.model_fields_set or (has_own_experts and not recipe.parallel.auto):
        keys.add("expert")
    if recipe.train.micro_batch is not None:
        keys.add("micro_batch")
    if "recompute" in recipe.train.model_fields_set and recipe.train.recompute != "budget":
        keys.add("recompute")
    return frozenset(keys)


ROUNDED_BATCH = 1.1
"""Largest ratio of batch to total tokens that still counts as a batch rounded up to whole sequences."""


def _whole_steps(recipe: Recipe, resolved: ResolvedRecipe) -> int:
    """Return the tokens of the run's whole steps. Raises InputError if one batch has more tokens than the run."""
    tokens = resolved.batches.tokens_before(resolved.train.steps)
    total, batch = recipe.train.tokens, recipe.train.global_batch_tokens
    if total is not None and batch is not None and batch > ROUNDED_BATCH * total:
        raise InputError(
            f"train.global_batch_tokens = {batch:,} exceeds all tokens of the run (train.tokens = {total:,}); make it smaller"
        )
    return tokens


def _of_mixture(recipe: Recipe, model: ModelConfig) -> Recipe:
    """Return the recipe of a mixture of experts, with unset tokens and batch chosen for its number of active parameters.

    No scaling law used here was fitted to mixtures of experts.
    """
    train, active, length = recipe.train, model.active_parameters, recipe.tokens.sequence_length
    tokens = train.tokens or TOKENS_PER_PARAMETER * active
    if train.steps is None and train.tokens is None:
        recipe = recipe.changed(train={"tokens": tokens})
    if train.global_batch_tokens is None:
        advised = advised_batch(flops_per_token(model) * tokens, active, tokens)
        recipe = recipe.changed(train={"global_batch_tokens": length << max(round(math.log2(advised / length)), 0)})
    return recipe


def _framework(recipe: Recipe, device: devices.DeviceSpec, model: ModelConfig, notes: list[str]) -> Framework:
    """Return the framework to plan for: the recipe's, or another one if Bessemer does not train this model or on this device.

    Adds a note when it switches. Raises InputError if the recipe sets `cluster.framework = bessemer` explicitly.
    """
    name, other, limit = recipe.cluster.framework, device.framework, f"does not train on {device.name}"
    if latent_of(model) is not None:
        other, limit = "megatron-core", "does not train latent attention"
    if other != "bessemer" and name == "bessemer":
        if "framework" in recipe.cluster.model_fields_set:
            raise InputError(f"cluster.framework: bessemer {limit}; remove the key to plan for {other}")
        notes.append(f"Bessemer {limit}: this is a plan for {other}")
        name = other
    return frameworks.find(name)


MOST_DEVICES = 10_000_000


def cluster_of(recipe: Recipe, device: devices.DeviceSpec) -> ClusterSpec:
    """Return the cluster: as many devices as [cluster] gives, else as [parallel] has ranks.

    If the planner chooses the layout and [cluster] gives no device count, `nodes` determines the size.
    """
    settings, world = recipe.cluster, recipe.parallel.world
    counted = "nodes" in settings.model_fields_set
    per_node = settings.devices_per_node or device.per_node
    if counted and settings.devices_per_node is None and not recipe.parallel.auto and world % settings.nodes == 0:
        per_node = world // settings.nodes
    count = settings.devices or (settings.nodes * per_node if counted or recipe.parallel.auto else world)
    if count > MOST_DEVICES:
        raise InputError(f"cluster.devices: {count:,} is more than any cluster has; give at most {MOST_DEVICES:,}")
    cluster = ClusterSpec.of(device, count)
    if settings.devices_per_node or per_node != device.per_node:
        cluster = replace(cluster, per_node=min(per_node, count), domain=0)
    return replace(cluster, inter_bandwidth=settings.inter_bandwidth * 1e9) if settings.inter_bandwidth else cluster


def _layout(recipe: Recipe, batch: int, sequence_parallel: bool) -> Layout:
    parallel, length = recipe.parallel, recipe.tokens.sequence_length
    usual = recipe_defaults.micro_batch_size(batch, length, recipe_defaults.MICRO_BATCH_TOKENS, parallel)
    return Layout(
        **{way: getattr(parallel, way) for way in AXES},
        virtual=parallel.stages_per_rank,
        zero=parallel.zero if divides_state(parallel) else 0,
        schedule=parallel.schedule,
        micro_batch=recipe.train.micro_batch or usual,
        sequence_parallel=sequence_parallel,
        recompute=recipe.train.recompute if recipe.train.recompute in get_args(Recompute) else "full",  # type: ignore[arg-type]
    )


def _precision(recipe: Recipe, device: devices.DeviceSpec, notes: list[str], *, is_open: bool) -> Precision:
    """Return the precision to plan, resolving `auto` to bf16 where the device has it.

    On a device without bf16, `auto` plans fp32 as a run does, or fp16 if there is no recipe yet (`is_open`), and adds a
    note. Raises InputError for a precision that the device does not have.
    """
    name = recipe.train.precision
    precision = "fp8" if name == "fp8-rowwise" else name
    if precision == "auto":
        if "bf16" in device.flops:
            return "bf16"
        chosen: Precision = "fp16" if is_open and "fp16" in device.flops else "fp32"
        notes.append(f"{device.name} has no bf16: {chosen} is planned; train.precision sets another")
        return chosen
    if precision not in device.flops:
        lacks = f"{device.name} does not have it" if precision in PRECISIONS else "the planner has no rates for it"
        raise InputError(f"train.precision = {name}: {lacks}; possible: {', '.join(device.flops)}")
    return precision  # type: ignore[return-value]


MORE_SEQUENCES = 1.25
"""Largest ratio of devices to sequences at which each device gets one sequence; above it, several devices share one."""


def dividing_batch(sequences: int, model: ModelConfig, cluster: ClusterSpec, *, copies_keys: bool = False) -> int:
    """Return the batch size near `sequences` that divides over the devices.

    `sequences` is returned unchanged if it divides over all devices, or over tensor groups of the smallest size that
    leaves at most `MORE_SEQUENCES` groups per sequence. Otherwise the result is a multiple of the number of groups.
    Within a quarter of `sequences`, the multiple with the most factors of two is chosen, to leave a choice of
    micro-batches. Pipelines are not considered: each stage needs a micro-batch, so they do not reduce the batch.

    Args:
        sequences: Wanted batch, in sequences.
        model: Model whose sizes limit the tensor groups.
        cluster: Devices to divide the batch over.
        copies_keys: True if tensor ranks may copy key-value heads.
    """
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
    """Return the batch that a plan proposes, in sequences.

    The wanted batch is rounded so that the devices divide it (`dividing_batch`). If it exceeds the critical batch by
    every law, it is halved until it does not.

    Args:
        sequences: Wanted batch, in sequences.
        tokens: Training tokens, or None to skip the critical batch because no law applies.
        model: Model to train.
        cluster: Devices to divide the batch over.
        copies_keys: True if tensor ranks may copy key-value heads.
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
"""Largest share of the devices that a plan leaves as spares if no layout divides all of them."""


def fewer_devices(devices: int, per_node: int) -> list[int]:
    """Return smaller device counts that more layouts divide, largest first.

    Each is the largest multiple of (devices of a node) x 2^k below `devices`, for some k, and drops at most the share
    `MOST_SPARE` of the devices.
    """
    units = [per_node << power for power in range(24)]
    return sorted(
        {each for unit in units if devices * (1 - MOST_SPARE) <= (each := devices - devices % unit) < devices}
    )[::-1]


def divisors(number: int) -> list[int]:
    """Return all divisors of a number in ascending order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]
