"""All ways to split a job over its devices: those that fit in memory, ranked by predicted speed, and why the others fall out.

For every way to divide the model and its state (tensor, pipeline, context, shard, zero, schedule, micro-batch) no more is
recomputed than must be for it to fit: recomputing costs time and gives nothing but memory. State is divided over all devices that
share the batch, over those of a node, or over none. A test holds this against trying everything.

The layout that is chosen leaves headroom on the device (plan/estimate/risk.py), and of those that are nearly as fast as the
fastest it divides the model over the fewest devices: in nanotron's sweep runs with deeper pipelines were the ones that ran far
slower than predicted, or failed.

Also the same plan with changes (`--what-if`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from bessemer.errors import InputError
from bessemer.layout.validity import divides_evenly, indivisible_by_tensor, require_context, require_tensor
from bessemer.model.config import ModelConfig
from bessemer.plan.ask import PlanRequest, with_changes
from bessemer.plan.estimate.job import Job, Layout, Recompute
from bessemer.plan.estimate.memory import DeviceMemory, fits, memory
from bessemer.plan.estimate.risk import HEADROOM, out_of_memory
from bessemer.plan.estimate.step import Step, refuse, step
from bessemer.plan.jobs import dividing_batch, divisors
from bessemer.plan.mixture import MixtureConfig
from bessemer.recipe import Parallel
from bessemer.recipe.parallel import PipelineSchedule
from bessemer.terminal import counted

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # in the order of their price in time
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
MIN_CONTEXT_TOKENS = 16_384  # tokens of a sequence below which dividing it is not tried: one device holds it easily
MAX_CONTEXT = 16
STAGES_EACH = (1, 2, 4, 8)  # interleaved stages on a device
NEARLY_AS_FAST = 1.05  # seconds over the fastest's; with it the sweep's 1.34B and 8.86B models lost least


class NoLayoutError(InputError):
    """No layout of a job can be, or none fits in memory."""


class NoSplitError(NoLayoutError):
    """No layout divides the devices and the batch, whatever the memory."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with what it takes."""

    job: Job
    memory: DeviceMemory
    step: Step

    @property
    def risk(self) -> float:
        """Probability that it runs out of memory."""
        return out_of_memory(self.memory.total, self.job.cluster.device.memory)

    def leaves(self, headroom: float) -> bool:
        """True where this share of the device's memory stays free, by plan."""
        return self.memory.total <= (1 - headroom) * self.job.cluster.device.memory


@dataclass(frozen=True)
class RejectedLayout:
    """A layout that does not fit even with everything recomputed. reasons: the miss, then the largest parts of memory."""

    layout: Layout
    missing: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class LayoutSearchResult:
    """ranked: those that fit, the fastest first; rejected: those that do not, the nearest miss first; impossible: how many ways
    to split the model cannot take, by reason; headroom: share of a device's memory that the chosen one leaves free."""

    ranked: tuple[Candidate, ...]
    rejected: tuple[RejectedLayout, ...]
    impossible: dict[str, int]
    headroom: float = HEADROOM

    @property
    def safe(self) -> tuple[Candidate, ...]:
        """Those that leave the headroom, the fastest first."""
        return tuple(one for one in self.ranked if one.leaves(self.headroom))

    @property
    def preferred(self) -> tuple[Candidate, ...]:
        """All that fit, the best choice first: of those that leave the headroom, the ones nearly as fast as the fastest by how
        few devices they divide the model over, the others by speed; then those that do not leave it, by memory."""
        safe = self.safe
        limit = safe[0].step.seconds * NEARLY_AS_FAST if safe else 0.0
        near = sorted((one for one in safe if one.step.seconds <= limit), key=lambda one: _model_ways(one.job.layout))
        tight = sorted((one for one in self.ranked if not one.leaves(self.headroom)), key=lambda one: one.memory.total)
        return (*near, *(one for one in safe if one.step.seconds > limit), *tight)

    @property
    def pareto(self) -> tuple[Candidate, ...]:
        """Those that no other beats in both speed and free memory, the fastest first. On one cluster money goes with speed."""
        front: list[Candidate] = []
        for one in self.ranked:
            if not front or one.memory.total < front[-1].memory.total:
                front.append(one)
        return tuple(front)


