"""[model] of the recipe: the transformer, and the names of the model families."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from bessemer.recipe.section import Positive, Section

FamilyName = Literal[
    "qwen3", "qwen2", "llama", "mistral", "smollm3", "phi3", "gemma2", "gemma3", "olmo2", "gpt2", "bert", "roberta",
    "modernbert",
]  # fmt: skip
ENCODERS = ("bert", "roberta", "modernbert")  # attention sees both sides; objective masked
DECODERS = tuple(name for name in get_args(FamilyName) if name not in ENCODERS)


Factors = tuple[Annotated[float, Field(gt=0)], ...]
# The keys that each kind reads besides `kind` and `factor`.
KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_length",),
    "llama3": ("original_length", "low_frequency", "high_frequency"),
    "yarn": ("original_length", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "longrope": ("original_length", "attention_factor", "short_factor", "long_factor"),
}


class RopeScaling(Section):
    """How rotary positions are stretched beyond the length a model was first trained on."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """linear: all positions divided by the factor; dynamic: the base grows with the length of a sequence; llama3, yarn:
    only slow frequencies are divided; longrope: each frequency by a factor of its own."""
    factor: float = Field(ge=1, description="How many times longer the new length is.")
    original_length: Positive = Field(8192, description="The length first trained on (all kinds but linear).")
    low_frequency: float = Field(1.0, gt=0)
    """Frequencies with fewer turns over original_length are divided by the factor (llama3)."""
    high_frequency: float = Field(4.0, gt=0)
    """Frequencies with more turns over original_length stay as they are (llama3)."""
    beta_fast: float = Field(32.0, gt=0, description="Frequencies with more turns over original_length stay (yarn).")
    beta_slow: float = Field(1.0, gt=0)
    """Frequencies with fewer turns over original_length are divided by the factor (yarn)."""
    truncate: bool = Field(True, description="The bounds between these are rounded to whole dimensions (yarn).")
    attention_factor: float | None = Field(None, gt=0)
    """Cosines and sines are multiplied by it (yarn, longrope); left out: as the method says."""
    mscale: float = Field(0.0, ge=0, description="Numerator of yarn's attention_factor in its general form; 0: off.")
    mscale_all_dim: float = Field(0.0, ge=0, description="Denominator of the same; 0: off.")
    short_factor: Factors = Field((), strict=False)
    """Divisor of each frequency in sequences of up to original_length tokens (longrope)."""
    long_factor: Factors = Field((), strict=False, description="Divisors of frequencies in long sequences (longrope).")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        for key, field in type(self).model_fields.items():
            if key not in ("kind", "factor", *KEYS[self.kind]) and getattr(self, key) != field.default:
                raise ValueError(f"{key} has no effect with kind = {self.kind!r}; remove it, or choose another kind")
        if self.kind == "llama3" and self.low_frequency >= self.high_frequency:
            raise ValueError(
                f"low_frequency = {self.low_frequency} must be below high_frequency = {self.high_frequency}"
            )
        if self.kind == "yarn" and self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow = {self.beta_slow} must be below beta_fast = {self.beta_fast}")
        if self.kind == "longrope" and (not self.short_factor or len(self.short_factor) != len(self.long_factor)):
            raise ValueError(
                f"longrope needs short_factor and long_factor, as many of one as of the other; there are "
                f"{len(self.short_factor)} and {len(self.long_factor)}"
            )
        return self


Layers = tuple[Annotated[int, Field(ge=0)], ...]


class Model(Section):
    """The transformer: `depth` alone, explicit dimensions, `from` a folder, or a size that follows from the corpus.

    Options left out are the family's.
    """

    family: FamilyName = "qwen3"
    """The kind of block, named for the models that have it: qwen3 is RMSNorm, SwiGLU, rotary positions and QK-norm;
    docs/models.md has a table of all. Masked language models need an encoder: bert, roberta, modernbert."""
    from_: str | None = Field(None, alias="from")
    """hf:FOLDER starts from the weights and dimensions of a model in the Hugging Face layout, hf:ORG/NAME or
    hf:ORG/NAME@REVISION from one of the hub; its tokenizer comes along unless [tokenizer] says otherwise."""
    depth: int | None = Field(None, gt=0)
    """The one dial: number of layers, from which width, heads, learning rate, batch and horizon are derived. Each
    derived value can be overridden by its own key."""
    layers: int | None = Field(None, gt=0, description="Number of transformer blocks.")
    width: int | None = Field(None, gt=0, description="Width of the residual stream.")
    heads: int | None = Field(None, gt=0, description="Number of query heads.")
    kv_heads: int | None = Field(None, gt=0, description="Key/value heads (grouped-query attention); else as heads.")
    head_dim: int | None = Field(None, gt=0, description="Width of a head; left out: width / heads.")
    mlp_width: int | None = Field(None, gt=0)
    """Hidden width of the MLP; left out: 4 x width, gated 8/3 x width rounded up to a multiple of 64."""
    vocabulary: int | None = Field(None, gt=0)
    """Rows of the embedding, when more than the tokenizer has ids, as a multiple of 64; left out: the tokenizer's."""
    max_positions: int | None = Field(None, gt=0)
    """Positions the model knows, when more than tokens.sequence_length; left out: as that."""
    qk_norm: Literal["none", "head", "full"] | None = None
    """RMSNorm on queries and keys: none, over each head, or over all heads at once (full)."""
    norm_bias: bool | None = Field(None, description="LayerNorm has a bias.")
    qkv_bias: bool | None = Field(None, description="Queries, keys and values have biases.")
    out_bias: bool | None = Field(None, description="The projection after attention has a bias.")
    mlp_bias: bool | None = Field(None, description="The projections of the MLP have biases.")
    transform_bias: bool | None = Field(None, description="The layer before an encoder's output has a bias.")
    head_bias: bool | None = Field(None, description="The output matrix has a bias.")
    activation: Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"] | None = None
    """What the MLP's gate, or the MLP without one, goes through: silu (swish), gelu, its approximations by tanh
    (gelu_new, gelu_pytorch_tanh) and sigmoid (quick_gelu), relu, or its square."""
    tie_embeddings: bool | None = Field(None, description="Input embedding and output matrix are one matrix.")
    window: int | None = Field(None, ge=0)
    """Tokens a windowed layer's attention sees: itself and those before, or half to each side in an encoder; 0: all."""
    global_every: int | None = Field(None, ge=0)
    """Every so many layers, from the first, one sees everything; 0: all have the window."""
    global_last: bool | None = Field(None, description="It is the last of every so many (Gemma), not the first.")
    global_layers: Layers | None = Field(None, strict=False, description="Further layers that see all, counted from 0.")
    query_scalar: int | None = Field(None, ge=0)
    """Attention scores are divided by the root of it; 0: of the width of a head."""
    inverse_layer_scale: bool | None = Field(None, description="Divide attention scores by the layer's number, from 1.")
    attention_soft_cap: float | None = Field(None, ge=0, description="Attention scores are c*tanh(score/c); 0: off.")
    logit_soft_cap: float | None = Field(None, ge=0, description="Logits are c*tanh(logit/c) with this c; 0: off.")
    rope_theta: float | None = Field(None, gt=0, description="Base of the rotary position embedding; left out: 10000.")
    window_rope_theta: float | None = Field(None, gt=0)
    """Base of the rotary positions in windowed layers; left out: rope_theta."""
    rope_scaling: RopeScaling | None = None
    """How rotary positions are stretched beyond the length first trained on; left out: not."""
    window_rope_scaling: RopeScaling | None = None
    """The same in windowed layers, where window_rope_theta gives them a base; left out: not stretched."""
    rotary_fraction: float | None = Field(None, gt=0, le=1, description="Share of a head's dimensions that rotate.")
    unrotated_every: int | None = Field(None, ge=0)
    """The last of every so many layers has no rotary positions; 0: all have."""
    unrotated_layers: Layers | None = Field(None, strict=False, description="More layers without rotation, from 0.")
    position_padding: int | None = Field(None, ge=0)
    """Id of the token that learned positions pass over, and after whose own row they begin (roberta). An encoder
    trained from scratch takes the end-of-text token's, 0 in our tokenizers."""
    token_types: int | None = Field(None, ge=0, description="Rows of the token types' embedding; all have type 0.")
    norm_eps: float | None = Field(None, gt=0, description="Epsilon of every norm; left out: the family's.")

    @property
    def has_size(self) -> bool:
        """Whether the recipe says how large the model is; else it follows from the corpus and the machine."""
        return self.from_ is not None or any(
            value is not None for value in (self.depth, self.layers, self.width, self.heads)
        )

    @field_validator("from_")
    @classmethod
    def _is_hf(cls, value: str | None) -> str | None:
        if value is not None and not value.removeprefix("hf:"):
            raise ValueError("hf: names no model; write hf:FOLDER or hf:ORG/NAME")
        if value is not None and not value.startswith("hf:"):
            raise ValueError(
                f"write hf:{value}: a model in the Hugging Face layout (train.start takes the folder of a run)"
            )
        return value

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.depth is not None and self.layers is not None and self.depth != self.layers:
            raise ValueError(f"depth = {self.depth} and layers = {self.layers} disagree; give one of them")
        if self.depth is None and self.from_ is None and self.has_size:
            missing = [key for key in ("layers", "width", "heads") if getattr(self, key) is None]
            if missing:
                raise ValueError(f"needs depth, or layers, width and heads, or none of them; {missing[0]} is missing")
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            near = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}; possible: {near}")
        if self.width is not None and self.heads is not None and self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"heads = {self.heads} does not divide width = {self.width}; give head_dim or change one of them"
            )
        for key in ("global_every", "global_layers"):
            if getattr(self, key) and self.window == 0:
                raise ValueError(f"{key} = {getattr(self, key)} has no meaning without a window; give window as well")
        return self
