"""Context parallelism: the processes of a group share every sequence, each holding some of its tokens.

Everything but attention works on single tokens. For attention the keys and values of the whole sequence are gathered,
and each process computes what its own queries see of them. Sequences are cut as in the Llama 3 report (Grattafiori et
al. 2024, section 3.3.2), keys and values gathered as there: 2c chunks for c processes, of which process r takes r and
2c - 1 - r. Under a causal mask each then has the same number of (query, key) pairs to compute: a chunk from the front
sees little, its partner from the back as much more. Without a causal mask every cut is balanced, so the same one serves.

PyTorch's own `context_parallel` (torch.distributed.tensor.experimental, a prototype; looked at in 2.11 and 2.13) takes
no attention mask, so no packed documents, no windows and no soft caps, and none of its kernels is for a CPU; its variant
for FlexAttention is private, and gathers keys and values as it is done here. So this is one way for both: on CUDA
FlexAttention computes over a block mask of (own queries, all keys), on a CPU fused calls over pieces of documents.

Shapes: B sequences, T tokens of a whole sequence, S of them here, H query heads, G key/value heads, K width of a head,
C tokens of a chunk, c processes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bessemer.errors import InputError
from bessemer.model.attention import AttentionScope, AttentionSpec, Documents, QueryBlock, attention
from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import Transformer
from bessemer.parallel.exchange import require_tokens
from bessemer.parallel.team import Team
from bessemer.recipe import Parallel


@dataclass(frozen=True)
class Cut:
    """How sequences of `length` tokens are cut for `ways` processes, of which this one is number `place`."""

    ways: int
    place: int
    length: int

    @classmethod
    def of(cls, team: Team, length: int) -> Cut:
        """This process's cut. Raises InputError when the length does not divide, see `require_length`."""
        require_length(team.size("context"), length)
        return cls(team.size("context"), team.place("context"), length)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, end) in the sequence of the tokens here, in order; one range where the two chunks are neighbours."""
        chunk, back = self.length // (2 * self.ways), 2 * self.ways - 1 - self.place
        if back == self.place + 1:
            return ((self.place * chunk, (back + 1) * chunk),)
        return ((self.place * chunk, (self.place + 1) * chunk), (back * chunk, (back + 1) * chunk))

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Index in the whole sequence of each token here, (S,)."""
        return torch.cat([torch.arange(start, end, device=device) for start, end in self.ranges])

    def take(self, x_BT: Tensor) -> Tensor:
        """The tokens here, (B, S, ...), of whole sequences (B, T, ...): inputs, targets, positions."""
        assert x_BT.shape[1] == self.length, "whole sequences are cut"
        parts = [x_BT[:, start:end] for start, end in self.ranges]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class LocalDocuments(Documents):
    """The documents of whole sequences, seen from the tokens that are here.

    position_BT: position of each token here within its document, (B, S), or (S,) where sequences are one document each;
    document_BT: number of the document of every token of the sequence, (B, T), or (1, T) there; spans: of whole
    documents; batch: sequences.
    """

    cut: Cut
    batch: int

    @classmethod
    def seen_from(cls, cut: Cut, documents: Documents | None, batch: int, device: torch.device) -> LocalDocuments:
        """documents: of the whole sequences; None: each is one document."""
        if documents is not None:
            return cls(cut.take(documents.position_BT), documents.document_BT, documents.spans, cut, batch)
        one_1T = torch.zeros(1, cut.length, dtype=torch.long, device=device)
        return cls(cut.positions(device), one_1T, tuple((row, 0, cut.length) for row in range(batch)), cut, batch)

    @functools.cached_property
    def query_blocks(self) -> tuple[QueryBlock, ...]:  # type: ignore[override]
        """The parts of documents that lie here, in the order of the tokens here; made once for all layers."""
        if len(self.spans) == self.batch:
            return tuple(_pieces_of(slice(0, self.batch), ((0, self.cut.length),), self.cut))
        by_row: list[list[tuple[int, int]]] = [[] for _ in range(self.batch)]
        for row, start, end in self.spans:
            by_row[row].append((start, end))
        return tuple(
            piece for row, spans in enumerate(by_row) for piece in _pieces_of(slice(row, row + 1), spans, self.cut)
        )

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return self.cut.ranges

    def block_mask(self, spec: AttentionSpec) -> Any:
        """FlexAttention's mask of the queries here over all keys: what the spec allows within each document."""
        from torch.nn.attention.flex_attention import create_block_mask

        document_BT, index_S = self.document_BT, self.cut.positions(self.document_BT.device)
        one_each = self.position_BT.dim() == 1

        def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return spec.allows(index_S[q], kv)

        def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return allowed(b, h, q, kv) & (document_BT[b, index_S[q]] == document_BT[b, kv])

        batch, mask = (None, allowed) if one_each else (self.batch, within)
        return create_block_mask(mask, batch, None, len(index_S), self.cut.length, device=document_BT.device)


