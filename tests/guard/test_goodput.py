"""Goodput: manual examples, and runs that were killed and rolled back."""

import json
from datetime import UTC, datetime
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from bessemer.common.errors import BessemerError, Stopped
from bessemer.guard import goodput
from bessemer.guard.alerts import post_incidents, severity_of
from bessemer.guard.goodput import TIME_KINDS, WallClock, read_sessions, summarize_sessions
from bessemer.guard.incidents import CHECKPOINT_FAILED, LOST, PLATEAU, SPIKE, record
from bessemer.guard.journal import Journal, Rollback
from bessemer.run.directory import RunDirectory


def test_goodput_of_sessions_equals_manual_values(tmp_path: Path) -> None:
    """103 steps of 1 s, killed; 7 s later from step 80 to 120, with 5 steps rolled back."""
    rows = [
        {"began": 0.0, "at": 50.0, "from": 0, "step": 40, "redone_steps": 0, "start": 5.0, "steps": 40.0, "validation": 5.0},
        {"began": 0.0, "at": 120.0, "from": 0, "step": 100, "redone_steps": 0, "start": 5.0, "steps": 100.0,
         "validation": 10.0, "saving": 5.0, "data_wait": 4.0},
        {"began": 130.0, "at": 190.0, "from": 80, "reached": 103, "reached_at": "1970-01-01T00:02:03+00:00", "step": 120,
         "redone_steps": 5, "stopped_by": "SIGINT", "start": 5.0, "steps": 45.0,
         "recovery": 3.0, "saving": 5.0, "data_wait": 0.0},
    ]  # fmt: skip
    place = tmp_path / "time.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"began": 130.0, "at"')
    assert summarize_sessions(read_sessions(place)) == {
        "productive": pytest.approx((103 - 4) * 80 / 103 + 45 - 5),
        "data_wait": 4.0,
        "validation": 10.0,
        "saving": 10.0,
        "start": 10.0,
        "recovery": 3.0,
        "redone": pytest.approx((103 - 4) * 23 / 103 + 5),  # waiting for data counts once
        "stalled": 0.0,
        "stopped": 7.0,
        "other": pytest.approx(190 - 103 - 45 - 10 - 10 - 10 - 3 - 7),
        "total": 190.0,
        "last": 190.0,
        "effective": pytest.approx(((103 - 4) * 80 / 103 + 40) / 190),
        "sessions": 2,
        "restarts": [
            {
                "time": "1970-01-01T00:02:10.000+00:00",
                "after": 103,
                "from": 80,
                "seconds": 7.0,
                "stopped": "1970-01-01T00:02:03.000+00:00",
                "stopped_by": None,
            }
        ],
        "stopped_by": "SIGINT",
    }
    assert summarize_sessions(read_sessions(tmp_path / "none")) is None


