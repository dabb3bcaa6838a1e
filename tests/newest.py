"""Results of a training in its run directory: weights, losses and learning rates."""

import subprocess
import time
from pathlib import Path

from bessemer.checkpoint import latest
from bessemer.distributed.mesh import SINGLE_PROCESS
from bessemer.distributed.sharded_tensors import tensors_digest
from bessemer.run.files import read_json_lines, read_steps


def weights_hash(run: Path) -> str:
    """Return a hash of the weights: equal for two runs that agree bit for bit, whatever their layouts."""
    checkpoint = latest(run / "checkpoints")
    assert checkpoint is not None
    return tensors_digest(checkpoint.tensors("model").items(), SINGLE_PROCESS)


Result = tuple[int, str, list[tuple[float, float]]]


def training_result(run: Path) -> Result:
    """Return the newest checkpoint's step and weights hash, and each step's loss and learning rate.

    The result of a resumed run equals that of an uninterrupted one.
    """
    checkpoint = latest(run / "checkpoints")
    assert checkpoint is not None
    rows = [row for row in read_json_lines(run / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, checkpoint.step + 1)), "every step is there once"
    return checkpoint.step, weights_hash(run), [(row["loss"], row["learning_rate"]) for row in rows]


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str] | None = None) -> None:
    """Wait until a run has logged a step; fail with the messages of `process` if it ends before."""
    deadline = time.monotonic() + 240
    while not any(row["step"] >= step for row in read_steps(run / "metrics.jsonl")):
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode} before step {step}: {process.communicate()[1]}")
        assert time.monotonic() < deadline, f"no step {step}"
        time.sleep(0.01)
