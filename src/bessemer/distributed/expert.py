"""Expert parallelism: the routed experts of each layer divided over a group of ranks, which exchange tokens.

The ranks of a pipeline stage form a mesh of (copies, expert). The ranks of an expert group are neighbours, and each holds some
whole experts. Ranks with the same experts divide their state by FSDP2. Between the matmuls of attention each rank has its own
tokens, tensor and context ranks too, so tensor parallelism leaves experts whole (Liu et al. 2025, "MoE Parallel Folding").
Every expert's gradient is then the sum over all tokens, without any division.

Shapes: M rows that this rank sends, R rows that it receives, E experts, L = E / e of them on each of e ranks, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from bessemer.distributed.collectives import RankGroup, all_reduce, functional, wait
from bessemer.distributed.mesh import COPIES, EXPERT, ProcessMesh, set_timeout
from bessemer.distributed.sharded_tensors import local
from bessemer.distributed.tensor import read_locally
from bessemer.distributed.validity import require_experts
from bessemer.model.mixture_of_experts import Experts, mixtures
from bessemer.model.transformer import Transformer


def apply_ep(model: Transformer, mesh: ProcessMesh) -> None:
    """Divide the routed experts of a model over this process's expert group, in place. Collective.

    Call it after `tensor.apply_tp`. Raises InputError as `require_experts` does.
    """
    layout = mesh.layout
    require_experts(model.config, layout)
    assert mesh.device_mesh is not None
    if layout.context * layout.tensor > 1:
        set_timeout(sequence := mesh.device_mesh["context", "tensor"]._flatten("sequence").get_group())
        for _, mixture in mixtures(model):
            mixture.mean_over_sequence = partial(_mean, group=sequence)
    if layout.expert == 1:
        return
    ranks = mesh.device_mesh.mesh.view(layout.pipeline, -1, layout.expert)
    experts_mesh = DeviceMesh(mesh.device_mesh.device_type, ranks, mesh_dim_names=("pipeline", COPIES, EXPERT))
    for axis in (COPIES, EXPERT):
        set_timeout(experts_mesh.get_group(axis))
    group = RankGroup(experts_mesh.get_local_rank(EXPERT), layout.expert, experts_mesh.get_group(EXPERT).group_name)
    for _, mixture in mixtures(model):
        experts: Any = mixture.experts
        for name, weight in experts._parameters.items():
            # Without a source rank, each process takes its experts from its local values, without communication.
            placed = distribute_tensor(local(weight).detach(), experts_mesh[EXPERT], [Shard(0)], src_data_rank=None)
            experts._parameters[name] = nn.Parameter(placed, weight.requires_grad)
        read_locally(experts, Experts, DividedExperts, dict.fromkeys(experts._parameters, "shard"))
        experts.expert_group = group
        experts.fsdp_mesh = experts_mesh[COPIES]


def _mean(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_reduce(x, "sum", group.group_name) / group.size()


class DividedExperts(nn.Module):
    """The mixin of `Experts` of which each rank has some, and computes them for the tokens of all ranks of its group."""

    expert_group: RankGroup
    fsdp_mesh: DeviceMesh  # the ranks with the same experts, over which FSDP2 shards them

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the numbers of rows differ from step to step, and the host must know them
    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        exchange = Exchange.from_counts(counts_E, self.expert_group)
        out_RD = super().forward(exchange.send(x_MD), exchange.counts_L)
        return exchange.send_back(out_RD)


@dataclass(frozen=True)
class Exchange:
    """One all-to-all of rows, sorted by expert, and its return.

    Attributes:
        group: The expert group.
        sent: Rows that go to each rank.
        received: Rows that come from each rank.
        counts_L: Received rows of each local expert.
        order_R: The received row at each place of the order by expert; rows of an expert stay in the order of ranks.
        place_R: The inverse of `order_R`.
    """

    group: RankGroup
    sent: list[int]
    received: list[int]
    counts_L: Tensor
    order_R: Tensor
    place_R: Tensor

    @classmethod
    def from_counts(cls, counts_E: Tensor, group: RankGroup) -> Exchange:
        """Exchange the numbers of rows of each expert. The host waits for them."""
        even = [len(counts_E) // group.size] * group.size
        counts_eL = _all_to_all(counts_E, even, even, group).view(group.size, -1)
        rows = torch.stack([counts_E.view(group.size, -1).sum(dim=1), counts_eL.sum(dim=1)])
        sent, received = rows.tolist()
        expert_eL = torch.arange(counts_eL.shape[1], device=counts_E.device).expand_as(counts_eL)
        order_R = (
            expert_eL.flatten().repeat_interleave(counts_eL.flatten(), output_size=sum(received)).argsort(stable=True)
        )
        return cls(group, sent, received, counts_eL.sum(dim=0), order_R, order_R.argsort())

    def send(self, x_MI: Tensor) -> Tensor:
        """Send each row to the rank of its expert, and return the received rows in the order of experts, (R, I)."""
        return _Exchanged.apply(x_MI, self, False)  # type: ignore[no-any-return, no-untyped-call]

    def send_back(self, x_RI: Tensor) -> Tensor:
        """Return each row to the rank that sent it: the inverse of `send`, and its transpose."""
        return _Exchanged.apply(x_RI, self, True)  # type: ignore[no-any-return, no-untyped-call]

    def move(self, x: Tensor, is_back: bool) -> Tensor:
        if is_back:
            return _all_to_all(x[self.place_R], self.sent, self.received, self.group)
        return _all_to_all(x, self.received, self.sent, self.group)[self.order_R]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, is_back: bool) -> Tensor:
        ctx.exchange, ctx.is_back = exchange, is_back
        return exchange.move(x, is_back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.move(gradients[0], not ctx.is_back), None, None


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: RankGroup) -> Tensor:
    return wait(functional.all_to_all_single(x.contiguous(), received, sent, group.name))
