"""The same plan with changes, and on other numbers of devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from bessemer.errors import InputError
from bessemer.plan.ask import Asked, with_changes
from bessemer.plan.estimate.job import Cluster, Job
from bessemer.plan.jobs import Goal
from bessemer.plan.search import Candidate, search

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # numbers of devices of a curve, to those of the plan


def changed(asked: Asked, text: str) -> Asked:
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


@dataclass(frozen=True)
class Point:
    """The best layout on a number of devices; None: none fits, or none divides it."""

    devices: int
    best: Candidate | None


def curve(goal: Goal, factors: tuple[float, ...] = FACTORS) -> tuple[Point, ...]:
    """The fastest layouts on fewer and more devices: whole nodes, the same batch."""
    cluster = goal.job.cluster
    counts = sorted({max(round(cluster.devices * factor), 1) for factor in factors})
    whole = [count for count in counts if count % cluster.per_node == 0 or count < cluster.per_node]
    return tuple(Point(count, _best(_with_devices(goal.job, cluster, count), goal.free)) for count in whole)


def _with_devices(job: Job, cluster: Cluster, count: int) -> Job:
    return replace(job, cluster=replace(cluster, devices=count, per_node=min(cluster.per_node, count)))


def _best(job: Job, free: frozenset[str]) -> Candidate | None:
    try:
        found = search(job, free)
    except InputError:  # no way to divide so many devices and the batch
        return None
    return found.ranked[0] if found.ranked else None
