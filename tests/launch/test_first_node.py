"""The first node, which hosts the store of the rendezvous, is lost: the others wait for it, and go on with it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from trainings import another, command, errors, kill_tree, losses, node, wait_for_step, weights

from bessemer.launch import store
from bessemer.run import read_json_lines
from tests.ports import free_port, wait_for_listener

LAYOUT = "--set", "parallel.replicate=2", "--set", "train.steps=30"
NOWHERE = "192.0.2.1"  # kept free for documentation (RFC 5737)


class Nodes:
    """Two nodes of one process each."""

    def __init__(self, given: tuple[str, ...], *more: str, port: int | None = None) -> None:
        """port: of a store that is hosted elsewhere."""
        self.port = port or free_port()
        self.line = node(given, self.port, *LAYOUT, *more)
        self.running = [self.start(), self.start()]

    def start(self) -> subprocess.Popen[str]:
        started = subprocess.Popen(self.line, stderr=subprocess.PIPE, text=True, start_new_session=True)
        wait_for_listener(self.port)  # so that the first one hosts the store
        return started

    def wait_until_met(self) -> None:
        """Until each agent has a connection to the store that lasts."""
        deadline, since = time.monotonic() + 120, None
        while since is None or time.monotonic() - since < 1.0:
            assert time.monotonic() < deadline
            if connections(self.port) < 2:
                since = None
            else:
                since = since or time.monotonic()
            time.sleep(0.05)

    def lose(self, which: int) -> None:
        kill_tree(self.running[which].pid)
        self.running[which].communicate()

    def again(self, which: int) -> None:
        self.running[which] = self.start()

    def end(self) -> tuple[list[int], list[str]]:
        """Exit codes and what was said, when both have ended."""
        said = [one.communicate(timeout=240)[1] for one in self.running]
        return [one.returncode for one in self.running], said

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.running:
            kill_tree(one.pid)


def connections(port: int) -> int:
    """Established connections to a port of this machine."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def lost(run: Path) -> list[dict[str, Any]]:
    return [one for one in read_json_lines(run / "incidents.jsonl") if one["what"] == "lost"]


@pytest.mark.long
@pytest.mark.fault(32)
def test_the_first_node_is_lost_at_the_start_and_twice_in_a_row(made: Path, replicas: str) -> None:
    run = made.parent / "runs" / "lost-thrice"
    with Nodes(another(made, "lost-thrice")) as nodes:
        nodes.wait_until_met()
        nodes.lose(0)  # before the group has started
        nodes.again(0)
        wait_for_step(run, 6)
        nodes.lose(0)
        nodes.again(0)  # with the last attempt's files in the run folder, and lost again at its start
        nodes.lose(0)
        nodes.again(0)
        wait_for_step(run, 14)
        nodes.lose(0)
        nodes.again(0)
        codes, said = nodes.end()
    assert codes == [0, 0], said
    assert losses(made, "lost-thrice") == losses(made, replicas)
    assert weights(made, "lost-thrice") == weights(made, replicas)
    # The first loss counts where the group had met by then, and is recorded where the other node's process knew its run; the one
    # before the nodes had met again does not.
    before = [int(re.search(r"restart (\d) of 3", row["action"])[1]) for row in lost(run)]  # type: ignore[index]
    assert before in ([1, 2], [2, 3], [1, 2, 3])


@pytest.mark.long
@pytest.mark.fault(32)
@pytest.mark.parametrize("which", ["first, with the store elsewhere", "second"])
def test_a_node_without_the_store_that_is_lost_and_comes_back_costs_nothing(
    which: str, made: Path, replicas: str
) -> None:
    name, lost_one, port = f"lost-{which[:5]}-no-store", int(which == "second"), free_port()
    elsewhere = None if lost_one else TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    with Nodes(another(made, name), port=elsewhere and port) as nodes:
        wait_for_step(made.parent / "runs" / name, 6)
        nodes.lose(lost_one)
        nodes.again(lost_one)
        codes, said = nodes.end()
    assert codes == [0, 0], said
    (incident,) = lost(made.parent / "runs" / name)
    assert incident["cause"].startswith("node localhost was lost after step ") and incident["host"] == "localhost"
    assert incident["action"] == "the group starts again from the newest checkpoint (restart 1 of 3)"
    assert losses(made, name) == losses(made, replicas)
    assert weights(made, name) == weights(made, replicas)


