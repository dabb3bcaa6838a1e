"""Tasks on a Ray cluster, each as one Ray task."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from bessemer.common.environment import num_cores
from bessemer.common.errors import BessemerError, first_line, require_import
from bessemer.recipe import Work
from bessemer.run_tasks.local import in_threads, worker_environment
from bessemer.run_tasks.task import ATTEMPTS, Task, answer, raise_error, worker_error

PROBE_SECONDS = 10.0
# Tasks submitted to Ray ahead of time per core: enough to keep all cores busy, while the driver's memory stays bounded.
WAITING_PER_CORE = 4


def run_on_ray(tasks: Sequence[Task], settings: Work) -> Iterator[Task]:
    """Run tasks on the Ray cluster at `settings.address`, else on one started here, and yield each task when it is done."""
    ray = _connected(settings)
    remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(answer)
    under_way = set[Any]()
    # At most `workers` tasks are in flight; if it is not set, the queue of the cluster is kept filled.
    ahead = settings.workers or max(int(ray.cluster_resources().get("CPU", 1)), 1) * WAITING_PER_CORE

    def run(task: Task) -> None:
        under_way.add(reference := remote.remote(task.to_json()))
        try:
            raise_error(ray.get(reference))
        except ray.exceptions.RayError as error:  # its node was lost, or its worker died too often
            reason = f"{type(error).__name__}: {first_line(error)}"[:300]
            raise worker_error(task, reason, "lower corpus.workers") from None
        under_way.remove(reference)

    def cancel() -> None:
        with contextlib.suppress(Exception):  # if the cluster was lost, its tasks have ended
            for reference in [*under_way]:
                ray.cancel(reference, force=True)

    return in_threads(run, tasks, min(ahead, len(tasks)), cancel)


def _connected(settings: Work) -> Any:
    """Return the ray module, connected to a cluster; a cluster started here ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with require_import("corpus.engine: ray is not installed; install it with: pip install 'bessemer[ray]'"):
        import ray
    if ray.is_initialized():
        return ray
    address = settings.address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.removeprefix("ray://").rpartition(":")
    on_terminate = signal.getsignal(signal.SIGTERM)  # Ray replaces it with one that exits with another code
    cluster: dict[str, Any] = {"address": address}
    if not address:
        cluster = {"num_cpus": settings.workers or num_cores(), "include_dashboard": False}
    environment = {"env_vars": worker_environment()}
    try:
        if host and port.isdecimal():  # Ray would try for six minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
        ray.init(**cluster, runtime_env=environment, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at {address}" if address else "a cluster on this machine"
        problem = f"corpus.address: {where} cannot be reached: {first_line(error)}"
        raise BessemerError(f"{problem}; check that it is running") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_terminate)
    return ray
