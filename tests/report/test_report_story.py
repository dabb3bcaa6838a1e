"""The story at the top of a run's page."""

import json
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from bessemer.report import comparison, planned
from bessemer.report import data as run_data
from bessemer.report.data import read
from bessemer.report.page import render
from bessemer.report.story import MAX_EVENTS, incident_counts, story
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
    } | more


def test_alarms_rollbacks_and_restarts_are_in_order(make_run: MakeRun) -> None:
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
        ("step 40", f"{again} 10.5 s after the stop and continued from step 40."),
        ("step 51", "spike: the loss is high. Update skipped."),
        ("step 90", "diverged: the loss is high. It began at step 80. Rolled back to step 60; 30 batches skipped."),
        ("step 120", "lost: the loss is high. The group starts again."),
        ("step 100", f"{again} 1 min 19 s after the stop and continued from step 100; 14 steps were repeated."),
        ("step 141", "the training was killed, or its machine lost."),
        ("step 140", f"{again} 49.0 s after the stop and continued from step 140; 1 step was repeated."),
    ]


def test_a_failure_recorded_after_the_restart_is_shown_before_it_as_the_cause(make_run: MakeRun) -> None:
    """The other process ends with its own error, since it lost the first one."""
    times = [
        {"began": 0.0, "at": 40.0, "from": 0, "step": 40, "redone_steps": 0, "stopped_by": "an error: RuntimeError"},
        {"began": 40.5, "at": 80.0, "from": 40, "step": 80, "redone_steps": 0},
    ]
    found = told(make_run(), [incident(41, "lost", "the group starts again")], times)
    assert [step for step, _ in found] == ["step 41", "step 40"]
    assert found[0][1].startswith("lost:") and "started again" in found[1][1]
    assert not any("RuntimeError" in sentence for _, sentence in found)


def test_a_run_without_incidents_has_no_story(make_run: MakeRun) -> None:
    run = make_run()
    assert told(run, [incident(20, "slow", "recorded")]) == []
    assert 'id="story"' not in render(run_data.read(run))


