"""Layers of blocks and heads: norms, activations, rotary positions and output heads.

Shapes: B sequences, T tokens, D width, V vocabulary, L labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bessemer.model.config import ModelConfig
from bessemer.model.dropout import DropoutMasks
from bessemer.model.kernels import rms_norm, upcast
from bessemer.model.options import Rope
from bessemer.model.sublayers import Sublayer
from bessemer.recipe.model import RopeScaling

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # maps (x, weight, bias) to x @ weight.T + bias


def linear_layer(facts: Sublayer, name: str) -> nn.Linear:
    """Return a linear layer with the shape of the sublayer's parameter `name`.weight, and a bias if it has `name`.bias."""
    columns, rows = facts.shapes[f"{name}.weight"]
    return nn.Linear(rows, columns, bias=f"{name}.bias" in facts.shapes)


def joint_bias(facts: Sublayer, name: str) -> nn.Parameter | None:
    """Return an uninitialised bias for the joint projection `name`, or None if the sublayer has no parameter `name`_bias."""
    shape = facts.shapes.get(f"{name}_bias")
    return None if shape is None else nn.Parameter(torch.empty(shape))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), computed in fp32 (fp64 for fp64) for every input dtype.

    With `zero_centred` the factor is 1 + weight, as in Gemma. Without a width there is no weight, and the factor is 1.
    """

    def __init__(self, width: int | None, eps: float, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = None if width is None else nn.Parameter(torch.zeros(width) if zero_centred else torch.ones(width))
        self.eps, self.zero_centred = eps, zero_centred

    def scale(self, x: Tensor) -> Tensor:
        """Return the factor that multiplies the normalised x, (D,): the weight, 1 + weight, or ones."""
        weight_D = upcast(x.new_ones(x.shape[-1])) if self.weight is None else self.weight
        return weight_D + 1.0 if self.zero_centred else weight_D

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale(x), self.eps)


class LayerNorm(nn.LayerNorm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias (Ba et al. 2016), computed in fp32 (fp64 for fp64)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(upcast(input)).to(input.dtype)


def norm(config: ModelConfig) -> nn.Module:
    """Return a norm over the width, of the kind that the configuration has."""
    if config.norm == "rms":
        return RMSNorm(config.width if config.norm_weight else None, config.norm_eps, config.zero_centred_norm)
    return LayerNorm(config.width, config.norm_eps, bias=config.norm_bias)


# Activations by the names of `recipe.model.Activation`, and tanh.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,  # exact, by the error function; the next two approximate it (Hendrycks and Gimpel 2016, section 2)
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x).square(),  # So et al. 2021, "Primer", section 3
    "relu": F.relu, "silu": F.silu, "tanh": torch.tanh,
}  # fmt: skip


def rotary_cos_sin(positions: Tensor, rope: Rope, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary embedding, each (..., T, 1, rope.width / 2), in fp32 or for an fp64 model fp64.

    See Su et al. 2021, section 3.4.2. `length` is that of the full sequences, which dynamic and longrope scaling depend on.
    The angles are computed in fp64: in fp32 the angle at position 100,000 has an error of 0.004.
    """
    amplitude = rotary_amplitude(rope.scaling)
    angles = rope.direction * positions[..., None].double() * rotary_frequencies(rope, length, positions.device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (angles.cos() * amplitude).to(wide)[..., None, :], (angles.sin() * amplitude).to(wide)[..., None, :]


def rotary_amplitude(scaling: RopeScaling | None) -> float:
    """Return the factor on cosines and sines (YaRN, section 3.4; LongRoPE's published code)."""
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    log_factor = math.log(scaling.factor)
    if scaling.kind == "yarn":
        is_plain = not (scaling.mscale and scaling.mscale_all_dim)
        above, below = (1.0, 0.0) if is_plain else (scaling.mscale, scaling.mscale_all_dim)
        return (0.1 * above * log_factor + 1.0) / (0.1 * below * log_factor + 1.0)
    return math.sqrt(1 + log_factor / math.log(scaling.original_length)) if scaling.kind == "longrope" else 1.0


def rotary_frequencies(rope: Rope, length: int, device: torch.device | None = None) -> Tensor:
    """Return the rotation of each pair of dimensions in radians per position, (rope.width / 2,) in fp64.

    `length` is that of the full sequences, see `rotary_cos_sin`. A scaling is for sequences longer than `original_length`,
    the length of the first training:

    - linear: positions are divided by `factor` (Chen et al. 2023, "Extending context window of large language models via
      positional interpolation", section 3.2).
    - dynamic: the base grows with the length of the sequence, once it exceeds original_length (Peng et al. 2023, "YaRN",
      section 3.3).
    - llama3: only frequencies whose wavelength exceeds original_length / low_frequency are divided by `factor`, blending up
      to original_length / high_frequency (Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.2).
    - yarn: as llama3, with a ramp over the dimensions between those that make beta_fast and beta_slow turns over
      original_length, rounded outward to whole dimensions with `truncate` (YaRN, section 3.2).
    - longrope: each frequency is divided by a separate factor, of short_factor up to original_length tokens and of
      long_factor beyond (Ding et al. 2024, "LongRoPE", section 3).
    """
    exponents = torch.arange(0, rope.width, 2, device=device, dtype=torch.float64) / rope.width
    frequencies: Tensor = rope.theta**-exponents
    if (scaling := rope.scaling) is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "dynamic":
        longer = max(length / scaling.original_length, 1.0)
        # theta is multiplied by growth^(width / (width - 2)), which divides the slowest frequency by exactly `growth`.
        growth = scaling.factor * longer - (scaling.factor - 1.0)
        base_growth: float = growth ** (rope.width / (rope.width - 2))
        return frequencies * torch.pow(base_growth, -exponents)
    if scaling.kind == "longrope":
        factors = scaling.long_factor if length > scaling.original_length else scaling.short_factor
        return frequencies / torch.tensor(factors, device=device, dtype=torch.float64)
    if scaling.kind == "yarn":
        unscaled_share = _yarn_ramp(rope, scaling, device)
    else:
        # The turns of each frequency over the original length; between the two bounds, scaled and unscaled are blended.
        turns = scaling.original_length * frequencies / (2 * math.pi)
        unscaled_share = (turns - scaling.low_frequency) / (scaling.high_frequency - scaling.low_frequency)
        unscaled_share = unscaled_share.clamp(0.0, 1.0)
    return frequencies * (unscaled_share + (1.0 - unscaled_share) / scaling.factor)


def _yarn_ramp(rope: Rope, scaling: RopeScaling, device: torch.device | None) -> Tensor:
    """Return the unscaled share of each frequency: 1 at the dimension that makes beta_fast turns, 0 at that of beta_slow."""

    def dimension(turns: float) -> float:
        wavelengths = scaling.original_length / (turns * 2 * math.pi)
        return rope.width * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    high += 0.001 * (low == high)  # avoids a division by zero, as the published code does
    index = torch.arange(rope.width // 2, device=device, dtype=torch.float64)
    return 1.0 - ((index - low) / (high - low)).clamp(0.0, 1.0)


class Transform(nn.Module):
    """The layer norm(act(dense(x))) before the output matrix of BERT and ModernBERT.

    Before BERT's classifier it is tanh(dense(x)).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = "tanh" if config.pooler else config.activation
        self.dense = nn.Linear(config.width, config.width, bias=config.transform_bias)
        self.norm = nn.Identity() if config.pooler else norm(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(ACTIVATIONS[self.activation](self.dense(x)))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Base of the output layers: a transform, if the configuration has one, and a matrix with `rows` rows and a bias."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        super().__init__()
        self.transform = Transform(config) if config.head_transform else nn.Identity()
        self.weight = nn.Parameter(torch.empty(rows, config.width))
        self.bias = nn.Parameter(torch.empty(rows)) if config.head_bias else None


class LanguageHead(Head):
    """The output layer of a language model, from hidden states to logits over the vocabulary.

    The loss reads its weights and computes logits in chunks. `vocabulary` is the VocabularyShard if the output matrix is
    sharded.
    """

    vocabulary: Any = None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.vocabulary)
        self.soft_cap = config.logit_soft_cap

    def tie(self, embedding: nn.Embedding) -> None:
        self.register_parameter("weight", embedding._parameters["weight"])

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits, (B, T, V)."""
        logits_BTV = F.linear(self.transform(hidden_BTD), self.weight, self.bias)
        return torch.tanh(logits_BTV / self.soft_cap) * self.soft_cap if self.soft_cap else logits_BTV


class ClassificationHead(Head):
    """The output layer of a classifier, which returns one logit per label.

    It reads the hidden states of one token, or their mean over the text.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.labels)
        self.pooling = config.pooling

    def forward(self, hidden_BTD: Tensor, lengths_B: Tensor, masks: DropoutMasks | None = None) -> Tensor:
        """Return the logits, (B, L). Tokens of a text beyond its length in `lengths_B` are padding."""
        if self.pooling == "first":
            pooled_BD = hidden_BTD[:, 0]
        elif self.pooling == "last":
            pooled_BD = hidden_BTD[torch.arange(len(hidden_BTD), device=hidden_BTD.device), lengths_B - 1]
        else:
            inside_BT = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device) < lengths_B[:, None]
            pooled_BD = (hidden_BTD * inside_BT[..., None]).sum(dim=1) / lengths_B[:, None]
        read_BD = self.transform(pooled_BD)
        return F.linear(read_BD if masks is None else masks.classifier(read_BD), self.weight, self.bias)
