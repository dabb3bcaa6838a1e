"""The same tasks on a Ray cluster: one task one partition or bucket, done again by Ray when a worker dies.

Ray tasks, and not a plan of a data engine on Ray: a partition is published by its own rename as soon as it is done, so that
whatever dies, driver or machine, the next build goes on with what is missing. A plan is one unit of failure.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

from bessemer import interrupt
from bessemer.corpus import worker
from bessemer.corpus.worker import ATTEMPTS, POLL_SECONDS, Done, Task, cores, gave_up, worker_environment
from bessemer.errors import BessemerError, InputError
from bessemer.recipe import Work

PROBE_SECONDS = 10.0

WAITING_PER_CORE = 4
"""Tasks handed over ahead of time for each core: enough that none waits, and the driver's memory stays bounded."""


def each_on_ray(kind: str, tasks: Sequence[Task], settings: Work, done: Done) -> None:
    """As `tasks.each`, on the cluster at `settings.address`, or on one that is started here for the time being."""
    ray = _connected(settings)
    remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(worker.answer)
    slots = settings.workers or max(int(ray.cluster_resources().get("CPU", 1)), 1)
    under_way: dict[Any, Task] = {}
    left = list(reversed(tasks))
    # With a number of workers given, no more than so many are under way; else the cluster's own queue is kept filled.
    ahead = slots if settings.workers else slots * WAITING_PER_CORE
    try:
        while left or under_way:
            interrupt.check()
            while left and len(under_way) < ahead:
                task = left.pop()
                under_way[remote.remote(kind, task)] = task
            ready, _ = ray.wait(list(under_way), num_returns=1, timeout=POLL_SECONDS)
            for reference in ready:
                task = under_way.pop(reference)
                try:
                    answer = ray.get(reference)
                except ray.exceptions.RayError as error:
                    first = (str(error).strip().splitlines() or [""])[0]
                    raise gave_up(kind, task, f"{type(error).__name__}: {first}"[:300]) from None
                done(worker.result(answer))
    finally:
        for reference in under_way:
            try:
                ray.cancel(reference, force=True)
            except Exception:  # the cluster is gone: so are its tasks
                break


def _connected(settings: Work) -> Any:
    """The ray module, connected; a cluster started here lives as long as this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise InputError("corpus.engine: ray is not installed; install it with: pip install 'bessemer[ray]'") from None
    if ray.is_initialized():
        return ray
    _probe(settings.address or os.environ.get("RAY_ADDRESS", ""))
    stops = signal.getsignal(signal.SIGTERM)  # Ray puts its own in its place, which ends the process with another code
    common: dict[str, Any] = {
        "runtime_env": {"env_vars": worker_environment()},
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    try:
        if settings.address is None and "RAY_ADDRESS" not in os.environ:
            ray.init(num_cpus=settings.workers or cores(), include_dashboard=False, **common)
        else:
            ray.init(address=settings.address or "auto", **common)
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        where = f"the cluster at {settings.address}" if settings.address else "a cluster on this machine"
        raise BessemerError(f"corpus.address: {where} cannot be reached: {first}; is it running?") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, stops)
    return ray


def _probe(address: str) -> None:
    """Refuse an address where nothing answers: Ray itself would try for six minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # auto, local, or nothing
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS).close()
    except OSError as error:
        raise BessemerError(
            f"corpus.address: the cluster at {address} cannot be reached: {error.strerror or error}; is it running?"
        ) from None
