"""Status of a run: its state, its progress, and the time and money left."""

from __future__ import annotations

from dataclasses import dataclass
from time import time

import numpy as np

from bessemer.common.console import duration
from bessemer.guard.goodput import ERROR, seconds_of
from bessemer.report.data import RunData, as_number, as_text, number_or_0
from bessemer.run.directory import RunDirectory, checkpoint_steps

PACE_STEPS = 100  # number of last logged steps whose median sets the pace
FRESH_SECONDS = 30.0  # more recent progress without a local lock means that another machine trains the run
# A run without a new line for this many steps' time, and at least this long, counts as silent.
QUIET_STEPS, QUIET_SECONDS = 10.0, 60.0


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and an estimate of its remaining time and cost.

    Attributes:
        state: `training`, `preparing` (before step 1), `silent` (running without progress), `stopped`, `finished` or `empty`.
        sentence: The state as a sentence, with the next action.
        step: Last trained step.
        steps: Total steps of the run; None if unknown.
        seconds_left: Remaining seconds at the current pace; None if unknown.
        dollars_left: Cost of the remaining seconds; None if unknown.
        last: Time of the last sign of progress in seconds since the epoch; None without one.
    """

    state: str
    sentence: str
    step: int
    steps: int | None
    seconds_left: float | None
    dollars_left: float | None
    last: float | None

    @property
    def share(self) -> float:
        """Fraction of the steps that are done."""
        return min(self.step / self.steps, 1.0) if self.steps else 0.0

    @property
    def is_live(self) -> bool:
        """True while the run is active."""
        return self.state in ("training", "preparing", "silent")


def read_status(run: RunDirectory, data: RunData) -> RunStatus:
    """Determine the status of a run from its files."""
    saved = max(checkpoint_steps(run.checkpoints)[-1:], default=0)  # used if metrics.jsonl was removed
    step = int(data.train.step[-1]) if len(data.train) else saved
    steps = None if data.planned_steps is None else int(data.planned_steps)
    last = max(seconds_of(data.last_time), number_or_0(data.times, "last")) or None
    age = None if last is None else max(time() - last, 0.0)
    pace, stopped_by = seconds_a_step(data), as_text(data.times, "stopped_by")
    has_ended = bool(stopped_by) or (steps is not None and step >= steps)
    is_fresh = age is not None and age < FRESH_SECONDS
    is_running = run.is_locked() or (is_fresh and not has_ended and not run.was_locked_locally())
    quiet = max(QUIET_STEPS * (pace or 0.0), QUIET_SECONDS)
    label = f"step {step:,} of {steps:,}" if steps else f"step {step:,}"
    if steps is not None and step >= steps:
        state, sentence = "finished", f"Finished: {label}."
    elif not is_running and not data.recipe and not len(data.train):
        state, sentence = "empty", "There is no file of a run yet."
    elif not is_running:
        state, sentence = "stopped", _stopped(label, step, stopped_by, _next_start(run, saved))
    elif not step:
        state, sentence = "preparing", "Preparing: no step is trained yet."
    elif age is not None and age > quiet:
        state, sentence = "silent", f"No sign of progress for {duration(age)}, though a process holds the run: {label}."
    else:
        state, sentence = "training", f"Training: {label}."
    left = cost = None
    if steps is not None and pace is not None and state in ("training", "silent"):
        left = max(steps - step, 0) * pace
        dollars, seconds = as_number(data.plan, "cost"), as_number(data.plan, "seconds")
        cost = dollars / seconds * left if dollars and seconds else None
        sentence += f" About {duration(left)} left{'' if cost is None else f', ${cost:,.2f}'}."
    return RunStatus(state, sentence, step, steps, left, cost, last)


def seconds_a_step(data: RunData) -> float | None:
    """Return the wall time per recent step, including its share of validation and saving; None before the first."""
    recent = data.train.columns.get("step_seconds", np.empty(0))[-PACE_STEPS:]
    if not np.isfinite(recent).any():
        return None
    seconds = float(np.nanmedian(recent))
    between = sum(number_or_0(data.times, kind) for kind in ("validation", "saving"))
    in_steps = sum(number_or_0(data.times, kind) for kind in ("productive", "data_wait", "redone"))
    return seconds * (1.0 + between / in_steps if in_steps else 1.0)


def _stopped(label: str, step: int, stopped_by: str, next_start: str) -> str:
    """Return the sentence on a stopped run: by what it was stopped, after which step, and how it resumes."""
    if stopped_by.startswith(ERROR):
        return f"Stopped after {label}; {stopped_by.removesuffix('.')}; {next_start}."
    by = f" by {stopped_by}" if stopped_by else ": killed, or its machine lost" if step else ""
    return f"Stopped{by} after {label}; {next_start}."


def _next_start(run: RunDirectory, saved: int) -> str:
    """Describe how a stopped run resumes. `saved` is the step of its newest checkpoint, 0 without one."""
    if not saved and run.was_saved:
        return "its checkpoints are missing: restore them, or start over with `bessemer run --restart`"
    if not run.recipe.exists():
        return "recipe.toml is missing, so it cannot continue: copy the whole folder of the run"
    start = f"continues from step {saved:,}" if saved else "starts at step 1, because no checkpoint was saved"
    return f"`bessemer run` on this folder {start}"
