"""The processes of a node as forks: codes, environments, ends; and launches without them in test_faults_of_ranks.py and others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bessemer.launch.fork_server import ForkServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are of Linux")
SLEEPS = "-m", "timeit", "-n", "1", "-r", "1", "import time; time.sleep(100)"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def test_a_fork_ends_as_the_command_does(server: ForkServer) -> None:
    good = server.start(("-m", "bessemer", "--version"), os.environ)
    bad = server.start(("-m", "bessemer", "no-such-command"), os.environ)
    assert good is not None and bad is not None
    assert (bad.wait(60), good.wait(60), good.poll()) == (2, 0, 0)


def test_a_fork_has_its_own_environment_and_session(server: ForkServer) -> None:
    fork = server.start(SLEEPS, {**os.environ, "RANK": "7"})
    assert fork is not None and fork.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        fork.wait(0.1)
    assert os.getsid(fork.pid) == fork.pid != os.getsid(0)
    os.killpg(fork.pid, signal.SIGKILL)
    assert fork.wait(60) == -signal.SIGKILL and "RANK" not in os.environ


@pytest.mark.parametrize(
    ("arguments", "changes"), [(SLEEPS, {"OMP_NUM_THREADS": "3"}), (SLEEPS, {"PYTHONPATH": "/"}), (("train.py",), {})]
)
def test_what_is_read_at_import_wants_a_new_interpreter(
    server: ForkServer, arguments: tuple[str, ...], changes: dict[str, str]
) -> None:
    assert server.start(arguments, os.environ | changes) is None


def test_with_the_server_its_forks_count_as_killed(server: ForkServer) -> None:
    fork = server.start(SLEEPS, os.environ)
    assert fork is not None
    os.kill(server.pid, signal.SIGKILL)
    assert fork.wait(60) == -signal.SIGKILL and server.start(SLEEPS, os.environ) is None
    os.kill(fork.pid, signal.SIGKILL)  # a training asks the kernel for this