def _model_ways(layout: Layout) -> int:
    """Devices over which one copy of the computation is divided."""
    return layout.tensor * layout.pipeline * layout.context


def search(
    job: Job, free: frozenset[str] = frozenset({"micro_batch", "recompute"}), headroom: float = HEADROOM
) -> LayoutSearchResult:
    """Every layout of a job on its cluster's devices. free: of micro_batch and recompute, what may be chosen; else the job's;
    headroom: share of a device's memory that the chosen one leaves free.

    Raises NoSplitError where no layout divides the devices and the batch at all.
    """
    ranked: list[Candidate] = []
    rejected: list[RejectedLayout] = []
    impossible: Counter[str] = Counter()
    for split in _splits(job, impossible):
        _try_split(job, split, free, headroom, ranked, rejected, impossible)
    if not ranked and not rejected:
        raise NoSplitError(_no_split(job, impossible))
    ranked.sort(key=lambda one: (one.step.seconds, one.memory.total))
    rejected.sort(key=lambda one: one.missing)
    return LayoutSearchResult(tuple(ranked), tuple(rejected), dict(impossible), headroom)


def _no_split(job: Job, impossible: Counter[str]) -> str:
    reasons = "; ".join(f"{reason} ({count})" for reason, count in impossible.most_common(3))
    sequences = dividing_batch(job.batch, job.model, job.cluster, copies_keys=job.framework.copies_keys)
    tokens = sequences * job.model.sequence_length
    advice = (
        f"; a batch of {tokens:,} tokens ({counted(sequences, 'sequence')}) divides" if sequences != job.batch else ""
    )
    return (
        f"parallel: no way to split over {counted(job.cluster.devices, 'device')} with a batch of "
        f"{counted(job.batch, 'sequence')}: {reasons}{advice}"
    )


