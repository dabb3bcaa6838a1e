"""What stands after the last block: the prediction of tokens, or of a class.

Shapes: B sequences, T tokens, D width, V vocabulary, L labels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.parts import activate, norm


class Transform(nn.Module):
    """norm(act(dense(x))): BERT's and ModernBERT's layer before the output matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.dense = nn.Linear(config.width, config.width, bias=config.transform_bias)
        self.norm = norm(config)

    def forward(self, x: Tensor) -> Tensor:
        transformed: Tensor = self.norm(activate(self.activation, self.dense(x)))
        return transformed


class Pooler(nn.Module):
    """tanh(dense(x)): BERT's layer before a classifier."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.width, bias=config.transform_bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x))


class LanguageHead(nn.Module):
    """Hidden states to logits over the vocabulary. Its parts are open to the loss, which never holds all logits.

    vocabulary: which part of the output matrix is here (a VocabularyShard), when it is not all of it.
    """

    vocabulary: Any = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.transform = Transform(config) if config.head_transform else nn.Identity()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.bias = nn.Parameter(torch.empty(config.vocabulary)) if config.head_bias else None
        self.soft_cap = config.logit_soft_cap

    def tie(self, embedding: nn.Embedding) -> None:
        """Make the embedding's matrix the output matrix."""
        self.register_parameter("weight", embedding._parameters["weight"])

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, V)."""
        logits_BTV = F.linear(self.transform(hidden_BTD), self.weight, self.bias)
        return torch.tanh(logits_BTV / self.soft_cap) * self.soft_cap if self.soft_cap else logits_BTV


class Classifier(nn.Module):
    """Hidden states to one logit a label: of one token, or of the mean over the text."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pooling = config.pooling
        self.transform: nn.Module = nn.Identity()
        if config.head_transform:
            self.transform = Pooler(config) if config.pooler else Transform(config)
        self.weight = nn.Parameter(torch.empty(config.labels, config.width))
        self.bias = nn.Parameter(torch.empty(config.labels)) if config.head_bias else None

    def forward(self, hidden_BTD: Tensor, lengths_B: Tensor, masks: DropoutMasks | None = None) -> Tensor:
        """(B, L). lengths_B: tokens of each text; what follows is padding."""
        if self.pooling == "first":
            pooled_BD = hidden_BTD[:, 0]
        elif self.pooling == "last":
            pooled_BD = hidden_BTD[torch.arange(len(hidden_BTD), device=hidden_BTD.device), lengths_B - 1]
        else:
            inside_BT = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device) < lengths_B[:, None]
            pooled_BD = (hidden_BTD * inside_BT[..., None]).sum(dim=1) / lengths_B[:, None]
        read_BD = self.transform(pooled_BD)
        if masks is not None:
            read_BD = masks.classifier(read_BD)
        return F.linear(read_BD, self.weight, self.bias)
