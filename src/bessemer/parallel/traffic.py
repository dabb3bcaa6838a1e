"""What this process sends to the others, in bytes, counted where every exchange passes: at the c10d operators.

FSDP2, DDP, functional collectives and the pipeline's sends all end there, so nothing that computes knows that it is counted.
The cost is one short Python call an exchange. What is not seen: exchanges inside compiled graphs (`covers`) and in inference
mode.

Bytes are those that a ring moves (Patarasuk and Yuan 2009, section 3; Thakur et al. 2005, section 4), whatever the library
does: of n processes each sends (n - 1) / n of a tensor that is gathered, reduce-scattered, broadcast or exchanged all to all,
twice that of one that is all-reduced, and all of what it sends to one other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.recipe import Parallel

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "send", "broadcast", "all_to_all")

# Operator: its kind, which of its arguments has the whole tensors, and how often a ring moves (n - 1) / n of them.
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
_HERE = "ADInplaceOrView"
_PASSED = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

_sent = dict.fromkeys(KINDS, 0.0)
_uncounted: set[str] = set()
_kept: list[torch.library.Library] = []  # registrations last as long as these


def count(control: dist.ProcessGroup) -> None:
    """Count from now on, but for what goes over `control`. Calling it again adds a group that is not counted."""
    _uncounted.add(control.group_name)
    if _kept:
        return
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name, (kind, whole, times) in _OPERATORS.items():
        library.impl(name, _counting(name, kind, whole, times), _HERE)
    _kept.append(library)


def covers(layout: Parallel, compiled: bool) -> bool:
    """Whether nothing is missed: tensor and context parallelism exchange inside of blocks, which may be compiled."""
    return not compiled or layout.tensor * layout.context == 1


def sent() -> dict[str, float]:
    """Bytes that this process has sent since counting began, by kind."""
    return dict(_sent)


def sent_by_all(add: Callable[[Tensor], Tensor], before: dict[str, float]) -> dict[str, int]:
    """Bytes that all processes together have sent since each found `before`, by kind. add: sums over all processes."""
    now = sent()
    told = add(torch.tensor([now[kind] - before[kind] for kind in KINDS], dtype=torch.float64)).tolist()
    return {kind: round(value) for kind, value in zip(KINDS, told, strict=True) if value}


def _counting(name: str, kind: str, whole: int, times: int) -> Callable[..., Any]:
    operator: Any = getattr(torch.ops.c10d, name).default

    def counted(*given: Any) -> Any:
        group = next(dist.ProcessGroup.unbox(one) for one in given if isinstance(one, torch.ScriptObject))
        if group.group_name not in _uncounted:
            size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(given[whole]))
            processes = group.size()
            _sent[kind] += size if kind == "send" else times * size * (processes - 1) / processes
        # Called as an operator, it lets go of the interpreter's lock, which the library's threads may wait for.
        with torch._C._ExcludeDispatchKeyGuard(_PASSED):
            return operator(*given)

    return counted


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    else:
        for one in given:
            yield from _tensors(one)