def _pieces_of(rows: slice, spans: Any, cut: Cut) -> Iterator[QueryBlock]:
    """What lies here of the documents (start, end) of a sequence."""
    here = 0
    for low, high in cut.ranges:
        for start, end in spans:
            first, last = max(low, start), min(high, end)
            if first < last:
                queries = slice(here + first - low, here + last - low)
                yield QueryBlock(rows, queries, slice(start, end), first - start)
        here += high - low


@dataclass(frozen=True)
class Share:
    """What a process computes of a micro-batch: its tokens' inputs and targets (B, S), their documents, and what dropout
    drops there."""

    inputs_BS: Tensor
    targets_BS: Tensor
    documents: Documents | None
    masks: DropoutMasks | None = None


def share(
    team: Team, inputs_BT: Tensor, targets_BT: Tensor, documents: Documents | None, masks: DropoutMasks | None = None
) -> Share:
    """This process's share of a micro-batch of whole sequences, all of it where the context is not split.

    documents, masks: of the whole sequences. Raises InputError when the length does not divide.
    """
    if team.size("context") == 1:
        return Share(inputs_BT, targets_BT, documents, _masks_here(team, masks))
    cut = Cut.of(team, inputs_BT.shape[1])
    local = LocalDocuments.seen_from(cut, documents, len(inputs_BT), inputs_BT.device)
    if masks is not None:
        masks = replace(masks, token_BT=cut.take(masks.token_BT))
    return Share(cut.take(inputs_BT), cut.take(targets_BT), local, _masks_here(team, masks))


def _masks_here(team: Team, masks: DropoutMasks | None) -> DropoutMasks | None:
    """The same for a process of a tensor group, which has a part of the heads, of the hidden units, and, between the
    products, of the tokens."""
    if masks is None:
        return None
    ways, place = team.size("tensor"), team.place("tensor")
    require_tokens(masks.token_BT.shape[1], ways)
    return replace(masks, stream_BS=masks.token_BT.chunk(ways, dim=1)[place], part=place)


def apply(model: Transformer, team: Team) -> None:
    """Let the model's attention see the whole sequences of which it is given shares.

    Before recompute and compile. Raises InputError for a model that cannot be split this way, see `require_config`.
    """
    if team.size("context") == 1:
        return
    require_config(model.config, team.layout)
    model.use_attention(functools.partial(attend, group=team.group("context")))


def attend(
    q_BHSK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, scope: AttentionScope, masks: DropoutMasks | None = None, *,
    group: dist.ProcessGroup,
) -> Tensor:  # fmt: skip
    """What the queries here see of the whole sequences, (B, H, S, K). Keys and values are those of the tokens here."""
    documents = scope.documents
    assert isinstance(documents, LocalDocuments), "a split context needs the shares that `share` gives"
    k_BGTK, v_BGTK = gathered(k_BGSK, v_BGSK, documents.cut, group)
    return attention(q_BHSK, k_BGTK, v_BGTK, scope, masks)


