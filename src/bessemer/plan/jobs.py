"""From a recipe to the jobs that the planner counts with: its model, its cluster, and its layout where it gives one."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from bessemer.defaults import derived_keys
from bessemer.defaults.scaling_rules import TOKENS_PER_PARAMETER, batch_tokens, kaplan_critical_batch, kaplan_loss
from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.layout.devices import PRECISIONS
from bessemer.layout.flops import flops_per_token
from bessemer.layout.validity import indivisible_by_tensor
from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.config import model_config
from bessemer.plan import unplanned
from bessemer.plan.batch import BEYOND, batch_outlook, require_batch_of_tokens
from bessemer.plan.estimate import experts, frameworks
from bessemer.plan.estimate.frameworks import Framework
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout, Precision, Recompute, RunState, domain_size
from bessemer.plan.estimate.memory import HEADROOM
from bessemer.plan.estimate.step import refuse
from bessemer.plan.mixture import MixtureConfig
from bessemer.recipe import Parallel, Recipe
from bessemer.recipe.parallel import AXES, MODEL_AXES
from bessemer.terminal import amount, counted

GB = 1e9


@dataclass(frozen=True)
class Goal:
    """A recipe as the planner sees it. recipe: resolved; job: its layout, or what is given of it where the planner chooses the
    rest; given: names of `Layout` that are not chosen; notes: how the request was understood, where a reader of the plan must
    know it; unplanned: what the recipe sets and the plan does not count; headroom: share of a device's memory that a layout which
    it chooses leaves free; tokens_by_size: the recipe says neither tokens nor steps; checkpoint_every: steps between checkpoints,
    where the recipe says so."""

    recipe: Recipe
    job: Job
    tokens: int
    chooses_layout: bool
    given: frozenset[str]
    notes: tuple[str, ...] = ()
    headroom: float = HEADROOM
    tokens_by_size: bool = False
    unplanned: tuple[str, ...] = ()
    checkpoint_every: int | None = None

    @property
    def default_note(self) -> str:
        """For a reader: that the tokens are the default. Empty where tokens, steps or minutes are given."""
        if not self.tokens_by_size or self.recipe.train.minutes is not None:
            return ""
        note = f"by default, {self.tokens / self.job.model.active_parameters:.3g} a parameter"
        return f" ({note}{'' if self.recipe.is_pretraining else ', as of a pretraining: say train.tokens'})"


def goal_of(
    recipe: Recipe, vocabulary: int, labels: int = 0, *, model: ModelConfig | None = None, is_open: bool = False
) -> Goal:
    """What a recipe asks for. model: in the place of the recipe's; is_open: there is no recipe yet, so that what it would leave
    to a run may be chosen. Raises InputError where the recipe names no device, or a device or a framework that is unknown, or
    sizes that do not go together."""
    if recipe.cluster.device is None:
        count = recipe.cluster.devices
        named = next((one for one in devices.catalogue().values() if str(count) in one.name.split()), None)
        meant = (
            f"; {count:,} is read as a number of devices, for one {named.name} write --gpus 1x{count}" if named else ""
        )
        raise InputError(
            f"cluster.device: which device to plan for? name one, as H100; `bessemer plan --devices` lists them{meant}"
        )
    device = devices.find(recipe.cluster.device, Path(recipe.cluster.catalogue) if recipe.cluster.catalogue else None)
    has_batch = recipe.train.global_batch_tokens is not None
    by_size = recipe.train.tokens is None and recipe.train.steps is None
    if isinstance(model, MixtureConfig):
        recipe = _of_mixture(recipe, model)
    resolved = derived_keys.resolve(recipe, vocabulary, labels=labels)
    classes = labels if resolved.train.objective == "classify" else 0
    config = model or model_config(resolved, vocabulary, labels=classes)
    cluster, notes = _cluster(recipe, device), list[str]()
    framework = _framework(recipe, device, config, notes)
    not_counted = unplanned.for_catalogue(recipe, framework.name)
    if recipe.train.precision == "fp8-rowwise":
        framework = replace(framework, fp8="row")
    if recipe.parallel.auto and not has_batch:
        copies = framework.copies_keys
        default, length = resolved.batches.full, resolved.tokens.sequence_length
        horizon = resolved.batches.tokens_before(resolved.train.steps or 0)
        sequences, too_large = dividing_batch(default, config, cluster, copies_keys=copies), ""
        if recipe.is_pretraining:
            sequences, too_large = proposed_batch(default, horizon, config, cluster, copies_keys=copies)
        if sequences != default:
            recipe = recipe.changed(train={"global_batch_tokens": sequences * length})
            resolved = derived_keys.resolve(recipe, vocabulary, labels=labels)
            notes.append(
                f"a batch of {counted(sequences, 'sequence')} is proposed, which {counted(cluster.devices, 'device')} divide; "
                f"the default is {default:,}{too_large}"
            )
    batch = resolved.batches.full
    tokens = _whole_steps(recipe, resolved, notes, proposed_for=None if has_batch else cluster.devices)
    layout = _layout(recipe, batch, framework.sequence_parallel)
    if framework.fully_sharded and (why := experts.refuse(config, layout, framework)):
        raise InputError(why)
    if isinstance(config, MixtureConfig) and "zero" not in recipe.parallel.model_fields_set:
        layout = replace(layout, zero=min(layout.zero, 1))
    precision = _precision(recipe, device, notes, is_open=is_open)
    job = Job(config, layout, cluster, batch, precision, framework, _run_state(resolved, framework))
    notes += [*_node_notes(recipe, cluster), *_unmeasured(device)]
    if recipe.train.recompute == "budget":
        notes.append(
            "recompute budget, which recomputes some of the blocks, is planned as one of none, selective and full, which the row "
            "layout names; a run lies between none and full in time and memory"
        )
    chosen, given = recipe.parallel.auto, set[str]()
    if not chosen and job.layout.world != cluster.devices:
        raise InputError(_mismatch(recipe, job))
    if chosen:
        given |= recipe.parallel.given_layout
        job = job.with_layout(zero=recipe.parallel.zero, virtual=recipe.parallel.virtual or 1)
    if recipe.train.micro_batch is not None:
        given.add("micro_batch")
    if "recompute" in recipe.train.model_fields_set and recipe.train.recompute != "budget":
        given.add("recompute")
    headroom = HEADROOM if recipe.cluster.headroom is None else recipe.cluster.headroom
    return Goal(
        resolved,
        job,
        tokens,
        chosen,
        frozenset(given),
        tuple(notes),
        headroom,
        by_size,
        not_counted,
        recipe.checkpoint.every,
    )


WEB_TOKENS = 3.1e15
"""Of all text of the web, the deep web included, at most (Villalobos et al. 2024, table 1: 3,100T)."""
MOST_TOKENS = 100 * WEB_TOKENS

MORE_TOKENS = 0.01
"""Share of the tokens by which whole steps may exceed them without a note."""


def _whole_steps(recipe: Recipe, resolved: Recipe, notes: list[str], *, proposed_for: int | None) -> int:
    """Tokens of the run's steps, with a note where whole steps need more than the recipe says. proposed_for: devices that a batch
    is proposed for, where none is given. Raises InputError for a batch of more tokens than the run has."""
    tokens = resolved.batches.tokens_before(resolved.train.steps or 0)
    if tokens > MOST_TOKENS:
        raise InputError(
            f"train.tokens: {amount(tokens)} is over {MOST_TOKENS / WEB_TOKENS:.0f} times the text of the whole web "
            f"({amount(WEB_TOKENS)}); give fewer"
        )
    asked = recipe.train.tokens
    if asked is None:
        return tokens
    require_batch_of_tokens(recipe, proposed_for)
    if tokens > (1 + MORE_TOKENS) * asked:
        steps = counted(resolved.train.steps or 0, "whole step")
        notes.append(
            f"{amount(tokens)} tokens in {steps} are planned, {tokens / asked - 1:.1%} more than {amount(asked)}"
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
        critical = kaplan_critical_batch(kaplan_loss(active, tokens))
        advised = min(batch_tokens(flops_per_token(model) * tokens), critical)
        recipe = recipe.changed(train={"global_batch_tokens": length << max(round(math.log2(advised / length)), 0)})
    return recipe


MIXTURE_FRAMEWORK = "megatron-core"


def _framework(recipe: Recipe, device: devices.DeviceSpec, model: ModelConfig, notes: list[str]) -> Framework:
    """The recipe's; of a device or a model that Bessemer does not train, another program's, which is noted. Raises InputError."""
    name, other, what = recipe.cluster.framework, "bessemer", ""
    if isinstance(model, MixtureConfig):
        other, what = MIXTURE_FRAMEWORK, "mixtures of experts"
    elif device.framework != "bessemer":
        other, what = device.framework, f"on {device.name}"
    if other != "bessemer" and name == "bessemer":
        if "framework" in recipe.cluster.model_fields_set:
            raise InputError(
                f"cluster.framework = bessemer: it does not train {what}; leave it out, which plans for {other}"
            )
        notes.append(f"Bessemer does not train {what}: this is a plan for a program that does, {other}")
        name = other
    if device.framework not in ("bessemer", name):
        notes.append(f"{name} does not run on {device.name}: read the plan as what such a program would take there")
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
        raise InputError(
            f"cluster.devices: {count:,} is more than any cluster has; at most {MOST_DEVICES:,} are planned"
        )
    if recipe.parallel.auto and given.devices is None and given.devices_per_node is None and not counted:
        _require_ways_of_a_node(recipe.parallel, device, count)
    return ClusterSpec(
        device=device,
        devices=count,
        per_node=min(per_node, count),
        intra_bandwidth=given.intra_bandwidth * GB if given.intra_bandwidth else device.intra_bandwidth,
        inter_bandwidth=given.inter_bandwidth * GB if given.inter_bandwidth else device.inter_bandwidth,
        domain=0 if given.devices_per_node or per_node != device.per_node else domain_size(device, count),
    )


def _require_ways_of_a_node(layout: Parallel, device: devices.DeviceSpec, count: int) -> None:
    """Raises InputError where the ways that are given do not divide a node, which is planned where nothing says how many devices
    there are."""
    ways = {axis: size for axis in AXES if axis in layout.given_layout and (size := getattr(layout, axis)) > 1}
    product = math.prod(ways.values())
    if count % product == 0:
        return
    named = " x ".join(f"{axis} {size}" for axis, size in ways.items()) + f" = {product:,}" * (len(ways) > 1)
    raise InputError(
        f"parallel: {named} does not divide {counted(count, 'device')}, one node of {device.name}, which is planned where "
        f"nothing gives the number of devices; add --gpus {shlex.quote(f'{product}x{device.name}')}, "
        f"or cluster.devices = {product}"
    )


def _node_notes(recipe: Recipe, cluster: ClusterSpec) -> list[str]:
    """What to note of nodes that the devices do not fill."""
    asked, count = recipe.cluster.devices_per_node, cluster.devices
    if asked is not None and asked > count:
        return [
            f"cluster.devices_per_node = {asked:,} is more than the {counted(count, 'device')}: planned as one node of {count:,}"
        ]
    if last := count % cluster.per_node:
        return [
            f"the last of {cluster.nodes:,} nodes has {last} of its {cluster.per_node} devices; the others are not in the figures"
        ]
    return []


def _unmeasured(device: devices.DeviceSpec) -> list[str]:
    """What to note of an entry of the user's without a measured share of the peak."""
    if device.matmul is not None:
        return []
    return [
        f"{device.name} is planned as if its matmuls reach {devices.UNMEASURED_MATMUL:.0%} of the peak, in all of a step: its "
        "entry has no `matmul` that was measured; H100s reach 64% over whole steps"
    ]


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


