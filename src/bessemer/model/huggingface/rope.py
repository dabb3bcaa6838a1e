"""Rotary positions in config.json: the base, and how positions are stretched."""

from __future__ import annotations

from typing import Any

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.settings import Settings

KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
BASE = 10_000.0  # of transformers, where config.json gives none
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_KINDS: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}


def read_rotary(settings: Settings, positions: int) -> dict[str, Any]:
    """rope_theta and rope_scaling: from `rope_parameters` (transformers 5), or from the two keys of before.

    positions: max_position_embeddings, which a table without the length first trained on means.
    """
    table, older = settings.table("rope_parameters"), settings.table("rope_scaling")
    if list(table) and list(older) and read_scaling(table, positions) != read_scaling(older, positions):
        raise settings.wrong("rope_scaling", "is not what rope_parameters says; remove one of them")
    table = table if list(table) else older
    base = table if table.raw("rope_theta") is not None else settings
    return {"rope_theta": base.number("rope_theta", BASE), "rope_scaling": read_scaling(table, positions)}


def write_rotary(config: ModelConfig) -> dict[str, Any]:
    """The two keys that every version of transformers reads."""
    return {"rope_theta": config.rope_theta, "rope_scaling": _scaling_to(config.rope_scaling)}


def read_scaling(table: Settings, positions: int) -> RopeScaling | None:
    """The scaling that a table describes. Raises InputError for a kind or key that is not supported, or a missing key."""
    key = "rope_type" if table.raw("rope_type") is not None else "type"
    kind = table.text(key, "default")
    if kind not in _KINDS:
        raise table.wrong(key, f"is not supported; supported: {', '.join(_KINDS)}")
    for name in table:
        if name not in ("rope_type", "type", "rope_theta", *_KINDS[kind]) and table.raw(name) is not None:
            raise table.wrong(name, f"is not supported with {key} = {kind!r}")
    if kind == "default":
        return None
    factor = table.number("factor")
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = table.number("low_freq_factor"), table.number("high_freq_factor")
    if low >= high:
        raise table.wrong("low_freq_factor", f"must be below high_freq_factor = {high:g}")
    return RopeScaling("llama3", factor, low, high, table.integer("original_max_position_embeddings", positions))


def _scaling_to(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_frequency,
        "high_freq_factor": scaling.high_frequency,
        "original_max_position_embeddings": scaling.original_length,
    }
