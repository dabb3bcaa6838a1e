"""Context parallelism, in which the ranks of a group share every sequence, and the loss of a rank's tokens of a micro-batch.

Only attention mixes tokens: keys and values of the full sequence are all-gathered, and each rank computes attention for its
own queries. Sequences are sharded as in the Llama 3 report (Grattafiori et al. 2024, section 3.3.2): into 2c chunks for c
ranks, of which rank r takes two (`chunks_of`). With a causal mask each rank then has the same number of (query, key) pairs.
Without one every sharding is balanced, so the same sharding is used.

PyTorch's `context_parallel` (torch.distributed.tensor.experimental, a prototype in 2.11 and 2.13) takes no attention mask,
so it supports no packed documents, windows or soft caps, and none of its kernels runs on a CPU. Here CUDA uses
FlexAttention with a block mask of (local queries, all keys), and a CPU uses fused calls over pieces of documents.

Shapes: B sequences, T tokens of a full sequence, L of them on this rank, S targets of a sequence (T, or 1 for a
classifier), D width, H query heads, G key/value heads, K width of a head, c ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from bessemer.distributed.collectives import RankGroup, all_gather, collective, require_divisible_tokens
from bessemer.distributed.mesh import ProcessMesh
from bessemer.distributed.validity import require_context, require_length
from bessemer.model.attention import AttentionFunction, attention
from bessemer.model.attention_scope import AttentionScope, AttentionSpec, Documents, QueryBlock, make_block_mask
from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import Transformer
from bessemer.recipe import Dropout


def chunks_of(rank: int, num_ranks: int) -> tuple[int, int]:
    """Return the two chunks, of the 2 x num_ranks of a sequence, that a context rank holds."""
    return rank, 2 * num_ranks - 1 - rank


@dataclass(frozen=True)
class SequenceShard:
    """The tokens that one of `num_ranks` context ranks holds of sequences of `length` tokens."""

    num_ranks: int
    rank: int
    length: int

    @classmethod
    def from_mesh(cls, mesh: ProcessMesh, length: int) -> SequenceShard:
        """Return this process's shard. Raises InputError when the length does not divide (`require_length`)."""
        require_length(mesh.size("context"), length)
        return cls(mesh.size("context"), mesh.coordinate("context"), length)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The (start, end) ranges of the local tokens in the sequence, in order; one range when the two chunks are adjacent."""
        chunk, (front, back) = self.length // (2 * self.num_ranks), chunks_of(self.rank, self.num_ranks)
        if back == front + 1:
            return ((front * chunk, (back + 1) * chunk),)
        return ((front * chunk, (front + 1) * chunk), (back * chunk, (back + 1) * chunk))

    def positions(self, device: torch.device | None = None) -> Tensor:
        """Return the index in the full sequence of each local token, (L,)."""
        return torch.cat([torch.arange(start, end, device=device) for start, end in self.ranges])

    def take(self, x_BT: Tensor) -> Tensor:
        """Return the local tokens (B, L, ...) of full sequences (B, T, ...), such as inputs, targets or positions."""
        assert x_BT.shape[1] == self.length, "whole sequences are sharded"
        parts = [x_BT[:, start:end] for start, end in self.ranges]
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


@dataclass(frozen=True)
class LocalDocuments(Documents):
    """The documents of full sequences, for attention between local queries and all keys.

    `position_BT` is the position of each local token in its document, (B, L), or (L,) when each sequence is one document.
    `document_BT` is the document number of every token of the sequence, (B, T), or (1, T) in that case. `spans` describes
    the full documents, and `batch` is the number of sequences.
    """

    shard: SequenceShard
    batch: int

    @classmethod
    def from_shard(cls, shard: SequenceShard, documents: Documents | None, batch: int, device: torch.device) -> Self:
        """Build from the documents of the full sequences; with None, each sequence is one document."""
        if documents is not None:
            return cls(shard.take(documents.position_BT), documents.document_BT, documents.spans, shard, batch)
        one_1T = torch.zeros(1, shard.length, dtype=torch.long, device=device)
        spans = tuple((row, 0, shard.length) for row in range(batch))
        return cls(shard.positions(device), one_1T, spans, shard, batch)

    @functools.cached_property
    def query_blocks(self) -> tuple[QueryBlock, ...]:  # type: ignore[override]
        """The local parts of documents, in the order of local tokens; computed once for all layers."""
        if len(self.spans) == self.batch:
            return tuple(_query_blocks(slice(0, self.batch), [(0, self.shard.length)], self.shard))
        by_row: list[list[tuple[int, int]]] = [[] for _ in range(self.batch)]
        for row, start, end in self.spans:
            by_row[row].append((start, end))
        blocks = (_query_blocks(slice(row, row + 1), spans, self.shard) for row, spans in enumerate(by_row))
        return tuple(chain.from_iterable(blocks))

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        return self.shard.ranges

    def block_mask(self, spec: AttentionSpec) -> Any:
        """Return FlexAttention's BlockMask of (local queries, all keys): the keys that the spec allows within each document."""
        document_BT, index_L = self.document_BT, self.shard.positions(self.document_BT.device)
        one_document_each = self.position_BT.dim() == 1

        def within(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            allowed = spec.allows(index_L[q], kv)
            return allowed if one_document_each else allowed & (document_BT[b, index_L[q]] == document_BT[b, kv])

        batch = None if one_document_each else self.batch
        return make_block_mask(within, batch, len(index_L), self.shard.length, document_BT.device)


def _query_blocks(rows: slice, spans: list[tuple[int, int]], shard: SequenceShard) -> Iterator[QueryBlock]:
    """Yield a query block for each local part of a document in the sequences `rows`.

    `spans` has the (start, end) of each document in the full sequence, in order.
    """
    offset = 0
    for low, high in shard.ranges:
        for start, end in spans:
            first, last = max(low, start), min(high, end)
            if first < last:
                queries = slice(offset + first - low, offset + last - low)
                yield QueryBlock(rows, queries, slice(start, end), first - start)
        offset += high - low


@dataclass(frozen=True)
class LocalBatch:
    """This rank's tokens of a micro-batch: inputs and targets (B, L), their documents and their dropout masks."""

    inputs_BL: Tensor
    targets_BL: Tensor
    documents: Documents | None = None
    masks: DropoutMasks | None = None


@dataclass(frozen=True)
class MicroBatchLoss:
    """The loss of one micro-batch.

    Attributes:
        total: Sum of the losses over the targets; differentiable unless `detached`.
        nats_B: Sum of the losses of each sequence, detached.
        correct_B: Number of correctly predicted targets of each sequence, if the objective counts them.
    """

    total: Tensor
    nats_B: Tensor
    correct_B: Tensor | None = None

    def detached(self) -> MicroBatchLoss:
        """Return a copy without the autograd graph."""
        return MicroBatchLoss(self.total.detach(), self.nats_B.detach(), self.correct_B)


class ModelTask(Protocol):
    """The methods of `train.task.ObjectiveTask` that `ModelWithLoss` and pipeline stages call."""

    def documents(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Documents | None: ...

    def loss(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch) -> MicroBatchLoss: ...

    def score(self, model: Transformer, hidden_BTD: Tensor, batch: LocalBatch) -> tuple[Tensor, Tensor | None]: ...


# Maps (inputs_BT, targets_BS, starts_BT, dropout_B) of full sequences to this rank's tokens.
ReadBatch = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], LocalBatch]


