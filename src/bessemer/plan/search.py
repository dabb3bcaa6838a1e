"""Search for a layout: every layout of a job that fits in memory, ranked by predicted speed, and why the others do not.

What is given of a layout is kept. For every way to divide the model and its state (tensor, pipeline, context, shard, zero,
schedule, micro-batch) no more is recomputed than must be for it to fit: recomputing costs time and gives nothing but memory.
State is divided over all devices that share the batch, over those of a node, or over none. A test holds this against trying
everything.

The layout that is chosen leaves headroom on the device (plan/estimate/memory.py), and of those that are nearly as fast as the
fastest it divides the model over the fewest devices: in nanotron's sweep runs with deeper pipelines were the ones that ran far
slower than predicted, or failed. Where none leaves the headroom, the same holds of those that take little more memory, at little
more risk, than the one that takes least: that one alone may be many times slower.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.plan.estimate.job import Job, Layout, Recompute
from bessemer.plan.estimate.memory import HEADROOM, DeviceMemory, excess, memory, out_of_memory
from bessemer.plan.estimate.step import Step, refuse, step
from bessemer.plan.layouts import as_given, micro_batch_sizes, splits, zero_stages
from bessemer.recipe.parallel import describe_axes

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")  # in the order of their price in time
NEARLY_AS_FAST = 1.05  # seconds over the fastest's; with it the sweep's 1.34B and 8.86B models lost least
# Over the layout that takes least, where none leaves the headroom: points of risk, and of the device's memory.
MORE_RISK, MORE_MEMORY = 0.05, 0.05


class NoLayoutError(InputError):
    """No layout of a job can be, or none fits in memory."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what it takes."""

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
        fast = (one for one in first if one.step.seconds <= limit)
        near = sorted(fast, key=lambda one: one.job.layout.world // one.job.layout.data)
        rest = {id(one) for one in self.ranked} - {id(one) for one in first}
        tight = sorted((one for one in self.ranked if id(one) in rest), key=lambda one: one.memory.total)
        return (*near, *(one for one in first if one.step.seconds > limit), *tight)

    @property
    def _near_least(self) -> tuple[Candidate, ...]:
        """Those with at most MORE_RISK and MORE_MEMORY over the one that takes least, the fastest first."""
        if not self.ranked:
            return ()
        least = min(self.ranked, key=lambda one: one.memory.total)
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


def layout_line(job: Job) -> str:
    """Return a job's layout in a line: the ways that divide something, and what goes with them."""
    batches = f"{job.micro_batches} micro-batch{'es' if job.micro_batches > 1 else ''} of {job.layout.micro_batch}"
    return ", ".join([*layout_parts(job.layout), batches, f"recompute {job.layout.recompute}"])


def layout_parts(layout: Layout) -> list[str]:
    """Return how the model and its state are divided."""
    found = [describe_axes(layout) + (f", expert {layout.expert}" if layout.expert > 1 else "")]
    if layout.pipeline > 1:
        found.append(layout.schedule + (f" with virtual {layout.virtual}" if layout.virtual > 1 else ""))
    return [*found, f"zero {layout.zero}"] if layout.zero else found


@lru_cache(maxsize=16)  # a budget is spent on plans that differ in tokens alone
def search(job: Job, given: frozenset[str] = frozenset(), headroom: float = HEADROOM) -> LayoutSearchResult:
    """Return every layout of a job on its cluster's devices. given: names of the job's layout that are kept, the others are
    chosen; headroom: share of a device's memory that the chosen one leaves free.

    Raises NoLayoutError where no layout divides the devices and the batch at all.
    """
    ranked: list[Candidate] = []
    rejected: list[RejectedLayout] = []
    impossible: Counter[str] = Counter()
    for split in splits(job, given, impossible):
        _try_split(job, split, given, headroom, ranked, rejected, impossible)
    if not ranked and not rejected:
        kept = as_given(job.layout, given)
        raise NoLayoutError(
            f"parallel: no way to split over {counted(job.cluster.devices, 'device')} with a batch of "
            f"{counted(job.batch, 'sequence')}{f' and {kept} as given' if kept else ''}: "
            f"{'; '.join(reason for reason, _ in impossible.most_common(3))}"
        )
    ranked.sort(key=lambda one: (one.step.seconds, one.memory.total))
    rejected.sort(key=lambda one: one.missing)
    return LayoutSearchResult(tuple(ranked), tuple(rejected), dict(impossible), headroom)


def _try_split(
    job: Job, split: Layout, given: frozenset[str], headroom: float, ranked: list[Candidate], rejected: list[RejectedLayout],
    impossible: Counter[str],
) -> None:  # fmt: skip
    """Add what becomes of one division of the model, for each micro-batch up to the largest that fits: the cheapest way to make
    it fit, and to make it leave the headroom, or the miss."""
    modes: tuple[Recompute, ...] = (job.layout.recompute,) if "recompute" in given else RECOMPUTE
    zeros = zero_stages(job, split, given, impossible)
    for micro_batch in micro_batch_sizes(job, split, given, impossible) if zeros else ():
        if (why := refuse(replace(job, layout=replace(split, micro_batch=micro_batch)))) is not None:
            impossible[why] += 1
            continue
        missed: RejectedLayout | None = None
        fits_once, tried = False, zeros
        if split.pipeline > 1 and split.micro_batches(job.batch, micro_batch) > split.pipeline and "zero" not in given:
            # More would be divided, and gathered anew, for every micro-batch of every stage.
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
                if missing > 0 and (missed is None or missing < missed.missing):
                    missed = RejectedLayout(layout, missing, excess(one, held))
            if fitting is not None:
                missed, fits_once = None, True
        if missed is not None:
            rejected.append(missed)
        if not fits_once and tried == zeros:
            break  # a larger one takes more