def gathered(k_BGSK: Tensor, v_BGSK: Tensor, cut: Cut, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequences, (B, G, T, K) each, by one all-gather; one reduce-scatter on the way back,
    which sums the gradients in their own precision."""
    # The two chunks lead, so that the gathered tensor is the 2c chunks in the order 0, 2c - 1, 1, 2c - 2, ...
    chunked = [x.unflatten(2, (2, -1)).movedim(2, 0) for x in (k_BGSK, v_BGSK)]  # type: ignore[no-untyped-call]
    all_chunks: Tensor = _Gather.apply(torch.stack(chunked, dim=1), group.group_name, cut.ways)  # type: ignore[no-untyped-call]
    chunks, last = all_chunks.unbind(0), 2 * cut.ways - 1
    in_order = [chunks[2 * n] if n < cut.ways else chunks[2 * (last - n) + 1] for n in range(2 * cut.ways)]
    k_BGTK, v_BGTK = torch.cat(in_order, dim=3).unbind(0)
    return k_BGTK, v_BGTK


class _Gather(torch.autograd.Function):
    """All processes' tensors, joined along the first dimension.

    By the operators under torch.distributed's functions: the functions of 2.11 are deprecated in 2.13, whose successors
    2.11 does not have.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, ways: int) -> Tensor:
        ctx.group, ctx.ways = group, ways
        collectives = torch.ops._c10d_functional
        joined: Tensor = collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), ways, group))
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        collectives = torch.ops._c10d_functional
        mine = collectives.reduce_scatter_tensor(gradients[0].contiguous(), "sum", ctx.ways, ctx.group)
        return collectives.wait_tensor(mine), None, None


def whole(team: Team, x_BS: Tensor) -> Tensor:
    """What each process has of its tokens, (B, S, ...), put together in the order of the sequences, (B, T, ...), on each.

    For scores of held-out text: nothing flows back through it.
    """
    if team.size("context") == 1:
        return x_BS
    ways, length = team.size("context"), x_BS.shape[1] * team.size("context")
    collectives = torch.ops._c10d_functional
    group = team.group("context").group_name
    given = x_BS.detach().contiguous()
    joined = collectives.wait_tensor(collectives.all_gather_into_tensor(given, ways, group))
    index = torch.cat([Cut(ways, place, length).positions(x_BS.device) for place in range(ways)])
    in_order = torch.empty(len(x_BS), length, *x_BS.shape[2:], dtype=x_BS.dtype, device=x_BS.device)
    in_order[:, index] = torch.cat(joined.chunk(ways), dim=1)
    return in_order


def require_length(ways: int, length: int) -> None:
    """Raise InputError, with the nearest lengths that work, when sequences do not divide into 2 x ways chunks."""
    unit = 2 * ways
    if ways == 1 or length % unit == 0:
        return
    below, above = length // unit * unit, -(-length // unit) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    raise InputError(
        f"tokens.sequence_length: {length} tokens do not divide for parallel.context = {ways}, which cuts a sequence into "
        f"{unit} equal parts; the nearest that does is {nearest}"
    )


def require_config(config: ModelConfig, layout: Parallel) -> None:
    """Raise InputError when a model cannot be trained with this layout's context: a classifier reads one token of a
    text, or the mean over it, of which a process holds some, and its texts are short."""
    if layout.context == 1:
        return
    if config.labels:
        raise InputError(
            f"parallel.context: {layout.context} processes cannot share the texts of a classifier; "
            "use parallel.replicate or parallel.shard instead"
        )
    if config.position_padding is not None:
        raise InputError(
            f"parallel.context: {layout.context} processes cannot share a sequence whose learned positions pass over "
            "padding (RoBERTa): a process does not see the tokens before its own; use parallel.tensor instead"
        )
    require_length(layout.context, config.sequence_length)