class ModelWithLoss(nn.Module):
    """A module that computes the loss from token ids and targets.

    DDP and FSDP2 wrap this module and not the model, because the loss reads the head's weights too. `autocast` is entered
    in the forward pass: around a pipeline schedule it would apply to the backward passes as well.
    """

    def __init__(
        self, model: Transformer, task: ModelTask, autocast: Callable[[], AbstractContextManager[object]],
        local_batch: ReadBatch,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.task, self.autocast, self.local_batch = model, task, autocast, local_batch

    def forward(
        self, inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None = None, dropout_B: Tensor | None = None,
        scored: bool = False, x_BTD: Tensor | None = None,
    ) -> Any:  # fmt: skip
        """Return the fields of a `MicroBatchLoss` as a tuple, since FSDP2's hooks find tensors only in plain tuples.

        With `scored` it returns the result of the task's `score`, and on a pipeline stage without the head the hidden
        states, contiguous. `x_BTD` is that of `Transformer.forward`.
        """
        with self.autocast():
            batch = self.local_batch(inputs_BT, targets_BS, starts_BT, dropout_B)
            hidden_BTD: Tensor = self.model(batch.inputs_BL, batch.documents, masks=batch.masks, x_BTD=x_BTD)
            if self.model.norm is None:
                return hidden_BTD.contiguous()
            if scored:
                return self.task.score(self.model, hidden_BTD, batch)
            loss = self.task.loss(self.model, hidden_BTD, batch)
        return loss.total, loss.nats_B, loss.correct_B


def read_batch(
    mesh: ProcessMesh, task: ModelTask, rates: Dropout, inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None,
    dropout_B: Tensor | None,
) -> LocalBatch:  # fmt: skip
    """Return this rank's tokens of a micro-batch of full sequences, with the documents that the task finds in them.

    `dropout_B` has the key of each sequence's dropout masks; None for no dropout. `starts_BT` is True where a piece of a
    packed sequence starts.
    """
    masks = None if dropout_B is None else DropoutMasks.from_sequences(rates, dropout_B, inputs_BT.shape[1])
    return local_batch(mesh, inputs_BT, targets_BS, task.documents(inputs_BT, starts_BT), masks)


def local_batch(
    mesh: ProcessMesh, inputs_BT: Tensor, targets_BT: Tensor, documents: Documents | None,
    masks: DropoutMasks | None = None,
) -> LocalBatch:  # fmt: skip
    """Return this rank's tokens of a micro-batch of full sequences; all tokens without context parallelism.

    `documents` and `masks` are those of the full sequences. Raises InputError when the length does not divide.
    """
    if mesh.size("context") == 1:
        return LocalBatch(inputs_BT, targets_BT, documents, _tensor_masks(mesh, masks))
    shard = SequenceShard.from_mesh(mesh, inputs_BT.shape[1])
    local = LocalDocuments.from_shard(shard, documents, len(inputs_BT), inputs_BT.device)
    if masks is not None:
        masks = replace(masks, token_BT=shard.take(masks.token_BT))
    return LocalBatch(shard.take(inputs_BT), shard.take(targets_BT), local, _tensor_masks(mesh, masks))


def _tensor_masks(mesh: ProcessMesh, masks: DropoutMasks | None) -> DropoutMasks | None:
    """Return the masks of this tensor rank's heads and hidden units and, between matmuls, of its tokens."""
    if masks is None:
        return None
    size, rank = mesh.size("tensor"), mesh.coordinate("tensor")
    require_divisible_tokens(masks.token_BT.shape[1], size)
    return replace(masks, stream_BL=masks.token_BT.chunk(size, dim=1)[rank], part=rank)


def apply_cp(model: Transformer, mesh: ProcessMesh) -> None:
    """Replace the model's attention by attention over the keys and values of all ranks.

    Call it before recompute and compile are applied. Raises InputError for a model that cannot be split this way
    (`require_context`).
    """
    if mesh.size("context") == 1:
        return
    require_context(model.config, mesh.layout)
    group = RankGroup.from_mesh(mesh, "context")
    for attending in (block.attention for block in model.blocks if block is not None):
        attending.attend = functools.partial(attend, group=group, inner=attending.attend)  # type: ignore[union-attr,arg-type]


def attend(
    q_BHLK: Tensor, k_BGLK: Tensor, v_BGLK: Tensor, scope: AttentionScope, masks: DropoutMasks | None = None, *,
    group: RankGroup, inner: AttentionFunction = attention,
) -> Tensor:  # fmt: skip
    """Return the attention of local queries over the full sequences, (B, H, L, K), from local keys and values.

    `inner` is the attention function that computes it once the keys and values are gathered.
    """
    documents = scope.documents
    assert isinstance(documents, LocalDocuments), "context parallelism needs batches from `local_batch`"
    k_BGTK, v_BGTK = gather_keys_values(k_BGLK, v_BGLK, group)
    return inner(q_BHLK, k_BGTK, v_BGTK, scope, masks)


def gather_keys_values(k_BGLK: Tensor, v_BGLK: Tensor, group: RankGroup) -> tuple[Tensor, Tensor]:
    """All-gather keys and values of the full sequences, (B, G, T, K) each, in one collective.

    The backward is one reduce-scatter, which sums gradients in their own dtype.
    """
    # The chunk dimension comes first, so that the gathered tensor has the 2c chunks in the order of ranks.
    chunked = [x.unflatten(2, (2, -1)).movedim(2, 0) for x in (k_BGLK, v_BGLK)]  # type: ignore[no-untyped-call]
    chunks = collective(torch.stack(chunked, dim=1), group, 0, "all_gather", "reduce_scatter").unbind(0)
    by_rank = [chunk for rank in range(group.size) for chunk in chunks_of(rank, group.size)]
    k_BGTK, v_BGTK = torch.cat([chunks[by_rank.index(n)] for n in range(len(chunks))], dim=3).unbind(0)
    return k_BGTK, v_BGTK


def gather_sequences(mesh: ProcessMesh, x_BL: Tensor) -> Tensor:
    """All-gather per-token values (B, L, ...) to full sequences (B, T, ...); not differentiable, used for validation."""
    if mesh.size("context") == 1:
        return x_BL
    group = RankGroup.from_mesh(mesh, "context")
    gathered_BT, length = all_gather(x_BL.detach(), group, 1), x_BL.shape[1] * group.size
    index = [SequenceShard(group.size, rank, length).positions(x_BL.device) for rank in range(group.size)]
    return gathered_BT[:, torch.cat(index).argsort()]
