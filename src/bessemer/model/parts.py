"""The small parts that blocks and heads share: norms and activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.config import ModelConfig
from bessemer.model.elementwise import rms_norm, widened


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), in fp32 (fp64 for fp64) whatever the input."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016), in fp32 (fp64 for fp64) whatever the input."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(widened(x), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


def norm(config: ModelConfig) -> nn.Module:
    """A norm over the width, of the configuration's kind."""
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps)
    return LayerNorm(config.width, config.norm_eps, config.norm_bias)


def activate(name: str, x: Tensor) -> Tensor:
    """silu, gelu (exact, by the error function) or gelu_tanh (its approximation, Hendrycks and Gimpel 2016)."""
    if name == "silu":
        return F.silu(x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
