"""What would fit where no layout of a job does: without what is given, or with a smaller state of the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from bessemer.plan.estimate.job import Job, Layout, Precision
from bessemer.plan.estimate.memory import fits, memory
from bessemer.plan.jobs import Goal
from bessemer.plan.search import LayoutSearchResult, NoSplitError, search
from bessemer.plan.splits import LAYOUT_NAMES, as_given
from bessemer.recipe.parallel import LAYOUT_KEYS
from bessemer.terminal import size

NARROW: tuple[Precision, ...] = ("bf16", "fp16")


def no_layout(goal: Goal, found: LayoutSearchResult) -> str:
    """Why none fits: the nearest miss, and how many devices the state alone would fill where that is more than there are; and
    what would do."""
    job = goal.job
    miss, framework, device = found.rejected[0], job.framework, job.cluster.device
    each = framework.weight_bytes + framework.master_bytes + framework.gradient_bytes + framework.moment_bytes
    num_full = math.ceil(job.model.parameters * each / device.memory)
    is_hopeless = num_full > job.cluster.devices
    alone = f"; weights, gradients and optimizer alone fill {num_full:,} of them" if is_hopeless else ""
    without = without_given(goal)
    held = memory(replace(job, layout=miss.layout))
    is_long = held.activations > held.total / 2 and miss.layout.micro_batch == 1
    smaller = "shorter sequences" if is_long else "a smaller model"
    return (
        f"plan: no layout of {job.cluster.devices:,} x {device.name} fits; the nearest misses by {size(miss.missing)}: "
        f"{'; '.join(miss.reasons)}{alone}; {f'{without}; or ' if without else ''}take more devices, larger ones, or "
        f"{smaller}{_smaller_state(goal, replace(job, layout=miss.layout))}"
    )


def without_given(goal: Goal) -> str:
    """What is given and stands in the way of each layout that fits, with the memory of the plan without it; of several things
    that do so by themselves each, else all together. Empty where nothing fits without them either."""
    if alone := [f"without {name} it fits in {held}" for name, held in _fitting_without(goal)]:
        return "; or ".join(alone)
    if len(goal.given) > 1 and (held := _planned_memory(goal, goal.job, frozenset())):
        return f"without {as_given(goal.job.layout, goal.given)} it fits in {held}"
    return ""


def another_layout(goal: Goal) -> str:
    """Of a recipe's layout that does not fit: the one that the planner would choose with the recipe's micro-batch and recompute
    where it gives them, else what else would do."""
    try:
        found = search(goal.job, goal.given - set(LAYOUT_KEYS), goal.headroom)
    except NoSplitError:
        return ""
    if not found.ranked:
        nearest = replace(goal.job, layout=found.rejected[0].layout)
        return f"no other layout of these devices fits either{_smaller_state(goal, nearest)}"
    best = found.preferred[0]
    layout, plain = best.job.layout, Layout()
    chosen = frozenset(name for name in LAYOUT_NAMES if getattr(layout, name) != getattr(plain, name))
    return (
        f"another layout of these devices fits, in {size(best.memory.total)}: {as_given(layout, chosen)}; a recipe without "
        "[parallel] is planned with it"
    )


def _fitting_without(goal: Goal) -> Iterator[tuple[str, str]]:
    """Single things that are given and without which a layout fits, with the memory that is then planned."""
    job, train = goal.job, goal.recipe.train
    pair = frozenset(("replicate", "shard"))  # which --dp gives together
    names = [frozenset((name,)) for name in LAYOUT_NAMES if name in goal.given]
    if pair <= goal.given:
        names = [pair, *(name for name in names if not name <= pair)]
    for name in names:
        if held := _planned_memory(goal, job, goal.given - name):
            yield as_given(job.layout, name), held
    if train.precision != "auto" and job.precision not in NARROW:
        narrow = next((name for name in NARROW if name in job.cluster.device.flops), None)
        if narrow and (held := _planned_memory(goal, replace(job, precision=narrow), goal.given)):
            yield f"precision {train.precision}, in {narrow},", held


def _planned_memory(goal: Goal, job: Job, given: frozenset[str]) -> str:
    """The memory of a job's plan; empty where no layout fits."""
    try:
        found = search(job, given, goal.headroom)
    except NoSplitError:
        return ""
    return size(found.preferred[0].memory.total) if found.ranked else ""


def _smaller_state(goal: Goal, nearest: Job) -> str:
    """What of a run of this program would make a layout fit, if anything: narrow moments of the optimizer, or offloaded ones.
    nearest: with the layout that misses by least, which is tried before a whole search is."""
    if nearest.framework.name != "bessemer":
        return ""
    ways = {"train.optimizer.offload=true": replace(nearest.state, offload=True)}
    if nearest.state.optimizer == "adamw":
        ways = {"train.optimizer.state=8bit": replace(nearest.state, moments="8bit"), **ways}
    for key, state in ways.items():
        smaller = replace(nearest, state=state)
        if fits(smaller, memory(smaller)).fits:
            return f"; with --set {key} it fits in {_planned_memory(goal, replace(goal.job, state=state), goal.given)}"
    return ""
