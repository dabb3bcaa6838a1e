"""Alarms from the losses and gradient norms of a run. guard/incidents.py has the response to each kind.

| kind | rule |
|---|---|
| spike | loss and log gradient norm both above median + 6 deviations of the last 128 steps |
| diverged | 7 of the last 8 losses above a limit (below) |
| explosion | gradient norm above 100 x the clipping norm |
| plateau | mean loss of the second half of the last 100 steps within 1% of the first half, above 3/4 of a uniform guess |

The limit of "diverged" is 1.1 x the larger of a uniform guess and the lowest of the first 4 losses. Once a median of 16 losses
is below a uniform guess, the limit is at most

    lowest median + max(gain / 4, min(4 s, max(gain, 3 s)))

where the gain is the uniform guess minus the lowest median, and s is the deviation of those 16 losses. A quarter of a small
gain is within the noise, so the loss must also rise by 4 deviations. It need not rise by more than the whole gain, so that a
return to a uniform guess raises an alarm, unless the gain itself is within 3 deviations.

A deviation is 1.4826 x MAD, or the distance to the 84th percentile of a full window if that is larger, because losses of small
batches are skewed.

The limits of a spike are updated every train.log_every steps, when the host reads the losses of these steps.

The first steps of a run are guarded too. "spike" applies from step 16 on, with a wider threshold until its window is full.
"diverged" applies from step 8 on, since a model worse than a uniform guess has learned nothing; it uses the lowest median from
step 16 on. "plateau" needs a full window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from bessemer.guard.incidents import DIVERGED, EXPLOSION, PLATEAU, SPIKE, IncidentKind

SPIKE_WINDOW, SPIKE_DEVIATIONS, SPIKE_MIN = 128, 6.0, 16
LEVEL_STEPS = 16  # the median loss of this number of steps is the level of a run
RECENT = 32  # steps among which the onset of a divergence is searched
DIVERGED_STEPS, DIVERGED_RATIO, DIVERGED_SHARE, DIVERGED_DEVIATIONS = 8, 1.1, 0.25, (3.0, 4.0)
DIVERGED_BELOW = 1  # this number of steps may be below the limit, since a single batch may be easy
FIRST_STEPS = 4  # the lowest loss of these steps is the starting loss
EXPLOSION_RATIO = 100.0
PLATEAU_WINDOW, PLATEAU_GAIN, PLATEAU_SHARE = 100, 0.01, 0.75
UPPER_SHARE = 0.8413  # share of a normal distribution below the median plus one standard deviation
MAD_TO_STD = 1.4826  # for a normal distribution
MIN_SPREAD = 0.002  # as a share of the median loss: all recorded runs have more noise, but a constant loss has none
MIN_LOG_SPREAD = 0.05  # for the log gradient norm


@dataclass(frozen=True)
class Alarm:
    """An anomaly of a run, to which the guard responds.

    Attributes:
        kind: The kind of incident.
        onset: The first bad step (1-based).
        cause: A sentence with the figures.
        loss: The loss of the step that raised the alarm, if finite.
        grad_norm: The gradient norm of that step, if finite.
    """

    kind: IncidentKind
    onset: int
    cause: str
    loss: float | None = field(default=None, compare=False)
    grad_norm: float | None = field(default=None, compare=False)


@dataclass(frozen=True)
class SpikeLimits:
    """The limits of a spike: a step whose loss and gradient norm both exceed them is one.

    Attributes:
        loss: The limit of the loss, in nats per target.
        grad_norm: The limit of the gradient norm.
        num_steps: The number of steps from which the limits were computed.
    """

    loss: float
    grad_norm: float
    num_steps: int

    def exceeded_by(self, loss: float, grad_norm: float) -> bool:
        return loss > self.loss and grad_norm > self.grad_norm


@dataclass(frozen=True)
class History:
    """The state of the anomaly detector. It is stored in checkpoints, so that a resumed run raises the same alarms.

    Attributes:
        losses: The last 128 losses, without spikes and excluded steps.
        log_norms: The log gradient norms of the same steps.
        recent: The last 32 losses of all steps.
        first_losses: The losses of the first steps.
        quiet_until: The step before which no alarm that needs a rollback is raised, so that one anomaly raises one alarm.
        explosion_quiet_until: The step before which no explosion is reported.
        plateau_quiet_until: The step before which no plateau is reported.
        level: The lowest median of 16 losses so far.
        level_spread: The deviation of those 16 losses.
        limits: The current spike limits, which devices compare each step with.
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
        """Return the history with empty windows and no level, for a step at which the loss may rise, such as a new data phase."""
        return replace(self, losses=(), log_norms=(), recent=(), level=None, level_spread=0.0, limits=None)


