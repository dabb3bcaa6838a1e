"""The small parts that blocks and heads share: norms and activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.config import ModelConfig
from bessemer.model.elementwise import rms_norm, widened


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), in fp32 (fp64 for fp64) whatever the input.

    zero_centred: times 1 + weight, as in Gemma; `scale` is what x is multiplied by.
    """

    def __init__(self, width: int, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if zero_centred else torch.ones(width))
        self.eps, self.zero_centred = eps, zero_centred

    @property
    def scale(self) -> Tensor:
        return self.weight + 1.0 if self.zero_centred else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)


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
        return RMSNorm(config.width, config.norm_eps, config.zero_centred_norm)
    return LayerNorm(config.width, config.norm_eps, config.norm_bias)


def activate(name: str, x: Tensor) -> Tensor:
    """An activation of `config.Activation`.

    gelu: exact, by the error function; gelu_tanh, gelu_quick: its approximations by tanh and by x * sigmoid(1.702 x)
    (Hendrycks and Gimpel 2016, section 2); relu2: the square of relu (So et al. 2021, "Primer", section 3).
    """
    if name in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
    if name == "gelu_quick":
        return x * torch.sigmoid(1.702 * x)
    if name == "relu2":
        return F.relu(x).square()
    return F.relu(x) if name == "relu" else F.silu(x)
