"""Several processes that do not fit together: one clear error from one of them, all leave soon, and no exit code is 0.

Processes are started here as a plain launcher would, with the environment of torchrun and nothing that watches over them,
or as nodes with our own agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainings import another, command, errors, injected, together, tree, wait_for_step

from tests.ports import free_port

pytestmark = pytest.mark.long

SECONDS = 10.0
# Processes with their own command lines and parents: not forks of the tests' server (tests/warm.py).
REAL = os.environ | {"NO_COLOR": "1"}
Found = list[tuple[int, str, float]]


def ranks(commands: list[list[str]], port: int, more: list[dict[str, str]] | None = None) -> Found:
    """Run each command as a rank of one group."""
    world = len(commands)
    environments = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost",
         "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **(more[rank] if more else {})}
        for rank in range(world)
    ]  # fmt: skip
    return together(commands, environments)


def one_error(found: Found, code: int) -> str:
    """What the one process that speaks says; all leave together with the code."""
    told = [line for _, said, _ in found for line in errors(said)]
    assert len(told) == 1, found
    assert all("Traceback" not in said for _, said, _ in found), "\n".join(said for _, said, _ in found)
    assert [ended for ended, _, _ in found] == [code] * len(found), found
    ends = [when for _, _, when in found]
    assert max(ends) - min(ends) < SECONDS
    return told[0]


def test_ranks_that_do_not_fit_together(made: Path, tmp_path: Path) -> None:
    layout = "--set", "parallel.replicate=2"
    # Another number of processes than the layout needs: what would fit.
    given = another(made, "number")
    told = one_error(ranks([command("train", *given, "--set", "parallel.tensor=3")] * 2, free_port()), 2)
    assert "tensor x pipeline x context = 3 does not divide 2; possible: [1, 2]" in told
    # A layout that the model cannot take: found out by all of them, told by one.
    given = another(made, "model")
    told = one_error(ranks([command("train", *given, "--set", "parallel.pipeline=2")] * 2, free_port()), 2)
    assert "pipeline" in told
    # Other values of a key.
    given = another(made, "recipes")
    one = command("train", *given, *layout)
    told = one_error(ranks([one, [*one, "--set", "train.steps=9"]], free_port()), 2)
    assert "different recipes: rank 1 differs from rank 0" in told
    # A recipe that only one of them cannot read.
    told = one_error(ranks([one, [*one, "--set", "train.stepz=9"]], free_port()), 2)
    assert "unknown key; did you mean train.steps?" in told


def test_ranks_with_other_data_or_another_folder(made: Path, tmp_path: Path) -> None:
    layout = "--set", "parallel.replicate=2"
    runs = made.parent / "runs"
    # The tokens lie on each node's own disk (here: in its working directory), and one of them has others.
    given = another(made, "data")
    (runs / "data" / "tokens").unlink()
    os.symlink("/proc/self/cwd/tokens", runs / "data" / "tokens")
    places = [tmp_path / "here", tmp_path / "there"]
    for place in places:
        shutil.copytree(runs / "t" / "tokens", place / "tokens")
    manifest = places[1] / "tokens" / "manifest.json"
    text = manifest.read_text()
    at = text.index('"sha256": "', text.index('"files"')) + len('"sha256": "')
    manifest.write_text(text[:at] + ("0" if text[at] != "0" else "1") + text[at + 1 :])
    one = command("train", *given, *layout)
    shells = [["bash", "-c", 'cd "$0" && exec "$@"', str(place), *one] for place in places]
    told = one_error(ranks(shells, free_port()), 2)
    assert "different tokens" in told and "rank 1 differs from rank 0" in told
    # Each node has a run folder of its own under the same name.
    for place in places:
        (place / "runs" / "apart").mkdir(parents=True)
        os.symlink(runs / "t" / "tokens", place / "runs" / "apart" / "tokens")
    apart = command("train", str(made), *layout, "--set", "run.name=apart", "--set", "run.dir=runs")
    shells = [["bash", "-c", 'cd "$0" && exec "$@"', str(place), *apart] for place in places]
    told = one_error(ranks(shells, free_port()), 2)
    assert "rank 1 does not see what rank 0 writes there" in told and "set run.dir" in told
    # The same on nodes with agents of ours.
    port = free_port()
    meet = "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"localhost:{port}"
    told = one_error(together([[*shell, *meet] for shell in shells]), 2)
    assert "rank 1 does not see" in told


def test_a_port_in_use(made: Path) -> None:
    given = another(made, "port")
    one = command("train", *given, "--set", "parallel.replicate=2")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        # The first process cannot hold the store there. What starts processes ends the others; here nobody does.
        (found,) = ranks([one], port, [{"WORLD_SIZE": "2"}])
        assert found[0] == 2 and len(errors(found[1])) == 1, found
        assert f"localhost:{port} is in use by another program; set another MASTER_PORT" in errors(found[1])[0]
        meet = "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-endpoint", f"localhost:{port}"
        ((code, said, _),) = together([[*one, *meet]])
        assert code == 2 and len(errors(said)) == 1, said
        assert f"port {port} of localhost is in use by another program" in errors(said)[0]


DIES = """
import os, signal
if os.environ.get("RANK") == "1":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_that_dies_at_every_start(made: Path, tmp_path: Path) -> None:
    given = another(made, "dies")
    fault = injected(tmp_path, DIES)
    keys = "parallel.replicate=2", "parallel.restarts=1"
    one = command("train", *given, *(part for key in keys for part in ("--set", key)))
    ((code, said, _),) = together([one], [fault])
    assert code == 1
    (told,) = errors(said)
    assert "the processes ended 2 times (process 1 of this node was killed)" in told and "Traceback" not in said
    assert "no checkpoint was saved yet, the same command begins the training again" in told
    assert not members_of(made.parent / "runs" / "dies")