@pytest.mark.long
@pytest.mark.fault(32)
@pytest.mark.parametrize("end", ["limit", "stop", "restarts"])
def test_a_first_node_that_stays_away_ends_the_wait(end: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, restarts = made.parent / "runs" / f"away-{end}", 0 if end == "restarts" else 3
    monkeypatch.setenv("BESSEMER_WAIT_SECONDS", "12" if end == "limit" else "600")
    with Nodes(another(made, f"away-{end}"), "--set", f"parallel.restarts={restarts}") as nodes:
        wait_for_step(run, 6, nodes.running[1])
        nodes.lose(0)
        began = time.monotonic()
        if end == "stop":
            time.sleep(5)
            began = time.monotonic()
            nodes.running[1].send_signal(signal.SIGTERM)
        _, said = nodes.running[1].communicate(timeout=60)
        assert time.monotonic() - began < {"limit": 40, "stop": 5, "restarts": 20}[end]
    assert nodes.running[1].returncode == (1 if end == "restarts" else 75), said
    (told,) = errors(said)
    assert {"limit": "the first node (localhost) did not answer within 12.0 s", "stop": "stopped; ",
            "restarts": "no restart is left (parallel.restarts = 0)"}[end] in told  # fmt: skip
    assert "goes on from the last checkpoint" in told


def test_a_node_waits_for_a_first_node_that_is_not_there_yet_until_its_limit_or_a_stop(made: Path) -> None:
    meet = "--nnodes", "2", "--rdzv-endpoint", f"{NOWHERE}:29500"
    line = command("train", *another(made, "not-yet"), *LAYOUT, *meet)
    soon = {**os.environ, "BESSEMER_WAIT_SECONDS": "1"}
    short = subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=soon)
    patient = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    _, said = short.communicate(timeout=60)
    assert short.returncode == 1, said
    assert f"launch: the first node ({NOWHERE}) did not answer within 1.0 s (" in errors(said)[0]
    began = time.monotonic()
    patient.send_signal(signal.SIGTERM)
    _, said = patient.communicate(timeout=60)
    assert patient.returncode == 75 and time.monotonic() - began < 5, said


def test_the_endpoint_is_resolved_anew_at_each_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that is replaced keeps its name and gets another address."""
    port, resolve, asked = free_port(), socket.getaddrinfo, list[str]()
    monkeypatch.setattr(store, "RETRY_SECONDS", 0.01)

    def resolved(host: str, *arguments: Any, **more: Any) -> Any:
        asked.append(host)
        if len(asked) == 2:
            host = "127.0.0.1"
            servers.append(TCPStore(host, port, is_master=True, wait_for_workers=False))
        return resolve("127.0.0.77" if len(asked) < 2 else host, *arguments, **more)

    servers = list[TCPStore]()
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert store.find(f"localhost:{port}", time.monotonic() + 60, True, asked.append) is False
    assert asked == ["localhost", "localhost"]


def test_looking_for_connections_leaves_no_file_open() -> None:
    """An agent looks before each start of its group: one that left files open had none to give after nine restarts."""
    with socket.create_server(("127.0.0.1", 0)) as server, open(__file__) as _, socket.socket() as own:
        own.connect(server.getsockname())
        before = os.listdir("/proc/self/fd")
        store.end_dead_connections(f"127.0.0.1:{server.getsockname()[1]}")
        assert os.listdir("/proc/self/fd") == before
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
