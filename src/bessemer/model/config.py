"""The transformer's dimensions and options as numbers; no torch, so that plans can be made without it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from bessemer.errors import InputError

QkNorm = Literal["none", "head", "full"]


def swiglu_width(width: int) -> int:
    """Hidden width that gives a gated MLP the parameters of a 4x MLP: 8/3 of the width (Shazeer 2020, section 2),
    rounded up to a multiple of 64 for the hardware's tiles."""
    return -(-(8 * width) // (3 * 64)) * 64


@dataclass(frozen=True)
class RopeScaling:
    """How rotary positions are stretched beyond the length a model was first trained on.

    linear: every position is divided by `factor` (Chen et al. 2023, section 3.2). llama3: only the slow frequencies
    are, those whose wavelength exceeds original_length / low_frequency, blending up to original_length /
    high_frequency (Grattafiori et al. 2024, section 3.2, and its published code).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions, in elements, and options of a transformer.

    max_positions: positions the model was made for, when more than sequence_length; 0: as that;
    causal: each token sees the earlier ones, else all; norm_position: before a sublayer (input), after it (output) or
    after its sum with the residual (residual); qk_norm: none, over each head, or over all heads at once (full);
    window: tokens a windowed layer sees, itself included (causal), or in all to both sides (bidirectional); 0: all;
    global_every: every so many layers, from the first, one has no window; 0: all layers have it; global_layers: further
    layers without one, counted from 0; soft caps: c tanh(x/c)
    of the scores and of the logits; 0: off; first_norm: whether the first block normalises what its attention reads;
    head_transform: a dense layer, GELU and norm between the blocks and the output matrix; labels: classes of a
    classifier in the output matrix's stead; 0: a language model; pooling: the token a classifier reads, or the mean;
    bias: of every projection; qkv_bias: of queries, keys and values alone; family: the one it came from, which an export
    prefers where several have these options.
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
    norm_position: Literal["input", "output", "residual"] = "input"
    norm_bias: bool = True
    norm_eps: float = 1e-6
    first_norm: bool = True
    qk_norm: QkNorm = "head"
    bias: bool = False
    qkv_bias: bool = False
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_tanh"] = "swiglu"
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    window: int = 0
    global_every: int = 0
    global_layers: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    tie_embeddings: bool = False
    embedding_norm: bool = False
    token_types: int = 0
    head_transform: bool = False
    head_bias: bool = False
    labels: int = 0
    pooling: Literal["first", "last", "mean"] = "last"
    family: str | None = field(default=None, compare=False)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """What to_dict gave. Raises InputError on a field this version does not know."""
        unknown = sorted(set(values) - {field.name for field in fields(cls)})
        if unknown:
            raise InputError(f"model configuration: {unknown[0]!r} is unknown to this version")
        scaling = values.get("rope_scaling")
        read = {"rope_scaling": RopeScaling(**scaling) if scaling else None}
        return cls(**{**values, **read, "global_layers": tuple(values.get("global_layers", ()))})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them, for checkpoints."""
        return asdict(self) | {"global_layers": list(self.global_layers)}

    def with_changes(self, **changes: Any) -> ModelConfig:
        """The same model but for `changes`."""
        return ModelConfig(**{field.name: getattr(self, field.name) for field in fields(self)} | changes)

    @property
    def positions_length(self) -> int:
        """Positions the model knows: rows of a learned position table, or what an export says it was made for."""
        return max(self.max_positions, self.sequence_length)

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections (SwiGLU, GeGLU)."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def pooler(self) -> bool:
        """Whether the transform before a classifier is BERT's: tanh and no norm."""
        return self.labels > 0 and self.norm_position == "residual"

    @property
    def inner_dropout(self) -> bool:
        """Whether dropout is placed as in ModernBERT, whose block is the one without a first norm: on the MLP's hidden
        units, and on the attention's output by the attention's rate; else on the outputs of both."""
        return not self.first_norm

    def window_of(self, layer: int) -> int:
        """Tokens that a layer's attention sees; 0: all."""
        every = self.global_every
        return 0 if layer in self.global_layers or (every and layer % every == 0) else self.window

    def rope_theta_of(self, layer: int) -> float:
        """Base of a layer's rotary positions."""
        windowed = self.window_rope_theta is not None and self.window_of(layer) > 0
        return self.window_rope_theta if windowed and self.window_rope_theta is not None else self.rope_theta

    @property
    def block_matrix_parameters(self) -> int:
        """Parameters of one block that are in matrices: queries, keys, values, output, gate, up, down."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + (3 if self.gated else 2) * self.width * self.mlp_width

    @property
    def joint_bias_parameters(self) -> int:
        """Parameters of one block that are in the biases of its joint projections: queries, keys, values; gate, up."""
        queries_keys_values = (self.heads + 2 * self.kv_heads) * self.head_dim if self.bias or self.qkv_bias else 0
        return queries_keys_values + (2 * self.mlp_width if self.bias and self.gated else 0)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings of tokens, positions and types, and of the output matrix unless it is tied."""
        matrices = 1 if self.tie_embeddings or self.labels else 2
        positions = self.positions_length if self.positions == "learned" else 0
        return (self.vocabulary * matrices + positions + self.token_types) * self.width

    @property
    def head_matrix_parameters(self) -> int:
        """Parameters that a token multiplies with after the last block: the transform and the output matrix."""
        outputs = self.labels or self.vocabulary
        return outputs * self.width + (self.width**2 if self.head_transform else 0)

    @property
    def parameters(self) -> int:
        """All parameters; a tied matrix counts once."""
        norm = self.width * (2 if self.norm == "layer" and self.norm_bias else 1)
        qk = {"none": 0, "head": 2 * self.head_dim, "full": (self.heads + self.kv_heads) * self.head_dim}[self.qk_norm]
        block = self.block_matrix_parameters + 2 * norm + qk + self.joint_bias_parameters
        if self.bias:  # of the two projections into the residual stream, and of the MLP that is not gated
            block += 2 * self.width + (0 if self.gated else self.mlp_width)
        norms = -norm * (not self.first_norm) + norm * (self.norm_position != "residual") + norm * self.embedding_norm
        head = self.classifier_parameters
        if not self.labels:
            head += self._transform_parameters + (self.vocabulary if self.head_bias else 0)
        return self.embedding_parameters + self.layers * block + norms + head

    @property
    def classifier_parameters(self) -> int:
        """Parameters of a classifier's head, which are all that is trained when the transformer is frozen."""
        if not self.labels:
            return 0
        return self._transform_parameters + self.labels * self.width + (self.labels if self.head_bias else 0)

    @property
    def _transform_parameters(self) -> int:
        """Parameters of the transform between the blocks and the output matrix."""
        if not self.head_transform:
            return 0
        norm = self.width * (2 if self.norm == "layer" and self.norm_bias else 1)
        return self.width**2 + (self.width if self.bias else 0) + (0 if self.pooler else norm)

    @property
    def matrix_parameters(self) -> int:
        """Parameters that multiply every token: the blocks' matrices and the output head; not the embedding, which is
        looked up."""
        return self.layers * self.block_matrix_parameters + (self.head_matrix_parameters if not self.labels else 0)


def default_mlp_width(width: int, mlp: str) -> int:
    """Hidden width of the MLP when the recipe gives none: 8/3 of the width when gated, else 4 times the width."""
    return swiglu_width(width) if mlp in ("swiglu", "geglu") else 4 * width