def _precision(recipe: Recipe, device: devices.DeviceSpec, notes: list[str], *, is_open: bool) -> Precision:
    """The recipe's; auto: bf16 where the device has it. Where it has none a run of auto is in fp32, which is noted; is_open:
    nobody has written a recipe yet, so fp16 is planned. Raises InputError for one that the device does not have."""
    asked = recipe.train.precision
    precision = "fp8" if asked == "fp8-rowwise" else asked
    if precision == "fp32" and (faster_ones := [name for name in ("bf16", "fp16") if name in device.flops]):
        narrow = faster_ones[0]
        notes.append(f"fp32 as asked: {narrow} has {device.flops[narrow] / device.flops['fp32']:.3g} times its rate")
    if precision == "auto":
        if "bf16" in device.flops or "fp16" not in device.flops:
            return "bf16" if "bf16" in device.flops else "fp32"
        faster = f"{device.flops['fp16'] / device.flops['fp32']:.3g} times the rate of fp32"
        if is_open:
            notes.append(
                f'{device.name} has no bf16: fp16 is planned, {faster}; a run takes it with train.precision = "fp16"'
            )
            return "fp16"
        notes.append(f'{device.name} has no bf16, so auto is fp32: train.precision = "fp16" would have {faster}')
        return "fp32"
    if precision not in device.flops:
        lacks = f"{device.name} does not have it" if precision in PRECISIONS else "the planner has no rates for it"
        raise InputError(f"train.precision = {asked}: {lacks}; possible: {', '.join(device.flops)}")
    return precision  # type: ignore[return-value]


