"""A pipeline's stages: which blocks each one holds, a model of which only they are left, and what a stage computes.

Shapes: B sequences of a micro-batch, T tokens, D width, S targets of a sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from bessemer.layout.stages import Span
from bessemer.model.attention import Documents
from bessemer.model.dropout import DropoutMasks
from bessemer.model.transformer import Transformer
from bessemer.parallel.context import Share

BEFORE_BLOCKS = ("embedding", "position_embedding", "type_embedding", "embedding_norm")
AFTER_BLOCKS = ("norm", "head", "classifier")

# of (inputs_BT, targets_BS, starts_BT, dropout_B)
Reading = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Share]


def cut(model: Transformer, held: Sequence[Span]) -> None:
    """Leave of a model (of `initialisation.shell`), in place, what the stages `held` by this process need.

    Blocks elsewhere become None; so do the embeddings without the first stage, and norm, head and classifier without the
    last. Names stay as they are, but that a tied matrix is `head.weight` on the last stage and `embedding.weight` on the
    first, two parameters even on one process: `parallel.tied` keeps them the same.
    """
    if model.config.tie_embeddings and not model.config.labels:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone(), model.head.weight.requires_grad)
    for number in range(len(model.blocks)):
        if not any(span.first <= number < span.end for span in held):
            model.blocks[number] = None  # type: ignore[assignment]
    _drop(model, any(span.has_embedding for span in held), any(span.has_head for span in held))


def part_of(model: Transformer, span: Span) -> Transformer:
    """One stage of a model that `cut` has left several: another Transformer around the same blocks and embeddings."""
    part = copy.copy(model)
    part._modules = dict(model._modules)
    blocks = [block if span.first <= number < span.end else None for number, block in enumerate(model.blocks)]
    part.blocks = nn.ModuleList()
    for number, block in enumerate(blocks):
        part.blocks.register_module(str(number), block)
    _drop(part, span.has_embedding, span.has_head)
    return part


def _drop(model: Transformer, has_embedding: bool, has_head: bool) -> None:
    for names, stays in ((BEFORE_BLOCKS, has_embedding), (AFTER_BLOCKS, has_head)):
        for name in names:
            if not stays and name in model._modules:
                model._modules[name] = None


class Objective(Protocol):
    """What a stage asks of a task (`train.task.Task`)."""

    def documents(self, inputs_BT: Tensor, starts_BT: Tensor | None = None) -> Documents | None: ...

    def loss(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor,
        masks: DropoutMasks | None = None,
    ) -> Any:  # fmt: skip
        """An outcome: total, nats_B, correct_B."""
        ...

    def score(
        self, model: Transformer, hidden_BTD: Tensor, inputs_BT: Tensor, targets_BS: Tensor
    ) -> tuple[Tensor, Tensor | None]: ...


@dataclass(frozen=True)
class Found:
    """What the last stage found of a micro-batch, detached: the loss's sum, each sequence's nats, and how many of its
    targets were predicted right where the loss knows it."""

    total: Tensor
    nats_B: Tensor
    correct_B: Tensor | None


class Stage(nn.Module):
    """What one stage computes of a micro-batch: what FSDP2 and DDP wrap, and what the schedule runs.

    model: `part_of` the stage. autocast: what forward runs inside of; a schedule must not run inside of it, for its
    backward passes would too. share: (inputs_BT, targets_BS, starts_BT,
    dropout_B) of whole sequences to what this process computes of them.

    divisor, factor: what the last stage divides and multiplies its sum of losses by. found: one a micro-batch, in order.
    """

    def __init__(
        self,
        model: Transformer,
        span: Span,
        task: Objective,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        share: Reading | None = None,
    ) -> None:
        super().__init__()
        self.model, self.span, self.task, self.autocast = model, span, task, autocast
        self.share = share or self._whole_sequences
        self.divisor, self.factor = 1, 1.0
        self.found: list[Found] = []

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that lie here."""
        return [block for block in self.model.blocks if block is not None]

    def forward(
        self,
        x: Tensor,
        *,
        inputs_BT: Tensor,
        targets_BS: Tensor,
        starts_BT: Tensor | None = None,
        dropout_B: Tensor | None = None,
        scored: bool = False,
    ) -> Any:
        """x: the tokens (B, T) on the first stage, else the hidden states (B, T, D) of the stage before.

        Returns the hidden states after the last block here, contiguous; on the last stage the micro-batch's sum of losses
        / divisor x factor, in fp32 (fp64 for fp64), or with `scored` what the task's `score` gives.
        """
        with self.autocast():
            mine = self.share(inputs_BT, targets_BS, starts_BT, dropout_B)
            inputs_BT, targets_BS, documents = mine.inputs_BS, mine.targets_BS, mine.documents
            if documents is None:
                positions = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
            else:
                positions = documents.position_BT
            x_BTD = self.model.embed(inputs_BT, positions, mine.masks) if self.span.has_embedding else x
            x_BTD = self.model.run_blocks(x_BTD, positions, documents, masks=mine.masks)
            if not self.span.has_head:
                return x_BTD.contiguous()
            hidden_BTD: Tensor = self.model.norm(x_BTD)
            if scored:
                return self.task.score(self.model, hidden_BTD, inputs_BT, targets_BS)
            outcome = self.task.loss(self.model, hidden_BTD, inputs_BT, targets_BS, mine.masks)
        self.found.append(Found(outcome.total.detach(), outcome.nats_B.detach(), outcome.correct_B))
        return (outcome.total / self.divisor * self.factor).to(torch.promote_types(hidden_BTD.dtype, torch.float32))

    def _whole_sequences(
        self, inputs_BT: Tensor, targets_BS: Tensor, starts_BT: Tensor | None, dropout_B: Tensor | None
    ) -> Share:
        return Share(inputs_BT, targets_BS, self.task.documents(inputs_BT, starts_BT))
