"""Several nodes, played by several agents on this machine: torchrun's and our own; the losses of one process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trainings import another, differ, errors, facts, kill_tree, losses, node, together, wait_for_step

from tests.ports import free_port, wait_for_listener

pytestmark = pytest.mark.long

FP64 = ("--set", "train.precision=fp64")


def torchrun(given: tuple[str, ...], port: int, *more: str) -> list[str]:
    meet = "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"
    here = "--local-addr=localhost", "--rdzv-id=test"
    return [sys.executable, "-m", "torch.distributed.run", *meet, *here, "-m", "bessemer", "train", *given, *more]


def test_torchrun_on_two_nodes_gives_the_losses_of_one_process(made: Path, whole: str) -> None:
    given, port = another(made, "torchrun"), free_port()
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    layout = "--set", "parallel.replicate=2"
    both = together([torchrun(given, port, *layout, *FP64) for _ in range(2)], [environment] * 2)
    assert [code for code, _, _ in both] == [0, 0], both
    assert differ(losses(made, whole), losses(made, "torchrun")) < 1e-9
    assert facts(made, "torchrun")["world"] == 2
    # The first process of the run writes: every step once.
    lines = (made.parent / "runs" / "torchrun" / "metrics.jsonl").read_text().splitlines()
    assert sum('"kind": "train"' in line for line in lines) == 12
    # One process too few for the layout: each torchrun ends with 1, whatever its processes end with; one sentence.
    given, port = another(made, "torchrun-wrong"), free_port()
    both = together([torchrun(given, port, "--set", "parallel.shard=4") for _ in range(2)], [environment] * 2)
    assert all(code != 0 for code, _, _ in both)
    told = [line for _, said, _ in both for line in errors(said)]
    assert len(told) == 1 and "parallel.shard = 2 with replicate = 1 would fit" in told[0], both


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
        assert first.returncode == 0, said
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
    nodes = [subprocess.Popen(node(given, port, *more), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    wait_for_step(run, 2)
    nodes[0].send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=240)[1] for process in nodes]
    assert [process.returncode for process in nodes] == [75, 75], said
    told = [line for text in said for line in errors(text)]
    assert len(told) == 2 and all("everything is saved" in line for line in told)
