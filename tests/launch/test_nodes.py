"""Several nodes, played by several commands on this machine; the losses of one process."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainings import another, differ, errors, facts, kill_tree, losses, node, result, together, wait_for_step

from bessemer.run.files import read_json_lines
from tests.ports import free_port, wait_for_listener

pytestmark = pytest.mark.long

FP64 = ("--set", "train.precision=fp64")


def outcome(run: Path | str, code: int, *options: str) -> tuple[int, list[str]]:
    """The exit code and the errors of the program that is asked after torchrun. run: its folder or recipe."""
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
    # The first process of the run writes: every step once.
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert sum('"kind": "train"' in line for line in lines) == 12


def test_a_node_whose_processes_have_ended_is_stopped(tmp_path: Path) -> None:
    """torchrun waits in C++ for the other node then, where no handler of a signal runs."""
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
        time.sleep(3)  # for torchrun to see the end of its process
        running[0].send_signal(signal.SIGTERM)
        assert running[0].wait(timeout=300) == 0
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.fault(27)
def test_a_node_that_is_lost_is_not_waited_for(made: Path, whole: str) -> None:
    """Two nodes of one process with 1 enough: one is killed whole, the other goes on alone, from the last checkpoint."""
    given, port, run = another(made, "lost-node"), free_port(), made.parent / "runs" / "lost-node"
    more = *FP64, "--set", "parallel.replicate=2", "--set", "parallel.elastic=true"
    first = subprocess.Popen(node(given, port, *more, nodes="1:2"), stderr=subprocess.PIPE, text=True)
    wait_for_listener(port)  # where the nodes meet is lost with the node that holds it
    second = subprocess.Popen(
        node(given, port, *more, nodes="1:2"), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for_step(run, 5)
        kill_tree(second.pid)  # it may hold the first rank or the second
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
    wait_for_listener(port)  # the other one ends with the node that hosts the store
    nodes.append(subprocess.Popen(node(given, port, *more)))
    wait_for_step(run, 2)
    nodes[0].send_signal(signal.SIGTERM)
    assert nodes[0].wait(timeout=240) == 0 and nodes[1].wait(timeout=240) in (0, 1)
    code, (told,) = outcome(run, 0)
    assert code == 75 and "everything is saved" in told


@pytest.mark.fault(32)
def test_a_lost_node_is_waited_for_and_losing_the_first_ends_the_job(made: Path, replicas: str) -> None:
    """The second node is killed whole and started again; then the first, after which the same command resumes."""
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
        assert code == 1 and "continues from the last checkpoint" in told, said
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
