"""Injected faults of one of two processes: rows of the fault matrix (tests/fault_matrix.toml)."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trainings import another, bessemer, command, errors, injected, losses, metrics, pid_of_rank, result, wait_for_step

# Raise an error at a step of one rank.
SICK = """
import os, pathlib, sys, threading, time
def patch():
    while not hasattr(sys.modules.get("bessemer.train.trainer"), "Trainer"):
        time.sleep(0.001)
    from bessemer.train.trainer import Trainer
    honest = Trainer.forward_backward
    def gradients(self, batch, *scale):
        if batch.first == 8 * 9:
            pathlib.Path(os.environ["RAISED"]).write_text(str(time.time()))
            raise RuntimeError("the fault of rank 1")
        return honest(self, batch, *scale)
    Trainer.forward_backward = gradients
if os.environ.get("LOCAL_RANK") == "1":
    threading.Thread(target=patch, daemon=True).start()
"""


@pytest.mark.long
@pytest.mark.fault(12)
def test_a_rank_that_raises_ends_all_and_is_named_first(
    made: Path, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    environment = {**injected(tmp_path, SICK), "RAISED": str(tmp_path / "raised")}
    sets = "--set", "parallel.replicate=2", "--set", "parallel.restarts=0"
    done = bessemer("train", *another(made, "raises"), *sets, environment=environment)
    seconds = time.time() - float((tmp_path / "raised").read_text())
    assert done.returncode not in (0, 75), done.stderr
    assert "the fault of rank 1" in done.stderr
    (first, *_) = errors(done.stderr)
    assert "rank 1" in first, done.stderr
    record_property("obtained", f"ended after {seconds:.1f} s, exit {done.returncode}")


@pytest.mark.long
@pytest.mark.fault(1)
def test_ranks_killed_at_random_steps_do_not_change_the_losses(
    made: Path, is_thorough: bool, record_property: Callable[..., None]
) -> None:
    kills = 20 if is_thorough else 2
    steps, every = 60 * kills + 60, 20
    sets = "--set", "parallel.replicate=2", "--set", f"train.steps={steps}", "--set", f"checkpoint.every={every}"
    draw = random.Random(1)
    given = another(made, "kills")
    run = made.parent / "runs" / "kills"
    restarts = "--set", f"parallel.restarts={kills}"
    killed = []
    with subprocess.Popen(command("train", *given, *sets, *restarts), stderr=subprocess.PIPE, text=True) as process:
        for number in range(kills):
            wait_for_step(run, 60 * number + draw.randrange(10, 60), process)
            time.sleep(draw.uniform(0, 0.05))
            killed.append(max(losses(made, "kills")))
            os.kill(pid_of_rank(run, draw.randrange(2)), signal.SIGKILL)
        _, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    assert bessemer("train", *another(made, "kills-none"), *sets).returncode == 0
    assert result(made, "kills") == result(made, "kills-none")
    resumed = [row["step"] for row in metrics(made, "kills", "resumed")]
    lost = [step - max([0, *(to for to in resumed if to <= step)]) for step in killed]
    assert max(lost) <= every + 2
    record_property("obtained", f"{kills} kills, at most {max(lost)} steps lost, bit for bit")
