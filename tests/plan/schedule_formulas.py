"""What a schedule's lists must be, and the bubbles that are published for them."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from bessemer.distributed.schedules import Action, Kind, ScheduleActions, actions
from bessemer.plan.timetable import Durations


def check(schedule: ScheduleActions) -> None:
    """Raises ValueError unless the lists are complete and every stage lies where `rank_of_stage` says.

    Complete: each stage has each micro-batch's forward once, and its backward once, whole or as I and then W. Whether
    the ranks can wait for each other in this order, the simulation finds out (timetable.simulate).
    """
    seen: Counter[Action] = Counter()
    for rank, steps in enumerate(schedule.steps):
        for action in actions(steps):
            if schedule.rank_of_stage(action.stage) != rank:
                raise ValueError(f"rank {rank}: {action} is of a stage of rank {schedule.rank_of_stage(action.stage)}")
            before = {"B": "F", "I": "F", "W": "I"}.get(action.kind)
            if before and not seen[Action(action.stage, before, action.micro_batch)]:  # type: ignore[arg-type]
                raise ValueError(f"rank {rank}: {action} comes before its {before}")
            seen[action] += 1
    for stage in range(schedule.stages):
        for number in range(schedule.micro_batches):
            times = {kind: seen.pop(Action(stage, kind, number), 0) for kind in get_args(Kind)}
            whole, split = {"F": 1, "B": 1, "I": 0, "W": 0}, {"F": 1, "B": 0, "I": 1, "W": 1}
            if times not in (whole, split):
                raise ValueError(f"stage {stage}, micro-batch {number}: {times}, not one forward and one backward")
    if seen:
        raise ValueError(f"actions of stages or micro-batches that there are not: {', '.join(map(str, seen))}")


def bubble(schedule: ScheduleActions, durations: Durations | None = None) -> float | None:
    """The published time-steps that a step takes beyond its work, all stages alike. None: no such formula.

    gpipe and 1f1b: (p - 1)(F + B), so that utilisation is m / (m + p - 1); interleaved, m a multiple of p: the same of
    stages 1/v as deep, so that the idle share is (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2). zbv, where
    forward, I and W take the same time and m >= 2p - 1: nothing within a rank's span (Qi et al. 2023, section 6), and
    p - 1 forwards over all, until the last rank has its first input. dualpipev, likewise where they take the same
    time: (p - 1)(F&B + B - 3W), F&B an overlapped pair, here as long as both (table of the authors' DualPipe
    repository, whose PP is 2p).
    """
    asked, p, m = durations or Durations(), schedule.ranks, schedule.micro_batches
    if asked.stages is not None:
        return None
    forward, backward = asked.forward, asked.backward
    alike = backward == 2 * forward
    if schedule.name in ("gpipe", "1f1b") or (schedule.name == "interleaved" and m % p == 0):
        return (p - 1) * (forward + backward)
    if schedule.name == "zbv" and alike and m >= 2 * p - 1:
        return (p - 1) * forward
    if schedule.name == "dualpipev" and alike:
        return (p - 1) * (forward + backward + backward - 3 * backward / 2)
    return None
