"""Seconds that this process has waited for others: in collectives and sends, on a CPU.

With NCCL a wait makes the device wait and not the process, so nothing is counted there; nor in compiled graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch.distributed as dist

_waited = 0.0
_last_bucket: float | None = None  # when DDP's last bucket of gradients was sent
_is_timing = False


def waited() -> float:
    """Seconds waited since `start_timing`."""
    return _waited


def start_timing() -> None:
    """Time all waits from here on. All collectives and sends of torch end in `Work.wait`, which has no hook of its own."""
    global _is_timing
    if not _is_timing:
        dist.Work.wait = _timed(dist.Work.wait)  # type: ignore[method-assign]
        _is_timing = True


def _timed(wait: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():  # an asynchronous checkpoint communicates too
            return wait(*arguments, **options)
        with timing():
            return wait(*arguments, **options)

    return timed


@contextmanager
def timing() -> Iterator[None]:
    """Time a wait for other processes and add it to the seconds waited."""
    global _waited
    began = perf_counter()
    try:
        yield
    finally:
        _waited += perf_counter() - began


def bucket_sent() -> None:
    """Record that DDP started the all-reduce of a gradient bucket; called from its communication hook."""
    global _last_bucket
    _last_bucket = perf_counter()


def backward_ended() -> None:
    """Add the time since DDP's last bucket was sent: since then the backward pass only waited, in C++, for all-reduces."""
    global _waited, _last_bucket
    if _last_bucket is not None:
        _waited += perf_counter() - _last_bucket
        _last_bucket = None
