"""The transformer's dimensions and options; no torch, so that plans can be made without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from bessemer.common.errors import InputError
from bessemer.recipe.model import Activation

SCALINGS = ("rope_scaling", "window_rope_scaling")


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary positions are stretched beyond original_length, the length a model was first trained on.

    linear: positions are divided by `factor` (Chen et al. 2023, "Extending context window of large language models via
    positional interpolation", section 3.2). dynamic: the base grows with the length of the sequence, once it exceeds
    original_length (Peng et al. 2023, "YaRN", section 3.3). llama3: only frequencies whose wavelength exceeds
    original_length / low_frequency are divided, blending up to original_length / high_frequency (Grattafiori et al. 2024,
    "The Llama 3 herd of models", section 3.2). yarn: the same with a ramp over the dimensions between those that make
    beta_slow and beta_fast turns over original_length, rounded outward to whole dimensions where truncate (YaRN, section
    3.2). longrope: every frequency is divided by a factor of its own, of short_factor up to original_length tokens, else of
    long_factor (Ding et al. 2024, "LongRoPE", section 3).

    attention_factor: cosines and sines are multiplied by it (yarn, longrope); None: see `amplitude`. mscale,
    mscale_all_dim: yarn's recommendation in its general form; 0: the plain one.
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RotaryScaling:
        """The inverse of `asdict`, for values read from JSON or TOML."""
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return cls(**(values | lists))

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by (YaRN, section 3.4; LongRoPE's published code)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            if self.mscale and self.mscale_all_dim:
                return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
            return _mscale(self.factor, 1.0)
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_length))
        return 1.0

    def regime(self, length: int) -> int:
        """Key of the rotation at a sequence length: lengths with equal keys rotate alike, so cached keys fit both."""
        if self.kind == "dynamic":
            return max(length, self.original_length)
        return int(self.kind == "longrope" and length > self.original_length)


def _mscale(factor: float, scale: float) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Rope:
    """How a layer rotates queries and keys: the base, its scaling, and how many of a head's dimensions are rotated."""

    theta: float
    width: int
    scaling: RotaryScaling | None = None


