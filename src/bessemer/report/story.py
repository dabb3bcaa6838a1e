"""The events of a run in order: incidents with the responses to them, stops and restarts."""

from __future__ import annotations

from itertools import groupby

from bessemer.guard.incidents import KINDS, RECORDED
from bessemer.report.data import Json, RunData, as_number, as_objects, as_text, number_or_0
from bessemer.report.parts import count, words
from bessemer.report.results import document_names
from bessemer.terminal import duration

MAX_EVENTS = 12
MINOR = {kind.name for kind in KINDS.values() if kind.is_minor}


def story(data: RunData) -> list[tuple[str, str]]:
    """(steps, sentence) of every event that changed the run; empty where none did. The middle of a long story is left to the
    table of incidents."""
    events = [*_incidents(data), *_restarts(data)]
    if not events and not data.gated:
        return []
    rows = [(steps, sentence) for _, steps, sentence in sorted(events, key=lambda event: event[0])]
    if len(rows) > MAX_EVENTS:
        num_more = len(rows) - MAX_EVENTS
        rows[MAX_EVENTS // 2 : -MAX_EVENTS // 2] = [("…", f"{num_more} more: see Incidents")]
    if data.gated:
        rows.append(("throughout", f"the gate: {data.gated}."))
    if data.train.step.size:
        rows.append((_steps(data.train.step[-1]), "the last step that was trained."))
    return rows


def _incidents(data: RunData) -> list[tuple[str, str, str]]:
    """(time, steps, sentence) of each incident but minor ones that were only recorded; several of a kind in a row are one."""
    major = [row for row in data.incidents if as_text(row, "action") != RECORDED or as_text(row, "what") not in MINOR]
    events = []
    for (kind, is_rollback), group in groupby(major, lambda row: (as_text(row, "what"), as_number(row, "rollback"))):
        same = list(group)
        cause, action = as_text(same[-1], "cause"), as_text(same[-1], "action")
        first, last = number_or_0(same[0], "step"), number_or_0(same[-1], "step")
        many = f"{count(len(same))} times " if len(same) > 1 else ""
        began = as_number(same[-1], "onset") if is_rollback else None
        since = f" It began at step {count(began)}." if began is not None and began < last else ""
        sentence = f"{many}{words(kind)}: {cause}.{since} {_sentence(action)}{_documents(same)}"
        events.append((as_text(same[0], "time"), _steps(first, last), sentence))
    return events


def _documents(incidents: list[Json]) -> str:
    names = {name for row in incidents for name in document_names(row.get("documents"))}
    return f" Its {count(len(names))} documents are listed under Incidents." if names else ""


def _restarts(data: RunData) -> list[tuple[str, str, str]]:
    """(time, steps, sentence) of each restart."""
    events = []
    for restart in as_objects(data.times, "restarts"):
        stopped_at, start, pause = (number_or_0(restart, key) for key in ("after", "from", "seconds"))
        repeated = f"; {count(stopped_at - start)} steps were repeated" if stopped_at > start else ""
        sentence = f"the training stopped, and {duration(pause)} later went on from step {count(start)}{repeated}."
        events.append((as_text(restart, "time"), _steps(stopped_at), sentence))
    return events


def _steps(first: float, last: float | None = None) -> str:
    return f"step {count(first)}" if last is None or last == first else f"steps {count(first)} to {count(last)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