def test_a_long_story_is_shortened_in_the_middle_and_escaped(make_run: MakeRun) -> None:
    run = make_run()
    rows = [incident(step, f"<b>{step}", "update skipped") for step in range(10, 10 + 3 * MAX_EVENTS)]
    found = told(run, rows)
    assert incident_counts(run_data.read(run)).startswith("<b>10 (1), <b>11 (1), ")
    assert len(found) == MAX_EVENTS + 1 and found[MAX_EVENTS // 2] == ("…", f"{2 * MAX_EVENTS} more: see Incidents")
    html = render(run_data.read(run))
    section = re.search(r'<section id="story">.*?</section>', html, re.DOTALL)
    assert section is not None and "<b>" not in section[0] and "<b>10: the loss is high." in unescape(section[0])


PLAN = {"step_seconds": 1.1, "memory_bytes": {"total": 90}, "step_seconds_from": "a guess"}


def step(number: int, seconds: float, tokens: int = 1000, **more: Any) -> dict[str, Any]:
    return {"kind": "train", "step": number, "step_seconds": seconds, "tokens_per_second": tokens / seconds, **more}


def compared(folder: Path, rows: Sequence[dict[str, Any]], plan: dict[str, Any] = PLAN) -> dict[str, Any]:
    """Write plan.json and metrics.jsonl, and compare them."""
    run = RunDirectory(folder)
    run.plan.write_text(json.dumps(plan))
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return planned.compare(read(run))


def test_the_median_leaves_out_the_start_and_single_slow_steps(tmp_path: Path) -> None:
    rows = [step(1, 9.0), step(2, 3.0), step(3, 2.0), *(step(n, 1.0) for n in range(4, 30)), step(30, 50.0)]
    found = compared(tmp_path, rows)
    assert (found["step_seconds"]["measured"], found["step_seconds"]["spread"]) == (1.0, 0.0)
    assert found["steps"] == 27 and "memory_bytes" not in found
    assert compared(tmp_path, rows[:2]) == {}


def test_a_growing_batch_counts_once_it_is_full(tmp_path: Path) -> None:
    rows = [*(step(n, 0.1, 100) for n in range(50)), *(step(n, 1.0) for n in range(50, 60))]
    assert compared(tmp_path, rows)["step_seconds"]["measured"] == 1.0


def test_the_spread_covers_the_middle_half(tmp_path: Path) -> None:
    seconds = [1.0, 1.0, 1.0, *(0.8 + 0.1 * number for number in range(5))]
    found = compared(tmp_path, [step(number, value) for number, value in enumerate(seconds, 1)])["step_seconds"]
    assert (found["measured"], found["spread"]) == (pytest.approx(1.0), pytest.approx(0.2))


def test_memory_is_the_maximum_of_all_lines(tmp_path: Path) -> None:
    rows = [step(n, 1.0, memory_bytes=100 + n) for n in range(1, 10)]
    last = {"kind": "memory", "step": 9, "measured": 150, "planned": 120}
    assert compared(tmp_path, rows)["memory_bytes"] == {
        "planned": 90,
        "measured": 109,
        "error": 90 / 109 - 1,
        "since": 0,
    }
    found = compared(tmp_path, [*rows, last])["memory_bytes"]
    assert (found["planned"], found["measured"]) == (120, 150), "what the training process itself held"


def test_after_a_resume_only_later_steps_count(tmp_path: Path) -> None:
    old = [step(n, 9.0, memory_bytes=500) for n in range(1, 10)] + [{"kind": "memory", "step": 9, "measured": 600}]
    new = [step(n, 1.0, memory_bytes=300) for n in range(10, 16)] + [{"kind": "memory", "step": 15, "measured": 400}]
    plan = {"step_seconds": 1.0, "memory_bytes": {"total": 90}}
    found = compared(tmp_path, [*old, {"kind": "resumed", "step": 9}, *new[:6]], plan)
    assert (found["step_seconds"]["measured"], found["since"]) == (1.0, 9)
    too_few = compared(tmp_path, [*old, {"kind": "resumed", "step": 9}, *new[:2]], plan)
    assert (too_few["step_seconds"]["measured"], too_few["since"]) == (9.0, 0)
    run = RunDirectory(tmp_path)
    assert read(run).peak_memory == 300, "of the last process"
    run.metrics.write_text(run.metrics.read_text() + json.dumps(new[-1]) + "\n")
    assert read(run).peak_memory == 400


def test_plan_and_measurement_side_by_side(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    rows = [step(n, 1.0, memory_bytes=100) for n in range(1, 9)]
    found = compared(tmp_path, rows)
    planned.write(run, read(run))
    assert found == json.loads((tmp_path / "planned_against_measured.json").read_text())
    assert found["step_seconds"]["error"] == pytest.approx(0.1)
    assert found["memory_bytes"]["error"] == pytest.approx(-0.1)
    time = {"kind": "time", "step": 8, "resumed_at": 6, "seconds": 4.0, "validation": 1.5, "saving": 0.5}
    of_more_steps = compared(tmp_path, [*rows, time], {"seconds": 12.0, "steps": 16})
    assert of_more_steps["seconds"]["planned"] == 1.5 and planned.rows(of_more_steps)
    run.plan.write_text("{")
    assert planned.compare(read(run)) == {}


def test_nothing_is_written_before_there_are_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert compared(tmp_path, []) == {}
    planned.write(run, read(run))
    assert not (tmp_path / "planned_against_measured.json").exists()


def read_all(runs: list[RunDirectory]) -> dict[str, run_data.RunData]:
    return {run.path.name: run_data.read(run) for run in runs}


def test_runs_side_by_side(make_run: MakeRun, tmp_path: Path) -> None:
    first, second = make_run(steps=300), make_run(steps=200, folder=tmp_path / "b", seed=1)
    second.recipe.write_text(
        second.recipe.read_text().replace('"forge"', '"anvil"').replace("clip_norm = 1.0", "clip_norm = 0.5")
    )
    runs = {"forge": run_data.read(first), "anvil": run_data.read(second)}
    columns, rows = comparison.differences(runs)
    assert (columns, rows) == (["Key", "forge", "anvil"], [["train.optimizer.clip_norm", "1", "0.5"]])
    outcome = {row[0]: row[1:] for row in comparison.results(runs)[1]}
    assert outcome["Steps"] == ["300", "200"]
    page = comparison.write(tmp_path / "comparison.html", [first, second]).read_text()
    assert "train.optimizer.clip_norm" in page
    figures = comparison.overlay_figures(runs)
    assert all(len(figure["traces"]) == 2 for figure in figures)


def test_a_source_in_only_one_run_is_a_difference(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5, folder=tmp_path / name) for name in "ab"]
    text = runs[1].recipe.read_text()
    source = '[[corpus.sources]]\nname = "extra"\nformat = "jsonl"\npaths = ["more"]\n'
    runs[1].recipe.write_text(text + source)
    for run, scores in zip(runs, ({"prose": 2.0}, {"prose": 1.9, "extra": 3.0}), strict=True):
        found = {"bits_per_byte": 2.0, "bits_per_byte_by_source": scores, "ngram": {"order": 5, "bits_per_byte": 2.5}}
        found["ppmd"] = {"order": 10, "bits_per_byte": 1.5}
        run.evaluation.write_text(json.dumps(found))
    named = read_all(runs)
    rows = {row[0]: row[1:] for row in comparison.differences(named)[1]}
    assert rows == {"corpus.sources[extra].name": ["–", "extra"]}
    outcome = {row[0]: row[1:] for row in comparison.results(named)[1]}
    assert outcome["Held-out bits per byte of prose"] == ["2.0000", "1.9000"]
    assert outcome["Held-out bits per byte of extra"] == ["–", "3.0000"]
    assert outcome["Bits per byte of a byte 5-gram on the same text"] == ["2.5000", "2.5000"]
    assert outcome["Bits per byte of PPMd order 10 on the same text"] == ["1.5000", "1.5000"]


def test_runs_with_the_same_name_are_named_by_their_folders(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5), make_run(steps=5, folder=tmp_path / "b")]
    named = comparison.name_runs([run_data.read(run) for run in runs], [run.path for run in runs])
    assert list(named) == [str(run.path) for run in runs]
    assert comparison.differences(named)[1] == []


