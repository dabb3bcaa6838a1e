"""Typed reading of a foreign config.json, and rules that convert groups of its keys to options and back. No torch.

families.toml names the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bessemer.common.console import counted
from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.recipe.model import MOST, Activation

Values = dict[str, Any]
LARGEST = 2**31 - 1  # maximum of an integer, more than any dimension of a model
WINDOWED, GLOBAL = "sliding_attention", "full_attention"  # values of layer_types

# Activations by their names in transformers. Exports write the first name of each activation.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh", "gelu_python_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "quick_gelu": "gelu_quick", "relu": "relu", "relu2": "relu2",
}  # fmt: skip


class ForeignConfig:
    """A table of settings in a foreign file, with typed access.

    A value of the wrong type or out of bounds raises an InputError that names the file and the key. As in `transformers`, a
    key whose value is null counts as missing.
    """

    def __init__(self, path: Path, values: Any, inside: str = "") -> None:
        if not isinstance(values, Mapping):
            raise InputError(f"{path}: {inside.rstrip('.') or 'its content'} must be a table of settings")
        self.path = path
        self._values, self._inside = values, inside

    def __contains__(self, key: str) -> bool:
        """Return True if the table has the key, even with the value null."""
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def raw(self, key: str) -> Any:
        """Return the unchecked value of a key, or None if it is missing."""
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        """Return True if the table has the key with the value null."""
        return key in self._values and self._values[key] is None

    def error(self, key: str, reason: str) -> InputError:
        """Return the error about a key's value, for the caller to raise."""
        return InputError(f"{self.path}: {self._inside}{key} = {repr(self.raw(key))[:60]} {reason}")

    def integer(self, key: str, default: int | None = None, min_value: int = 1) -> int:
        """Return the integer from `min_value` to 2^31 - 1 under a key; without a default, the key is required."""
        what = f"must be a whole number from {min_value} to {LARGEST}"
        return int(self._value(key, default, lambda x: _is_number(x, min_value, LARGEST) and x == int(x), what))

    def number(self, key: str, default: float | None = None) -> float:
        """Return the finite number above 0 under a key; without a default, the key is required."""
        return float(self._value(key, default, _is_positive, f"must be a finite number above 0, at most {MOST**2:g}"))

    def share(self, key: str) -> float:
        """Return a number from 0 to 1; the key is required."""
        return float(self._value(key, None, lambda x: _is_number(x, 0.0, 1.0), "must be a share from 0 to 1"))

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self._value(key, default, lambda x: isinstance(x, bool), "must be true or false"))

    def text(self, key: str, default: str) -> str:
        return str(self._value(key, default, lambda x: isinstance(x, str), "must be a string"))

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a tuple of finite numbers above 0; the key is required."""
        return tuple(map(float, self._list(key, None, _is_positive, "finite numbers above 0")))

    def integers(self, key: str) -> list[int]:
        """Return a list of integers; empty if the key is missing."""
        return list(map(int, self._list(key, [], lambda x: isinstance(x, int), "whole numbers")))

    def texts(self, key: str) -> list[str]:
        """Return a list of strings; empty if the key is missing."""
        return self._list(key, [], lambda x: isinstance(x, str), "strings")

    def table(self, key: str) -> ForeignConfig:
        """Return a table inside this one; an empty one if the key is missing."""
        return ForeignConfig(self.path, self._value(key, {}), f"{self._inside}{key}.")

    def _list(self, key: str, default: list[Any] | None, fits: Callable[[Any], bool], what: str) -> list[Any]:
        """Return the list under a key, or the default. Raises InputError if an item is wrong; `what` describes the items."""
        is_list = lambda x: isinstance(x, list) and all(map(fits, x))  # noqa: E731
        return list(self._value(key, default, is_list, f"must be a list of {what}"))

    def _value(self, key: str, default: Any, fits: Callable[[Any], bool] = lambda x: True, what: str = "") -> Any:
        """Return the value of a key, or else the default. Raises InputError if it does not fit; `what` says what would."""
        value = self._values.get(key)
        value = default if value is None else value
        if value is None:
            raise InputError(f"{self.path}: {self._inside}{key} is missing")
        if not fits(value):
            raise self.error(key, what)
        return value


def _is_number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def _is_positive(value: Any) -> bool:
    return _is_number(value, 0.0, MOST**2) and value > 0


@dataclass(frozen=True)
class ConfigRule:
    """A conversion between a group of keys of config.json and some of our options.

    Attributes:
        keys: The keys of config.json that `read` understands.
        read: Returns options from the settings, given the options read before.
        write: Returns the keys for a configuration, the inverse of `read`.
        obstacles: Returns the values of options that the keys would need to express a configuration.
        free: Options that the rule can express with any value.
    """

    keys: tuple[str, ...] = ()
    read: Callable[[ForeignConfig, Values], Values] = lambda settings, values: {}
    write: Callable[[ModelConfig], Values] = lambda config: {}
    obstacles: Callable[[ModelConfig], list[str]] = lambda config: []
    free: tuple[str, ...] = ()


def unless(fits: Callable[[ModelConfig], object], obstacle: str) -> Callable[[ModelConfig], list[str]]:
    """Return an `obstacles` function that reports `obstacle` for a configuration that does not fit.

    `obstacle` is a format string, in which {0} is the configuration.
    """
    return lambda config: [] if fits(config) else [obstacle.format(config)]


def read_activation(settings: ForeignConfig, key: str, default: str = "") -> Activation:
    """Return our name of an activation. Raises InputError for one that is not supported."""
    name = settings.text(key, default)
    if name not in ACTIVATIONS:
        raise settings.error(key, f"is not supported; use one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def write_activation(activation: Activation) -> str:
    """Return the name of an activation in `transformers`."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


