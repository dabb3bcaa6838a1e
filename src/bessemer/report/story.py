"""The history of a run: incidents with their responses, stops and restarts."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from operator import itemgetter

from bessemer.common.console import counted, duration
from bessemer.guard.goodput import ERROR, seconds_of
from bessemer.guard.incidents import INCIDENT_KINDS, RECIPE_CHANGED, RECORDED
from bessemer.report.data import Json, RunData, as_number, as_objects, as_text, number_or_0
from bessemer.report.parts import capitalised, words

MAX_EVENTS = 16
NOTED_SECONDS = 10.0  # the launcher records a loss at most this long after the next session starts
MINOR = {kind.name for kind in INCIDENT_KINDS.values() if kind.is_minor}
LOSSES = {kind.name for kind in INCIDENT_KINDS.values() if kind.response == "restart"}

Event = tuple[float, str, str]
"""Time in seconds since the epoch, steps, and a sentence."""


def story(data: RunData) -> list[tuple[str, str]]:
    """Return (steps, sentence) for every event that changed the run.

    The middle of a long history is left out, because the table of incidents lists it.
    """
    rows = [(steps, sentence) for _, steps, sentence in sorted([*_incidents(data), *_stops(data)], key=itemgetter(0))]
    if len(rows) > MAX_EVENTS:
        num_more = len(rows) - MAX_EVENTS
        rows[MAX_EVENTS // 2 : -MAX_EVENTS // 2] = [("…", f"{num_more} more: see Incidents")]
    if data.gated:
        rows.append(("throughout", f"the gate: {data.gated}."))
    return rows


def incident_counts(data: RunData) -> str:
    """Return the number of incidents of each kind that `story` names, such as "collapse (2), spike (1)"; "" without any."""
    kinds = Counter(as_text(row, "what") for row in _major(data))
    return ", ".join(f"{words(kind)} ({count:,})" for kind, count in kinds.items() if kind != RECIPE_CHANGED.name)


def _major(data: RunData) -> list[Json]:
    """Return the incidents, except minor ones that needed no action."""
    return [row for row in data.incidents if as_text(row, "action") != RECORDED or as_text(row, "what") not in MINOR]


def _incidents(data: RunData) -> list[Event]:
    """Return events for the incidents that are not minor.

    Consecutive incidents of one kind between two restarts become one event.
    """
    restarts = as_objects(data.times, "restarts")
    stops = [(seconds_of(restart.get("stopped")), seconds_of(restart.get("time"))) for restart in restarts]

    def sort(row: Json) -> tuple[str, float | None, int, str]:
        kind, moment = as_text(row, "what"), seconds_of(row.get("time"))
        change = as_text(row, "cause") if kind == RECIPE_CHANGED.name else ""  # merge equal changes only
        return kind, as_number(row, "rollback"), sum(again <= moment for _, again in stops), change

    events = []
    for (kind, rollback, *_), group in groupby(_major(data), sort):
        same = list(group)
        cause, action = as_text(same[-1], "cause"), as_text(same[-1], "action")
        first, last, onset = number_or_0(same[0], "step"), number_or_0(same[-1], "step"), number_or_0(same[-1], "onset")
        many = f"{len(same):,.0f} times " if len(same) > 1 else ""
        since = f" It began at step {onset:,.0f}." if rollback and 0 < onset < last else ""
        sentence = f"{many}{words(kind)}: {cause}.{since}" + (f" {capitalised(action)}." if action else "")
        moment = seconds_of(same[0].get("time"))
        if kind in LOSSES:  # the launcher may record the loss after it has restarted the group
            moment = min([moment, *(again for stop, again in stops if _is_of(moment, stop, again))])
        events.append((moment, _steps(first, last), sentence))
    return events


def _is_of(loss: float, stopped: float, began: float) -> bool:
    """Return True if the loss of a process was recorded between a session's stop and shortly after the next session's start.

    Then it caused the stop. `loss`, `stopped` and `began` are these three times in seconds since the epoch.
    """
    return stopped - 1.0 <= loss <= began + NOTED_SECONDS


def _stops(data: RunData) -> list[Event]:
    """Return events for the stops of the run, with their cause, and for its restarts.

    A stop caused by a lost process is left out, because `_incidents` has an event for it.
    """
    losses = [seconds_of(row.get("time")) for row in data.incidents if as_text(row, "what") in LOSSES]
    events = []
    for restart in as_objects(data.times, "restarts"):
        after, start, pause = (number_or_0(restart, key) for key in ("after", "from", "seconds"))
        stopped, began = seconds_of(restart.get("stopped")), seconds_of(restart.get("time"))
        stopped_by = as_text(restart, "stopped_by")
        is_error = stopped_by.startswith(ERROR)
        if (stopped_by and not is_error) or not any(_is_of(loss, stopped, began) for loss in losses):
            ended = f"the run ended with {stopped_by.rstrip('.')}." if is_error else f"{stopped_by} stopped the run."
            events.append(
                (stopped, _steps(after), ended if stopped_by else "the training was killed, or its machine lost.")
            )
        repeated = int(after - start)
        again = f"; {counted(repeated, 'step')} {'was' if repeated == 1 else 'were'} repeated" if repeated > 0 else ""
        resumed = f"continued from step {start:,.0f}" if start else "started from the beginning"
        started = f"the training was started again {duration(pause)} after the stop and {resumed}{again}."
        events.append((began, _steps(start), started))
    return events


def _steps(first: float, last: float | None = None) -> str:
    return f"step {first:,.0f}" if last is None or last == first else f"steps {first:,.0f} to {last:,.0f}"
