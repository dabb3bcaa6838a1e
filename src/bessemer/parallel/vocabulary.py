"""The vocabulary split over a tensor group: which ids are here, and what their softmax needs of the others.

Each process holds the rows of its own ids of the embedding and of the output matrix, and the logits of those ids alone
(Shoeybi et al. 2019, section 3). The rows are as many on each process, but fewer on the last where they do not divide.

Shapes: C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from bessemer.parallel.exchange import Share, all_reduce


@dataclass(frozen=True)
class VocabularyShard:
    """The ids [first, first + size) of a vocabulary of `whole`, of which no process of the group holds more than `most`."""

    first: int
    size: int
    whole: int
    most: int
    group: GroupName

    @classmethod
    def of(cls, whole: int, share: Share) -> VocabularyShard:
        """The ids of a process."""
        return cls(*share.rows(whole), whole, -(-whole // share.size), share.group)

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of ids here (0 for those elsewhere), and whether each is here."""
        rows = ids - self.first
        here = (rows >= 0) & (rows < self.size)
        return torch.where(here, rows, 0), here

    def max(self, x: Tensor) -> Tensor:
        """The largest over the group, elementwise."""
        return all_reduce(x, "max", self.group)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the group, elementwise."""
        return all_reduce(x, "sum", self.group)
