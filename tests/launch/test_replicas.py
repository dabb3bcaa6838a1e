"""A node that is killed whole and started anew, on this machine: its processes go on from the copy on the other node, bit for bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from trainings import another, bessemer, errors, kill_tree, losses, metrics, node, wait_for_step, weights

from tests.ports import free_port, wait_for_listener

pytestmark = pytest.mark.long

STEPS = 40
LAYOUT = "--set", "parallel.shard=2", "--set", f"train.steps={STEPS}"
DISK_EVERY = 8


def with_a_node_replaced(recipe: Path, name: str, *sets: str, after: int, which: int = 1) -> str:
    """Run on two nodes of one process; one is killed after a step and started again. Returns what both said at the end."""
    given, port, run = another(recipe, name), free_port(), recipe.parent / "runs" / name
    line = node(given, port, *LAYOUT, *sets)
    started = list[subprocess.Popen[str]]()

    def start() -> None:
        started.append(subprocess.Popen(line, stderr=subprocess.PIPE, text=True, start_new_session=True))
        wait_for_listener(port)  # so that the first one hosts the store

    try:
        for _ in range(2):
            start()
        wait_for_step(run, after)
        kill_tree(started[which].pid)
        start()
        last = [started[1 - which], started[2]]
        said = [one.communicate(timeout=300)[1] for one in last]
        assert [one.returncode for one in last] == [0, 0], said
        return "".join(said)
    finally:
        for process in started:
            kill_tree(process.pid)


@pytest.mark.fault(1)
@pytest.mark.parametrize("which", [1, 0])
def test_a_lost_node_costs_the_steps_since_the_last_replica(made: Path, shards: str, which: int) -> None:
    """Of the first node too, which hosts the store of the rendezvous."""
    name = f"replaced-{which}"
    sets = "checkpoint.memory_every=3", "checkpoint.memory_replicas=1", f"checkpoint.every={STEPS}"
    said = with_a_node_replaced(made, name, *(part for one in sets for part in ("--set", one)), after=20, which=which)
    (resumed,) = metrics(made, name, "resumed")
    assert resumed["from"] == "memory" and resumed["step"] % 3 == 0 and resumed["step"] >= 3
    assert f"fetching the copy of step {resumed['step']} in memory: node " in said
    assert f"going on from step {resumed['step']} of {STEPS}, from the copy in memory" in said
    assert losses(made, name) == losses(made, shards)
    assert weights(made, name) == weights(made, shards)


def test_without_replicas_it_costs_the_steps_since_the_last_checkpoint(made: Path, shards: str) -> None:
    sets = "--set", "checkpoint.memory_every=3", "--set", f"checkpoint.every={DISK_EVERY}"
    with_a_node_replaced(made, "not-replicated", *sets, after=12)
    (resumed,) = metrics(made, "not-replicated", "resumed")
    assert "from" not in resumed and resumed["step"] % DISK_EVERY == 0
    assert losses(made, "not-replicated") == losses(made, shards)
    assert weights(made, "not-replicated") == weights(made, shards)


def test_more_replicas_than_other_nodes_are_refused(made: Path) -> None:
    given, sets = another(made, "too-many"), ("--set", "parallel.shard=2", "--set", "checkpoint.memory_every=3")
    for replicas, line in (("1", ("train", *given, *sets)), ("2", tuple(node(given, free_port(), *sets)[3:]))):
        done = bessemer(*line, "--set", f"checkpoint.memory_replicas={replicas}")
        (said,) = errors(done.stderr)
        assert done.returncode == 2
        assert (
            f"memory_replicas = {replicas} needs at least {int(replicas) + 1} nodes, and this run is on {replicas}"
            in said
        )
    done = bessemer("train", *given, "--set", "checkpoint.memory_replicas=1")
    assert done.returncode == 2 and "memory_every = 0 makes none; set memory_every" in done.stderr
