"""[model] of the recipe: the transformer, and the names of the model families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator

from bessemer.common.errors import InputError
from bessemer.recipe.section import Section
from bessemer.recipe.uses import names_extension

FamilyName = Literal[
    "qwen3", "qwen2", "llama", "mistral", "smollm3", "phi3", "gemma2", "gemma3", "olmo2", "olmo3", "nanochat", "gpt2",
    "bert", "roberta", "modernbert", "qwen3_moe", "olmoe", "dots1", "mixtral",
]  # fmt: skip
Balance = Literal["loss", "bias", "both", "none"]
Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2"]
ENCODERS = ("bert", "roberta", "modernbert")  # bidirectional attention; objective masked
DECODERS = tuple(name for name in get_args(FamilyName) if name not in ENCODERS)


MOST = 1e9  # largest factor or number of turns; larger ones leave no precision for a position
Factors = tuple[Annotated[float, Field(ge=1 / MOST, le=MOST)], ...]
# The keys that each kind reads besides `kind` and `factor`.
KEYS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "dynamic": ("original_length",),
    "llama3": ("original_length", "low_frequency", "high_frequency"),
    "yarn": ("original_length", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "longrope": ("original_length", "attention_factor", "short_factor", "long_factor"),
}


class RopeScaling(Section):
    """Scaling of rotary position embeddings for sequences longer than those that a model was first trained on."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float = Field(ge=1, le=MOST)
    original_length: int = Field(8192, ge=2)
    low_frequency: float = Field(1.0, ge=1 / MOST, le=MOST)
    high_frequency: float = Field(4.0, ge=1 / MOST, le=MOST)
    beta_fast: float = Field(32.0, ge=1 / MOST, le=MOST)
    beta_slow: float = Field(1.0, ge=1 / MOST, le=MOST)
    truncate: bool = True
    attention_factor: float | None = Field(None, ge=1 / MOST, le=MOST)
    mscale: float = Field(0.0, ge=0, le=MOST)
    mscale_all_dim: float = Field(0.0, ge=0, le=MOST)
    short_factor: Factors = Field((), strict=False)
    long_factor: Factors = Field((), strict=False)

    def _complaints(self) -> Iterator[str]:
        for key, field in type(self).model_fields.items():
            if key not in ("kind", "factor", *KEYS[self.kind]) and getattr(self, key) != field.default:
                yield f"{key} has no effect with kind = {self.kind!r}; remove it, or choose another kind"
        if self.kind == "llama3" and self.low_frequency >= self.high_frequency:
            yield f"low_frequency = {self.low_frequency} must be below high_frequency = {self.high_frequency}"
        if self.kind == "yarn" and self.beta_slow >= self.beta_fast:
            yield f"beta_slow = {self.beta_slow} must be below beta_fast = {self.beta_fast}"
        if self.kind == "longrope" and (not self.short_factor or len(self.short_factor) != len(self.long_factor)):
            yield f"longrope: {len(self.short_factor)} of short_factor and {len(self.long_factor)} of long_factor differ"


# Keys of [model] about experts. A recipe may change the last ones of an imported model.
BALANCE = ("router_z_loss", "balance", "balance_loss", "balance_rate")
MIXTURE = (
    "experts_per_token", "expert_width", "shared_experts", "dense_layers", "router", "router_normalised", "router_scale",
    *BALANCE,
)  # fmt: skip
# Keys of [model] that have an effect only with other options, those options, and whether the options of a model are such.
CONDITIONS: tuple[tuple[tuple[str, ...], str, Callable[[Mapping[str, Any]], object]], ...] = (
    (("balance_loss",), "balance = loss or both", lambda model: model.get("balance") in ("loss", "both")),
    (("balance_rate",), "balance = bias or both", lambda model: model.get("balance") in ("bias", "both")),
    (("global_every", "global_last", "global_layers", "window_rope_theta"), "window", lambda x: x.get("window")),
    (("window_rope_scaling",), "window_rope_theta", lambda model: model.get("window_rope_theta")),
    (("mlp_width",), "dense_layers (or use expert_width)", lambda x: x.get("dense_layers") or not x.get("experts")),
    (MIXTURE, "experts", lambda model: model.get("experts")),
)
SIZES = ("depth", "layers", "width", "heads")  # keys of [model], any of which sets its size
HIDDEN_WIDTHS = ("mlp_width", "expert_width")  # a model has one of them, or both
Layers = tuple[Annotated[int, Field(ge=0)], ...]


