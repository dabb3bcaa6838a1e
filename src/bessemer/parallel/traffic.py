"""Bytes that this process sends, and seconds that it waits for others.

Bytes are counted at the c10d operators, which all collectives and sends go through: those of FSDP2 and DDP, functional
collectives and the pipeline's sends end there, so no caller has to count; the cost is a short Python call
for each. Collectives inside compiled graphs (see `covers`) and in inference mode are not seen. The operators are registered once
for the process, because torch has no hook on a process group that sees the tensors.

Bytes are those that a ring algorithm moves (Patarasuk and Yuan 2009, section 3; Thakur et al. 2005, section 4), whatever the
library does: of n processes each sends (n - 1) / n of a tensor that is gathered, reduce-scattered, broadcast or exchanged all to
all, twice that of one that is all-reduced, and all of what it sends point to point.

Seconds that this process has waited for others, in collectives and sends, are counted on a CPU. With NCCL a wait makes the device
wait and not the process, so nothing is counted there; nor in compiled graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.recipe import Parallel

COMMUNICATION_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "send", "broadcast", "all_to_all")

# Operator: its kind, the index of the argument with the full tensors, and how many times a ring sends (n - 1) / n of them.
_OPERATORS = {
    "_allgather_base_": ("all_gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 1),
    "allgather_coalesced_": ("all_gather", 0, 1),
    "allgather_": ("all_gather", 0, 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 1),
    "reduce_scatter_": ("reduce_scatter", 1, 1),
    "allreduce_": ("all_reduce", 0, 2),
    "allreduce_coalesced_": ("all_reduce", 0, 2),
    "broadcast_": ("broadcast", 0, 1),
    "alltoall_base_": ("all_to_all", 1, 1),
    "alltoall_": ("all_to_all", 1, 1),
    "send": ("send", 0, 1),
}

# Between autograd and the kernels: a dispatch key that every tensor has and these operators do not use.
_KEY = "ADInplaceOrView"
_KEY_SET = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

_sent = dict.fromkeys(COMMUNICATION_KINDS, 0.0)
_uncounted: set[str] = set()
_is_counting = True
_libraries: list[torch.library.Library] = []  # registrations last as long as these


def start_counting(control: dist.ProcessGroup) -> None:
    """Start counting, except for the group `control`. Further calls add groups that are not counted."""
    _uncounted.add(control.group_name)
    if _libraries:
        return
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, (kind, argument, times) in _OPERATORS.items():
        library.impl(name, _counted(name, kind, argument, times), _KEY)
    _libraries.append(library)


def covers(layout: Parallel, compiled: bool) -> bool:
    """Whether all communication is counted: that of tensor and context parallelism is inside blocks, which may be compiled."""
    return not compiled or layout.tensor * layout.context == 1


def sent() -> dict[str, float]:
    """Bytes that this process has sent since counting began, by kind."""
    return dict(_sent)


def sent_by_all(add: Callable[[Tensor], Tensor], before: dict[str, float]) -> dict[str, int]:
    """Bytes that all processes have sent since each one's `before`, by kind. add: sums over all processes."""
    return sum_over_all(add, {kind: total - before[kind] for kind, total in sent().items()})


def sum_over_all(add: Callable[[Tensor], Tensor], by_kind: dict[str, float]) -> dict[str, int]:
    """Bytes of all processes from those of this one, by kind. add: sums over all processes."""
    totals = add(torch.tensor([by_kind[kind] for kind in COMMUNICATION_KINDS], dtype=torch.float64)).tolist()
    return {kind: round(value) for kind, value in zip(COMMUNICATION_KINDS, totals, strict=True) if value}


@contextmanager
def not_counting() -> Iterator[None]:
    """Context of bytes that no plan has: a step's few numbers, which a GPU's processes sum on their devices."""
    global _is_counting
    _is_counting = False
    try:
        yield
    finally:
        _is_counting = True


def _counted(name: str, kind: str, argument: int, times: int) -> Callable[..., Any]:
    operator: Any = getattr(torch.ops.c10d, name).default

    def counted(*arguments: Any) -> Any:
        group = next(dist.ProcessGroup.unbox(one) for one in arguments if isinstance(one, torch.ScriptObject))
        if _is_counting and group.group_name not in _uncounted:
            size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(arguments[argument]))
            world = group.size()
            _sent[kind] += size if kind == "send" else times * size * (world - 1) / world
        # Called as an operator, which releases the interpreter lock that the library's threads may wait for.
        with torch._C._ExcludeDispatchKeyGuard(_KEY_SET):
            return operator(*arguments)

    return counted


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    else:
        for value in values:
            yield from _tensors(value)


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
