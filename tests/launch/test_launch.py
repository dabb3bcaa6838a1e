"""A run on several processes: one more key in the recipe, the same losses; kills, stops and errors."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from trainings import another, bessemer, command, differ, errors, facts, losses, pid_of_rank, result, wait_for_step

from bessemer.common.errors import InputError
from bessemer.launch.rendezvous import fit_layout
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import parse
from bessemer.run.files import read_json_lines
from tests.ports import free_port


@pytest.mark.long
def test_two_processes_give_the_same_losses_from_checkpoints_of_any_layout(made: Path) -> None:
    constant = "--set", "train.schedule.kind=constant"
    given = *another(made, "shards"), *constant
    done = bessemer("train", *given, "--set", "parallel.shard=2", "--set", "train.steps=4")
    assert done.returncode == 0, done.stderr
    assert "on 2 processes: shard 2" in done.stderr
    on = bessemer("train", *given, "--set", "parallel.replicate=2", "--set", "train.steps=6")
    assert on.returncode == 0, on.stderr
    assert "Warning" not in on.stderr, "torch's hints to its developers"
    alone = *another(made, "alone"), *constant
    for steps in ("train.steps=4", "train.steps=6"):
        assert bessemer("train", *alone, "--set", steps).returncode == 0
    for kind in ("train", "validation"):
        assert differ(losses(made, "alone", kind), losses(made, "shards", kind)) < 1e-4
    assert facts(made, "shards")["given"] == facts(made, "alone")["given"]


# Enough steps to be stopped in the middle.
LAYOUT = "--set", "parallel.shard=2", "--set", "checkpoint.asynchronous=true", "--set", "train.steps=24"


@pytest.mark.fault(1)
def test_a_killed_process_does_not_change_the_losses(made: Path, shards: str) -> None:
    killed = another(made, "killed")
    run = made.parent / "runs" / "killed"
    with subprocess.Popen(command("train", *killed, *LAYOUT), stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(run, 5)
        os.kill(pid_of_rank(run, 1), signal.SIGKILL)
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
    assert sum("was lost after step" in line for line in said.splitlines()) == 1, said
    assert "exitcode" not in said, "torch's own lines are not shown"
    (incident,) = read_json_lines(run / "incidents.jsonl")
    assert (incident["what"], incident["rank"], incident["host"]) == ("lost", 1, socket.gethostname())
    assert incident["step"] >= 5
    assert result(made, "killed") == result(made, shards)


@pytest.mark.long
@pytest.mark.parametrize(("number", "rank"), [(signal.SIGTERM, 1), (signal.SIGINT, None)], ids=str)
@pytest.mark.fault(9)
def test_a_stop_saves_and_the_same_command_resumes(
    made: Path, shards: str, number: signal.Signals, rank: int | None
) -> None:
    """The signal goes to the command or to one of its processes."""
    name = f"stopped-{number.name}"
    stopped = another(made, name)
    run = made.parent / "runs" / name
    with subprocess.Popen(command("train", *stopped, *LAYOUT), stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(run, 2)
        os.kill(process.pid if rank is None else pid_of_rank(run, rank), number)
        _, said = process.communicate(timeout=240)
        assert process.returncode == 75, said
        (told,) = errors(said)
        assert f"stopped by {number.name}" in told and "Traceback" not in said
    saved = (run / "checkpoints" / "latest").read_text()
    assert int(saved.removeprefix("step-")) == max(losses(made, name)), "no finished step is lost"
    assert bessemer("train", *stopped, *LAYOUT).returncode == 0
    assert result(made, name) == result(made, shards)
    assert not (run / "incidents.jsonl").exists()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("parallel.shard=3",), "do not divide the 8 sequences of a global batch"),
        (("parallel.replicate=2", "train.micro_batch=8"), "take 16 or 32"),
        (("parallel.shard=2", "train.optimizer.state=8bit"), "8bit needs a CUDA device"),
        (("parallel.tensor=3",), "cannot be divided by 3 processes"),
    ],
)
def test_an_unusable_layout_is_an_error_before_any_text_is_read(
    made: Path, tmp_path: Path, keys: tuple[str, ...], says: str
) -> None:
    sets = [part for key in (f"run.dir={tmp_path / 'runs'}", *keys) for part in ("--set", key)]
    done = bessemer("run", str(made), *sets)
    assert done.returncode == 2
    (told,) = errors(done.stderr)
    assert says in told and "corpus" not in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / "runs").glob("*/corpus*")) and not list((tmp_path / "runs").glob("*/*/"))


def test_one_process_computes_the_same_losses_however_it_is_started(made: Path) -> None:
    port = str(free_port())
    starts = {
        "plain": {},
        "worker": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": port},
        "slurm": {f"SLURM_{name}": "1" for name in ("JOB_ID", "NNODES", "NTASKS", "CPUS_PER_TASK")} | {"SLURM_PROCID": "0"},
    }  # fmt: skip
    found = []
    for name, environment in starts.items():
        done = bessemer("train", *another(made, name), environment={"OMP_NUM_THREADS": "1", **environment})
        assert done.returncode == 0, done.stderr
        rows = [row for row in read_json_lines(made.parent / "runs" / name / "metrics.jsonl") if row["kind"] == "train"]
        found.append([(row["loss"], row["grad_norm"], row["learning_rate"]) for row in rows])
    assert len(found[0]) == 12 and found[0] == found[1] == found[2]


RECIPE = """
run.name = "t"
model.depth = 1
corpus.sources = [{ name = "a", format = "text", paths = ["a"] }]
tokens.sequence_length = 32
train = { steps = 4, global_batch_tokens = 384, micro_batch = 1 }
"""


@pytest.mark.parametrize(
    ("asked", "processes", "expected"),
    [
        ({"replicate": 4}, 3, (3, 1)),
        ({"replicate": 6}, 5, (4, 1)),  # 5 does not divide 12 sequences
        ({"replicate": 4}, 13, (12, 1)),  # more than before
        ({"replicate": 2, "shard": 2}, 3, (1, 2)),  # a whole replica ends
        ({"shard": 4}, 3, (1, 3)),
        ({"replicate": 2, "tensor": 2}, 3, (1, 1)),
        ({"tensor": 2}, 1, None),
    ],
)
@pytest.mark.fault(27)
def test_the_layout_follows_the_number_of_processes(
    asked: dict[str, int], processes: int, expected: tuple[int, int] | None
) -> None:
    made = resolve(parse(RECIPE, "here"), 300).changed(parallel={**asked, "elastic": True})
    if expected is None:
        with pytest.raises(InputError, match=r"parallel\.elastic: .* 2$"):
            fit_layout(made, processes)
        return
    found = fit_layout(made, processes)
    assert (found.replicate, found.shard) == expected