@dataclass(frozen=True)
class ModelOptions:
    """Dimensions, in elements, and options of a transformer. What is off by default is off in most families.

    `recipe.Model` says what the options are that a recipe may set; the others belong to families.

    max_positions: positions the model was made for, when more than sequence_length; 0: as that;
    causal: each token sees the earlier ones, else all.
    norm_position: before a sublayer (input), after it (output), both, or after its sum with the residual (residual);
    zero_centred_norm: RMSNorm multiplies by 1 + weight; first_norm: whether the first block normalises what its
    attention reads; gated: act(gate) * up instead of act(up); scale_embedding: by the root of the width.
    head_transform: a dense layer, activation and norm between the blocks and the output matrix; labels: classes of a
    classifier in the output matrix's stead; 0: a language model; pooling: the token a classifier reads, or the mean.
    family: the one it came from, which an export prefers where several have these options.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    sequence_length: int
    max_positions: int = 0
    causal: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_position: Literal["input", "output", "both", "residual"] = "input"
    norm_bias: bool = True
    norm_eps: float = 1e-6
    zero_centred_norm: bool = False
    first_norm: bool = True
    qk_norm: Literal["none", "head", "full"] = "head"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    activation: Activation = "silu"
    positions: Literal["rotary", "learned"] = "rotary"
    position_padding: int | None = None
    rotary_fraction: float = 1.0
    rope_theta: float = 10_000.0
    rope_scaling: RotaryScaling | None = None
    unrotated_every: int = 0
    unrotated_layers: tuple[int, ...] = ()
    window: int = 0
    global_every: int = 0
    global_last: bool = False
    global_layers: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    window_rope_scaling: RotaryScaling | None = None
    query_scalar: int = 0
    inverse_layer_scale: bool = False
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    tie_embeddings: bool = False
    scale_embedding: bool = False
    embedding_norm: bool = False
    token_types: int = 0
    head_transform: bool = False
    transform_bias: bool = False
    head_bias: bool = False
    labels: int = 0
    pooling: Literal["first", "last", "mean"] = "last"
    family: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        width = int(self.head_dim * self.rotary_fraction)
        if self.positions == "rotary" and width % 2:
            part = "" if self.rotary_fraction == 1 else f", of which {width} dimensions are rotated"
            raise InputError(f"model: the width of a head is {self.head_dim}{part}; rotary positions need an even one")
        for key in SCALINGS:
            scaling: RotaryScaling | None = getattr(self, key)
            if scaling is not None and scaling.kind == "dynamic" and width == 2:
                raise InputError(f"model.{key}: dynamic positions need heads with more than 2 rotated dimensions")
            if scaling is None or scaling.kind != "longrope":
                continue
            if not len(scaling.short_factor) == len(scaling.long_factor) == width // 2:
                raise InputError(f"model.{key}: short_factor and long_factor must have {width // 2} values each")

    @property
    def positions_length(self) -> int:
        """Positions the model knows: rows of a learned position table, or what an export says it was made for."""
        return max(self.max_positions, self.sequence_length)

    @property
    def pooler(self) -> bool:
        """Whether the transform before a classifier is BERT's: tanh and no norm."""
        return self.labels > 0 and self.norm_position == "residual"

    @property
    def inner_dropout(self) -> bool:
        """Whether dropout is ModernBERT's, whose first block has no norm: on hidden units of the MLP, and on the attention's
        output by the attention's rate; else on the outputs of both."""
        return not self.first_norm

    @property
    def norms_each(self) -> int:
        """Norms over the width in a block."""
        return 4 if self.norm_position == "both" else 2

    @property
    def recomputes_mlp_output(self) -> bool:
        """Whether a recomputed block, which stops at what its backward pass needs, recomputes the MLP's last matmul: only where a
        norm reads the result. Selective recompute saves that result instead."""
        return self.norm_position != "input"

    def window_of(self, layer: int) -> int:
        """Tokens that a layer's attention sees; 0: all."""
        every, place = self.global_every, self.global_every - 1 if self.global_last else 0
        return 0 if layer in self.global_layers or (every and layer % every == place) else self.window

    def rope_of(self, layer: int) -> Rope | None:
        """How a layer rotates queries and keys; None: not at all."""
        is_nope = layer in self.unrotated_layers or (self.unrotated_every and (layer + 1) % self.unrotated_every == 0)
        if self.positions != "rotary" or is_nope:
            return None
        width = int(self.head_dim * self.rotary_fraction)
        if self.window_rope_theta is not None and self.window_of(layer):
            return Rope(self.window_rope_theta, width, self.window_rope_scaling)
        return Rope(self.rope_theta, width, self.rope_scaling)

    def query_scale_of(self, layer: int) -> float | None:
        """What a layer's scores are multiplied by; None: 1 / sqrt(head_dim)."""
        if not self.query_scalar and not self.inverse_layer_scale:
            return None
        scale = (self.query_scalar or self.head_dim) ** -0.5
        return float(scale / (layer + 1) if self.inverse_layer_scale else scale)

    def rope_regime(self, length: int) -> tuple[int, ...]:
        """Sequences of two lengths are rotated alike when this is equal (see `RotaryScaling.regime`)."""
        scalings = (self.rope_scaling, self.window_rope_scaling)
        return tuple(scaling.regime(length) for scaling in scalings if scaling is not None)

    @property
    def position_rows(self) -> int:
        """Rows of a table of learned positions."""
        return self.positions_length + (0 if self.position_padding is None else self.position_padding + 1)

    @property
    def is_tied(self) -> bool:
        """Whether one matrix is embedding and output matrix; a classifier has no output matrix."""
        return self.tie_embeddings and not self.labels

    def tables(self, has_embedding: bool = True, has_head: bool = True) -> int:
        """Matrices with a row for each token id in a part of the model with these ends; a tied one counts once."""
        return has_embedding + (has_head and not self.labels and not (self.is_tied and has_embedding))

    @property
    def attention_width(self) -> float:
        """Width of a head's scores and values, on average."""
        return self.head_dim

    @property
    def norm_parameters(self) -> int:
        return self.width * (2 if self.norm == "layer" and self.norm_bias else 1)

    @property
    def norm_start(self) -> float:
        """Initial weight of a norm."""
        return 0.0 if self.zero_centred_norm else 1.0

    @property
    def output_start(self) -> float | None:
        """Initial value of the matrices that write into the residual stream: zero, so that every block starts as the identity
        (Zhang et al. 2019, Fixup; Yang et al. 2022, appendix D.2); None: not so, as a norm that follows would blow it up."""
        return None if self.norm_position in ("output", "both") else 0.0