def test_a_process_whose_command_has_ended_meanwhile_ends_without_a_word(tmp_path: Path) -> None:
    """As after Ctrl-C while it still imports: the folder of its node is gone."""
    code = "from bessemer.launch.member import run_member, MemberTask; run_member(MemberTask(None))"
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "BESSEMER_NODE": str(tmp_path / "gone")}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stdout, found.stderr) == (75, "", "")


def test_a_killed_command_leaves_no_process_behind(made: Path) -> None:
    given, run = another(made, "orphans"), made.parent / "runs" / "orphans"
    keys = "parallel.replicate=2", "train.steps=100000", "checkpoint.every=100000"
    one = command("train", *given, *(part for key in keys for part in ("--set", key)))
    said = made.parent / "orphans.txt"
    with said.open("w") as file, subprocess.Popen(one, stderr=file, env=REAL) as process:
        wait_for_step(run, 1)
        assert len(members_of(run)) == 2
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 3 * SECONDS
    while members_of(run) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not members_of(run)
    assert "Traceback" not in said.read_text()


def test_a_killed_agent_takes_its_processes_with_it(made: Path) -> None:
    given, run = another(made, "agent"), made.parent / "runs" / "agent"
    keys = "parallel.replicate=2", "train.steps=100000", "checkpoint.every=100000"
    one = command("train", *given, *(part for key in keys for part in ("--set", key)))
    with subprocess.Popen(one, stderr=subprocess.PIPE, text=True, env=REAL) as process:
        wait_for_step(run, 2)
        assert len(members_of(run)) == 2
        agent = next(pid for pid in tree(process.pid) if b"launch.agent" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(agent, signal.SIGKILL)
        said = process.communicate(timeout=3 * SECONDS)[1]
    assert process.returncode == 1 and not members_of(run)
    (told,) = errors(said)
    assert "was ended by SIGKILL, and the processes with it" in told and "Traceback" not in said
    (lost,) = map(json.loads, (run / "incidents.jsonl").read_text().splitlines())
    assert lost["what"] == "lost" and "agent" in lost["cause"] and lost["step"] >= 1


def members_of(run: Path) -> list[int]:
    """Processes that train a run: their command line, or that of the agent they are forks of, names its folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(run).encode() in path.read_bytes() and path.with_name("comm").read_text().startswith("rank "):
                found.append(int(path.parent.name))
    return found
