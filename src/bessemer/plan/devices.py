"""The catalogue of devices: what each can compute, hold, move, send and cost, with the source of every figure.

The figures stand in devices.toml beside this file; a user's own file of the same form adds to it or replaces entries.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """An accelerator (or a CPU).

    flops: peak rates in FLOP/s, dense, by precision; matmul: share of the peak that the best large product reaches when it is
    measured; memory: bytes; bandwidth: bytes/s of that memory; intra, inter: bytes/s that it sends to others of its node and
    beyond, one way, where a typical node is built so; per_node: devices of such a node; watts: of the board; price: dollars an
    hour, and when it was asked.
    """

    name: str
    flops: dict[str, float]
    matmul: float
    memory: float
    bandwidth: float
    intra: float
    inter: float
    per_node: int
    watts: float
    price: float | None
    price_date: str | None
    source: str
