"""What happened to a run, told at the head of its page."""

import json
import re
from collections.abc import Sequence
from html import unescape
from typing import Any

from bessemer.report import data as run_data
from bessemer.report.page import render
from bessemer.report.story import MAX_EVENTS, story
from bessemer.run.directory import RunDirectory
from tests.report.conftest import MakeRun


def told(
    run: RunDirectory, incidents: list[dict[str, Any]], times: Sequence[dict[str, Any]] = ()
) -> list[tuple[str, str]]:
    run.incidents.write_text("".join(json.dumps(row) + "\n" for row in incidents), encoding="utf-8")
    run.times.write_text("".join(json.dumps(row) + "\n" for row in times), encoding="utf-8")
    return story(run_data.read(run))


def incident(step: int, what: str, action: str, **more: Any) -> dict[str, Any]:
    when = f"1970-01-01T00:{step // 60:02}:{step % 60:02}+00:00"
    return {
        "time": when,
        "step": step,
        "what": what,
        "cause": "the loss is high",
        "action": action,
        "onset": step,
        **more,
    }


def test_alarms_rollbacks_and_restarts_stand_in_order(make_run: MakeRun) -> None:
    incidents = [
        incident(20, "slow", "recorded"),
        incident(30, "spike", "update skipped"),
        incident(31, "spike", "update skipped"),
        incident(51, "spike", "update skipped"),
        incident(90, "diverged", "rolled back to step 60; 30 batches skipped", rollback=1) | {"onset": 80},
        incident(120, "lost", "the group starts again"),
    ]
    times = [
        {"began": 0.0, "at": 40.0, "from": 0, "step": 40, "redone_steps": 0, "stopped_by": "SIGINT"},
        {"began": 50.5, "at": 50.8, "from": 40, "step": 40, "redone_steps": 0},
        {"began": 130.0, "at": 150.0, "from": 100, "reached": 114, "step": 140, "redone_steps": 0},
        {"began": 200.0, "reached": 141, "reached_at": "1970-01-01T00:02:31+00:00", "at": 300.0, "from": 140, "step": 1200,
         "redone_steps": 0, "stopped_by": "the guard"},
    ]  # fmt: skip
    found = told(make_run(), incidents, times)
    again = "the training was started again"
    assert found == [
        ("steps 30 to 31", "2 times spike: the loss is high. Update skipped."),
        ("step 40", "SIGINT stopped the run."),
        ("step 40", f"{again} 10.5 s after the stop and went on from step 40."),
        ("step 51", "spike: the loss is high. Update skipped."),
        ("step 90", "diverged: the loss is high. It began at step 80. Rolled back to step 60; 30 batches skipped."),
        ("step 120", "lost: the loss is high. The group starts again."),
        ("step 100", f"{again} 1 min 19 s after the stop and went on from step 100; 14 steps were repeated."),
        ("step 141", "the training was killed, or its machine lost."),
        ("step 140", f"{again} 49.0 s after the stop and went on from step 140; 1 step was repeated."),
    ]


def test_a_loss_that_is_noted_after_the_group_began_again_stands_before_it_and_is_the_cause(
    make_run: MakeRun,
) -> None:
    """The other process ends with an error of its own, since it lost its neighbour."""
    times = [
        {"began": 0.0, "at": 40.0, "from": 0, "step": 40, "redone_steps": 0, "stopped_by": "an error: RuntimeError"},
        {"began": 40.5, "at": 80.0, "from": 40, "step": 80, "redone_steps": 0},
    ]
    found = told(make_run(), [incident(41, "lost", "the group starts again")], times)
    assert [step for step, _ in found] == ["step 41", "step 40"]
    assert found[0][1].startswith("lost:") and "started again" in found[1][1]
    assert not any("RuntimeError" in sentence for _, sentence in found)


def test_a_run_to_which_nothing_happened_has_no_story(make_run: MakeRun) -> None:
    run = make_run()
    assert told(run, [incident(20, "slow", "recorded")]) == []
    assert 'id="story"' not in render(run_data.read(run))


def test_a_long_story_leaves_out_its_middle_and_escapes_what_it_says(make_run: MakeRun) -> None:
    run = make_run()
    rows = [incident(step, f"<b>{step}", "update skipped") for step in range(10, 10 + 3 * MAX_EVENTS)]
    found = told(run, rows)
    assert len(found) == MAX_EVENTS + 1 and found[MAX_EVENTS // 2] == ("…", f"{2 * MAX_EVENTS} more: see Incidents")
    html = render(run_data.read(run))
    section = re.search(r'<section id="story">.*?</section>', html, re.DOTALL)
    assert section is not None and "<b>" not in section[0] and "<b>10: the loss is high." in unescape(section[0])
