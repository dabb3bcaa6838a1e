"""Seconds of collectives and sends on a cluster: bytes over the slowest link of a ring, and a wait for each hop.

Ranks lie as in distributed/mesh.py: tensor neighbours are the closest, then context, shard, replicate, and pipeline the
farthest. A group's members are `stride` apart; as many groups as `stride` share a node's links at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, log2

from bessemer.plan.estimate.job import ClusterSpec, Physics


@dataclass(frozen=True)
class CommunicationGroup:
    """Members of a group, how many of them share a node, the bytes/s that one of them moves in a ring over all, and seconds:
    of a call before anything moves, of a hop between nodes and of one inside."""

    size: int
    local: int
    rate: float
    call: float
    far: float
    near: float

    @property
    def nodes(self) -> int:
        """Nodes that the group spans."""
        return ceil(self.size / self.local)

    @property
    def hops(self) -> float:
        """Seconds of a chunk's way round the ring, which passes every member (NCCL's ring over nodes)."""
        return (self.nodes - 1) * self.far + (self.size - self.nodes) * self.near


@lru_cache(maxsize=65_536)
def of(cluster: ClusterSpec, size: int, stride: int, physics: Physics) -> CommunicationGroup:
    """A group of `size` ranks of a cluster, `stride` apart.

    Within a node: the device's own links. Across: the members of a node share the NICs of the devices that the group has
    there, so that the ring over nodes is `local` NICs wide (NCCL opens a ring for each NIC), but no faster than the links
    inside. Groups begin at multiples of what they span: `local` is of the node that has the fewest members of one.
    """
    local = max(gcd(size * stride, cluster.near) // stride, 1)
    inside = cluster.intra_rate(local) * physics.intra
    rate = inside if local >= size else min(inside, local * cluster.inter_bandwidth * physics.inter)
    return CommunicationGroup(size, local, rate, physics.call, physics.far, physics.near)


def gather(group: CommunicationGroup, whole: float, calls: float = 1.0) -> float:
    """All-gather of `whole` bytes, or reduce-scatter of them: each member sends (n - 1) / n (Thakur et al. 2005).

    calls: into how many collectives the bytes are divided; each goes round by itself.
    """
    if group.size == 1 or whole == 0:
        return 0.0
    return whole * (group.size - 1) / group.size / group.rate + calls * (group.hops + group.call)


def reduce(group: CommunicationGroup, whole: float, calls: float = 1.0) -> float:
    """All-reduce: a round of each kind where the ring is best, a tree over nodes for few bytes (NCCL)."""
    if group.size == 1 or whole == 0:
        return 0.0
    ring = 2 * whole * (group.size - 1) / group.size / group.rate + calls * (2 * group.hops + group.call)
    if group.nodes == 1:
        return ring
    climb = 2 * log2(group.nodes) * group.far + 2 * (group.local - 1) * group.near + group.call
    return min(ring, 2 * whole / group.rate + calls * climb)


def summed(group: CommunicationGroup, whole: float, calls: float, sums: str) -> float:
    """Gradients of which each member keeps its shard: a reduce-scatter, or (sums: "all") an all-reduce."""
    return reduce(group, whole, calls) if sums == "all" else gather(group, whole, calls)


def send(cluster: ClusterSpec, ranks: tuple[int, int], stride: int, whole: float, physics: Physics) -> float:
    """A message between two ranks of an axis whose neighbours are `stride` devices apart: over the links of a node where both
    lie in one whatever their place along the other axes, else through one NIC."""
    if whole == 0 or ranks[0] == ranks[1]:
        return 0.0
    if min(ranks) * stride // cluster.near == ((max(ranks) + 1) * stride - 1) // cluster.near:
        return whole / (cluster.intra_rate(2) * physics.intra) + physics.call + physics.near
    return whole / (cluster.inter_bandwidth * physics.inter) + physics.call + physics.far
