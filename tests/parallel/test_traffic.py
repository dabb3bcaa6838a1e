"""What is counted, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from processes import run_on

from bessemer.parallel import traffic
from bessemer.parallel.mesh import join
from bessemer.recipe import Parallel

BYTES = 64 * 4  # of a tensor of 64 numbers in fp32
functional = torch.ops._c10d_functional


class Gather(torch.autograd.Function):
    """There an all-gather, back a reduce-scatter, as the modules do it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        return functional.wait_tensor(functional.all_gather_into_tensor(x, 2, group))

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, None]:
        parts = functional.reduce_scatter_tensor(given[0].contiguous(), "sum", 2, ctx.group)
        return functional.wait_tensor(parts), None


def counted() -> dict[str, dict[str, float]]:
    mesh = join(Parallel(shard=2), torch.device("cpu"))
    traffic.start_counting(mesh.control)  # as a second mesh of the process would
    group = mesh.group("shard")
    x = torch.ones(64)

    def gather_and_back() -> None:
        half = torch.ones(32, requires_grad=True)
        Gather.apply(half, group.group_name).sum().backward()
        assert half.grad is not None and half.grad.tolist() == [2.0] * 32

    def to_the_other() -> None:
        told = torch.zeros(64)
        both = [
            dist.P2POp(kind, tensor, 1 - mesh.rank, group=group)
            for kind, tensor in ((dist.isend, x), (dist.irecv, told))
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        assert told.tolist() == [1.0] * 64

    def reduced() -> None:
        y = torch.ones(64)
        dist.all_reduce(y, group=group)
        assert y.tolist() == [2.0] * 64

    acts: dict[str, Callable[[], object]] = {
        "all_reduce": reduced,
        "functional all_reduce": lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group.group_name)),
        "gather and back": gather_and_back,
        "send": to_the_other,
        "broadcast": lambda: dist.broadcast(x, group_src=0, group=group),
        "control": lambda: (mesh.sum(x), mesh.gather("anything"), mesh.barrier()),
    }
    found = {}
    for name, act in acts.items():
        before = traffic.sent()
        act()
        found[name] = {kind: value - before[kind] for kind, value in traffic.sent().items() if value != before[kind]}
    before = traffic.sent()
    reduced()
    found["by all"] = {kind: float(value) for kind, value in traffic.sent_by_all(mesh.sum, before).items()}
    return found


def test_every_exchange_is_counted_once_as_a_ring_would_move_it() -> None:
    half = {"all_gather": BYTES / 2, "reduce_scatter": BYTES / 2}
    for found in run_on(2, counted):
        assert found == {
            "all_reduce": {"all_reduce": BYTES},
            "functional all_reduce": {"all_reduce": BYTES},
            "gather and back": half,
            "send": {"send": BYTES},
            "broadcast": {"broadcast": BYTES / 2},
            "control": {},
            "by all": {"all_reduce": 2 * BYTES},
        }


def test_exchanges_inside_compiled_blocks_are_not_passed_off_as_none() -> None:
    assert traffic.covers(Parallel(shard=4, pipeline=2), True)
    assert not traffic.covers(Parallel(tensor=2), True)
    assert not traffic.covers(Parallel(context=2), True)
    assert traffic.covers(Parallel(context=2, tensor=2), False)
