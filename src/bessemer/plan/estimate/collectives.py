"""Time of collectives and sends: bytes over the slowest link of a ring, plus a latency for each hop.

Ranks are placed as in distributed/mesh.py: tensor neighbours are closest, then context, shard, replicate, and pipeline
is farthest. Members of a group are `stride` apart, and `stride` groups share the links of a node at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, gcd, log2

from bessemer.plan.estimate.job import ClusterSpec, Physics


@dataclass(frozen=True)
class CommunicationGroup:
    """A group of ranks with its bandwidth and latencies.

    Attributes:
        size: Number of members.
        local: Members that share a node.
        rate: Bytes/s that one member moves in a ring over all members.
        call: Seconds of a call before it moves data.
        far: Seconds of a hop between nodes.
        near: Seconds of a hop within a node.
    """

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
        """Latency of one pass around the ring through every member, in seconds (NCCL's ring over nodes)."""
        return (self.nodes - 1) * self.far + (self.size - self.nodes) * self.near


@lru_cache(maxsize=65_536)
def of(cluster: ClusterSpec, size: int, stride: int, physics: Physics) -> CommunicationGroup:
    """Return the bandwidth and latencies of a group of `size` ranks of a cluster, `stride` apart.

    Within a node, members use the device's own links. Across nodes, the members in a node share the NICs of their
    devices. The ring over nodes is therefore `local` NICs wide (NCCL opens a ring for each NIC), but no faster than the
    links inside. Groups begin at multiples of their span, and `local` is that of the node with the fewest members.
    """
    local = max(gcd(size * stride, cluster.near) // stride, 1)
    inside = cluster.intra_rate(local) * physics.intra
    rate = inside if local >= size else min(inside, local * cluster.inter_bandwidth * physics.inter)
    return CommunicationGroup(size, local, rate, physics.call, physics.far, physics.near)


def gather(group: CommunicationGroup, whole: float, calls: float = 1.0) -> float:
    """Return the seconds of an all-gather or reduce-scatter of `whole` bytes, split over `calls` collectives.

    Each member sends (n - 1) / n of the bytes (Thakur et al. 2005).
    """
    if group.size == 1 or whole == 0:
        return 0.0
    return whole * (group.size - 1) / group.size / group.rate + calls * (group.hops + group.call)


def reduce(group: CommunicationGroup, whole: float, calls: float = 1.0) -> float:
    """Return the seconds of an all-reduce of `whole` bytes: a ring, or a tree over nodes if that is faster (NCCL)."""
    if group.size == 1 or whole == 0:
        return 0.0
    ring = 2 * whole * (group.size - 1) / group.size / group.rate + calls * (2 * group.hops + group.call)
    if group.nodes == 1:
        return ring
    climb = 2 * log2(group.nodes) * group.far + 2 * (group.local - 1) * group.near + group.call
    return min(ring, 2 * whole / group.rate + calls * climb)


def summed(group: CommunicationGroup, whole: float, calls: float, sums: str) -> float:
    """Return the seconds to reduce `whole` bytes of sharded gradients, by reduce-scatter or, if `sums` is "all", all-reduce."""
    return reduce(group, whole, calls) if sums == "all" else gather(group, whole, calls)


def send(cluster: ClusterSpec, ranks: tuple[int, int], stride: int, whole: float, physics: Physics) -> float:
    """Return the seconds to send `whole` bytes between two ranks of an axis whose neighbours are `stride` devices apart.

    It uses the links of a node if both ranks share one at every position along the other axes, otherwise one NIC.
    """
    if whole == 0 or ranks[0] == ranks[1]:
        return 0.0
    if min(ranks) * stride // cluster.near == ((max(ranks) + 1) * stride - 1) // cluster.near:
        return whole / (cluster.intra_rate(2) * physics.intra) + physics.call + physics.near
    return whole / (cluster.inter_bandwidth * physics.inter) + physics.call + physics.far
