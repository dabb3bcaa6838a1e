"""What a refusal of a layout names: the reason, and numbers of devices, batches and ways that do divide."""

from __future__ import annotations

import heapq
import itertools
import math
import shlex
from collections import Counter
from dataclasses import replace

from bessemer.layout.shards import padding
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.memory import fits, memory
from bessemer.plan.estimate.step import refuse
from bessemer.plan.jobs import divisors
from bessemer.plan.splits import as_given, micro_batch_sizes, splits, zero_stages
from bessemer.recipe.parallel import AXES
from bessemer.terminal import counted


def no_split(job: Job, given: frozenset[str], impossible: Counter[str]) -> str:
    """Why no layout divides a job's devices and batch, with a batch and sizes of what is given that do. impossible: how many
    ways to split were tried, by what is in their way."""
    common = impossible.most_common(3)
    reasons = "; ".join(f"{reason}{f' ({count:,} ways to split)' if count > 1 else ''}" for reason, count in common)
    reasons = _product_of(job, given) or reasons
    advice = _other_batches(job, given) + (_as_copies(job, given) or _other_ways(job, given))
    kept = as_given(job.layout, given)
    return (
        f"parallel: no way to split over {counted(job.cluster.devices, 'device')} with a batch of "
        f"{counted(job.batch, 'sequence')}{f' and {kept} as given' if kept else ''}: {reasons}{advice}"
    )


NEAR_MULTIPLES = 8  # of each number of sequences that some split divides into, on both sides of the batch
TRIED_BATCHES = 16  # on each side, the nearest first