class Model(Section):
    """Settings of the transformer. Options that are not set have the defaults of the model family.

    The size is set by `depth` alone, by explicit dimensions or by an imported model (`from`), else derived from the corpus.
    """

    code: str | None = None
    family: Annotated[FamilyName | str, names_extension("model_families", *get_args(FamilyName))] = "qwen3"
    from_: str | None = Field(None, alias="from")
    depth: int | None = Field(None, gt=0)
    layers: int | None = Field(None, gt=0)
    width: int | None = Field(None, gt=0)
    heads: int | None = Field(None, gt=0)
    kv_heads: int | None = Field(None, gt=0)
    head_dim: int | None = Field(None, gt=0)
    mlp_width: int | None = Field(None, gt=0)
    vocabulary: int | None = Field(None, gt=0)
    max_positions: int | None = Field(None, gt=0)
    qk_norm: Literal["none", "head", "full"] | None = None
    norm_bias: bool | None = None
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = None
    transform_bias: bool | None = None
    head_bias: bool | None = None
    activation: Activation | None = None
    tie_embeddings: bool | None = None
    window: int | None = Field(None, ge=0)
    global_every: int | None = Field(None, ge=0)
    global_last: bool | None = None
    global_layers: Layers | None = Field(None, strict=False)
    query_scalar: int | None = Field(None, ge=0)
    attention_soft_cap: float | None = Field(None, ge=0)
    logit_soft_cap: float | None = Field(None, ge=0)
    experts: int | None = Field(None, ge=0)
    experts_per_token: int | None = Field(None, gt=0)
    expert_width: int | None = Field(None, gt=0)
    shared_experts: int | None = Field(None, ge=0)
    dense_layers: int | None = Field(None, ge=0)
    router: Literal["softmax", "sigmoid"] | None = None
    router_normalised: bool | None = None
    router_scale: float | None = Field(None, gt=0, le=MOST)
    router_z_loss: float | None = Field(None, ge=0, le=MOST)
    balance: Balance | None = None
    balance_loss: float | None = Field(None, ge=0, le=MOST)
    balance_rate: float | None = Field(None, ge=0, le=MOST)
    rope_theta: float | None = Field(None, ge=2, le=MOST**2)
    window_rope_theta: float | None = Field(None, ge=2, le=MOST**2)
    rope_scaling: RopeScaling | None = None
    window_rope_scaling: RopeScaling | None = None
    rotary_fraction: float | None = Field(None, gt=0, le=1)
    unrotated_every: int | None = Field(None, ge=0)
    unrotated_layers: Layers | None = Field(None, strict=False)
    position_padding: int | None = Field(None, ge=0)
    token_types: int | None = Field(None, ge=0)
    norm_eps: float | None = Field(None, gt=0)

    @property
    def has_size(self) -> bool:
        """True if the recipe sets the model's size; otherwise it is derived from the corpus and the machine."""
        return self.from_ is not None or any(getattr(self, key) is not None for key in SIZES)

    @field_validator("from_")
    @classmethod
    def _is_hf(cls, value: str | None) -> str | None:
        if value is not None and value in (name := value.removeprefix("hf:"), "hf:"):
            raise ValueError(f"write hf:{name or 'ORG/NAME'} for a Hugging Face model; a run is train.start")
        return value

    def _complaints(self) -> Iterator[str]:
        if self.depth is not None and self.layers is not None and self.depth != self.layers:
            yield f"depth = {self.depth} and layers = {self.layers} disagree; give one of them"
        missing = [key for key in ("layers", "width", "heads") if getattr(self, key) is None]
        if missing and self.depth is None and self.from_ is None and self.has_size:
            yield f"needs depth, or layers, width and heads, or none of them; {missing[0]} is missing"
        if self.heads is not None and self.kv_heads is not None and self.heads % self.kv_heads:
            near = [k for k in range(1, self.heads + 1) if self.heads % k == 0]
            yield f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}; possible: {near}"
        if self.width is not None and self.heads is not None and self.head_dim is None and self.width % self.heads:
            yield f"heads = {self.heads} does not divide width = {self.width}; give head_dim or change one of them"

    def require_fitting(self, options: Mapping[str, Any]) -> None:
        """Raise InputError if a key does not fit all options of the model, its family's or imported ones included."""
        for key, needed in idle_keys(options).items():
            if getattr(self, key):
                raise InputError(f"model.{key}: it has no effect without {needed}; set that, or remove the key")
        if (self.experts_per_token or 0) > (experts := options["experts"]):
            raise InputError(f"model.experts_per_token: {self.experts_per_token} exceeds experts = {experts}; lower it")
        if (self.dense_layers or 0) >= options["layers"]:
            raise InputError(f"model.dense_layers: {self.dense_layers} leaves no layer with experts; lower it")
        if self.mlp_bias and experts:
            raise InputError("model.mlp_bias: not supported with experts; remove it")


def idle_keys(options: Mapping[str, Any]) -> dict[str, str]:
    """Return a dict from each key of [model] that has no effect on a model with these options to what it needs."""
    return {key: needed for keys, needed, is_met in CONDITIONS if not is_met(options) for key in keys}
