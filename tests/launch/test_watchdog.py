"""Processes that hang: ended by their watchdogs, started again with the losses of an undisturbed run, and named."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from trainings import another, command, injected, pid_of_rank, result, wait_for_step

from bessemer.common.errors import BessemerError
from bessemer.guard.heartbeat import Heartbeat, Reading
from bessemer.launch import status_files
from bessemer.launch.outcome import culprits, read_outcome
from bessemer.run.directory import RunDirectory
from bessemer.run.files import read_json_lines

BUSY = Reading(pid=1, rank=0, node=0, host="a", phase="step", step=7, beat=1e6, since=1e6 - 61, limit=60.0)

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


def test_the_one_whose_beats_ended_first_or_that_is_behind_is_the_culprit() -> None:
    stuck = [replace(BUSY, rank=rank) for rank in range(3)]
    assert culprits(stuck) == stuck, "nobody knows which"
    for culprit in replace(stuck[2], beat=BUSY.beat - 31), replace(stuck[2], step=6):
        assert culprits([*stuck[:2], culprit]) == [culprit]
    assert culprits([stuck[0], replace(stuck[1], phase="saving", limit=1800.0), stuck[2]]) == [stuck[0], stuck[2]]


def test_a_crash_is_no_stop_where_srun_ends_the_other_nodes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.status.mkdir()
    for message, code in (("Connection closed by peer", 75), ("the fault", 1)):
        status_files.write_crash(run, 1, RuntimeError(message))
        with pytest.raises(BessemerError, match="SIGTERM" if code == 75 else message) as ended:
            read_outcome(run, 128 + signal.SIGTERM)
        assert ended.value.exit_code == code


def test_a_process_alone_tells_of_itself(tmp_path: Path) -> None:
    with Heartbeat(None, 0, tmp_path / "stacks.txt", 0.3) as alone:
        alone.mark("step", 4)
        deadline = time.monotonic() + 240
        while not (tmp_path / "incidents.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    (told,) = read_json_lines(tmp_path / "incidents.jsonl")
    assert told["what"] == "hang" and told["step"] == 5
    assert "test_a_process_alone" in (tmp_path / "stacks.txt").read_text()


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
            os.kill(pid_of_rank(run, 1), signal.SIGSTOP)
        else:
            trigger.touch()
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, said
    seconds = time.monotonic() - started
    record_property("obtained", f"named, restarted and finished in {seconds:.0f} s, bit for bit")
    (found,) = read_json_lines(run / "incidents.jsonl")
    assert found["what"] == "hang" and found["rank"] == 1 and "held the interpreter" in found["cause"], found
    stacks = Path(found["stacks"]).read_text()
    assert "rank-0" in stacks and "loop.py" in stacks, "where the other one waits"
    assert result(made, name) == result(made, replicas)
