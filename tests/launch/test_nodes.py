"""Several nodes, simulated by several commands on this machine, with the losses of one process."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainings import (
    another,
    command,
    differ,
    errors,
    facts,
    kill_tree,
    lives,
    losses,
    node,
    pid_of_rank,
    result,
    together,
    tree,
    wait_for_step,
)

from bessemer.run.files import read_json_lines
from tests.ports import free_port, wait_for_listener

pytestmark = pytest.mark.long

FP64 = ("--set", "train.precision=fp64")


def outcome(run: Path | str, code: int, *options: str) -> tuple[int, list[str]]:
    """Return exit code and errors of a command that runs after torchrun. `run` is its run directory or recipe."""
    line = [sys.executable, "-m", "bessemer.launch.outcome", str(run), str(code), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    return done.returncode, errors(done.stderr)


def test_torchrun_on_two_nodes_gives_the_losses_of_one_process(made: Path, whole: str) -> None:
    given, port, run = another(made, "torchrun"), free_port(), made.parent / "runs" / "torchrun"
    layout = "--set", "parallel.replicate=2"
    assert outcome(run, 1)[0] == 1, "nothing was reported"
    both = together([node(given, port, *layout, *FP64) for _ in range(2)])
    assert [code for code, _, _ in both] == [0, 0], both
    assert outcome(run, 0) == outcome(given[0], 0, *given[1:]) == (0, [])
    told = "".join(said for _, said, _ in both)
    assert told.count("12 steps, ") == 1 and told.count(f"bessemer evaluate {run}") == 1, "rank 0 shows the result"
    assert (run / "planned_against_measured.json").exists()
    assert differ(losses(made, whole), losses(made, "torchrun")) < 1e-9
    assert facts(made, "torchrun")["world"] == 2
    # The first process of the run writes every step once.
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert sum('"kind": "train"' in line for line in lines) == 12


def test_a_node_whose_processes_have_ended_is_stopped(tmp_path: Path) -> None:
    """torchrun then waits for the other node in C++, where no signal handler runs."""
    script, port = tmp_path / "script.py", free_port()
    script.write_text("import os, time; open(os.environ['MARK'], 'w'); time.sleep(float(os.environ['SLEEP']))")
    line = [*node((), port)[:-2], str(script)]
    running = [
        subprocess.Popen(line, env=os.environ | {"MARK": str(tmp_path / seconds), "SLEEP": seconds})
        for seconds in ("0", "60")
    ]
    try:
        deadline = time.monotonic() + 60
        while not ((tmp_path / "0").exists() and (tmp_path / "60").exists()):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(3)  # time for torchrun to notice the end of its process
        running[0].send_signal(signal.SIGTERM)
        assert running[0].wait(timeout=300) == 0
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.fault(27)
def test_a_node_that_is_lost_is_not_waited_for(made: Path, whole: str) -> None:
    """Two nodes of one process, of which 1 is enough: one is killed with all its processes, and the other continues from the
    last checkpoint.
    """
    given, port, run = another(made, "lost-node"), free_port(), made.parent / "runs" / "lost-node"
    more = *FP64, "--set", "parallel.replicate=2", "--set", "parallel.elastic=true"
    first = subprocess.Popen(node(given, port, *more, nodes="1:2"), stderr=subprocess.PIPE, text=True)
    wait_for_listener(port)  # the rendezvous is lost with the node that hosts it
    second = subprocess.Popen(
        node(given, port, *more, nodes="1:2"), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for_step(run, 5)
        kill_tree(second.pid)  # it may have the first rank or the second
        _, said = first.communicate(timeout=300)
        assert first.returncode == 0 and outcome(run, 0) == (0, []), said
    finally:
        for process in (first, second):
            if process.poll() is None:
                kill_tree(process.pid)
    assert differ(losses(made, whole), losses(made, "lost-node")) < 1e-9
    assert facts(made, "lost-node")["given"] == facts(made, whole)["given"]
    assert facts(made, "lost-node")["world"] == 1


def test_a_stop_of_one_node_stops_all(made: Path) -> None:
    given, port, run = another(made, "stopped-nodes"), free_port(), made.parent / "runs" / "stopped-nodes"
    more = "--set", "parallel.replicate=2", "--set", "train.steps=150", "--set", "checkpoint.every=150"
    nodes = [subprocess.Popen(node(given, port, *more))]
    wait_for_listener(port)  # the other node ends with the one that hosts the store
    nodes.append(subprocess.Popen(node(given, port, *more)))
    wait_for_step(run, 2)
    nodes[0].send_signal(signal.SIGTERM)
    assert nodes[0].wait(timeout=240) == 0 and nodes[1].wait(timeout=240) in (0, 1)
    code, (told,) = outcome(run, 0)
    assert code == 75 and "everything is saved" in told


@pytest.mark.fault(32)
def test_a_lost_node_is_waited_for_and_losing_the_first_ends_the_job(made: Path, replicas: str) -> None:
    """The second node is killed with all its processes and restarted; then the first, after which the same command resumes."""
    given, run = another(made, "lost-nodes"), made.parent / "runs" / "lost-nodes"
    more = "--set", "parallel.replicate=2", "--set", "train.steps=30"

    def start(port: int) -> subprocess.Popen[str]:
        started = subprocess.Popen(node(given, port, *more), stderr=subprocess.PIPE, text=True, start_new_session=True)
        wait_for_listener(port)  # so that the first one hosts the store
        return started

    port = free_port()
    nodes = [start(port), start(port)]
    try:
        wait_for_step(run, 6)
        kill_tree(nodes[1].pid)
        nodes[1] = start(port)
        wait_for_step(run, 14)
        kill_tree(nodes[0].pid)
        _, said = nodes[1].communicate(timeout=300)
        code, (told,) = outcome(run, nodes[1].returncode)
        assert code == 1 and "from the last checkpoint" in told, said
        port = free_port()
        nodes = [start(port), start(port)]
        ended = [(one.communicate(timeout=240)[1], one.returncode) for one in nodes]
        assert [code for _, code in ended] == [0, 0], ended
    finally:
        for one in nodes:
            kill_tree(one.pid)
    found = [row for row in read_json_lines(run / "incidents.jsonl") if row["what"] == "lost"]
    assert len(found) == 2 and all(row["host"] == socket.gethostname() and row["step"] >= 6 for row in found), found
    assert result(made, "lost-nodes") == result(made, replicas)


SECONDS = 10.0
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
    """Return the error of the one process that prints; all exit with its code."""
    told = [line for _, said, _ in found for line in errors(said)]
    assert len(told) == 1, found
    assert all("Traceback" not in said for _, said, _ in found), "\n".join(said for _, said, _ in found)
    assert [ended for ended, _, _ in found] == [code] * len(found), found
    ends = [when for _, _, when in found]
    assert max(ends) - min(ends) < SECONDS
    return told[0]


def test_ranks_with_inconsistent_settings_are_errors(made: Path, tmp_path: Path) -> None:
    layout = "--set", "parallel.replicate=2"
    # A number of processes that does not fit the layout: the error suggests one that fits.
    given = another(made, "number")
    told = one_error(ranks([command("train", *given, "--set", "parallel.tensor=3")] * 2, free_port()), 2)
    assert "tensor x pipeline x context" in told and "[1, 2]" in told
    # Different values of a key.
    given = another(made, "recipes")
    one = command("train", *given, *layout)
    told = one_error(ranks([one, [*one, "--set", "train.steps=9"]], free_port()), 2)
    assert "rank 1 differs from rank 0" in told
    # A recipe that one of them cannot read.
    told = one_error(ranks([one, [*one, "--set", "train.stepz=9"]], free_port()), 2)
    assert "unknown key; did you mean train.steps?" in told


def test_ranks_with_different_data_or_run_directories_are_errors(made: Path, tmp_path: Path) -> None:
    layout = "--set", "parallel.replicate=2"
    runs = made.parent / "runs"
    # Each node has the tokens on its own disk (here its working directory), and one node has different ones.
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
    assert "rank 1 differs from rank 0" in told
    # Each node has its own run directory of the same name.
    for place in places:
        (place / "runs" / "apart").mkdir(parents=True)
        os.symlink(runs / "t" / "tokens", place / "runs" / "apart" / "tokens")
    apart = command("train", str(made), *layout, "--set", "run.name=apart", "--set", "run.dir=runs")
    shells = [["bash", "-c", 'cd "$0" && exec "$@"', str(place), *apart] for place in places]
    told = one_error(ranks(shells, free_port()), 2)
    assert "rank 1 does not see" in told and "set run.dir" in told


@pytest.mark.parametrize("killed", ["command", "torchrun"])
def test_a_killed_launcher_leaves_no_process_behind(made: Path, killed: str) -> None:
    name = f"orphans-of-{killed}"
    given, run = another(made, name), made.parent / "runs" / name
    keys = "parallel.replicate=2", "train.steps=100000", "checkpoint.every=100000"
    one = command("train", *given, *(part for key in keys for part in ("--set", key)))
    with subprocess.Popen(one, stderr=subprocess.PIPE, text=True) as process:
        wait_for_step(run, 2)
        ranks = [pid_of_rank(run, rank) for rank in (0, 1)]
        assert all(map(lives, ranks))
        if killed == "command":
            process.send_signal(signal.SIGKILL)
        else:
            programs = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in tree(process.pid)}
            os.kill(next(pid for pid, line in programs.items() if b"launch.torchrun" in line), signal.SIGKILL)
        said = process.communicate(timeout=3 * SECONDS)[1]
    deadline = time.monotonic() + 3 * SECONDS
    while any(map(lives, ranks)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(lives, ranks)) and "Traceback" not in said
    if killed == "torchrun":
        assert process.returncode == 1 and len(errors(said)) == 1
    again = subprocess.run([*one, "--set", "train.steps=4"], capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    found = [one for one in read_json_lines(run / "incidents.jsonl") if one["what"] == "lost"]
    assert [one["rank"] for one in found] == [0] and found[0]["step"] >= 1, "one loss of the node"
