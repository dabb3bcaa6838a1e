"""The events of a run in order: incidents with the responses to them, stops and restarts."""

from __future__ import annotations

from bisect import bisect_right
from itertools import groupby
from operator import itemgetter

from bessemer.common.console import counted, duration
from bessemer.guard.goodput import ERROR, seconds_of
from bessemer.guard.incidents import INCIDENT_KINDS, RECIPE_CHANGED, RECORDED
from bessemer.report.data import Json, RunData, as_number, as_objects, as_text, number_or_0
from bessemer.report.parts import capitalised, count, words
from bessemer.report.summary import finished

MAX_EVENTS = 16
NOTED_SECONDS = 10.0  # within which the launcher notes a loss, after the next session has begun
MINOR = {kind.name for kind in INCIDENT_KINDS.values() if kind.is_minor}
LOSSES = {kind.name for kind in INCIDENT_KINDS.values() if kind.response == "restart"}

Event = tuple[float, str, str]
"""Seconds since the epoch, steps, sentence."""


def story(data: RunData) -> list[tuple[str, str]]:
    """(steps, sentence) of every event that changed the run; empty where none did. The middle of a long story is left to the
    table of incidents."""
    events = [*_incidents(data), *_stops(data)]
    stopped_by = as_text(data.times, "stopped_by")
    is_cut = not stopped_by and not data.is_open and len(data.train) > 0 and not finished(data)
    if not events and not data.gated and not stopped_by and not is_cut:
        return []
    rows = [(steps, sentence) for _, steps, sentence in sorted(events, key=itemgetter(0))]
    if len(rows) > MAX_EVENTS:
        num_more = len(rows) - MAX_EVENTS
        rows[MAX_EVENTS // 2 : -MAX_EVENTS // 2] = [("…", f"{num_more} more: see Incidents")]
    if data.gated:
        rows.append(("throughout", f"the gate: {data.gated}."))
    if data.train.step.size:
        by = ", and no end is recorded: the training was killed, or its machine lost." if is_cut else ""
        if stopped_by:
            by = f"; {_ending(stopped_by)}" if stopped_by.startswith(ERROR) else f", where {_ending(stopped_by)}"
        rows.append((_steps(data.train.step[-1]), f"the last step that was trained{by or '.'}"))
    return rows


def _incidents(data: RunData) -> list[Event]:
    """Each incident but minor ones that were only recorded; several of a kind in a row of one session are one."""
    major = [row for row in data.incidents if as_text(row, "action") != RECORDED or as_text(row, "what") not in MINOR]
    restarts = as_objects(data.times, "restarts")
    stops = [(seconds_of(restart.get("stopped")), seconds_of(restart.get("time"))) for restart in restarts]
    starts = [again for _, again in stops]

    def sort(row: Json) -> tuple[str, float | None, int, str]:
        kind = as_text(row, "what")
        change = as_text(row, "cause") if kind == RECIPE_CHANGED.name else ""  # each is another one
        return kind, as_number(row, "rollback"), bisect_right(starts, seconds_of(row.get("time"))), change

    events = []
    for (kind, rollback, *_), group in groupby(major, sort):
        same = list(group)
        cause, action = as_text(same[-1], "cause"), as_text(same[-1], "action")
        first, last = number_or_0(same[0], "step"), number_or_0(same[-1], "step")
        many = f"{count(len(same))} times " if len(same) > 1 else ""
        began = as_number(same[-1], "onset") if rollback else None
        since = f" It began at step {count(began)}." if began is not None and began < last else ""
        sentence = f"{many}{words(kind)}: {cause}.{since} {_sentence(action)}"
        moment = seconds_of(same[0].get("time"))
        if kind in LOSSES:  # a launcher writes it when the group is begun again already
            moment = min([moment, *(again for stop, again in stops if _is_of(moment, stop, again))])
        events.append((moment, _steps(first, last), sentence))
    return events


def _is_of(loss: float, stopped: float, began: float) -> bool:
    """Return whether a recorded loss stopped a session. All in seconds since the epoch; began: of the next session."""
    return stopped - 1.0 <= loss <= began + NOTED_SECONDS


def _stops(data: RunData) -> list[Event]:
    """Each stop with who stopped the run, and each restart. A loss that the launcher recorded is an incident already."""
    losses = [seconds_of(row.get("time")) for row in data.incidents if as_text(row, "what") in LOSSES]
    events = []
    for restart in as_objects(data.times, "restarts"):
        after, start, pause = (number_or_0(restart, key) for key in ("after", "from", "seconds"))
        stopped, began = seconds_of(restart.get("stopped")), seconds_of(restart.get("time"))
        stopped_by = as_text(restart, "stopped_by")
        is_loss = not stopped_by or stopped_by.startswith(ERROR)
        if not (is_loss and any(_is_of(loss, stopped, began) for loss in losses)):
            ended = _ending(stopped_by) if stopped_by else "the training was killed, or its machine lost."
            events.append((stopped, _steps(after), ended))
        repeated = int(after - start)
        again = f"; {counted(repeated, 'step')} {'was' if repeated == 1 else 'were'} repeated" if repeated > 0 else ""
        went_on = f"went on from step {count(start)}" if start else "began anew"
        started = f"the training was started again {duration(pause)} after the stop and {went_on}{again}."
        events.append((began, _steps(start), started))
    return events


def _ending(stopped_by: str) -> str:
    """Describe in a sentence how a session ended."""
    if stopped_by.startswith(ERROR):
        return f"the run ended with {stopped_by.rstrip('.')}."
    return f"{stopped_by} stopped the run."


def _steps(first: float, last: float | None = None) -> str:
    return f"step {count(first)}" if last is None or last == first else f"steps {count(first)} to {count(last)}"


def _sentence(text: str) -> str:
    return f"{capitalised(text)}." if text else ""