def _other_batches(job: Job, given: frozenset[str]) -> str:
    """The nearest smaller and larger batch that a layout divides and that fits; where no batch makes what is given of the
    micro-batch fit, the largest micro-batch that does. Empty where there is none."""
    micro_batch = job.layout.micro_batch if "micro_batch" in given else 1
    every = replace(job, batch=job.cluster.devices * micro_batch)  # which each number of data ranks divides
    units = {split.data * micro_batch for split in splits(every, given, Counter())}
    counts = {
        unit * (job.batch // unit + step) for unit in units for step in range(-NEAR_MULTIPLES, NEAR_MULTIPLES + 1)
    }
    sides = (sorted((n for n in counts if 0 < n < job.batch), reverse=True), sorted(n for n in counts if n > job.batch))
    near = [next((n for n in side[:TRIED_BATCHES] if _can_split(replace(job, batch=n), given)), None) for side in sides]
    found = [n for n in near if n is not None]
    if fitting := [n for n in found if _can_split(replace(job, batch=n), given, fitting=True)]:
        return f"; {' or '.join(_batch_words(job, n) for n in fitting)} divides"
    if "micro_batch" not in given:
        return ""
    powers = [1 << power for power in reversed(range(micro_batch.bit_length())) if 1 << power < micro_batch]
    smaller = next((n for n in powers if _can_split(job.with_layout(micro_batch=n), given, fitting=True)), None)
    too_large = "; with a batch that divides, so large a micro-batch does not fit in the memory" if found else ""
    return f"{too_large}; with micro-batch {smaller} it can be" if smaller is not None else too_large


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


def _as_copies(job: Job, given: frozenset[str]) -> str:
    """The data ranks that are given as shards of one copy (`--dp`), as copies that can be, the fewest. Empty: none can."""
    layout = job.layout
    if layout.replicate > 1 or not {"replicate", "shard"} <= given:
        return ""
    for shard in (size for size in reversed(divisors(layout.shard)) if size < layout.shard):
        other = job.with_layout(replicate=layout.shard // shard, shard=shard)
        if _can_split(other, given):
            return f"; as replicate {other.layout.replicate} x shard {shard} it can be ({_options(job, other)}, in place of --dp)"
    return ""


TRIED_TOGETHER = 64  # sizes of all given axes, the nearest first, where no other size of one axis would do


def _other_ways(job: Job, given: frozenset[str]) -> str:
    """Sizes of the axes that are given with which a layout can be: of each axis with the others as given, else of all of them
    together, the nearest. Empty where none would do."""
    layout, sizes = job.layout, divisors(job.cluster.devices)
    # `--dp` gives replicate 1 as well.
    axes = [axis for axis in AXES if axis in given and not (axis == "replicate" and layout.replicate == 1)]
    alone = list[str]()
    for axis in axes:
        others = [size for size in sizes if size != getattr(layout, axis)]
        if can_be := [size for size in others if _can_split(job.with_layout(**{axis: size}), given)]:
            alone.append(f"{axis} {', '.join(map(str, can_be))}")
    if alone:
        return f"; with the rest as it is these can be: {'; or '.join(alone)}"
    if len(axes) < 2:
        return ""

    def distance(together: tuple[int, ...]) -> float:
        return sum(abs(math.log(size / getattr(layout, axis))) for axis, size in zip(axes, together, strict=True))

    dividing = (
        each for each in itertools.product(sizes, repeat=len(axes)) if job.cluster.devices % math.prod(each) == 0
    )
    for together in heapq.nsmallest(TRIED_TOGETHER, dividing, key=distance):
        changes = dict(zip(axes, together, strict=True))
        if _can_split(job.with_layout(**changes), given):
            return f"; the nearest that can be: {' x '.join(f'{axis} {size}' for axis, size in changes.items())}"
    return ""


def _can_split(job: Job, given: frozenset[str], *, fitting: bool = False) -> bool:
    """Whether any layout divides a job's devices and batch, whatever the memory. fitting: one that fits."""
    unused: Counter[str] = Counter()
    for split in splits(job, given, unused):
        zeros = zero_stages(job, split, given, unused)
        for micro_batch in micro_batch_sizes(job, job.batch // split.data, given, unused) if zeros else ():
            one = replace(job, layout=replace(split, micro_batch=micro_batch))
            if refuse(one) is None and (not fitting or any(_fits(one, zero, given) for zero in zeros)):
                return True
            if fitting:
                break  # a larger one takes more
    return False


def _fits(job: Job, zero: int, given: frozenset[str]) -> bool:
    """Whether a layout fits with that ZeRO stage, all recomputed where that is left open."""
    recompute = job.layout.recompute if "recompute" in given else "full"
    one = job.with_layout(zero=zero, recompute=recompute)
    return fits(one, memory(one)).fits


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
        if (number := next((one for one in sizes if _is_even(with_size(one))), None)) is not None:
            other = with_size(number)
            devices = counted(other.cluster.devices, "device")
            found.append(f"{'replicate' if copies else 'shard'} {number} on {devices} ({_options(job, other)})")
    # Those that divide the weights first, of these the shards as given, else the largest that can be.
    for shard in sorted(divisors(layout.data), key=lambda n: (_padding(job, n) > 1, n != layout.shard, -n)):
        other = replace(job, layout=replace(layout, shard=shard, replicate=layout.data // shard))
        if (batch := _nearest_batch(other)) is not None:
            copied = f"replicate {other.layout.replicate} x " if other.layout.replicate > 1 else ""
            more = "" if batch == job.batch else f" with {_batch_words(job, batch)}"
            found.append(f"{copied}shard {shard}{more} ({_options(job, replace(other, batch=batch))})")
            break
    return f"; with the rest as it is these divide: {'; or '.join(found)}" if found else ""


def _padding(job: Job, shard: int) -> float:
    """Of the weights, over so many shards."""
    return padding(job.model, job.layout.tensor, shard * job.layout.context)


def _is_even(job: Job) -> bool:
    """Whether a layout can be, and its shards divide the weights."""
    return refuse(job) is None and _padding(job, job.layout.shard) == 1


def _options(job: Job, other: Job) -> str:
    """What to type for another job in place of one that cannot be: devices, copies and shards, and the batch."""
    layout, cluster = other.layout, other.cluster
    options = list[str]()
    if cluster.devices != job.cluster.devices:
        options.append(f"--gpus {shlex.quote(f'{cluster.devices}x{cluster.device.name}')}")
    if layout.replicate == 1:
        options.append(f"--dp {layout.shard}")
    else:
        options.append(f"--set parallel.replicate={layout.replicate} --set parallel.shard={layout.shard}")
    if other.batch != job.batch:
        options.append(f"--batch {other.tokens}")
    return " ".join(options)


def _nearest_batch(job: Job) -> int | None:
    """The number of sequences nearest to a job's with which its layout can be; None: none near it."""
    unit = job.layout.data * job.layout.micro_batch
    middle = round(job.batch / unit)
    counts = range(max(middle - TRIED_NEAR, 1), middle + TRIED_NEAR + 1)
    tried = sorted((unit * count for count in counts), key=lambda batch: abs(batch - job.batch))
    return next((batch for batch in tried if refuse(replace(job, batch=batch)) is None), None)


def _batch_words(job: Job, sequences: int) -> str:
    return f"a batch of {sequences * job.model.sequence_length:,} tokens ({counted(sequences, 'sequence')})"
