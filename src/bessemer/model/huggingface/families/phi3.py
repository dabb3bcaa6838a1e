"""Phi-3: Llama with joint projections in its files, partly rotated heads and longrope."""

from __future__ import annotations

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.families import llama, mistral
from bessemer.model.huggingface.family import Family, Tensors, Values, heads_fill_the_width
from bessemer.model.huggingface.rope import BASE, read_scaling, write_scaling
from bessemer.model.huggingface.settings import Settings

_LENGTH = "original_max_position_embeddings"
_FRACTION = "partial_rotary_factor"


def _read(settings: Settings, values: Values) -> Values:
    table = settings.table("rope_parameters")
    table = table if list(table) else settings.table("rope_scaling")
    renamed = {"su": "longrope", "yarn": "longrope"}  # as transformers reads the names of earlier versions
    kind = table.raw("rope_type") or table.raw("type") or "default"
    given = {key: table.raw(key) for key in table} | {
        "rope_type": renamed.get(kind, kind) if isinstance(kind, str) else kind
    }
    if given["rope_type"] not in ("default", "longrope"):
        raise table.wrong(
            "rope_type" if "rope_type" in table else "type", "is not supported for phi3; only longrope is"
        )
    length = settings.integer(_LENGTH, table.integer(_LENGTH, 4096))
    if given["rope_type"] == "longrope":
        given[_LENGTH] = length
    scaling = read_scaling(
        Settings(settings.path, given, "rope_scaling."), values["max_positions"], (_FRACTION, _LENGTH)
    )
    return {
        "rope_theta": table.number("rope_theta", settings.number("rope_theta", BASE)),
        "rope_scaling": scaling,
        "rotary_fraction": table.number(_FRACTION, settings.number(_FRACTION, 1.0)),
        "window": 0 if settings.raw("sliding_window") is None else settings.integer("sliding_window"),
    }


def _write(config: ModelConfig) -> Values:
    length = config.rope_scaling.original_length if config.rope_scaling else config.positions_length
    return {
        "rope_theta": config.rope_theta, "rope_scaling": write_scaling(config.rope_scaling), _LENGTH: length,
        _FRACTION: config.rotary_fraction, "sliding_window": config.window or None,
    }  # fmt: skip


def _obstacles(config: ModelConfig) -> list[str]:
    kind = "longrope" if config.rope_scaling is None else config.rope_scaling.kind
    scaled = [] if kind == "longrope" else [f"rope_scaling.kind = {kind}"]
    return mistral.obstacles(config) + heads_fill_the_width(config) + scaled


FAMILY = Family(
    name="phi3",
    title="Phi-3",
    summary=("RMSNorm, before", "rotary", "SwiGLU", "the same window in every layer, or none; longrope"),
    architecture="Phi3ForCausalLM",
    classifier="Phi3ForSequenceClassification",
    options={"qk_norm": "none", "norm_eps": 1e-5},
    keys={ours: theirs for ours, theirs in llama.NAMES.items() if ours != "head_dim"},
    defaults={"tie_embeddings": False, "norm_eps": 1e-5, "activation": "silu"},
    tensors=Tensors(
        outer=llama.tensors().outer,
        prefix=llama.tensors().prefix,
        block=(
            ("self_attn.qkv_proj", "attention.qkv"),
            ("self_attn.o_proj", "attention.out"),
            ("mlp.gate_up_proj", "mlp.gate_up"),
            ("mlp.down_proj", "mlp.down"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "mlp_norm"),
        ),
    ),
    dropout={"attention_dropout": "attention", "resid_pdrop": "hidden", "embd_pdrop": "hidden"},
    free=("rotary_fraction",),
    reads=("rope_theta", "rope_scaling", "rope_parameters", _LENGTH, _FRACTION, "sliding_window"),
    read=_read,
    write=_write,
    obstacles=_obstacles,
    examples={
        "Phi-3": {"head_dim": 8, "window": 7},
        "Phi-3, half of each head rotated": {"head_dim": 8, "rotary_fraction": 0.5},
        "Phi-3, longrope beyond its first length": {
            "head_dim": 8, "rope_scaling": RopeScaling(
                "longrope", 3.0, original_length=8, short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(1.0, 2.0, 3.0, 4.0)
            ),
        },
        "Phi-3, longrope, attention factor, partly rotated": {
            "head_dim": 8, "rotary_fraction": 0.5, "rope_scaling": RopeScaling(
                "longrope", 2.0, original_length=12, attention_factor=1.3, short_factor=(1.0, 1.1), long_factor=(2.0, 3.0)
            ),
        },
        "Phi-3, classifier": {"head_dim": 8, "labels": 5},
    },
)  # fmt: skip
