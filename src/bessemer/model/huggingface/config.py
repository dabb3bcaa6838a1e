"""The configuration of a model from a recipe, and to and from the Hugging Face layout (`config.json`); no torch.

Both directions use the same `ModelFamily`. An option that a family cannot express is an error and is never dropped. A key
of a foreign config.json is either understood, known to change nothing (even in `transformers`, see `unread_keys`), or
rejected by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig, default_mlp_width
from bessemer.model.huggingface.families import (
    FAMILIES,
    FIXED,
    OPTIONS,
    READ_ANYWHERE,
    ModelFamily,
    family_named,
    family_of_type,
)
from bessemer.model.huggingface.rules import ForeignConfig, Values, read_activation, write_activation
from bessemer.model.options import SCALINGS
from bessemer.recipe import Dropout, Model, Recipe
from bessemer.recipe.model import Activation, idle_keys
from bessemer.storage.hub import foreign_file
from bessemer.tokens.tokenizer.files import read_table

# Options that belong to no family: a family accepts any value of them, or reports an obstacle.
FREE_OPTIONS = {
    "vocabulary", "layers", "width", "heads", "mlp_width", "sequence_length", "max_positions", "norm_eps", "tie_embeddings",
    "experts_per_token", "expert_width", "router_z_loss", "balance_loss", "balance_rate",
    "rope_theta", "rope_scaling", "global_every", "global_last", "global_layers", "labels", "pooling", "family",
}  # fmt: skip
LEFT_OVER = "remove it if it has no effect"
MAX_LABELS, MAX_LAYERS = 1_000_000, 10_000
NEAREST = 3  # families that an error about a configuration names
# Required unless `ModelFamily.defaults` has them.
REQUIRED = ("vocabulary", "layers", "width", "heads", "mlp_width", "max_positions")


def model_config(recipe: Recipe, vocabulary: int, labels: int = 0) -> ModelConfig:
    """Return the configuration of a resolved recipe's model for a tokenizer with `vocabulary` ids.

    `labels` is the number of classes of a classifier, or 0 for a language model. Raises InputError if a dimension is
    missing, or if the model has fewer embedding rows than the tokenizer has ids.
    """
    model = recipe.model
    if model.layers is None or model.width is None or model.heads is None:
        raise InputError("model: layers, width or heads is not set; resolve the recipe first")
    if model.vocabulary is not None and model.vocabulary < vocabulary:
        few = f"{model.vocabulary} is below the tokenizer's {vocabulary} ids"
        raise InputError(f"model.vocabulary: {few}; increase it, or set tokenizer.path to the model's own tokenizer")
    chosen = model.model_dump(exclude_none=True)
    settings = family_named(model.family).options | {key: value for key, value in chosen.items() if key in OPTIONS}
    derived = {
        "vocabulary": vocabulary, "sequence_length": recipe.tokens.sequence_length, "kv_heads": model.heads,
        "head_dim": model.width // model.heads, "labels": labels,
        "mlp_width": default_mlp_width(model.width, settings.get("gated", True)),
    }  # fmt: skip
    config = ModelConfig.from_dict(derived | settings)
    # The classifiers of every encoder family have a bias, even if the head for masked tokens has none.
    return config if labels == 0 or config.causal else config.with_changes(pooling="first", head_bias=True)


def family_standard(family: ModelFamily, config: ModelConfig) -> Values:
    """Return each option's standard value in a family: that of `family.options`, else ModelConfig's default.

    `kv_heads` and `head_dim` are those of plain multi-head attention with the heads and the width of `config`.
    """
    return family.standard | {"kv_heads": config.heads, "head_dim": config.width / config.heads}


def family_of(config: ModelConfig) -> ModelFamily:
    """Return the family that can express a configuration, preferring the one that the model came from.

    Raises InputError if none can; the message lists the options with which the nearest families could.
    """
    own, has_experts = family_named(config.family or "qwen3"), bool(config.experts)
    families = [one for one in (own, *FAMILIES.values()) if bool(one.options.get("experts")) == has_experts]
    obstacles = {family: list(_obstacles(family, config)) for family in families}
    ordered = sorted(obstacles, key=lambda family: len(obstacles[family]))
    if obstacles[ordered[0]]:
        nearest = "; ".join(f"{family.name} with {', '.join(obstacles[family])}" for family in ordered[:NEAREST])
        raise InputError(f"model: no model family has all of these options. Possible are {nearest}")
    return ordered[0]


def _obstacles(family: ModelFamily, config: ModelConfig) -> Iterator[str]:
    """Yield the values of options that a family would need to express a configuration, for each option that it cannot."""
    free, by_key = FREE_OPTIONS.union(family.keys, *(rule.free for rule in family.rules)), dict[str, str]()
    for option, standard in family_standard(family, config).items():
        value = getattr(config, option)
        if option == "shared_experts" and standard and not value:
            yield "shared_experts = 1 or more instead of 0"
        elif option not in free and value != standard:
            yield f"{option} = {_toml(standard)} instead of {_toml(value)}"
    for option, key in family.keys.items():
        first = by_key.setdefault(key, option)
        if getattr(config, option) != getattr(config, first):
            yield f"{option} = {first} = {getattr(config, first)} instead of {getattr(config, option)}"
    for obstacles in family.apply_rules("obstacles", config):
        yield from obstacles
    if config.labels and config.pooling not in family.poolings:
        yield f"pooling = {' or '.join(map(_toml, family.poolings))} instead of {_toml(config.pooling)}"


def _toml(value: Any) -> str:
    return "none" if value is None else json.dumps(value, default=str)


def to_hugging_face(config: ModelConfig, end_of_text: int, labels: Sequence[str] = ()) -> Values:
    """Return the config.json of a configuration, without dropout.

    `labels` are the names of a classifier's classes. Raises InputError when no family of transformers has this block.
    """
    family = family_of(config)
    values = config.to_dict() | {"max_positions": config.positions_length}
    values["activation"] = write_activation(config.activation)
    written: Values = {
        "architectures": [family.classifier if config.labels else family.architecture],
        "model_type": family.model_type,
        **{theirs: values[ours] for ours, theirs in family.keys.items()},
        **family.fixed,
        **dict.fromkeys(family.dropout, 0.0),
        **dict.fromkeys(family.token_keys, end_of_text),
        "dtype": "float32",
        "torch_dtype": "float32",  # the name of `dtype` in transformers before 4.56
    }
    if config.causal:
        written["use_cache"] = True
    if config.labels:
        names = dict(enumerate(labels or [f"LABEL_{number}" for number in range(config.labels)]))
        written["id2label"] = {str(number): name for number, name in names.items()}
        written["label2id"] = {name: number for number, name in names.items()}
    for keys in family.apply_rules("write", config):
        written |= keys
    return written


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a folder in the Hugging Face layout. Raises InputError on unsupported settings."""
    settings = read_settings(folder)
    family = _family(settings)
    _require_known(settings, family)
    defaults = {ours: value for ours, value in family.defaults.items() if value is not None}  # None is derived later
    values = family.options | defaults | {"family": family.name} | _mapped(settings, family)
    values = _derived(settings, family, values) | values
    for options in family.apply_rules("read", settings, values):
        values |= options
    pooling = values.pop("pooling", "last" if values.get("causal", True) else "first")
    labels = _labels(settings)  # checked for every head, because transformers creates a name for each
    if settings.texts("architectures")[:1] == [family.classifier]:
        values |= {"labels": labels, "pooling": pooling}
    try:
        config = ModelConfig(sequence_length=values["max_positions"], **values)
        Model.model_validate(_model_keys(config)).require_fitting(vars(config))
    except InputError as error:
        raise InputError(f"{settings.path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("model", *first["loc"])))
        raise InputError(f"{settings.path}: {key} = {str(first['input'])[:60]}: {first['msg']}") from None
    return config


def read_settings(folder: Path) -> ForeignConfig:
    """Return the folder's config.json. Raises InputError if it is missing or not a table of settings."""
    path = foreign_file(folder, "config.json")
    if not path.exists():
        raise InputError(f"{path}: file not found; `hf:` needs a folder in the Hugging Face layout")
    return ForeignConfig(path, read_table(path))


def export_dropout(config: ModelConfig, trained: Dropout) -> dict[str, float]:
    """Return the dropout rates of a training as a dict from the family's keys in config.json to rates.

    A rate for which the family has no key is left out, because inference does not need it.
    """
    return {theirs: getattr(trained, ours) for theirs, ours in family_of(config).dropout.items()}


def dropout_keys(folder: Path) -> dict[str, float]:
    """Return the dropout rates in a folder's config.json, by its keys. Raises InputError on a rate outside of [0, 1]."""
    settings = read_settings(folder)
    return {key: settings.share(key) for key in _family(settings).dropout if settings.raw(key) is not None}


def recipe_keys(folder: Path) -> Values:
    """Return a folder's config.json as keys of the recipe's [model] table."""
    return _model_keys(read_config(folder))


def _model_keys(config: ModelConfig) -> Values:
    unused = idle_keys(vars(config))
    values = {key: value for key, value in config.to_dict().items() if key in Model.model_fields and key not in unused}
    for key in SCALINGS:
        if values.get(key):  # TOML has no null
            values[key] = {name: value for name, value in values[key].items() if value is not None}
    return values


def _family(settings: ForeignConfig) -> ModelFamily:
    for key in ("quantization_config", "compression_config"):
        if settings.raw(key) is not None:
            raise InputError(f"{settings.path}: {key}: quantised weights are not supported; use the unquantised model")
    name = settings.raw("model_type")
    try:
        return family_of_type(str(name))
    except InputError as error:
        raise InputError(f"{settings.path}: model_type {name!r} is not supported: {error}") from None


def unread_keys(folder: Path) -> list[str]:
    """Return the keys of a folder's config.json that its family does not know, such as those of other programs."""
    settings = read_settings(folder)
    known = _family(settings).known
    return [key for key in settings if key not in known and settings.raw(key) is not None]


def understood_settings(folder: Path) -> Values:
    """Return the keys of a folder's config.json that Bessemer understands, and the class of its tokenizer."""
    settings = read_settings(folder)
    return {key: settings.raw(key) for key in settings if key in _family(settings).understood | {"tokenizer_class"}}


def _require_known(settings: ForeignConfig, family: ModelFamily) -> None:
    """Raise InputError on config.json keys that change the model in ways that this family does not support.

    These are keys that `transformers` reads for every family but this family's description lacks, and fixed keys with
    another value than the supported one. `unread_keys` reports the remaining ones.
    """
    for key in settings:
        if key in READ_ANYWHERE - family.known and settings.raw(key) is not None:
            raise settings.error(key, f"is read by transformers, but not supported for {family.name}; {LEFT_OVER}")
    for key, wanted in (FIXED | family.fixed).items():
        value = settings.raw(key)
        if key not in family.reads and value != wanted and (value or (wanted and value is not None)):
            raise settings.error(key, f"is not supported; use {wanted!r}")


_READERS: dict[Any, Callable[[ForeignConfig, str], Any]] = {
    bool: ForeignConfig.flag, float: ForeignConfig.number, Activation: read_activation,
}  # fmt: skip


def _mapped(settings: ForeignConfig, family: ModelFamily) -> Values:
    """Return the options that config.json states under one key each (`ModelFamily.keys`); missing keys are left out."""
    values: Values = {}
    for ours, theirs in family.keys.items():
        if settings.raw(theirs) is None and (ours in family.defaults or ours not in REQUIRED):
            continue  # use the family's default, or derive it from other options
        if ours in ("window", "token_types", "dense_layers"):
            values[ours] = settings.integer(theirs, min_value=0)
        else:
            values[ours] = _READERS.get(OPTIONS[ours], ForeignConfig.integer)(settings, theirs)
    if values["layers"] > MAX_LAYERS:  # limits the length of lists with an entry per layer
        raise settings.error(family.keys["layers"], f"exceeds the limit of {MAX_LAYERS} layers")
    return values


def _derived(settings: ForeignConfig, family: ModelFamily, values: Values) -> Values:
    """Return dimensions that follow from others. Raises InputError on dimensions that do not divide or are missing."""
    heads, width = values["heads"], values["width"]
    kv_heads = values.get("kv_heads", heads)
    if width % heads and "head_dim" not in values:
        raise settings.error(family.keys["heads"], f"does not divide {family.keys['width']} = {width}")
    if heads % kv_heads:
        raise settings.error(family.keys["kv_heads"], f"does not divide {family.keys['heads']} = {heads}")
    head_dim = values.get("head_dim", width // heads)
    return {"kv_heads": kv_heads, "head_dim": head_dim, "mlp_width": 4 * width}


def _labels(settings: ForeignConfig) -> int:
    """Return the number of classes: that of the names, else num_labels, else 2 as in transformers."""
    number = settings.integer("num_labels", 2)
    if number > MAX_LABELS:
        raise settings.error("num_labels", f"exceeds the limit of {MAX_LABELS}")
    return len(list(settings.table("id2label"))) or number
