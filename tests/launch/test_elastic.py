"""Fewer processes than before: which layout they take, and that the run goes on as it would have."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainings import another, command, differ, facts, injected, losses, together

from bessemer.launch.rendezvous import fitted
from bessemer.recipe import Recipe, parse
from bessemer.run import read_json_lines

LOST = """
import os, pathlib, signal
if os.environ.get("LOCAL_RANK") is not None and pathlib.Path(os.environ["LOST_AFTER"]).exists():
    if os.environ["BESSEMER_SLOTS"].split(",")[int(os.environ["LOCAL_RANK"])] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
"""


def recipe(**parallel: object) -> Recipe:
    """12 sequences a step, in micro-batches of one."""
    keys = "\n".join(f"{key} = {value!r}" for key, value in parallel.items())
    text = (
        '[run]\nname = "t"\n[model]\ndepth = 1\n[[corpus.sources]]\nname = "a"\nformat = "text"\npaths = ["a"]\n'
        "[tokens]\nsequence_length = 32\n[train]\nsteps = 4\nglobal_batch_tokens = 384\nmicro_batch = 1\n"
        f"[parallel]\n{keys}\n"
    )
    return parse(text, "here")


@pytest.mark.parametrize(
    ("asked", "processes", "expected"),
    [
        ({"replicate": 4}, 4, (4, 1)),
        ({"replicate": 4}, 3, (3, 1)),
        ({"replicate": 6}, 5, (4, 1)),  # 5 do not divide 12 sequences
        ({"replicate": 4}, 13, (12, 1)),  # more than before
        ({"replicate": 2, "shard": 2}, 3, (1, 2)),  # a whole copy goes
        ({"shard": 4}, 3, (1, 3)),
        ({"replicate": 2, "tensor": 2}, 3, (1, 1)),
        ({"tensor": 2}, 1, None),
        ({"pipeline": 2, "replicate": 2}, 3, (1, 1)),
    ],
)
@pytest.mark.fault(27)
def test_the_layout_follows_the_number_of_processes(
    asked: dict[str, int], processes: int, expected: tuple[int, int] | None
) -> None:
    found = fitted(_elastic(asked), processes)
    assert (None if found is None else (found.replicate, found.shard)) == expected
    if found is not None:
        assert found.world <= processes
        assert 12 % found.data == 0


def _elastic(asked: dict[str, int]) -> Recipe:
    made = recipe(**asked)
    return made.model_copy(update={"parallel": made.parallel.model_copy(update={"elastic": True})})


@pytest.mark.long
def test_a_process_that_dies_at_every_start_is_left_out(made: Path, whole: str, tmp_path: Path) -> None:
    """Four copies; from the first checkpoint on one of them is killed whenever it starts: two go on, with the same losses.

    8 sequences do not divide among 3. In fp64 the losses agree to 1e-9; they are not equal bit for bit, as two processes
    add up in another order than four.
    """
    fewer = another(made, "fewer")
    fault = injected(tmp_path, LOST)
    lost = {**fault, "LOST_AFTER": str(made.parent / "runs" / "fewer" / "checkpoints" / "latest")}
    layout = "parallel.replicate=4", "parallel.elastic=true", "parallel.restarts=1"
    elastic = command(
        "train", *fewer, "--set", "train.precision=fp64", *(part for key in layout for part in ("--set", key))
    )
    killer = ["bash", "-c", KILL_ONE.format(run=made.parent / "runs" / "fewer")]
    cut, _ = together([elastic, killer], [lost, {}])
    assert cut[0] == 0, cut[1]
    assert "process 1 cannot be brought back" in cut[1] and "going on with 2" in cut[1]
    assert differ(losses(made, whole), losses(made, "fewer")) < 1e-9
    assert facts(made, "fewer")["given"] == facts(made, whole)["given"]
    incidents = read_json_lines(made.parent / "runs" / "fewer" / "incidents.jsonl")
    assert [one["what"] for one in incidents if one["what"] != "lost"] == ["fewer_processes"]
    assert all(one["rank"] == 1 for one in incidents if one["what"] == "lost")


# A real SIGKILL in the middle, once the first checkpoint is there.
KILL_ONE = (
    "for i in $(seq 1200); do [[ -e {run}/checkpoints/latest ]] && break; sleep 0.1; done; "
    "kill -9 $(cat {run}/.training/rank-1.pid)"
)
