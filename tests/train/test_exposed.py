"""Communication that nothing is computed beside, by intervals made by hand."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from bessemer.train.profile import communication, length, union

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(name: str, start: float, end: float, device: Any = CPU, children: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(
        name=name, device_type=device, cpu_children=list(children), time_range=SimpleNamespace(start=start, end=end)
    )


def test_unions_and_overlaps_are_those_of_sets_of_instants() -> None:
    draw = random.Random(0)
    for _ in range(200):
        one, other = (
            [(float(a), float(a + draw.randint(0, 9))) for a in draw.choices(range(60), k=draw.randint(0, 8))]
            for _ in range(2)
        )
        instants = [{n for a, b in spans for n in range(int(a), int(b))} for spans in (one, other)]
        assert length(union(one)) == len(instants[0])
        assert length(union([*one, *other])) == len(instants[0] | instants[1])


def test_on_a_cpu_what_the_host_waits_for_is_exposed() -> None:
    waits = event("c10d::allreduce_", 30, 50)
    events = [
        event("gloo:all_reduce", 10, 50),
        event("gloo:all_gather", 40, 60),
        event("aten::mm", 0, 30),
        event("FSDP::post_backward", 0, 60, children=(waits,)),
        waits,
    ]
    found = communication(events, cuda=False, steps=2)
    assert found.total == 50e-6 / 2 and found.exposed == 30e-6 / 2


def test_on_cuda_the_kernels_count() -> None:
    events = [
        event("ncclDevKernel_AllGather_RING_LL", 0, 100, CUDA),
        event("ampere_sgemm", 20, 50, CUDA),
        event("gloo:all_reduce", 0, 1000),
        event("aten::mm", 0, 1000),
    ]
    found = communication(events, cuda=True, steps=1)
    assert (found.total, found.exposed) == (100e-6, 70e-6)