@dataclass(frozen=True)
class GuardReference:
    """Constants of a run with which the anomaly detector compares losses and gradient norms.

    Attributes:
        uniform_loss: The loss of a uniform guess among all outcomes, in nats.
        clip_norm: The norm to which gradients are clipped.
    """

    uniform_loss: float
    clip_norm: float


def observe(
    history: History, step: int, loss: float, grad_norm: float, reference: GuardReference, *,
    exclude_from_history: bool = False,
) -> tuple[History, Alarm | None]:  # fmt: skip
    """Judge a step with finite loss and gradient norm, and add it to the history.

    Args:
        history: The history before the step.
        step: The step (1-based).
        loss: Its loss in nats per target.
        grad_norm: Its global gradient norm before clipping.
        reference: The constants of the run.
        exclude_from_history: Judge the step without adding it to the windows, because its learning rate, and so perhaps its
            loss, is lower than that of later steps. Plateaus are not detected then.

    Returns:
        The history after the step, and the most serious alarm that it raises, or None.
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
    """Return the median and a robust standard deviation of values.

    The deviation is 1.4826 x the median absolute deviation (Rousseeuw and Croux 1993, section 1), but at least the noise that
    every run has: MIN_SPREAD times the median of losses, or MIN_LOG_SPREAD for log gradient norms.

    Args:
        values: Losses or log gradient norms.
        is_log: True for log gradient norms.
    """
    middle = median(values)
    spread = MAD_TO_STD * median(abs(value - middle) for value in values)
    return middle, max(spread, MIN_LOG_SPREAD if is_log else MIN_SPREAD * abs(middle))


def _upper_centre(values: tuple[float, ...], *, is_log: bool = False) -> tuple[float, float]:
    """Return the median, and the standard deviation of a normal distribution with the same upper tail.

    With fewer than SPIKE_WINDOW values, this is `centre`: in the first steps, the values above the median are from before the
    loss fell.
    """
    middle, spread = centre(values, is_log=is_log)
    if len(values) < SPIKE_WINDOW:
        return middle, spread
    return middle, max(spread, sorted(values)[math.ceil(UPPER_SHARE * len(values)) - 1] - middle)


def spike_limits(history: History) -> SpikeLimits | None:
    """Return the spike limits that follow from a history; None if its windows are too short."""
    window = len(history.losses)
    if window < SPIKE_MIN:
        return None
    deviations = SPIKE_DEVIATIONS * math.sqrt(SPIKE_WINDOW / window)  # the spread of a short window is less certain
    middle, spread = _upper_centre(history.losses)
    log_middle, log_spread = _upper_centre(history.log_norms, is_log=True)
    norm_limit = math.exp(min(log_middle + deviations * log_spread, 700.0))
    return SpikeLimits(middle + deviations * spread, norm_limit, window)


def _spike(history: History, step: int, loss: float, grad_norm: float) -> Alarm | None:
    limits = history.limits
    if limits is None or not limits.exceeded_by(loss, grad_norm):
        return None
    figures = f"loss {loss:.4f} (limit {limits.loss:.4f}), gradient norm {grad_norm:.4g} (limit {limits.grad_norm:.4g})"
    return Alarm(SPIKE, step, f"{figures}; limits from the last {limits.num_steps} steps")


def _change_point(values: tuple[float, ...]) -> int:
    """Return the index that splits the values with the largest rise of the mean, by the t statistic of equal variances."""

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
    # Single losses may fall below the limit after the onset, so the change point can be earlier.
    first = min(low[-1] + 1, _change_point(history.recent)) if low else 0
    onset = step - len(history.recent) + 1 + first
    why = f"the lowest median was {reached:.2f}" if has_learned else "worse than a uniform guess and the first steps"
    figures = f"above {limit:.2f}, the last is {recent[-1]:.2f}: {why}"
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
        return None  # a rise of the loss is a divergence, not a plateau
    figures = f"{now:.4f}, that of the {half} before {before:.4f}; that of a uniform guess {reference.uniform_loss:.2f}"
    return Alarm(PLATEAU, step - PLATEAU_WINDOW + 1, f"the mean loss of the last {half} steps is {figures}")
