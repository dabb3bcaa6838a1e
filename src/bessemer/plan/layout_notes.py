"""What a plan notes of its layout: what a run would do otherwise, what costs more than it needs to, and what would fit."""

from __future__ import annotations

from dataclasses import replace

from bessemer.layout.shards import uneven_note
from bessemer.plan.estimate.job import Job
from bessemer.plan.estimate.memory import memory
from bessemer.plan.estimate.step import step
from bessemer.plan.jobs import Goal
from bessemer.plan.search import Candidate
from bessemer.plan.would_fit import another_layout
from bessemer.terminal import size

SLOWER = 0.05
"""Share of a step that a rounder vocabulary saves, from which a plan says so."""
ROUND_VOCABULARY = 128


def layout_notes(goal: Goal, best: Candidate) -> tuple[str, ...]:
    """All of them, of the layout that was given or chosen."""
    notes = [] if goal.chooses_layout else [_recompute(goal, best), _instead(goal, best)]
    return tuple(note for note in (*notes, _uneven(best.job), _vocabulary(best)) if note)


def _recompute(goal: Goal, best: Candidate) -> str | None:
    """Where more is recomputed than a run of the recipe would, which leaves it open: by how much that one's memory is larger."""
    run, job = goal.recipe.train.recompute, best.job
    if "recompute" in goal.given or run in (job.layout.recompute, "budget") or job.framework.name != "bessemer":
        return None
    held = memory(goal.job.with_layout(recompute="none"))
    leaves = best.leaves(goal.headroom)
    why = f"to leave {goal.headroom:.0%} of the memory free" if leaves else "which takes the least memory"
    return (
        f"recompute {job.layout.recompute} is planned, {why}; the recipe leaves "
        f"train.recompute open, and a run of it recomputes nothing, in {size(held.total)}"
    )


def _instead(goal: Goal, best: Candidate) -> str | None:
    """Where the recipe's layout does not fit: one that does, on the same devices."""
    return another_layout(goal) if best.missing > 0 else None


def _uneven(job: Job) -> str | None:
    """Of shards that do not divide the weights."""
    if job.framework.name != "bessemer" or not job.layout.zero:
        return None
    return uneven_note(job.model, job.layout)


def _vocabulary(best: Candidate) -> str | None:
    """Of logits of a width that keeps their matmul off the matrix units: a rounder vocabulary and what it saves."""
    job, vocabulary = best.job, best.job.model.vocabulary
    rounder = -(-vocabulary // ROUND_VOCABULARY) * ROUND_VOCABULARY
    if rounder == vocabulary or job.framework.name != "bessemer":  # others round it by themselves
        return None
    saved = 1 - step(replace(job, model=job.model.with_changes(vocabulary=rounder))).seconds / best.step.seconds
    if saved < SLOWER:
        return None
    return (
        f"a vocabulary of {vocabulary:,} is an uneven width for the matmul of the logits: {rounder:,}, with rows that no token "
        f"uses, takes {saved:.0%} less time (--set model.vocabulary={rounder})"
    )