def _run_state(recipe: Recipe, framework: Framework) -> RunState:
    """What of a recipe changes the memory of a run of this program."""
    train, optimizer = recipe.train, recipe.train.optimizer
    if framework.name != "bessemer":
        return RunState()
    return RunState(
        optimizer=optimizer.kind, moments=optimizer.state, offload=optimizer.offload, has_ema=train.ema > 0,
        loss_chunk=train.loss_chunk, offload_shards=recipe.parallel.offload, dropout=train.dropout,
        is_compiled=train.compile != "off",
    )  # fmt: skip


def _mismatch(recipe: Recipe, job: Job) -> str:
    layout, cluster, world = recipe.parallel, job.cluster, job.layout.world
    product = " x ".join(f"{getattr(layout, way)}" for way in AXES)
    rest, parts = layout.ranks_per_part, cluster.devices // layout.ranks_per_part
    fills = (replace(job.layout, shard=n, replicate=parts // n) for n in reversed(divisors(parts)))
    if cluster.devices % rest:
        advice = f"{' x '.join(MODEL_AXES)} = {rest} does not divide them; take a divisor of {cluster.devices}"
    elif (fit := next((one for one in fills if refuse(replace(job, layout=one)) is None), None)) is not None:
        copies = f"replicate = {fit.replicate} and " if fit.replicate > 1 else ""
        advice = f"{copies}shard = {fit.shard} would fill them"
    else:
        advice = (
            "no shard and replicate that fill them divide both weights and batch; take another batch or other devices"
        )
    return (
        f"parallel: replicate x shard x tensor x pipeline x context = {product} = {counted(world, 'process')}, but [cluster] "
        f"has {counted(cluster.devices, 'device')} ({counted(cluster.nodes, 'node')}); {advice}, "
        "or leave some of them out, and auto = true lets the planner choose those"
    )


NEAR_BATCH = 0.05
"""How far from a batch that was given a rounder one is looked for."""


def better_batches(job: Job) -> list[int]:
    """Numbers of sequences near a job's batch that divide over more layouts, if any: what the devices divide, and the one with
    most factors of two, where the batch has fewer than the devices can use."""
    sequences, devices = job.batch, job.cluster.devices
    near = range(math.ceil(sequences * (1 - NEAR_BATCH)), math.floor(sequences * (1 + NEAR_BATCH)) + 1)
    best = max(near, key=lambda n: (n & -n, -abs(n - sequences)), default=sequences)
    whole = dividing_batch(sequences, job.model, job.cluster, copies_keys=job.framework.copies_keys)
    found = {whole} if sequences / MORE_SEQUENCES <= whole <= sequences * MORE_SEQUENCES else set[int]()
    if best & -best > sequences & -sequences < devices:
        found.add(best)
    return sorted(found - {sequences})


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
    sequences: int, tokens: int, model: ModelConfig, cluster: ClusterSpec, *, copies_keys: bool = False
) -> tuple[int, str]:
    """The usual batch of `sequences` as the devices divide it. Where that is beyond the critical batch of a run of `tokens` by
    every law: the first of its half, quarter, ... that is not, if there is one, and the reason; the reason is empty otherwise."""
    smaller, why = sequences, ""
    while smaller:
        found = dividing_batch(smaller, model, cluster, copies_keys=copies_keys)
        if batch_outlook(model.active_parameters, tokens, found * model.sequence_length).verdict != BEYOND:
            return found, why
        divided = "" if found == smaller else f", which these devices divide as {found:,}"
        why = why or f"{divided}, beyond the critical batch by every law"
        smaller //= 2
    found = dividing_batch(sequences, model, cluster, copies_keys=copies_keys)
    return found, "; it is beyond the critical batch by every law, as is each smaller one that they divide"


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
