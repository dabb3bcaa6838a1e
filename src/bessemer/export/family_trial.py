"""A trial of a family before training: a comparison of its keys with `transformers`, and a small model for the gate."""

from __future__ import annotations

from dataclasses import fields

import torch

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.comparison import quiet_transformers
from bessemer.model.huggingface.config import REQUIRED
from bessemer.model.huggingface.families import READ_ANYWHERE, ModelFamily
from bessemer.model.huggingface.rules import ACTIVATIONS
from bessemer.model.transformer import Transformer, build_model

# Maximum values of the small model.
SMALL = {"layers": 4, "kv_heads": 2, "head_dim": 16, "mlp_width": 40, "window": 8, "sequence_length": 32}


def require_same_keys(family: ModelFamily) -> None:
    """Raise InputError unless a family has the keys and defaults of its configuration class in `transformers`."""
    architecture = getattr(quiet_transformers(), family.architecture, None)
    if architecture is None:
        raise family.error("architecture", f"transformers has no class {family.architecture}")
    kind = architecture.config_class
    if kind.model_type != family.model_type:
        raise family.error("model_type", f"{family.model_type!r}, but {kind.__name__} has {kind.model_type!r}")
    theirs = kind().to_dict()
    if unknown := sorted(theirs.keys() - family.known):
        raise family.error(
            "keys", f"{kind.__name__} has {unknown[0]!r}; list it in a rule, or in fixed, dropout or harmless"
        )
    standard = {field.name: field.default for field in fields(ModelConfig)} | family.options | family.defaults
    required = {*REQUIRED, *({"kv_heads", "head_dim"} - family.defaults.keys())}
    written = {"keys": family.keys.values(), "fixed": family.fixed, "dropout": family.dropout}
    for fact, key in ((fact, key) for fact, keys in written.items() for key in keys):
        if key not in {*theirs, *kind.attribute_map, *READ_ANYWHERE}:
            raise family.error(fact, f"{kind.__name__} has no key {key!r}")
    for option, key in family.keys.items():
        value = ACTIVATIONS.get(theirs[key]) if option == "activation" else theirs.get(key)
        if option not in required and value != standard[option]:
            raise family.error("defaults", f"{option} is {value!r} in {kind.__name__}, here {standard[option]!r}")


def small_model(config: ModelConfig) -> Transformer:
    """Return a small model with the options of `config` and random weights, to compare with `transformers`.

    Noise is added to all initial weights, because a weight of zero would hide errors.
    """
    changes = {name: min(getattr(config, name), most) for name, most in SMALL.items()}
    if int(changes["head_dim"] * config.rotary_fraction) % 2 or any((config.rope_scaling, config.window_rope_scaling)):
        changes["head_dim"] = config.head_dim  # longrope's factors require it
    heads = config.heads // config.kv_heads * changes["kv_heads"]
    width = heads * changes["head_dim"] if config.heads * config.head_dim == config.width else 48
    model = build_model(config.with_changes(**changes, heads=heads, width=width), seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model