def test_scores_on_different_data_are_separate_rows(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5, folder=tmp_path / name) for name in "ab"]
    for run, data, items in zip(runs, ("x.jsonl", "y.jsonl"), (8, 1), strict=True):
        tasks = [
            {
                "name": name,
                "items": items,
                "data": f"data/{data}",
                "content": content,
                "scores": {"acc": {"value": 1 / items} | ({"low": 0.0, "high": 0.5} if items == 8 else {})},
            }
            for name, content in (("quiz", data), ("same", "equal"))
        ]
        found = json.loads(run.evaluation.read_text()) if run.evaluation.exists() else {}
        run.evaluation.write_text(json.dumps({**found, "tasks": tasks}))
    outcome = {row[0]: row[1:] for row in comparison.results(read_all(runs))[1]}
    assert outcome["quiz of x.jsonl (8 items), acc"] == ["0.1250 (0.0000 to 0.5000)", "–"]
    assert outcome["quiz of y.jsonl (1 item), acc"] == ["–", "1.0000"]
    assert outcome["same, acc"] == ["0.1250 (0.0000 to 0.5000)", "1.0000"]


def test_losses_of_different_objectives_share_no_figure_or_row(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5, folder=tmp_path / name) for name in "ab"]
    runs[1].recipe.write_text(runs[1].recipe.read_text().replace("[train]\n", '[train]\nobjective = "masked"\n'))
    named = read_all(runs)
    assert named["b"].objective == "masked"
    figures = {figure["id"]: figure for figure in comparison.overlay_figures(named)}
    for id, name, unit in (("loss", "a", "nats per token"), ("loss-2", "b", "nats per hidden token")):
        assert [trace["name"] for trace in figures[id]["traces"]] == [name]
        assert figures[id]["layout"]["yaxis"]["title"]["text"] == unit
    rows = {row[0]: row[1:] for row in comparison.results(named)[1]}
    assert rows["Training loss, the last, nats per token"][1] == "–"
    assert rows["Training loss, the last, nats per hidden token"][0] == "–"


def test_scores_on_different_data_are_not_compared(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=20, folder=tmp_path / name) for name in "ab"]
    for run, later in zip(runs, (7, 8), strict=True):
        with open(run.metrics, "a") as file:
            for step, content in ((5, 7), (10, 7), (15, later), (20, later)):
                row = {"kind": "tasks", "step": step, "content": {"quiz": content}, "acc": {"quiz": step / 20}}
                file.write(json.dumps(row) + "\n")
    same, changed = (run_data.read(run) for run in runs)

    ids = [figure["id"] for figure in comparison.overlay_figures({"a": same, "b": same})]
    assert "tasks-acc-quiz" in ids
    assert "tasks-acc-quiz" not in [figure["id"] for figure in comparison.overlay_figures({"a": same, "b": changed})]


def test_an_unreadable_recipe_is_named_and_not_compared(make_run: MakeRun, tmp_path: Path) -> None:
    runs = [make_run(steps=5, folder=tmp_path / name) for name in "abc"]
    runs[1].recipe.write_text(runs[1].recipe.read_text().replace("clip_norm = 1.0", "clip_norm = 0.5"))
    runs[2].recipe.write_text("[run")
    unread = ["recipe.toml", "read", "read", "cannot be read"]
    found = comparison.differences(read_all(runs))[1]
    assert found == [unread, ["train.optimizer.clip_norm", "1", "0.5", "?"]]