def _splits(job: Job, impossible: Counter[str]) -> Iterator[Layout]:
    """Divisions of the model, with all that is left over for the batch (`shard`). What no micro-batch could make valid is left
    out early; what is valid `refuse` alone decides."""
    model, cluster, is_ours = job.model, job.cluster, job.framework.name == "bessemer"
    most_context = MAX_CONTEXT if model.sequence_length >= MIN_CONTEXT_TOKENS else 1
    copies = job.framework.copies_keys
    for tensor in divisors(math.gcd(cluster.near, cluster.devices)):
        if key := indivisible_by_tensor(model, tensor, copies_keys=copies):
            impossible[f"{key} does not divide over tensor"] += 1
            continue
        for context in (c for c in divisors(cluster.devices // tensor) if c <= most_context):
            try:
                require_tensor(model, Parallel(tensor=tensor, context=context), copies_keys=copies)
                require_context(model, Parallel(context=context))
            except InputError:
                impossible["the sequences do not divide over context x tensor"] += 1
                continue
            for pipeline in divisors(cluster.devices // (tensor * context)):
                if pipeline > model.layers:
                    impossible["more pipeline stages than blocks"] += 1
                    continue
                data = cluster.devices // (tensor * context * pipeline)
                if job.batch % data:
                    impossible["the batch does not divide over shard"] += 1
                    continue
                for (schedule, virtual), shard, expert in product(
                    _schedules(model, pipeline), _shards(job, data, tensor, tensor * context),
                    expert_ranks(model, tensor * context * data),
                ):  # fmt: skip
                    if is_ours and not divides_evenly(model, tensor, shard * context):
                        impossible["the weights do not divide over shard x context beside tensor"] += 1
                        continue
                    yield Layout(
                        replicate=data // shard, shard=shard, tensor=tensor, pipeline=pipeline, virtual=virtual, context=context,
                        schedule=schedule, sequence_parallel=job.layout.sequence_parallel, expert=expert,
                    )  # fmt: skip


def _shards(job: Job, data: int, tensor: int, inner: int) -> list[int]:
    """Over how many of the devices that divide the batch the state is divided: all, or as many as the weights divide over; those
    of a node, so that frequent collectives stay inside; none."""
    within = job.cluster.near // inner if job.cluster.near % inner == 0 else 1
    if job.model.expert_parameters:
        return [data]
    most = data
    if job.framework.name == "bessemer":
        most = next(n for n in reversed(divisors(data)) if divides_evenly(job.model, tensor, n * inner // tensor))
    return sorted({data, most, within if data % within == 0 else data, 1}, reverse=True)


def expert_ranks(model: ModelConfig, ranks: int) -> list[int]:
    """Over how many of the ranks of a pipeline stage a mixture's experts are divided."""
    if not isinstance(model, MixtureConfig):
        return [1]
    return [each for each in divisors(model.num_experts) if ranks % each == 0]


def _schedules(model: ModelConfig, pipeline: int) -> Iterator[tuple[PipelineSchedule, int]]:
    yield "1f1b", 1
    if pipeline > 1:
        for virtual in STAGES_EACH[1:]:
            if pipeline * virtual <= model.layers:
                yield "interleaved", virtual


def _try_split(
    job: Job, split: Layout, free: frozenset[str], headroom: float, ranked: list[Candidate], rejected: list[RejectedLayout],
    impossible: Counter[str],
) -> None:  # fmt: skip
    """Add what becomes of one division of the model, for each micro-batch: the cheapest way to make it fit, and to make it leave
    the headroom, or the miss."""
    each = job.batch // split.data
    sizes = MICRO_BATCHES if "micro_batch" in free else (job.layout.micro_batch,)
    modes = RECOMPUTE if "recompute" in free else (job.layout.recompute,)
    for micro_batch in sizes:
        if each % micro_batch:
            impossible["the micro-batch does not divide a part of the batch"] += 1
            continue
        count = each // micro_batch
        if (why := refuse(replace(job, layout=replace(split, micro_batch=micro_batch)))) is not None:
            impossible[why] += 1
            continue
        missed: RejectedLayout | None = None
        stages = (1,) if job.model.expert_parameters else (1, 2, 3)
        for zero in stages if split.state_shards > 1 else (0,):
            if zero > 1 and split.pipeline > 1 and count > split.pipeline:
                continue  # gradients and weights would be divided and gathered anew for every micro-batch of every stage
            fitting: Candidate | None = None
            for recompute in modes:
                layout = replace(split, zero=zero, micro_batch=micro_batch, recompute=recompute)
                one = replace(job, layout=layout)
                held = memory(one)
                verdict = fits(one, held)
                if verdict.fits and (fitting is None or held.total < fitting.memory.total):
                    fitting = Candidate(one, held, step(one))
                    ranked.append(fitting)
                    if fitting.leaves(headroom):
                        break
                if not verdict.fits and (missed is None or -verdict.free < missed.missing):
                    missed = RejectedLayout(layout, -verdict.free, verdict.reasons)
            if fitting is not None:
                missed = None
        if missed is not None:
            rejected.append(missed)


def changed(asked: PlanRequest, text: str) -> PlanRequest:
    """`name=value,name=value`: what is asked, with these changes. Raises InputError."""
    changes = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = one.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise InputError(
                f"--what-if {text}: write it as name=value,name=value, for example gpus=1024,precision=fp8"
            )
        changes[name.strip()] = value.strip()
    if not changes:
        raise InputError("--what-if: what? for example gpus=1024, or precision=fp8,tp=4")
    return with_changes(asked, changes)
