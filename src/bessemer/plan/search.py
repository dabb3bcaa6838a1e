"""Layout search: all layouts of a job that fit in memory, ranked by predicted speed, and why the others do not fit.

Layout settings that the request gives are kept. For every way to divide the model and its state (tensor, pipeline,
context, shard, ZeRO stage, schedule, micro-batch), the search recomputes only as much as the layout needs to fit,
because recomputation costs time and saves nothing but memory. State is sharded over all devices that share the batch,
over those of one node, or not at all. A test compares the result with exhaustive search.

The chosen layout leaves headroom on the device (plan/estimate/memory.py). Among the layouts nearly as fast as the
fastest, it divides the model over the fewest devices: in nanotron's sweep, runs with deeper pipelines were the ones
that ran far slower than predicted, or failed. If no layout leaves the headroom, the same rule applies to those that
need little more memory, at little more risk, than the smallest one. The smallest one alone may be many times slower.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.distributed.validity import describe_axes
from bessemer.plan.estimate.job import Job, Layout, Recompute
from bessemer.plan.estimate.memory import HEADROOM, DeviceMemory, excess, memory, out_of_memory
from bessemer.plan.estimate.step import Step, refuse, step
from bessemer.plan.layouts import describe_fixed, micro_batch_sizes, splits, zero_stages

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # by ascending cost in time
# Ratio to the fastest step time. The 1.34B and 8.86B models of nanotron's sweep lost least with this value.
NEARLY_AS_FAST = 1.05
# If no layout leaves the headroom: allowed increase over the smallest layout, as a probability of running out of memory and as
# a share of the device's memory.
MORE_RISK, MORE_MEMORY = 0.05, 0.05


class NoLayoutError(InputError):
    """No layout divides the job, or none fits in memory."""


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, with its memory and step time.

    Attributes:
        job: The job with this layout.
        memory: Peak memory of the fullest device.
        step: Predicted step time, by part.
    """

    job: Job
    memory: DeviceMemory
    step: Step

    @property
    def risk(self) -> float:
        """Probability that the layout runs out of memory."""
        return out_of_memory(self.memory.total, self.job.cluster.device.memory)

    def leaves(self, headroom: float) -> bool:
        """Return True if this share of the device's memory stays free in the plan."""
        return self.memory.total <= (1 - headroom) * self.job.cluster.device.memory


