"""Compare replicas: processes that hold the same weights must hold the same bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bessemer.parallel.dtensors import Box, bits_of, local_shard

Key = tuple[str, Box, Box]  # name, offset and size of a shard
Sums = dict[Key, int]


@dataclass(frozen=True)
class Difference:
    """A shard whose replicas differ. sums: of its bits, by rank."""

    name: str
    key: Key
    sums: dict[int, int]

    @property
    def suspects(self) -> list[int]:
        """The ranks that differ from most of the others; all of them where no value has a majority."""
        values = list(self.sums.values())
        common = max(set(values), key=values.count)
        if 2 * values.count(common) <= len(values):
            return sorted(self.sums)
        return self.differing_from(common)

    def differing_from(self, right: int) -> list[int]:
        """The ranks with another sum."""
        return sorted(rank for rank, value in self.sums.items() if value != right)


@torch.no_grad()
def bit_sums(named: Iterable[tuple[str, Tensor]]) -> Sums:
    """The sum of the bits of each of this process's shards as integers, which any flipped bit changes."""
    keys, sums = [], []
    for name, tensor in named:
        _, offset, shard = local_shard(tensor)
        if shard.numel():
            keys.append((name, offset, tuple(shard.shape)))
            sums.append(bits_of(shard).sum(dtype=torch.int64))
    return dict(zip(keys, torch.stack(sums).tolist(), strict=True)) if sums else {}  # one transfer from the device


def differences(by_rank: list[Sums]) -> list[Difference]:
    """The shards that several processes hold with different bits."""
    holders: dict[Key, dict[int, int]] = {}
    for rank, sums in enumerate(by_rank):
        for key, value in sums.items():
            holders.setdefault(key, {})[rank] = value
    return [Difference(key[0], key, sums) for key, sums in holders.items() if len(set(sums.values())) > 1]
