"""Where the wall time goes: by hand, and of runs that were killed and rolled back."""

import json
from pathlib import Path

import pytest

from bessemer.guard import goodput
from bessemer.guard.goodput import TIME_KINDS, WallClock, read_sessions, summarize_sessions


def test_sessions_by_hand(tmp_path: Path) -> None:
    """103 steps of 1 s, killed; 7 s later from step 80 on to 120, with 5 steps rolled back."""
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
        "redone": pytest.approx((103 - 4) * 23 / 103 + 5),  # the wait for data is counted once
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


def test_the_last_seconds_of_a_session_that_did_not_end_are_those_of_its_logged_steps(tmp_path: Path) -> None:
    """A run that trains, or was killed, within the first seconds: its only line is of the start."""
    began = {"began": 0.0, "at": 1.0, "from": 0, "step": 0, "redone_steps": 0, "start": 1.0}
    later = began | {"at": 6.0, "step": 10, "steps": 5.0}
    for row, kinds in ((began, {"productive": 9.0, "start": 1.0}), (later, {"productive": 9.0, "start": 1.0})):
        found = summarize_sessions([row], (30, "1970-01-01T00:00:10+00:00"))
        assert found is not None and found["total"] == 10.0 and found["effective"] == 0.9
        assert {kind: found[kind] for kind in TIME_KINDS if found[kind]} == kinds
    for ended in ({"stopped_by": "SIGTERM"}, {"finished": True}):  # the last line says all
        found = summarize_sessions([later | ended], (30, "1970-01-01T00:00:10+00:00"))
        assert found is not None and found["total"] == 6.0
    found = summarize_sessions([later], (8, "1970-01-01T00:00:02+00:00"))  # logged before the last line
    assert found is not None and (found["total"], found["productive"]) == (6.0, 5.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that clocks show."""
    now = [100.0]
    monkeypatch.setattr(goodput, "perf_counter", lambda: now[0])
    monkeypatch.setattr(goodput, "time", lambda: 1e9 + now[0])
    return now


def test_what_is_counted_otherwise_is_no_step(tmp_path: Path, now: list[float]) -> None:
    clock = WallClock(tmp_path / "time.jsonl", 0, 2.0)
    for step in range(1, 11):
        now[0] += 1.0
        if step == 5:
            with clock.counting("validation"):
                now[0] += 3.0
        clock.stepped(step, 0.25)
    clock.write(10)
    found = summarize_sessions(read_sessions(tmp_path / "time.jsonl"))
    assert found is not None
    assert {kind: found[kind] for kind in TIME_KINDS if found[kind]} == {
        "productive": 7.5, "data_wait": 2.5, "validation": 3.0, "start": 2.0,
    }  # fmt: skip
    assert found["total"] == 15.0 and found["effective"] == 0.5


def test_the_time_until_a_finished_run_is_trained_longer_is_not_its(tmp_path: Path) -> None:
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
        clock.stepped(step, 0.5 if step == 12 else 0.0)
    clock.write(12)
    found = summarize_sessions(read_sessions(tmp_path / "time.jsonl"))
    assert found is not None and (found["stalled"], found["data_wait"], found["productive"]) == (20.0, 0.5, 11.5)