# Attention and heads

# Gemma's query_pre_attn_scalar, which `ModelFamily.keys` maps; our 0 means the width of a head.
QUERY_SCALAR = ConfigRule(
    read=lambda settings, values: {
        "query_scalar": values["query_scalar"] if values["query_scalar"] != values["head_dim"] else 0
    },
    write=lambda config: {"query_pre_attn_scalar": config.query_scalar or config.head_dim},
)


def soft_cap(option: str, key: str, default: float) -> ConfigRule:
    """Return the rule that reads the soft cap `option` from `key`: null means none, and a missing key means `default`."""
    return ConfigRule(
        (key,),
        lambda settings, values: {option: 0.0 if settings.is_null(key) else settings.number(key, default)},
        lambda config: {key: getattr(config, option) or None},
        free=(option,),
    )


# Attention windows


def _window(settings: ForeignConfig, default: int) -> int:
    """Return `sliding_window`, which is `default` if the key is missing, and 0 for null."""
    is_none = settings.is_null("sliding_window") or not (default or "sliding_window" in settings)
    return 0 if is_none else settings.integer("sliding_window", default)


def same_window(default: int) -> ConfigRule:
    """Return the rule for one window in every layer; null means none.

    `default` is the window if config.json lacks the key.
    """

    return ConfigRule(
        ("sliding_window",),
        lambda settings, values: {"window": _window(settings, default)},
        lambda config: {"sliding_window": config.window or None},
        unless(
            lambda c: not c.window or all(c.window_of(layer) for layer in range(c.layers)),
            "a window in all layers or in none",
        ),
        free=("window",),
    )


def _layer_types(settings: ForeignConfig, layers: int, has_window: Callable[[int], object]) -> list[str]:
    """Return the type of each layer: the entries of `layer_types`, or without that key by `has_window(index of the layer)`.

    Raises InputError for an unsupported entry.
    """
    if settings.raw("layer_types") is None:
        return [WINDOWED if has_window(layer) else GLOBAL for layer in range(layers)]
    types = settings.texts("layer_types")
    unknown = [kind for kind in types if kind not in (WINDOWED, GLOBAL)]
    if unknown:
        raise settings.error("layer_types", f"has {unknown[0]!r}; use only {GLOBAL} and {WINDOWED}")
    if len(types) != layers:
        raise settings.error("layer_types", f"has {len(types)} entries for {counted(layers, 'layer')}")
    return types


def _pattern(types: list[str]) -> Values:
    """Return global_every, global_last and global_layers for a list of layer types; global_every = 1 means no windows."""
    values: Values = {"global_every": 0, "global_last": False, "global_layers": ()}
    without = [layer for layer, kind in enumerate(types) if kind == GLOBAL]
    if not without:
        return values
    every = next((layer for layer in without if layer > 0), len(types))
    if without == list(range(0, len(types), every)):
        return values | {"global_every": every}
    if without == list(range(without[0], len(types), without[0] + 1)):
        return values | {"global_every": without[0] + 1, "global_last": True}
    return values | {"global_layers": tuple(without)}


def _write_layer_types(config: ModelConfig) -> list[str]:
    return [WINDOWED if config.window_of(layer) else GLOBAL for layer in range(config.layers)]


def _windows(settings: ForeignConfig, values: Values, width: int, has_window: Callable[[int], object]) -> Values:
    """Return the options for windows of `width` tokens, 0 for none, in the layers that `_layer_types` finds."""
    types = _layer_types(settings, values["layers"], has_window)
    if WINDOWED not in types:
        return {"window": 0}
    if not width:
        raise settings.error("layer_types", f"has {WINDOWED} layers, but no key gives a window size")
    return {"window": width, **_pattern(types)}


def _switched_windows(default: int, has_window: Callable[[ForeignConfig, Values, int], object]) -> ConfigRule:
    """Return the rule for windows that `use_sliding_window` switches on; `default` is their width, 0 for none.

    Layers have one by `layer_types`, or without that key where `has_window(settings, options read before, layer
    index)`.
    """

    def read(settings: ForeignConfig, values: Values) -> Values:
        width = _window(settings, default) if settings.flag("use_sliding_window", False) else 0
        return _windows(settings, values, width, lambda layer: width and has_window(settings, values, layer))

    def write(config: ModelConfig) -> Values:
        if not config.window:
            return {}
        values = {"use_sliding_window": True, "sliding_window": config.window, "max_window_layers": 0}
        return values | {"layer_types": _write_layer_types(config)}

    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return ConfigRule(keys, read, write, free=("window",))


