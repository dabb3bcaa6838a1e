"""Processes that hang: noticed from outside, named, ended and started again, with the losses of an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trainings import another, command, injected, losses, wait_for_step, weights

from bessemer.guard import heartbeat
from bessemer.guard.heartbeat import Heartbeat, Reading
from bessemer.launch.watchdog import culprits
from bessemer.run import read_json_lines

BUSY = Reading(pid=1, rank=0, phase="step", step=7, silence=0.4, waiting=3.0, limit=60.0)

HOLDS_INTERPRETER = """
import ctypes, os, pathlib, threading, time
def hold():
    place = pathlib.Path(os.environ["HOLD_AFTER"])
    while not place.exists():
        time.sleep(0.05)
    place.unlink()
    ctypes.PyDLL(None).sleep(1000)  # a PyDLL call does not give the interpreter back
if os.environ.get("LOCAL_RANK") == "1":
    threading.Thread(target=hold, daemon=True).start()
"""


def ranks(readings: list[Reading]) -> list[int]:
    return [one.rank for one in culprits(readings)]


def test_the_one_that_does_not_answer_is_the_culprit() -> None:
    waits = [replace(BUSY, rank=rank, waiting=50.0) for rank in range(4)]
    assert ranks(waits) == []
    assert ranks([*waits[:2], replace(waits[2], silence=31.0), waits[3]]) == [2]
    short = [replace(one, limit=4.0, waiting=1.0) for one in waits]
    assert ranks([replace(short[0], silence=4.5), *short[1:]]) == [0]


def test_of_processes_that_answer_those_behind_are_the_culprits() -> None:
    stuck = [replace(BUSY, rank=rank, waiting=61.0) for rank in range(3)]
    assert ranks(stuck) == [0, 1, 2], "nobody knows which"
    assert ranks([stuck[0], replace(stuck[1], step=6), stuck[2]]) == [1]
    assert ranks([stuck[0], replace(stuck[1], phase="saving", limit=1800.0), stuck[2]]) == [0, 2]
    assert ranks([replace(BUSY, waiting=1e6, silence=1e6, limit=0.0)]) == [], "switched off"


def test_a_heartbeat_is_read_by_another_process(tmp_path: Path) -> None:
    with Heartbeat(tmp_path / "0.heartbeat", 3, tmp_path / "0.stacks") as beating:
        beating.mark("step", 11)
        found = heartbeat.read(tmp_path / "0.heartbeat")
        assert found is not None
        assert (found.pid, found.rank, found.phase, found.step, found.limit) == (os.getpid(), 3, "step", 11, 60.0)
        assert found.activity == "step 12" and found.silence < 5 and not found.hangs
        with beating.during("saving"):
            inside = heartbeat.read(tmp_path / "0.heartbeat")
            assert inside is not None and inside.activity == "the saving after step 11" and inside.limit == 1800.0
        os.kill(os.getpid(), signal.SIGUSR2)
        deadline = time.monotonic() + 20
        while "test_a_heartbeat_is_read" not in (tmp_path / "0.stacks").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "test_a_heartbeat_is_read" in (tmp_path / "0.stacks").read_text()
    assert heartbeat.read(tmp_path / "none") is None


def test_the_limit_follows_the_slow_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    beating = Heartbeat(None, 0, tmp_path / "stacks")
    for step in range(200):
        beating.mark("step", step)
        now[0] += 40.0 if step % 20 == 0 else 2.0
    assert beating._limit == 200.0
    assert Heartbeat(None, 0, tmp_path / "stacks", 7.0)._limit_of("step") == 7.0
    assert Heartbeat(None, 0, tmp_path / "stacks", 0)._limit_of("start") == 0.0


def test_a_process_alone_tells_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    with Heartbeat(None, 0, tmp_path / "stacks", 0.3, lambda cause, step: told.append((cause, step))) as alone:
        alone.mark("step", 4)
        deadline = time.monotonic() + 20
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        assert [step for _, step in told] == [5] and told[0][0].endswith("in step 5"), "once"
    assert "test_a_process_alone" in (tmp_path / "stacks").read_text()


def trained(made: Path, name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a training of two processes, and wait for its fifth step."""
    keys = "parallel.replicate=2", "guard.hang_seconds=5", "train.steps=30"
    sets = [part for key in keys for part in ("--set", key)]
    process = subprocess.Popen(
        command("train", *another(made, name), *sets), env=os.environ | environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_step(made.parent / "runs" / name, 5)
    return process


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [pytest.param("stopped", marks=pytest.mark.fault(10)), pytest.param("interpreter", marks=pytest.mark.fault(11))],
)
def test_a_process_that_hangs_is_ended_and_the_run_goes_on(
    made: Path, replicas: str, tmp_path: Path, fault: str, record_property: Callable[[str, object], None]
) -> None:
    variables = injected(tmp_path, HOLDS_INTERPRETER)
    name = f"hang-{fault}"
    run, trigger = made.parent / "runs" / name, tmp_path / "trigger"
    environment = {**variables, "HOLD_AFTER": str(trigger)} if fault == "interpreter" else {}
    process = trained(made, name, environment)
    try:
        started = time.monotonic()
        if fault == "stopped":
            os.kill(int((run / ".training" / "rank-1.pid").read_text()), signal.SIGSTOP)
        else:
            trigger.touch()
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, said
    seconds = time.monotonic() - started
    assert seconds < 75
    record_property("obtained", f"named, restarted and finished in {seconds:.0f} s, bit for bit")
    (found,) = read_json_lines(run / "incidents.jsonl")
    why = "stopped by a signal" if fault == "stopped" else "holds the interpreter"
    assert found["what"] == "hang" and found["rank"] == 1 and why in found["cause"], found
    assert "rank 1 ended" in said
    stacks = Path(found["stacks"]).read_text()
    assert "local rank 0" in stacks and "loop.py" in stacks, "where the other one waits"
    assert losses(made, name) == losses(made, replicas)
    assert weights(made, name) == weights(made, replicas)


def pid_of(*words: bytes) -> int:
    """The process whose command has all of these words, and no fork of it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            text = path.read_bytes()
            if all(word in text for word in words) and "python" in path.with_name("comm").read_text():
                return int(path.parent.name)
    raise AssertionError(f"no process of {words}")


@pytest.mark.long
def test_a_stopped_agent_is_continued(made: Path) -> None:
    """No process of the group may fail meanwhile: only the agent would see it."""
    process = trained(made, "agent-stopped", {})
    try:
        os.kill(pid_of(b"bessemer.launch.agent", b"agent-stopped"), signal.SIGSTOP)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, said
    (found,) = read_json_lines(made.parent / "runs" / "agent-stopped" / "incidents.jsonl")
    assert found["what"] == "hang" and "was stopped by a signal" in found["cause"] and found["action"] == "continued"
