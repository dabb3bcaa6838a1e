"""Rotary positions in config.json: the base, and how positions are stretched."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from bessemer.model.config import ModelConfig, RopeScaling
from bessemer.model.huggingface.settings import Settings
from bessemer.model.huggingface.windows import GLOBAL, WINDOWED

KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
BASE = 10_000.0  # of transformers, where config.json gives none
_NAMES = {
    "factor": "factor", "original_length": "original_max_position_embeddings", "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor", "attention_factor": "attention_factor", "beta_fast": "beta_fast",
    "beta_slow": "beta_slow", "truncate": "truncate", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
    "short_factor": "short_factor", "long_factor": "long_factor",
}  # fmt: skip
# Of each kind: the keys that must be there, and those that may be.
_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_frequency", "high_frequency"), ("original_length",)),
    "yarn": (
        (),
        ("factor", "original_length", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    ),
    "longrope": (("short_factor", "long_factor"), ("factor", "original_length", "attention_factor")),
}  # fmt: skip


def read_rotary(settings: Settings, positions: int, base: float = BASE) -> dict[str, Any]:
    """rope_theta, rope_scaling and max_positions: from `rope_parameters` (transformers 5), or from the keys of before.

    positions: max_position_embeddings, which a table without the length first trained on means; base: where none is given.
    """
    table, older = settings.table("rope_parameters"), settings.table("rope_scaling")
    if list(table) and list(older) and read_scaling(table, positions) != read_scaling(older, positions):
        raise settings.wrong("rope_scaling", "is not what rope_parameters says; remove one of them")
    table = table if list(table) else older
    source = table if table.raw("rope_theta") is not None else settings
    scaling = read_scaling(table, positions)
    stretched = round(positions * scaling.factor) if scaling and scaling.kind == "dynamic" else positions
    return {"rope_theta": source.number("rope_theta", base), "rope_scaling": scaling, "max_positions": stretched}


def write_rotary(config: ModelConfig) -> dict[str, Any]:
    """The two keys that every version of transformers reads, and the positions where their scaling counts from these."""
    written = {"rope_theta": config.rope_theta, "rope_scaling": write_scaling(config.rope_scaling)}
    if config.rope_scaling is not None and config.rope_scaling.kind == "dynamic":
        written["max_position_embeddings"] = config.rope_scaling.original_length
    return written


def read_by_layer_type(
    settings: Settings, positions: int, names: tuple[str, str], bases: tuple[float, float]
) -> dict[str, Any]:
    """The rotary options of a family in which layers with a window have a base of their own.

    names, bases: of the layers without a window and of those with one: the keys that older versions wrote, and what
    `transformers` takes where there are none.
    """
    tables = settings.table("rope_parameters")
    found: dict[str, Any] = {}
    for prefix, kind, older, base in zip(("", "window_"), (GLOBAL, WINDOWED), names, bases, strict=True):
        table = tables.table(kind)
        source, key = (table, "rope_theta") if table.raw("rope_theta") is not None else (settings, older)
        found |= {
            f"{prefix}rope_theta": source.number(key, base), f"{prefix}rope_scaling": read_scaling(table, positions),
        }  # fmt: skip
    for key in tables:
        if key not in (GLOBAL, WINDOWED):
            raise tables.wrong(key, f"is not supported; a table for {GLOBAL} and one for {WINDOWED} are expected")
    return found


def write_by_layer_type(config: ModelConfig, names: tuple[str, str]) -> dict[str, Any]:
    """The inverse: the keys of older versions too where they can say it."""
    window_theta = config.rope_theta if config.window_rope_theta is None else config.window_rope_theta
    window_scaling = config.rope_scaling if config.window_rope_theta is None else config.window_rope_scaling
    bases = (config.rope_theta, window_theta)
    written: dict[str, Any] = dict(zip(names, bases, strict=True))
    if config.rope_scaling is not None or window_scaling is not None:
        written["rope_parameters"] = {
            kind: {"rope_theta": base, **(write_scaling(scaling) or {"rope_type": "default"})}
            for kind, base, scaling in zip(
                (GLOBAL, WINDOWED), bases, (config.rope_scaling, window_scaling), strict=True
            )
        }
    return written


def read_scaling(table: Settings, positions: int, ignored: tuple[str, ...] = ()) -> RopeScaling | None:
    """The scaling that a table describes. Raises InputError for a kind or key that is not supported, or a missing key.

    ignored: keys that somebody else reads.
    """
    key = "rope_type" if table.raw("rope_type") is not None else "type"
    kind = table.text(key, "default")
    if kind not in _KINDS:
        raise table.wrong(key, f"is not supported; supported: {', '.join(_KINDS)}")
    required, optional = _KINDS[kind]
    known = {"rope_type", "type", "rope_theta", *ignored, *(_NAMES[ours] for ours in (*required, *optional))}
    for name in table:
        if name not in known and table.raw(name) is not None:
            raise table.wrong(name, f"is not supported with {key} = {kind!r}")
    if kind == "default":
        return None
    values: dict[str, Any] = {"kind": kind} | ({"original_length": positions} if kind != "linear" else {})
    for ours in (*required, *optional):
        if ours in required or table.raw(_NAMES[ours]) is not None:
            values[ours] = _value(table, ours)
    if "factor" not in values:  # how many times longer the sequences are than those first trained on
        values["factor"] = positions / values["original_length"]
    scaling = RopeScaling(**values)
    if scaling.kind == "llama3" and scaling.low_frequency >= scaling.high_frequency:
        raise table.wrong("low_freq_factor", f"must be below high_freq_factor = {scaling.high_frequency:g}")
    return scaling


def _value(table: Settings, ours: str) -> Any:
    name = _NAMES[ours]
    if ours == "original_length":
        return table.integer(name)
    if ours == "truncate":
        return table.flag(name, True)
    return tuple(table.numbers(name)) if ours in ("short_factor", "long_factor") else table.number(name)


def write_scaling(scaling: RopeScaling | None) -> dict[str, Any] | None:
    """The inverse of `read_scaling`. What has its default is left out where it may be."""
    if scaling is None:
        return None
    required, optional = _KINDS[scaling.kind]
    standard = {field.name: field.default for field in fields(RopeScaling)}
    written: dict[str, Any] = {"rope_type": scaling.kind}
    for ours in (*required, *optional):
        value = getattr(scaling, ours)
        if ours in (*required, "factor", "original_length") or value != standard[ours]:
            written[_NAMES[ours]] = list(value) if isinstance(value, tuple) else value
    return written