QWEN_WINDOWS = _switched_windows(
    4096, lambda settings, values, layer: layer >= settings.integer("max_window_layers", 28, min_value=0)
)


def gemma_windows(every: int, *pattern_keys: str) -> ConfigRule:
    """Return the rule for windows in all layers except each `every`-th, as in Gemma.

    The first of `pattern_keys` that config.json has overrides `every`, and `layer_types` overrides both.
    """

    def read(settings: ForeignConfig, values: Values) -> Values:
        global_every = settings.integer(pattern_keys[0], every) if pattern_keys else every
        return _windows(settings, values, _window(settings, 4096), lambda layer: (layer + 1) % global_every)

    def write(config: ModelConfig) -> Values:
        return {"sliding_window": config.window or 4096, "layer_types": _write_layer_types(config)}

    return ConfigRule(("sliding_window", "layer_types", *pattern_keys), read, write, free=("window",))


def _read_modernbert_windows(settings: ForeignConfig, values: Values) -> Values:
    every = settings.integer("global_attn_every_n_layers", 3)
    return _pattern(_layer_types(settings, values["layers"], lambda layer: layer % every))


MODERNBERT_WINDOWS = ConfigRule(
    ("layer_types", "global_attn_every_n_layers"),
    _read_modernbert_windows,
    lambda config: {
        "global_attn_every_n_layers": config.global_every or config.layers + 1, "layer_types": _write_layer_types(config)
    },
    unless(lambda c: c.window and c.window % 2 == 0, "window = an even number instead of {0.window}"),
)  # fmt: skip


def _read_unrotated(settings: ForeignConfig, values: Values) -> Values:
    layers = values["layers"]
    rotated, every = settings.integers("no_rope_layers"), settings.integer("no_rope_layer_interval", 4)
    rotated = rotated or [int((layer + 1) % every != 0) for layer in range(layers)]
    if len(rotated) < layers:
        raise settings.error("no_rope_layers", f"has {len(rotated)} entries for {counted(layers, 'layer')}")
    without = tuple(layer for layer in range(layers) if not rotated[layer])
    regular = without and without == tuple(range(without[0], layers, without[0] + 1))
    return {"unrotated_every": without[0] + 1 if regular else 0, "unrotated_layers": () if regular else without}


NO_ROPE_LAYERS = ConfigRule(  # SmolLM3: layers without rotary positions
    ("no_rope_layers", "no_rope_layer_interval"),
    _read_unrotated,
    lambda config: {
        "no_rope_layers": [int(config.rope_of(layer) is not None) for layer in range(config.layers)],
        "no_rope_layer_interval": config.unrotated_every or config.layers + 1,
    },
    free=("unrotated_every", "unrotated_layers"),
)


# SmolLM3: layers without rotary positions have a window.
SMOLLM_WINDOWS = _switched_windows(
    0,
    lambda settings, values, layer: (
        layer in values["unrotated_layers"]
        or (values["unrotated_every"] and (layer + 1) % values["unrotated_every"] == 0)
    ),
)


# Encoders


def _read_padded_positions(settings: ForeignConfig, values: Values) -> Values:
    padding = settings.integer("pad_token_id", 1, min_value=0)
    positions = values["max_positions"] - padding - 1
    if positions < 1:
        raise settings.error("max_position_embeddings", f"leaves no position after pad_token_id = {padding}")
    return {"position_padding": padding, "max_positions": positions}


PADDED_POSITIONS = ConfigRule(  # RoBERTa: learned positions start after the padding token's row
    ("pad_token_id",),
    _read_padded_positions,
    lambda config: {"pad_token_id": config.position_padding, "max_position_embeddings": config.position_rows},
    unless(lambda c: c.position_padding is not None, "a position_padding"),
    ("position_padding",),
)


EXACT_GELU_HEAD = ConfigRule(  # the layer before the output uses GELU even if the blocks use another activation
    obstacles=unless(lambda c: c.activation == "gelu" or c.labels, 'activation = "gelu" instead of "{0.activation}"')
)


def _read_head_activation(settings: ForeignConfig, values: Values) -> Values:
    if read_activation(settings, "classifier_activation", "gelu") != values["activation"]:
        raise settings.error("classifier_activation", "is not supported; use the value of hidden_activation")
    return {}


HEAD_ACTIVATION = ConfigRule(
    ("classifier_activation",),
    _read_head_activation,
    lambda config: {"classifier_activation": write_activation(config.activation)},
)
CLASSIFIER_POOLING = ConfigRule(
    ("classifier_pooling",),
    lambda settings, values: {"pooling": "mean" if settings.text("classifier_pooling", "cls") == "mean" else "first"},
    lambda config: {"classifier_pooling": "mean" if config.pooling == "mean" else "cls"},
    unless(lambda c: not c.labels or c.head_bias, "head_bias = true in a classifier"),
)
