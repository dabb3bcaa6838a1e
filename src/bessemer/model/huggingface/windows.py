"""Which layers have a window: `layer_types` in config.json, and our global_every and global_layers."""

from __future__ import annotations

from typing import Any

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.settings import Settings

WINDOWED, GLOBAL = "sliding_attention", "full_attention"


def read_layer_types(settings: Settings, layers: int) -> list[str] | None:
    """The kind of each layer, or None when config.json does not say. Raises InputError on a kind we do not have."""
    if settings.raw("layer_types") is None:
        return None
    types = settings.texts("layer_types")
    unknown = [kind for kind in types if kind not in (WINDOWED, GLOBAL)]
    if unknown:
        raise settings.wrong("layer_types", f"has {unknown[0]!r}; only {GLOBAL} and {WINDOWED} are supported")
    if len(types) != layers:
        raise settings.wrong("layer_types", f"has {len(types)} entries for {layers} layers")
    return types


def pattern(types: list[str]) -> dict[str, Any]:
    """global_every, global_last and global_layers of a list of layer types; every = 1: no layer has a window."""
    return {"global_every": 0, "global_last": False, "global_layers": ()} | _pattern(types)


def _pattern(types: list[str]) -> dict[str, Any]:
    without = [number for number, kind in enumerate(types) if kind == GLOBAL]
    if not without:
        return {}
    every = next((number for number in without if number > 0), len(types))
    if without == list(range(0, len(types), every)):
        return {"global_every": every}
    if without == list(range(without[0], len(types), without[0] + 1)):
        return {"global_every": without[0] + 1, "global_last": True}
    return {"global_layers": tuple(without)}


def write_layer_types(config: ModelConfig) -> list[str]:
    """The kind of each layer."""
    return [WINDOWED if config.window_of(number) else GLOBAL for number in range(config.layers)]
