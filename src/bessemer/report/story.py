"""What happened to a run, in the order in which it happened: alarms and what was done about them, stops and restarts."""

from __future__ import annotations

from itertools import groupby

from bessemer.report.data import Json, RunData, as_number, as_objects, as_text, number_or_0
from bessemer.report.parts import count, words
from bessemer.report.results import document_names
from bessemer.terminal import duration

MAX_EVENTS = 12
PASSED_OVER = "recorded"  # an action that changed nothing
UNTOLD = ("spike", "slow", "data_wait", "explosion")  # where they were only recorded


def story(data: RunData) -> list[tuple[str, str]]:
    """When (its steps) and what, for everything that changed the run; empty where nothing did. The middle of a long story is left
    to the table of incidents."""
    events = [*_incidents(data), *_restarts(data)]
    if not events and not data.gated:
        return []
    told = [(when, what) for _, when, what in sorted(events, key=lambda event: event[0])]
    if len(told) > MAX_EVENTS:
        left_out = len(told) - MAX_EVENTS
        told[MAX_EVENTS // 2 : -MAX_EVENTS // 2] = [("…", f"{left_out} more: see Incidents")]
    if data.gated:
        told.append(("throughout", f"the gate: {data.gated}."))
    if data.train.step.size:
        told.append((_steps(data.train.step[-1]), "the last step that was trained."))
    return told


def _incidents(data: RunData) -> list[tuple[str, str, str]]:
    """Time, steps and a sentence for each incident that was acted on; several of a kind in a row are one."""
    told = [
        one for one in data.incidents if as_text(one, "action") != PASSED_OVER or as_text(one, "what") not in UNTOLD
    ]
    found = []
    for (kind, is_rollback), group in groupby(told, lambda one: (as_text(one, "what"), as_number(one, "rollback"))):
        same = list(group)
        cause, action = as_text(same[-1], "cause"), as_text(same[-1], "action")
        first, last = number_or_0(same[0], "step"), number_or_0(same[-1], "step")
        many = f"{count(len(same))} times " if len(same) > 1 else ""
        began = as_number(same[-1], "onset") if is_rollback else None
        since = f" It began at step {count(began)}." if began is not None and began < last else ""
        found.append(
            (
                as_text(same[0], "time"),
                _steps(first, last),
                f"{many}{words(kind)}: {cause}.{since} {_sentence(action)}{_documents(same)}",
            )
        )
    return found


def _documents(incidents: list[Json]) -> str:
    names = {name for one in incidents for name in document_names(one.get("documents"))}
    return f" Its {count(len(names))} documents are listed under Incidents." if names else ""


def _restarts(data: RunData) -> list[tuple[str, str, str]]:
    found = []
    for one in as_objects(data.times, "restarts"):
        at, start, pause = (number_or_0(one, key) for key in ("after", "from", "seconds"))
        again = f"; {count(at - start)} steps were done again" if at > start else ""
        what = f"the training stopped, and {duration(pause)} later went on from step {count(start)}{again}."
        found.append((as_text(one, "time"), _steps(at), what))
    return found


def _steps(first: float, last: float | None = None) -> str:
    return f"step {count(first)}" if last is None or last == first else f"steps {count(first)} to {count(last)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
