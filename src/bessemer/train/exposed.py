"""How much of a step's communication nothing is computed beside, from the spans of a profile."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

Span = tuple[float, float]  # begin and end, microseconds

ON_HOST = re.compile(r"^gloo:")  # torch's name for a collective of gloo while its thread works on it
ON_DEVICE = re.compile(r"nccl", re.IGNORECASE)
# Host-side events that wait for a collective, or only stand around other events.
NO_WORK = re.compile(r"^c10d|^_c10d|^FSDP::|wait|record_param_comms|^gloo:|^nccl:")


@dataclass(frozen=True)
class Communication:
    """Of one step, seconds. total: in which at least one collective was under way, waiting for the others included; exposed:
    those of them in which this process computed nothing."""

    total: float
    exposed: float


def communication(events: Iterable[Any], cuda: bool, steps: int) -> Communication:
    """From torch.profiler's events of so many steps of one process: on CUDA from the kernels' spans, else from the host's."""
    moving: list[Span] = []
    computing: list[Span] = []
    for event in events:
        on_device = event.device_type != torch.autograd.DeviceType.CPU
        if on_device != cuda:
            continue
        span = (event.time_range.start, event.time_range.end)
        if (ON_DEVICE if cuda else ON_HOST).search(event.name):
            moving.append(span)
        elif cuda or not (event.cpu_children or NO_WORK.search(event.name)):
            computing.append(span)
    moving, computing = union(moving), union(computing)
    total = sum(end - begin for begin, end in moving)
    return Communication(total / 1e6 / steps, (total - overlap(moving, computing)) / 1e6 / steps)


def union(spans: list[Span]) -> list[Span]:
    """The same instants as spans that do not touch, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def overlap(one: list[Span], other: list[Span]) -> float:
    """How long both are; each a union."""
    first = second = 0
    both = 0.0
    while first < len(one) and second < len(other):
        both += max(min(one[first][1], other[second][1]) - max(one[first][0], other[second][0]), 0.0)
        if one[first][1] < other[second][1]:
            first += 1
        else:
            second += 1
    return both