def test_an_unfinished_session_ends_at_its_last_logged_step(tmp_path: Path) -> None:
    """A run in its first seconds, or killed then: its only line is that of the start."""
    began = {"began": 0.0, "at": 1.0, "from": 0, "step": 0, "redone_steps": 0, "start": 1.0}
    later = began | {"at": 6.0, "step": 10, "steps": 5.0}
    for row, kinds in ((began, {"productive": 9.0, "start": 1.0}), (later, {"productive": 9.0, "start": 1.0})):
        found = summarize_sessions([row], (30, "1970-01-01T00:00:10+00:00"))
        assert found is not None and found["total"] == 10.0 and found["effective"] == 0.9
        assert {kind: found[kind] for kind in TIME_KINDS if found[kind]} == kinds
    for ended in ({"stopped_by": "SIGTERM"}, {"finished": True}):  # the last line has everything
        found = summarize_sessions([later | ended], (30, "1970-01-01T00:00:10+00:00"))
        assert found is not None and found["total"] == 6.0
    found = summarize_sessions([later], (8, "1970-01-01T00:00:02+00:00"))  # logged before the last line
    assert found is not None and (found["total"], found["productive"]) == (6.0, 5.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Set the time that clocks return."""
    now = [100.0]
    monkeypatch.setattr(goodput, "perf_counter", lambda: now[0])
    monkeypatch.setattr(goodput, "time", lambda: 1e9 + now[0])
    return now


def test_time_counted_elsewhere_is_not_productive(tmp_path: Path, now: list[float]) -> None:
    clock = WallClock(tmp_path / "time.jsonl", 0, 2.0)
    for step in range(1, 11):
        now[0] += 1.0
        if step == 5:
            with clock.counting("validation"):
                now[0] += 3.0
        clock.add_step(step, 0.25)
    clock.write(10)
    found = summarize_sessions(read_sessions(tmp_path / "time.jsonl"))
    assert found is not None
    assert {kind: found[kind] for kind in TIME_KINDS if found[kind]} == {
        "productive": 7.5, "data_wait": 2.5, "validation": 3.0, "start": 2.0,
    }  # fmt: skip
    assert found["total"] == 15.0 and found["effective"] == 0.5


def test_the_time_before_a_run_is_extended_does_not_count(tmp_path: Path) -> None:
    rows = [
        {"began": 0.0, "at": 50.0, "from": 0, "step": 40, "redone_steps": 0, "steps": 50.0, "finished": True},
        {"began": 1000.0, "at": 1030.0, "from": 40, "step": 60, "redone_steps": 0, "steps": 30.0},
    ]
    (tmp_path / "time.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = summarize_sessions(read_sessions(tmp_path / "time.jsonl"))
    assert found is not None and found["stopped"] == 0.0 and found["total"] == found["productive"] == 80.0


def test_a_step_that_hung_is_not_productive(tmp_path: Path, now: list[float]) -> None:
    clock = WallClock(tmp_path / "time.jsonl", 0, 0.0)
    for step in range(1, 13):
        now[0] += 21.0 if step == 11 else 1.0
        clock.add_step(step, 0.5 if step == 12 else 0.0)
    clock.write(12)
    found = summarize_sessions(read_sessions(tmp_path / "time.jsonl"))
    assert found is not None and (found["stalled"], found["data_wait"], found["productive"]) == (20.0, 0.5, 11.5)


def rollback(number: int, at: int, to: int) -> Rollback:
    return Rollback(number, at, to, "diverged", at - 10, (8 * at, 8 * at + 80), 20)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Rollbacks from 120 to 80, from 150 to 60, and from 400 to 300, with a skipped update on each branch."""
    found = Journal(tmp_path / "journal.jsonl")
    found.add_skip(57)
    found.add_skip(90)
    found.add_rollback(rollback(1, 120, 80))
    found.add_skip(75)
    found.add_rollback(rollback(2, 150, 60))
    found.add_skip(95)
    found.add_rollback(rollback(3, 400, 300))
    found.add_skip(310)
    return found


def test_a_written_journal_reads_back_unchanged(journal: Journal) -> None:
    assert journal.path is not None
    assert Journal.read(journal.path) == journal
    assert Journal.read(journal.path.with_name("none")).rollbacks == []


def test_the_path_has_the_steps_no_rollback_undid(journal: Journal) -> None:
    assert [step for step in (57, 75, 90, 95, 310) if journal.skips_step(step)] == [57, 95, 310]
    assert [journal.keeps(60, 0), journal.keeps(80, 0), journal.keeps(80, 1), journal.keeps(300, 2)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert journal.keeps(301, 3) and not journal.keeps(301, 2)


def test_the_learning_rate_follows_the_last_rollback_to_an_earlier_step(journal: Journal) -> None:
    governing = {step: journal.rollback_before(step) for step in (0, 59, 60, 80, 299, 300)}
    assert {step: found and found.number for step, found in governing.items()} == {
        0: None, 59: None, 60: 2, 80: 2, 299: 2, 300: 3,
    }  # fmt: skip
    assert (journal.num_rollbacks_within(400, 10_000), journal.num_rollbacks_within(400, 260)) == (3, 2)


def test_an_incomplete_last_line_is_ignored(journal: Journal) -> None:
    assert journal.path is not None
    whole = journal.path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    for length in range(1, len(last)):
        journal.path.write_bytes(whole[:-length])
        found = Journal.read(journal.path)
        assert found.num_rollbacks == 3 and not found.skips_step(310)
        found.drop_torn_line()
        found.add_skip(311)
        assert Journal.read(journal.path).skips_step(311)


@pytest.mark.parametrize("damage", ["cut", "missing", "changed", "foreign"])
def test_other_damage_of_a_journal_is_an_error(journal: Journal, damage: str) -> None:
    assert journal.path is not None
    lines = journal.path.read_text().splitlines()
    if damage == "cut":
        lines[2] = lines[2][:30]
    elif damage == "missing":
        del lines[2]  # the first of the rollbacks
    elif damage == "changed":
        lines[2] = json.dumps({**json.loads(lines[2]), "omitted": 3})
    else:
        lines[0] = "[]"
    journal.path.write_text("\n".join(lines) + "\n")
    with pytest.raises(BessemerError, match=r"journal.jsonl: line [1345] .*--restart"):
        Journal.read(journal.path)


def test_incidents_that_changed_the_run_are_posted(tmp_path: Path, inbox: tuple[str, list[dict[str, Any]]]) -> None:
    url, posts = inbox
    run = RunDirectory(tmp_path / "mine")
    run.path.mkdir()
    record(run.incidents, LOST, step=1, cause="before", action="it was posted then")
    sleep(0.002)  # times have milliseconds
    began = datetime.now(UTC)
    record(run.incidents, SPIKE, step=2, cause="of this command", action="the update was skipped")
    with post_incidents(run, url, began):
        record(run.incidents, PLATEAU, step=5, cause="no progress")
        record(run.incidents, SPIKE, step=6, cause="the loss is 9", action="the update was skipped")
        record(run.incidents, LOST, step=7, cause="rank 1 was killed", action="restarting")
    assert [post["what"] for post in posts] == ["spike", "spike", "lost", "finished"]
    lost = next(post for post in posts if post["what"] == "lost")
    assert lost["text"] == lost["content"] == "[error] mine: lost at step 7: rank 1 was killed; restarting"
    assert lost["incident"]["cause"] == "rank 1 was killed" and lost["step"] == 7


@pytest.mark.parametrize(
    ("error", "what", "severity"),
    [
        (Stopped("by SIGTERM"), "stopped", "warning"),
        (BessemerError("no disk"), "failed", "error"),
        (ValueError(), "failed", "error"),
    ],
)
def test_the_end_of_a_run_is_posted(
    tmp_path: Path, inbox: tuple[str, list[dict[str, Any]]], error: Exception, what: str, severity: str
) -> None:
    url, posts = inbox
    with pytest.raises(type(error)), post_incidents(RunDirectory(tmp_path), url):
        raise error
    (post,) = posts
    assert (post["what"], post["severity"]) == (what, severity)


def test_a_url_that_does_not_answer_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    with post_incidents(run, "http://127.0.0.1:9/none"):
        for step in range(3):
            record(run.incidents, SPIKE, step=step, cause="x", action="y")
    assert capsys.readouterr().err.count("report.webhook") == 1


def test_recorded_incidents_are_posted_as_info() -> None:
    assert severity_of({"what": CHECKPOINT_FAILED.name, "action": "recorded"}) == "error", "nothing is saved"
    assert severity_of({"what": "unknown"}) == "info"
    assert severity_of({"what": "nonfinite", "rollback": 1}) == "error"
    assert severity_of({"what": "nonfinite", "action": "run stopped"}) == "error"
    assert severity_of({"what": "nonfinite", "action": "update skipped"}) == "warning"
    assert {severity_of({"what": what, "action": "recorded"}) for what in ("plateau", "spike")} == {"info"}
    assert severity_of({"what": "diverged", "action": "rolled back to step 3"}) == "error"
