"""All ways to split a job over its devices: those that fit in memory, ranked by predicted speed, and why the others fall out.

What is given of a layout is kept. For every way to divide the model and its state (tensor, pipeline, context, shard, zero,
schedule, micro-batch) no more is recomputed than must be for it to fit: recomputing costs time and gives nothing but memory.
State is divided over all devices that share the batch, over those of a node, or over none. A test holds this against trying
everything.

The layout that is chosen leaves headroom on the device (plan/estimate/memory.py), and of those that are nearly as fast as the
fastest it divides the model over the fewest devices: in nanotron's sweep runs with deeper pipelines were the ones that ran far
slower than predicted, or failed. Where none leaves the headroom, the same holds of those that take little more memory, at little
more risk, than the one that takes least: that one alone may be many times slower.

Also the same plan with changes (`--what-if`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from bessemer.errors import InputError
from bessemer.layout.validity import divides_evenly, indivisible_by_tensor, require_context, require_tensor
from bessemer.model.config import ModelConfig
from bessemer.plan.estimate.job import Job, Layout, Recompute
from bessemer.plan.estimate.memory import HEADROOM, DeviceMemory, fits, memory, out_of_memory
from bessemer.plan.estimate.step import Step, refuse, step
from bessemer.plan.jobs import dividing_batch, divisors
from bessemer.plan.mixture import MixtureConfig
from bessemer.recipe import Parallel
from bessemer.recipe.parallel import AXES, LAYOUT_KEYS, SCHEDULES, PipelineSchedule, stages_complaint
from bessemer.terminal import counted

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # in the order of their price in time
MIN_CONTEXT_TOKENS = 16_384  # tokens of a sequence below which dividing it is not tried: one device holds it easily
MAX_CONTEXT = 16
LAYOUT_NAMES = (*LAYOUT_KEYS, "micro_batch", "recompute")  # what a request may give of a layout
STAGES_EACH = (1, 2, 4, 8)  # interleaved stages on a device
NEARLY_AS_FAST = 1.05  # seconds over the fastest's; with it the sweep's 1.34B and 8.86B models lost least
# Over the layout that takes least, where none leaves the headroom: points of risk, and of the device's memory.
MORE_RISK, MORE_MEMORY = 0.05, 0.05


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
    def least(self) -> Candidate:
        """The one that takes least memory."""
        return min(self.ranked, key=lambda one: one.memory.total)

    @property
    def is_choice(self) -> bool:
        """Whether there was more than one layout to choose from, but for recompute, which follows from the memory, and the place
        of experts, of which a recipe says nothing."""
        layouts = [one.job.layout for one in self.ranked] or [one.layout for one in self.rejected]
        return len({replace(layout, recompute="none", expert=1) for layout in layouts}) > 1

    @property
    def preferred(self) -> tuple[Candidate, ...]:
        """All that fit, the best choice first: of those that leave the headroom, the ones nearly as fast as the fastest by how
        few devices they divide the model over, the others by speed; then those that do not leave it, by memory. Where none
        leaves it, those that take little more than the least stand for those that do."""
        first = self.safe or self._near_least
        limit = first[0].step.seconds * NEARLY_AS_FAST if first else 0.0
        near = sorted((one for one in first if one.step.seconds <= limit), key=lambda one: _model_ways(one.job.layout))
        rest = {id(one) for one in self.ranked} - {id(one) for one in first}
        tight = sorted((one for one in self.ranked if id(one) in rest), key=lambda one: one.memory.total)
        return (*near, *(one for one in first if one.step.seconds > limit), *tight)

    @property
    def _near_least(self) -> tuple[Candidate, ...]:
        """Those with at most MORE_RISK and MORE_MEMORY over the one that takes least, the fastest first."""
        if not self.ranked:
            return ()
        least = self.least
        limit = least.memory.total + MORE_MEMORY * least.job.cluster.device.memory
        return tuple(one for one in self.ranked if one.memory.total <= limit and one.risk <= least.risk + MORE_RISK)

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


@lru_cache(maxsize=16)  # a budget is spent on plans that differ in tokens alone
def search(job: Job, given: frozenset[str] = frozenset(), headroom: float = HEADROOM) -> LayoutSearchResult:
    """Every layout of a job on its cluster's devices. given: names of the job's layout that are kept, the others are chosen;
    headroom: share of a device's memory that the chosen one leaves free.

    Raises NoSplitError where no layout divides the devices and the batch at all.
    """
    ranked: list[Candidate] = []
    rejected: list[RejectedLayout] = []
    impossible: Counter[str] = Counter()
    for split in _splits(job, given, impossible):
        _try_split(job, split, given, headroom, ranked, rejected, impossible)
    if not ranked and not rejected:
        raise NoSplitError(_no_split(job, given, impossible))
    ranked.sort(key=lambda one: (one.step.seconds, one.memory.total))
    rejected.sort(key=lambda one: one.missing)
    return LayoutSearchResult(tuple(ranked), tuple(rejected), dict(impossible), headroom)


def as_given(layout: Layout, given: frozenset[str]) -> str:
    """What of a layout was given, for a reader: `tensor 8, zero 3`; empty where nothing was."""
    return ", ".join(f"{name.replace('_', '-')} {getattr(layout, name)}" for name in LAYOUT_NAMES if name in given)


def _no_split(job: Job, given: frozenset[str], impossible: Counter[str]) -> str:
    reasons = "; ".join(f"{reason} ({count})" for reason, count in impossible.most_common(3))
    reasons = _product_of(job, given) or reasons
    sequences = dividing_batch(job.batch, job.model, job.cluster, copies_keys=job.framework.copies_keys)
    if "micro_batch" in given:
        unit = job.cluster.devices * job.layout.micro_batch
        sequences = unit * max(round(job.batch / unit), 1)
    divides = sequences != job.batch and _can_split(replace(job, batch=sequences), given)
    advice = f"; {_batch_words(job, sequences)} divides" if divides else ""
    kept = as_given(job.layout, given)
    return (
        f"parallel: no way to split over {counted(job.cluster.devices, 'device')} with a batch of "
        f"{counted(job.batch, 'sequence')}{f' and {kept} as given' if kept else ''}: {reasons}{advice}"
    )


def _product_of(job: Job, given: frozenset[str]) -> str | None:
    """Why the product of the ways that are given is none of the devices; None: it is one."""
    ways, devices = {axis: getattr(job.layout, axis) for axis in AXES if axis in given}, job.cluster.devices
    product = math.prod(ways.values())
    is_whole = len(ways) == len(AXES)
    if product == devices or (devices % product == 0 and not is_whole):
        return None
    named = " x ".join(f"{axis} {size}" for axis, size in ways.items() if size > 1) or "one process"
    equals = f" = {product:,}" if sum(size > 1 for size in ways.values()) > 1 else ""
    return f"{named}{equals} {'does not divide' if devices % product else 'is not all of'} {counted(devices, 'device')}"


def _can_split(job: Job, given: frozenset[str]) -> bool:
    """Whether any layout divides a job's devices and batch, whatever the memory."""
    unused: Counter[str] = Counter()
    return any(
        refuse(replace(job, layout=replace(split, micro_batch=micro_batch))) is None
        for split in _splits(job, given, unused)
        if _zeros(job, split, given, unused)
        for micro_batch in _micro_batches(job, job.batch // split.data, given, unused)
    )


TRIED_NEAR = 64  # sizes below, and above, one that cannot be


def what_divides(job: Job) -> str:
    """What would do in place of a layout that cannot be, as the end of its refusal: other numbers of devices, another batch,
    or the same devices as other copies and shards, where need be with another batch. Empty where none of them would."""
    layout, found = job.layout, list[str]()
    copies = layout.shard == 1 and layout.replicate > 1
    size = layout.replicate if copies else layout.shard

    def with_size(number: int) -> Job:
        changed = replace(layout, replicate=number) if copies else replace(layout, shard=number)
        return replace(job, layout=changed, cluster=replace(job.cluster, devices=changed.world))

    for sizes in (range(size - 1, 0, -1)[:TRIED_NEAR], range(size + 1, size + 1 + TRIED_NEAR)):
        if (number := next((one for one in sizes if refuse(with_size(one)) is None), None)) is not None:
            devices = with_size(number).cluster.devices
            found.append(f"{'replicate' if copies else 'shard'} {number} on {counted(devices, 'device')}")
    for shard in sorted(divisors(layout.data), key=lambda n: (n != layout.shard, -n)):  # else the largest that can be
        other = replace(job, layout=replace(layout, shard=shard, replicate=layout.data // shard))
        if (batch := _nearest_batch(other)) is not None:
            copied = f"replicate {other.layout.replicate} x " if other.layout.replicate > 1 else ""
            more = "" if batch == job.batch else f" with {_batch_words(job, batch)}"
            found.append(f"{copied}shard {shard}{more}")
            break
    return f"; with the rest as it is these divide: {'; or '.join(found)}" if found else ""


def _nearest_batch(job: Job) -> int | None:
    """The number of sequences nearest to a job's with which its layout can be; None: none near it."""
    unit = job.layout.data * job.layout.micro_batch
    middle = round(job.batch / unit)
    counts = range(max(middle - TRIED_NEAR, 1), middle + TRIED_NEAR + 1)
    tried = sorted((unit * count for count in counts), key=lambda batch: abs(batch - job.batch))
    return next((batch for batch in tried if refuse(replace(job, batch=batch)) is None), None)


def _batch_words(job: Job, sequences: int) -> str:
    return f"a batch of {sequences * job.model.sequence_length:,} tokens ({counted(sequences, 'sequence')})"


def _splits(job: Job, given: frozenset[str], impossible: Counter[str]) -> Iterator[Layout]:
    """Divisions of the model, with all that is left over for the batch (`shard`). What no micro-batch could make valid is left
    out early; what is valid `refuse` alone decides."""
    model, cluster, is_ours = job.model, job.cluster, job.framework.name == "bessemer"
    most_context = MAX_CONTEXT if model.sequence_length >= MIN_CONTEXT_TOKENS else 1
    copies = job.framework.copies_keys
    for tensor in _ways(job, given, "tensor", math.gcd(cluster.near, cluster.devices), impossible):
        if key := indivisible_by_tensor(model, tensor, copies_keys=copies):
            impossible[f"{key} does not divide over tensor"] += 1
            continue
        for context in _ways(job, given, "context", cluster.devices // tensor, impossible, most_context):
            try:
                require_tensor(model, Parallel(tensor=tensor, context=context), copies_keys=copies)
                require_context(model, Parallel(context=context))
            except InputError:
                impossible["the sequences do not divide over context x tensor"] += 1
                continue
            for pipeline in _ways(job, given, "pipeline", cluster.devices // (tensor * context), impossible):
                if pipeline > model.layers + job.framework.stages_without_blocks:
                    impossible["more pipeline stages than blocks"] += 1
                    continue
                data = cluster.devices // (tensor * context * pipeline)
                if job.batch % data:
                    impossible["the batch does not divide over shard"] += 1
                    continue
                for (schedule, virtual), shard, expert in product(
                    _schedules(job, pipeline, given, impossible), _shards(job, data, tensor, tensor * context, given, impossible),
                    expert_ranks(model, tensor * context * data),
                ):  # fmt: skip
                    if is_ours and not divides_evenly(model, tensor, shard * context):
                        impossible["the weights do not divide over shard x context beside tensor"] += 1
                        continue
                    yield Layout(
                        replicate=data // shard, shard=shard, tensor=tensor, pipeline=pipeline, virtual=virtual, context=context,
                        schedule=schedule, sequence_parallel=job.layout.sequence_parallel, expert=expert,
                    )  # fmt: skip


def _ways(
    job: Job, given: frozenset[str], axis: str, devices: int, impossible: Counter[str], most: int | None = None
) -> list[int]:
    """Sizes of an axis to try over so many devices, the one that is given alone (a tensor group may then leave its node)."""
    size: int = getattr(job.layout, axis)
    if axis not in given:
        return [each for each in divisors(devices) if most is None or each <= most]
    over = job.cluster.devices if axis == "tensor" else devices
    if over % size:
        impossible[f"{axis} {size} does not divide {counted(over, 'device')}"] += 1
        return []
    return [size]


def _shards(job: Job, data: int, tensor: int, inner: int, given: frozenset[str], impossible: Counter[str]) -> list[int]:
    """Over how many of the devices that divide the batch the state is divided: all, or as many as the weights divide over; those
    of a node, so that frequent collectives stay inside; none; or what is given."""
    if kept := given & {"shard", "replicate"}:
        layout = job.layout
        shard = layout.shard if "shard" in kept else data // layout.replicate
        if shard and data % shard == 0 and ("replicate" not in kept or shard * layout.replicate == data):
            return [shard]
        ranks = as_given(layout, frozenset(kept))
        impossible[f"{ranks} times the other ways is not {counted(job.cluster.devices, 'device')}"] += 1
        return []
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


def _stages_each(blocks: int, pipeline: int) -> list[int]:
    """Numbers of interleaved stages on a device: powers of two, and where these stop short of it as many as there are blocks for,
    up to the largest power."""
    most = min(blocks // pipeline, STAGES_EACH[-1])
    return sorted({*STAGES_EACH[1:], *([most] if most > 1 else [])})


def _schedules(
    job: Job, pipeline: int, given: frozenset[str], impossible: Counter[str]
) -> list[tuple[PipelineSchedule, int]]:
    """Schedules with the stages of a device. One that is given, or several stages, are of a pipeline."""
    layout, is_deep = job.layout, "virtual" in given and job.layout.virtual > 1
    if pipeline == 1:
        if "schedule" in given or is_deep:
            impossible[f"{as_given(layout, given & {'schedule', 'virtual'})} needs a pipeline"] += 1
            return []
        return [("1f1b", 1)]
    names: tuple[PipelineSchedule, ...] = (layout.schedule,) if "schedule" in given else ("1f1b", "interleaved")
    found: list[tuple[PipelineSchedule, int]] = []
    most_stages = job.model.layers + job.framework.stages_without_blocks
    for name in names:
        own = SCHEDULES[name].stages_per_rank
        several = _stages_each(most_stages, pipeline) if name == "interleaved" else (own,)
        for virtual in (layout.virtual,) if "virtual" in given else several:
            if stages_complaint(name, virtual) is None and pipeline * virtual <= most_stages:
                found.append((name, virtual))
    if not found:
        impossible["more pipeline stages than blocks"] += 1
    return found


def _zeros(job: Job, split: Layout, given: frozenset[str], impossible: Counter[str]) -> tuple[int, ...]:
    """ZeRO stages to try: 0 where no two devices share state; what is given alone."""
    zero = job.layout.zero
    stages = (1,) if job.model.expert_parameters else (1, 2, 3)
    if SCHEDULES[split.schedule].splits_backward:  # gradients would be wrong (Parallel.effective_zero)
        stages = (1,)
        if "zero" in given and zero > 1:
            impossible[f"schedule {split.schedule} runs with zero 1, not {zero}"] += 1
            return ()
    if split.state_shards > 1:
        return (zero,) if "zero" in given else stages
    if "zero" in given and job.cluster.devices > 1:
        impossible[f"zero {zero} divides state over shard, and shard is 1"] += 1
        return ()
    return (0,)


def _micro_batches(job: Job, each: int, given: frozenset[str], impossible: Counter[str]) -> list[int]:
    """Sequences of a forward pass to try, of `each` on a device: powers of two."""
    if "micro_batch" in given:
        sizes = [job.layout.micro_batch]
    else:
        sizes = [1 << power for power in range((each & -each).bit_length())]
    if each % sizes[0]:
        impossible["the micro-batch does not divide a part of the batch"] += 1
        return []
    return sizes


def _try_split(
    job: Job, split: Layout, given: frozenset[str], headroom: float, ranked: list[Candidate], rejected: list[RejectedLayout],
    impossible: Counter[str],
) -> None:  # fmt: skip
    """Add what becomes of one division of the model, for each micro-batch up to the largest that fits: the cheapest way to make
    it fit, and to make it leave the headroom, or the miss."""
    each = job.batch // split.data
    modes: tuple[Recompute, ...] = (job.layout.recompute,) if "recompute" in given else RECOMPUTE
    zeros = _zeros(job, split, given, impossible)
    for micro_batch in _micro_batches(job, each, given, impossible) if zeros else ():
        count = each // micro_batch
        if (why := refuse(replace(job, layout=replace(split, micro_batch=micro_batch)))) is not None:
            impossible[why] += 1
            continue
        missed: RejectedLayout | None = None
        fits_once, tried = False, zeros
        if split.pipeline > 1 and count > split.pipeline and "zero" not in given:
            # More would be divided, and gathered anew, for every micro-batch of every stage.
            tried = tuple(zero for zero in zeros if zero <= 1)
        for zero in tried:
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
                missed, fits_once = None, True
        if missed is not None:
            rejected.append(missed)
        if not fits_once and tried == zeros:
            break  # a larger one takes more
