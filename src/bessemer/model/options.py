"""The dimensions and options of a transformer, without torch, so that plans can be made without it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bessemer.common.errors import InputError
from bessemer.recipe.model import Activation, Balance, RopeScaling

SCALINGS = ("rope_scaling", "window_rope_scaling")


@dataclass(frozen=True)
class Rope:
    """The rotation of a layer's queries and keys: its base `theta`, the rotated dimensions per head, scaling and direction."""

    theta: float
    width: int
    scaling: RopeScaling | None = None
    direction: int = 1


@dataclass(frozen=True)
class ModelOptions:
    """The dimensions, in elements, and options of a transformer.

    `recipe.Model` documents the options that a recipe may set. The others belong to families. Options that are off by
    default are off in most families.

    Attributes:
        max_positions: Positions that the model was made for, if more than sequence_length; 0 for sequence_length.
        causal: True if each token sees only earlier tokens.
        norm_position: Norm before a sublayer (input), after it (output), both, or after its sum with the residual
            (residual).
        norm_weight: True if norms multiply by a weight.
        zero_centred_norm: True if RMSNorm multiplies by 1 + weight.
        first_norm: True if the first block normalises the input of its attention.
        gated: True for act(gate) * up instead of act(up).
        rope_direction: 1 if positions rotate by positive angles, -1 by negative ones.
        scale_embedding: True if embeddings are multiplied by the square root of the width.
        experts: Routed experts of a layer; 0 for one MLP in every layer.
        head_transform: True for a dense layer, an activation and a norm between the blocks and the output matrix.
        labels: Classes of a classifier, which replaces the output matrix; 0 for a language model.
        pooling: The token that a classifier reads, or the mean over all.
        family: The family that the model came from, which an export prefers if several families have these options.
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
    norm_weight: bool = True
    zero_centred_norm: bool = False
    first_norm: bool = True
    qk_norm: Literal["none", "head", "full"] = "head"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated: bool = True
    activation: Activation = "silu"
    experts: int = 0
    experts_per_token: int = 2
    expert_width: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    router_normalised: bool = True
    router_scale: float = 1.0
    router_z_loss: float = 0.0
    balance: Balance = "loss"
    balance_loss: float = 0.01
    balance_rate: float = 0.001
    positions: Literal["rotary", "learned"] = "rotary"
    position_padding: int | None = None
    rotary_fraction: float = 1.0
    rope_theta: float = 10_000.0
    rope_direction: Literal[1, -1] = 1
    rope_scaling: RopeScaling | None = None
    unrotated_every: int = 0
    unrotated_layers: tuple[int, ...] = ()
    window: int = 0
    global_every: int = 0
    global_last: bool = False
    global_layers: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    window_rope_scaling: RopeScaling | None = None
    query_scalar: int = 0
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
            rotated = f"of head_dim = {self.head_dim} dimensions, {width} are rotated"
            raise InputError(f"model: {rotated}; rotary positions need an even number")
        scalings = {key: scaling for key in SCALINGS if (scaling := getattr(self, key)) is not None}
        for key, scaling in scalings.items():
            if scaling.kind == "dynamic" and width == 2:
                raise InputError(f"model.{key}: dynamic positions need heads with more than 2 rotated dimensions")
            counts = len(scaling.short_factor), len(scaling.long_factor)
            if scaling.kind == "longrope" and counts != (width // 2, width // 2):
                raise InputError(f"model.{key}: short_factor and long_factor must have {width // 2} values each")

    @property
    def positions_length(self) -> int:
        """The number of positions that the model supports, such as the rows of a learned position table."""
        return max(self.max_positions, self.sequence_length)

    @property
    def pooler(self) -> bool:
        """True if the transform before a classifier is BERT's, with tanh and without a norm."""
        return self.labels > 0 and self.norm_position == "residual"

    @property
    def inner_dropout(self) -> bool:
        """True for ModernBERT's dropout: on hidden units of the MLP, and on the attention's output at the attention's rate.

        Otherwise dropout applies to the outputs of both sublayers. ModernBERT is recognised by its first block without a
        norm.
        """
        return not self.first_norm

    @property
    def recomputes_mlp_output(self) -> bool:
        """True if a recomputed block recomputes the MLP's last matmul, which it does only if a norm reads the result.

        A recomputed block stops once its backward pass has its inputs. Selective recompute saves the result instead.
        """
        return self.norm_position != "input"

    def window_of(self, layer: int) -> int:
        """Return the number of tokens that a layer's attention sees; 0 for all."""
        every, offset = self.global_every, self.global_every - 1 if self.global_last else 0
        return 0 if layer in self.global_layers or (every and layer % every == offset) else self.window

    def rope_of(self, layer: int) -> Rope | None:
        """Return the rotation of a layer's queries and keys, or None for a layer without rotation."""
        is_nope = layer in self.unrotated_layers or (self.unrotated_every and (layer + 1) % self.unrotated_every == 0)
        if self.positions != "rotary" or is_nope:
            return None
        width = int(self.head_dim * self.rotary_fraction)
        if self.window_rope_theta is not None and self.window_of(layer):
            return Rope(self.window_rope_theta, width, self.window_rope_scaling, self.rope_direction)
        return Rope(self.rope_theta, width, self.rope_scaling, self.rope_direction)

    def rope_regime(self, length: int) -> tuple[int, ...]:
        """Return a cache key of all layers' rotations at a sequence length: equal keys mean equal rotations."""
        both = self.rope_scaling, self.window_rope_scaling
        scalings = [scaling for scaling in both if scaling is not None and scaling.kind in ("dynamic", "longrope")]
        return tuple(
            max(length, x.original_length) if x.kind == "dynamic" else length > x.original_length for x in scalings
        )

    @property
    def mixture_layers(self) -> int:
        """Number of layers with experts, which follow the dense ones."""
        return max(self.layers - self.dense_layers, 0) if self.experts else 0

    @property
    def has_balance_bias(self) -> bool:
        """True if routers choose experts with a bias per expert."""
        return self.balance in ("bias", "both")

    @property
    def has_balance_loss(self) -> bool:
        """True if the balance of experts is a part of the loss."""
        return self.balance in ("loss", "both")

    @property
    def position_rows(self) -> int:
        """Number of rows of a learned position table; 0 without one."""
        padding = 0 if self.position_padding is None else self.position_padding + 1
        return self.positions_length + padding if self.positions == "learned" else 0

    @property
    def is_tied(self) -> bool:
        """True if one matrix is both embedding and output matrix; a classifier has no output matrix."""
        return self.tie_embeddings and not self.labels

    def tables(self, has_embedding: bool = True, has_head: bool = True) -> int:
        """Return the number of matrices with a row per token id in a part of the model; a tied matrix counts once.

        Args:
            has_embedding: True if the part has the embedding.
            has_head: True if the part has the head.
        """
        return has_embedding + (has_head and not self.labels and not (self.is_tied and has_embedding))

    @property
    def attention_width(self) -> float:
        """The average width of a head's scores and values."""
        return self.head_dim

    @property
    def norm_parameters(self) -> int:
        """Number of parameters of a norm over the width."""
        return self.width * self.norm_weight * (2 if self.norm == "layer" and self.norm_bias else 1)

    @property
    def norm_start(self) -> float:
        """The initial weight of a norm."""
        return 0.0 if self.zero_centred_norm else 1.0

    @property
    def output_start(self) -> float | None:
        """The initial value of the matrices that write into the residual stream; None for random values.

        Zero makes every block start as the identity (Zhang et al. 2019, Fixup; Yang et al. 2022, appendix D.2). A norm
        after the sublayer would amplify outputs near zero, so those models start with random values.
        """
        return None if self.norm_position in ("output", "both") else 0.0
