"""Processes that hang: their watchdogs end them, the run resumes with the losses of an undisturbed run, and the rank is named."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainings import another, command, injected, pid_of_rank, result, trained, wait_for_step

from bessemer.common.errors import BessemerError
from bessemer.distributed.sharded_tensors import bit_sums
from bessemer.guard.heartbeat import Heartbeat, Reading
from bessemer.launch import status_files
from bessemer.launch.outcome import read_outcome, stalled_ranks
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


def test_the_rank_that_stopped_first_or_is_behind_is_named() -> None:
    stuck = [replace(BUSY, rank=rank) for rank in range(3)]
    assert stalled_ranks(stuck) == stuck, "nobody knows which"
    for culprit in replace(stuck[2], beat=BUSY.beat - 31), replace(stuck[2], step=6):
        assert stalled_ranks([*stuck[:2], culprit]) == [culprit]
    assert stalled_ranks([stuck[0], replace(stuck[1], phase="saving", limit=1800.0), stuck[2]]) == [stuck[0], stuck[2]]


def test_a_crash_is_not_a_stop_when_srun_ends_the_other_nodes(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.status.mkdir()
    for message, code in (("Connection closed by peer", 75), ("the fault", 1)):
        status_files.write_crash(run, 1, RuntimeError(message))
        with pytest.raises(BessemerError, match="SIGTERM" if code == 75 else message) as ended:
            read_outcome(run, 128 + signal.SIGTERM)
        assert ended.value.exit_code == code


def test_a_single_process_reports_itself(tmp_path: Path) -> None:
    with Heartbeat(None, 0, tmp_path / "stacks.txt", 0.3) as alone:
        alone.mark("step", 4)
        deadline = time.monotonic() + 240
        while not (tmp_path / "incidents.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    (told,) = read_json_lines(tmp_path / "incidents.jsonl")
    assert told["what"] == "hang" and told["step"] == 5
    assert "test_a_single_process_reports_itself" in (tmp_path / "stacks.txt").read_text()


def start_training(made: Path, name: str, environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a training of two processes and wait for the step after its first checkpoint.

    The next checkpoint is many steps later, because a process may wait long for a disk before it counts as hanging.
    """
    keys = "parallel.replicate=2", "guard.hang_seconds=5", "train.steps=30", "checkpoint.every=12"
    sets = [part for key in keys for part in ("--set", key)]
    process = subprocess.Popen(
        command("train", *another(made, name), *sets), env=os.environ | environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for_step(made.parent / "runs" / name, 13)
    return process


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [pytest.param("stopped", marks=pytest.mark.fault(10)), pytest.param("interpreter", marks=pytest.mark.fault(11))],
)
def test_a_hanging_process_is_ended_and_the_run_resumes(
    made: Path, replicas: str, tmp_path: Path, fault: str, record_property: Callable[[str, object], None]
) -> None:
    variables = injected(tmp_path, HOLDS_INTERPRETER)
    name = f"hang-{fault}"
    run, trigger = made.parent / "runs" / name, tmp_path / "trigger"
    environment = {**variables, "HOLD_AFTER": str(trigger)} if fault == "interpreter" else {}
    process = start_training(made, name, environment)
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
    assert found["what"] == "hang" and found["rank"] == 1 and "interpreter" in found["cause"], found
    stacks = Path(found["stacks"]).read_text()
    assert "rank-0" in stacks and "loop.py" in stacks, "where the other one waits"
    assert result(made, name) == result(made, replicas)


FLIPS = """
import os, pathlib, sys, threading, time
def patch():
    while not hasattr(sys.modules.get("bessemer.train.trainer"), "Trainer"):
        time.sleep(0.001)
    import torch
    from bessemer.train.trainer import Trainer
    honest, done = Trainer.update, pathlib.Path(os.environ["FLIPPED"])
    def update(self, step, *more):
        rate = honest(self, step, *more)
        if step == 12 and not done.exists():
            done.touch()
            weight = next(self.model.parameters()).data
            weight = getattr(weight, "_local_tensor", weight).view(-1)
            weight.view(torch.int32)[5] ^= 1 << 22
        return rate
    Trainer.update = update
if os.environ.get("LOCAL_RANK") == os.environ.get("FLIPS"):
    threading.Thread(target=patch, daemon=True).start()
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.fault(21)
def test_any_flipped_bit_changes_the_sum(dtype: torch.dtype) -> None:
    whole = torch.linspace(-2, 2, 48, dtype=dtype)
    before = bit_sums([("a", whole)])
    bits = whole.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])
    for place in (0, 17, 47):
        for bit in range(8 * whole.element_size() - 1):
            bits[place] ^= 1 << bit
            assert bit_sums([("a", whole)]) != before
            bits[place] ^= 1 << bit
    assert bit_sums([("a", whole)]) == before == bit_sums([("a", whole.clone())])


@pytest.mark.long
@pytest.mark.parametrize(("processes", "flips", "steps"), [(2, 1, 30), (4, 2, 16)])
@pytest.mark.fault(21)
def test_a_flipped_bit_is_detected_and_undone(
    made: Path, replicas: str, tmp_path: Path, processes: int, flips: int, steps: int
) -> None:
    fault = injected(tmp_path, FLIPS)
    name = f"flipped-{processes}"
    given = [f"parallel.replicate={processes}", "guard.compare_replicas_every=5", f"train.steps={steps}"]
    flipped = {**fault, "FLIPS": str(flips), "FLIPPED": str(tmp_path / "flipped")}
    if processes != 2:
        replicas = trained(made, "four-replicas", *given)
    trained(made, name, *given, environment=flipped)
    assert (tmp_path / "flipped").exists()
    found = read_json_lines(made.parent / "runs" / name / "incidents.jsonl")
    assert found[0]["what"] == "corruption"
    assert (found[0]["step"], found[0]["onset"]) == (15, 13), "checkpoints at 12, comparisons at 10, 12, 15"
    assert found[0]["action"].startswith("rolled back to step 12") and "the same steps" in found[0]["action"]
    (redone,) = {row["redone_steps"] for row in read_json_lines(made.parent / "runs" / name / "time.jsonl")[-1:]}
    assert redone == 3, "13, 14 and 15"
    assert found[-1]["rank"] == flips and f"rank {flips}" in found[-1]["cause"]
    assert result(made, name) == result(made, replicas)