@dataclass(frozen=True)
class RejectedLayout:
    """A layout that does not fit in memory, even with everything recomputed.

    Attributes:
        layout: The layout.
        missing: Bytes by which it exceeds the device's memory.
        reasons: The excess, followed by the largest parts of the memory.
    """

    layout: Layout
    missing: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class LayoutSearchResult:
    """The result of a layout search.

    Attributes:
        ranked: Layouts that fit, fastest first.
        rejected: Layouts that do not fit, smallest excess first.
        impossible: Number of splits that the model cannot use, by reason.
        headroom: Share of a device's memory that the chosen layout leaves free.
    """

    ranked: tuple[Candidate, ...]
    rejected: tuple[RejectedLayout, ...]
    impossible: dict[str, int]
    headroom: float = HEADROOM

    @property
    def safe(self) -> tuple[Candidate, ...]:
        """Layouts that leave the headroom, fastest first."""
        return tuple(one for one in self.ranked if one.leaves(self.headroom))

    @property
    def is_choice(self) -> bool:
        """True if the search had more than one layout to choose from.

        Recomputation does not count, because it follows from memory.
        """
        layouts = [one.job.layout for one in self.ranked] or [one.layout for one in self.rejected]
        return len({replace(layout, recompute="none") for layout in layouts}) > 1

    @property
    def preferred(self) -> tuple[Candidate, ...]:
        """All layouts that fit, best choice first.

        Layouts that leave the headroom come first. Of these, those nearly as fast as the fastest are ordered by the
        number of devices that hold one copy of the model, fewest first, and the others by speed. Layouts without the
        headroom follow, those with less memory first. If no layout leaves the headroom, those that need little more
        memory than the smallest one (`_near_least`) take the first place.
        """
        first = self.safe or self._near_least
        limit = first[0].step.seconds * NEARLY_AS_FAST if first else 0.0
        fast = (one for one in first if one.step.seconds <= limit)
        near = sorted(fast, key=lambda one: one.job.layout.world // one.job.layout.data)
        rest = {id(one) for one in self.ranked} - {id(one) for one in first}
        tight = sorted((one for one in self.ranked if id(one) in rest), key=lambda one: one.memory.total)
        return (*near, *(one for one in first if one.step.seconds > limit), *tight)

    @property
    def _near_least(self) -> tuple[Candidate, ...]:
        """Layouts within MORE_RISK and MORE_MEMORY of the one that needs least memory, fastest first."""
        if not self.ranked:
            return ()
        least = min(self.ranked, key=lambda one: one.memory.total)
        limit = least.memory.total + MORE_MEMORY * least.job.cluster.device.memory
        return tuple(one for one in self.ranked if one.memory.total <= limit and one.risk <= least.risk + MORE_RISK)

    @property
    def pareto(self) -> tuple[Candidate, ...]:
        """Layouts that no other beats in both speed and free memory, fastest first.

        Cost needs no separate axis, because it is proportional to time on one cluster.
        """
        front: list[Candidate] = []
        for one in self.ranked:
            if not front or one.memory.total < front[-1].memory.total:
                front.append(one)
        return tuple(front)


def layout_line(job: Job) -> str:
    """Describe a job's layout in one line: its parallel axes, micro-batches and recomputation."""
    batches = f"{job.micro_batches} micro-batch{'es' if job.micro_batches > 1 else ''} of {job.layout.micro_batch}"
    return ", ".join([*layout_parts(job.layout), batches, f"recompute {job.layout.recompute}"])


def layout_parts(layout: Layout) -> list[str]:
    """Describe how a layout divides the model and its state, one string for each part."""
    parts = [describe_axes(layout)]
    if layout.pipeline > 1:
        parts.append(layout.schedule + (f" with virtual {layout.virtual}" if layout.virtual > 1 else ""))
    return [*parts, f"zero {layout.zero}"] if layout.zero else parts


@lru_cache(maxsize=16)  # a budget search plans jobs that differ only in tokens
def search(job: Job, fixed: frozenset[str] = frozenset(), headroom: float = HEADROOM) -> LayoutSearchResult:
    """Search for all layouts of a job on the devices of its cluster.

    Args:
        job: Job to search a layout for.
        fixed: Names of the layout fields that the job's layout fixes. The search chooses the others.
        headroom: Share of a device's memory that the chosen layout leaves free.

    Returns:
        The layouts that fit, the layouts that do not, and the splits that are impossible.

    Raises:
        NoLayoutError: No layout divides the devices and the batch.
    """
    ranked: list[Candidate] = []
    rejected: list[RejectedLayout] = []
    impossible: Counter[str] = Counter()
    for split in splits(job, fixed, impossible):
        _try_split(job, split, fixed, headroom, ranked, rejected, impossible)
    if not ranked and not rejected:
        kept = describe_fixed(job.layout, fixed)
        raise NoLayoutError(
            f"parallel: no way to split over {counted(job.cluster.devices, 'device')} with a batch of "
            f"{counted(job.batch, 'sequence')}{f' and {kept} as given' if kept else ''}: "
            f"{'; '.join(reason for reason, _ in impossible.most_common(3))}"
        )
    ranked.sort(key=lambda one: (one.step.seconds, one.memory.total))
    rejected.sort(key=lambda one: one.missing)
    return LayoutSearchResult(tuple(ranked), tuple(rejected), dict(impossible), headroom)


def _try_split(
    job: Job, split: Layout, fixed: frozenset[str], headroom: float, ranked: list[Candidate], rejected: list[RejectedLayout],
    impossible: Counter[str],
) -> None:  # fmt: skip
    """Try one division of the model, `split`, with each micro-batch up to the largest that fits and each ZeRO stage.

    For each, adds the cheapest layout that fits in memory and the cheapest that leaves the headroom to `ranked`. If
    none fits, adds the one that misses by the fewest bytes to `rejected`. Impossible ones are counted in `impossible`
    by reason.
    """
    modes: tuple[Recompute, ...] = (job.layout.recompute,) if "recompute" in fixed else RECOMPUTE
    zeros = zero_stages(job, split, fixed, impossible)
    for micro_batch in micro_batch_sizes(job, split, fixed, impossible) if zeros else ():
        if (why := refuse(replace(job, layout=replace(split, micro_batch=micro_batch)))) is not None:
            impossible[why] += 1
            continue
        missed: tuple[int, Job, DeviceMemory] | None = None
        fits_once, tried = False, zeros
        if split.pipeline > 1 and split.micro_batches(job.batch, micro_batch) > split.pipeline and "zero" not in fixed:
            # ZeRO 2 and 3 would reduce or gather again for every micro-batch of every stage.
            tried = tuple(zero for zero in zeros if zero <= 1)
        for zero in tried:
            fitting: Candidate | None = None
            for recompute in modes:
                layout = replace(split, zero=zero, micro_batch=micro_batch, recompute=recompute)
                one = replace(job, layout=layout)
                held = memory(one)
                missing = round(held.total - job.cluster.device.memory)
                if missing <= 0 and (fitting is None or held.total < fitting.memory.total):
                    fitting = Candidate(one, held, step(one))
                    ranked.append(fitting)
                    if fitting.leaves(headroom):
                        break
                if missing > 0 and (missed is None or missing < missed[0]):
                    missed = missing, one, held
            if fitting is not None:
                missed, fits_once = None, True
        if missed is not None:
            missing, one, held = missed
            rejected.append(RejectedLayout(one.layout, missing, excess(one, held)))
        if not fits_once and tried == zeros:
            break  # a larger micro-batch needs more memory
