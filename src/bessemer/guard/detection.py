"""Alarms by the losses and gradient norms of a run. What follows an alarm of each kind: guard/incidents.py.

| kind | rule |
|---|---|
| spike | loss and log gradient norm both above median + 6 deviations of the last 128 steps |
| diverged | 7 of the last 8 losses above a limit (below) |
| explosion | gradient norm above 100 x the norm that gradients are clipped to |
| plateau | the second half of the last 100 losses within 1% of the first, above 3/4 of a uniform guess |

The limit of diverged is 1.1 x the larger of a uniform guess and the lowest of the first 4 losses; once a median of 16 losses lay
below a uniform guess, if that is lower,

    lowest median + max(gain / 4, min(4 s, max(gain, 3 s)))    gain: uniform guess - lowest median; s: deviation of those 16

A quarter of a small gain is within the noise, so 4 deviations must be lost too; but no more than the whole gain, so that a return
to a uniform guess is an alarm, where the gain is not itself within 3 deviations.

A deviation is 1.4826 x MAD, or the distance to the 84th percentile of a full window where that is more: losses of small
batches are skewed.

The limits of a spike are set again every train.log_every steps, when the host reads the losses of these steps.

The first steps of a run are guarded too: spike holds from 16 steps on, with a wider threshold until its window is full; diverged
from 8 on, since a model worse than a uniform guess has learned nothing, and against the lowest median once there are 16. Plateau
needs a full window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from bessemer.guard.incidents import DIVERGED, EXPLOSION, PLATEAU, SPIKE, IncidentKind

SPIKE_WINDOW, SPIKE_DEVIATIONS, SPIKE_MIN = 128, 6.0, 16
LEVEL_STEPS = 16  # whose median is the level of a run
RECENT = 32  # steps in which diverged looks for its onset
DIVERGED_STEPS, DIVERGED_RATIO, DIVERGED_SHARE, DIVERGED_DEVIATIONS = 8, 1.1, 0.25, (3.0, 4.0)
DIVERGED_BELOW = 1  # of the steps; a single batch may be easy
FIRST_STEPS = 4  # the lowest of their losses is the starting loss
EXPLOSION_RATIO = 100.0
PLATEAU_WINDOW, PLATEAU_GAIN, PLATEAU_SHARE = 100, 0.01, 0.75
UPPER_SHARE = 0.8413  # of normal numbers, below one standard deviation above the median
MAD_TO_STD = 1.4826  # of normal numbers
MIN_SPREAD = 0.002  # of the median loss: all recorded runs have more noise, but a constant loss has none
MIN_LOG_SPREAD = 0.05  # of the log gradient norm


@dataclass(frozen=True)
class Alarm:
    """An anomaly. onset: the first bad step (1-based); cause: a sentence with the figures; loss, grad_norm: of the step that
    raised it, where they are finite."""

    kind: IncidentKind
    onset: int
    cause: str
    loss: float | None = field(default=None, compare=False)
    grad_norm: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SpikeLimits:
    """A step is a spike where loss and gradient norm both exceed these. num_steps: that they follow from."""

    loss: float
    grad_norm: float
    num_steps: int

    def exceeded_by(self, loss: float, grad_norm: float) -> bool:
        return loss > self.loss and grad_norm > self.grad_norm


@dataclass(frozen=True)
class History:
    """The state of the rules; part of every checkpoint, so that a resumed run judges as an uninterrupted one.

    Attributes:
        losses: The last 128, without spikes and excluded steps.
        log_norms: The log gradient norms of the same steps.
        recent: The last 32 losses of all steps.
        first_losses: The losses of the first steps.
        quiet_until: No alarm that needs a rollback is raised before this step, so that one anomaly raises one alarm.
        explosion_quiet_until: The same for explosions.
        plateau_quiet_until: The same for plateaus.
        level: The lowest median of 16 losses so far.
        level_spread: The deviation of those 16.
        limits: Those of a spike in force, which devices compare each step with.
    """

    losses: tuple[float, ...] = ()
    log_norms: tuple[float, ...] = ()
    recent: tuple[float, ...] = ()
    first_losses: tuple[float, ...] = ()
    quiet_until: int = 0
    explosion_quiet_until: int = 0
    plateau_quiet_until: int = 0
    level: float | None = None
    level_spread: float = 0.0
    limits: SpikeLimits | None = None

    def restarted(self) -> History:
        """Return the history without windows and level: where the loss may rise for a good reason, as at another mixture."""
        return replace(self, losses=(), log_norms=(), recent=(), level=None, level_spread=0.0, limits=None)


@dataclass(frozen=True)
class GuardReference:
    """Figures of the run that the rules use. uniform_loss: nats of a guess among all outcomes; clip_norm: of the gradients."""

    uniform_loss: float
    clip_norm: float


def observe(
    history: History, step: int, loss: float, grad_norm: float, reference: GuardReference, *,
    exclude_from_history: bool = False,
) -> tuple[History, Alarm | None]:  # fmt: skip
    """Judge a finite step (1-based). Returns the history with it, and the most serious alarm that it raises.

    exclude_from_history: judge the step without adding it to the windows, since its learning rate, and so perhaps its loss, is
    lower than those of later steps; plateau is off.
    """
    spike = _spike(history, step, loss, grad_norm)
    firsts, recent = (*history.first_losses, loss)[:FIRST_STEPS], (*history.recent, loss)[-RECENT:]
    after = replace(history, recent=recent, first_losses=firsts)
    if spike is None and not exclude_from_history:
        log_norm = math.log(grad_norm) if grad_norm > 0 else -100.0
        log_norms = (*history.log_norms, log_norm)[-SPIKE_WINDOW:]
        after = replace(after, losses=(*history.losses, loss)[-SPIKE_WINDOW:], log_norms=log_norms)
    if not exclude_from_history and len(after.recent) >= LEVEL_STEPS:
        level, level_spread = centre(after.recent[-LEVEL_STEPS:])
        if after.level is None or level < after.level:
            after = replace(after, level=level, level_spread=level_spread)
    if step >= history.quiet_until and (alarm := _diverged(after, step, reference)) is not None:
        return replace(after.restarted(), quiet_until=step + alarm.kind.quiet_steps), alarm
    if spike is not None:
        return after, spike
    alarm = None
    if step >= history.explosion_quiet_until and (alarm := _explosion(step, loss, grad_norm, reference)):
        after = replace(after, explosion_quiet_until=step + EXPLOSION.quiet_steps)
    elif step < history.plateau_quiet_until or exclude_from_history:
        return after, None
    elif alarm := _plateau(after, step, reference):
        after = replace(after, plateau_quiet_until=step + PLATEAU.quiet_steps)
    return after, alarm


def centre(values: tuple[float, ...], *, is_log: bool = False) -> tuple[float, float]:
    """Median and robust standard deviation (Rousseeuw and Croux 1993, section 1: 1.4826 x MAD), which is at least that of the
    noise of any run. is_log: log gradient norms, not losses."""
    middle = median(values)
    spread = MAD_TO_STD * median(abs(value - middle) for value in values)
    return middle, max(spread, MIN_LOG_SPREAD if is_log else MIN_SPREAD * abs(middle))


def _upper_centre(values: tuple[float, ...], *, is_log: bool = False) -> tuple[float, float]:
    """Median and standard deviation of the values above it, for skewed values. Of a full window only: in the first steps the
    values above the median are those from before the loss fell."""
    middle, spread = centre(values, is_log=is_log)
    if len(values) < SPIKE_WINDOW:
        return middle, spread
    return middle, max(spread, sorted(values)[math.ceil(UPPER_SHARE * len(values)) - 1] - middle)


def spike_limits(history: History) -> SpikeLimits | None:
    """Return the limits that follow from the windows of a history; None where it is too short."""
    window = len(history.losses)
    if window < SPIKE_MIN:
        return None
    deviations = SPIKE_DEVIATIONS * math.sqrt(SPIKE_WINDOW / window)  # the spread of a shorter window is less certain
    middle, spread = _upper_centre(history.losses)
    log_middle, log_spread = _upper_centre(history.log_norms, is_log=True)
    norm_limit = math.exp(min(log_middle + deviations * log_spread, 700.0))
    return SpikeLimits(middle + deviations * spread, norm_limit, window)


def _spike(history: History, step: int, loss: float, grad_norm: float) -> Alarm | None:
    limits = history.limits
    if limits is None or not limits.exceeded_by(loss, grad_norm):
        return None
    figures = f"loss {loss:.4f} (limit {limits.loss:.4f}), gradient norm {grad_norm:.4g} (limit {limits.grad_norm:.4g})"
    return Alarm(SPIKE, step, f"{figures}, by the last {limits.num_steps} steps")


def _change_point(values: tuple[float, ...]) -> int:
    """The index at which the mean rises most significantly: the largest t statistic of equal variances, unscaled."""

    def rise(index: int) -> float:
        before, after = values[:index], values[index:]
        return (fmean(after) - fmean(before)) * math.sqrt(len(before) * len(after))

    return max(range(1, len(values)), key=rise)


def _diverged(history: History, step: int, reference: GuardReference) -> Alarm | None:
    recent = history.recent[-DIVERGED_STEPS:]
    limit = DIVERGED_RATIO * max(reference.uniform_loss, min(history.first_losses))
    reached = math.inf if history.level is None else history.level
    has_learned = reached < reference.uniform_loss
    if has_learned:
        gain, (fewer, more) = reference.uniform_loss - reached, DIVERGED_DEVIATIONS
        noise = min(more * history.level_spread, max(gain, fewer * history.level_spread))
        limit = min(limit, reached + max(DIVERGED_SHARE * gain, noise))
    if len(recent) < DIVERGED_STEPS or sorted(recent)[DIVERGED_BELOW] <= limit:
        return None
    low = [index for index, loss in enumerate(history.recent) if loss <= limit]
    first = min(low[-1] + 1, _change_point(history.recent)) if low else 0  # single losses fall below it again
    onset = step - len(history.recent) + 1 + first
    why = f"it had reached {reached:.2f}" if has_learned else "worse than a uniform guess, and than at the start"
    figures = f"above {limit:.2f}, the last one {recent[-1]:.2f}: {why}"
    which = "" if min(recent) > limit else f"{DIVERGED_STEPS - 1} of "
    return Alarm(DIVERGED, onset, f"{which}the last {DIVERGED_STEPS} losses are {figures}")


def _explosion(step: int, loss: float, grad_norm: float, reference: GuardReference) -> Alarm | None:
    limit = EXPLOSION_RATIO * reference.clip_norm
    if grad_norm <= limit:
        return None
    return Alarm(EXPLOSION, step, f"the gradient norm is {grad_norm:.4g} (limit {limit:g}) at a loss of {loss:.4f}")


def _plateau(history: History, step: int, reference: GuardReference) -> Alarm | None:
    window = history.losses[-PLATEAU_WINDOW:]
    if len(window) < PLATEAU_WINDOW:
        return None
    half = PLATEAU_WINDOW // 2
    before, now = fmean(window[:half]), fmean(window[half:])
    if abs(now - before) >= PLATEAU_GAIN * before or now <= PLATEAU_SHARE * reference.uniform_loss:
        return None  # a rise is another alarm
    figures = f"{now:.4f}, that of the {half} before {before:.4f}; a uniform guess has {reference.uniform_loss:.2f}"
    return Alarm(PLATEAU, step - PLATEAU_WINDOW + 1, f"the mean loss of the last {half} steps is {figures}")
