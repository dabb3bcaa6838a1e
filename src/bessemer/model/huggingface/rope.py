"""Rules for rotary positions in config.json: the base and the scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bessemer.model.config import ModelConfig
from bessemer.model.huggingface.rules import GLOBAL, WINDOWED, ConfigRule, ForeignConfig, Values, unless
from bessemer.recipe.model import KEYS, RopeScaling

ROPE_BASE = 10_000.0  # the default of transformers if config.json has none
# Maps our names of a scaling's values to theirs, if they differ.
_SCALING_KEYS = {
    "original_length": "original_max_position_embeddings", "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
}  # fmt: skip
# Keys of each kind in config.json: those that it must have, and those that it may have.
_SCALING_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_frequency", "high_frequency"), ("original_length",)),
    "yarn": ((), ("factor", *KEYS["yarn"])),
    "longrope": (("short_factor", "long_factor"), ("factor", "original_length", "attention_factor")),
}
_READERS: dict[str, Callable[[ForeignConfig, str], Any]] = {
    "original_length": ForeignConfig.integer, "truncate": ForeignConfig.flag,
    "short_factor": ForeignConfig.numbers, "long_factor": ForeignConfig.numbers,
}  # fmt: skip


def read_scaling(table: ForeignConfig, positions: int, ignored: tuple[str, ...] = ()) -> RopeScaling | None:
    """Return the scaling that a table describes, or None for unscaled positions.

    Args:
        table: The table of config.json.
        positions: The model's max_position_embeddings, the default of the original length.
        ignored: Keys that other code reads.

    Raises:
        InputError: A kind or key is not supported, or a key is missing.
    """
    key = "rope_type" if table.raw("rope_type") is not None else "type"
    kind = table.text(key, "default")
    if kind not in _SCALING_KINDS:
        raise table.error(key, f"is not supported; use one of {', '.join(_SCALING_KINDS)}")
    required, optional = _SCALING_KINDS[kind]
    names = {ours: _SCALING_KEYS.get(ours, ours) for ours in required + optional}
    for name in table:
        if name not in {"rope_type", "type", "rope_theta", *ignored, *names.values()} and table.raw(name) is not None:
            raise table.error(name, f"is not supported with {key} = {kind!r}")
    if kind == "default":
        return None
    values: Values = {"kind": kind} | ({"original_length": positions} if kind != "linear" else {})
    for ours, name in names.items():
        if ours in required or table.raw(name) is not None:
            values[ours] = _READERS.get(ours, ForeignConfig.number)(table, name)
    if "factor" not in values:  # the ratio of the sequence length to that of the first training
        values["factor"] = positions / values["original_length"]
    return RopeScaling.model_construct(**values)  # `read_config` validates the whole model


def write_scaling(scaling: RopeScaling | None) -> Values | None:
    """Return the table that `read_scaling` reads, without optional values that have their default."""
    if scaling is None:
        return None
    required, optional = _SCALING_KINDS[scaling.kind]
    changed = scaling.model_dump(mode="json", exclude_defaults=True)
    written: Values = {"rope_type": scaling.kind}
    for ours in required + optional:
        if ours in (*required, "factor", "original_length", *changed):
            written[_SCALING_KEYS.get(ours, ours)] = changed.get(ours, getattr(scaling, ours))
    return written


def same_rope(base: float = ROPE_BASE) -> ConfigRule:
    """Return the rule for rotary positions that are the same in all layers.

    It reads `rope_parameters` (transformers 5) or the older keys, which every version reads, and writes the older keys.
    `base` is the default if config.json has none.
    """

    def read(settings: ForeignConfig, values: Values) -> Values:
        table, older = settings.table("rope_parameters"), settings.table("rope_scaling")
        positions = values["max_positions"]
        if list(table) and list(older) and read_scaling(table, positions) != read_scaling(older, positions):
            raise settings.error("rope_scaling", "differs from rope_parameters; remove one of them")
        table = table if list(table) else older
        source = table if table.raw("rope_theta") is not None else settings
        scaling = read_scaling(table, positions)
        stretched = round(positions * scaling.factor) if scaling and scaling.kind == "dynamic" else positions
        return {"rope_theta": source.number("rope_theta", base), "rope_scaling": scaling, "max_positions": stretched}

    def write(config: ModelConfig) -> Values:
        written = {"rope_theta": config.rope_theta, "rope_scaling": write_scaling(config.rope_scaling)}
        if config.rope_scaling is not None and config.rope_scaling.kind == "dynamic":
            written["max_position_embeddings"] = config.rope_scaling.original_length
        return written

    return ConfigRule(("rope_theta", "rope_scaling", "rope_parameters"), read, write)


def rope_by_layer_type(keys: Sequence[str], bases: Sequence[float], has_rope_scaling: bool = False) -> ConfigRule:
    """Return the rule for rotary positions with a separate base for layers with a window.

    Args:
        keys: The keys of older versions for layers without a window and for those with one, which may be the same.
        bases: The defaults of transformers, in the same order.
        has_rope_scaling: True if older versions state the scaling of layers without a window under rope_scaling.
    """

    def read(settings: ForeignConfig, values: Values) -> Values:
        tables, positions = settings.table("rope_parameters"), values["max_positions"]
        options: Values = {}
        for prefix, kind, older, base in zip(("", "window_"), (GLOBAL, WINDOWED), keys, bases, strict=True):
            table = tables.table(kind)
            source, key = (table, "rope_theta") if table.raw("rope_theta") is not None else (settings, older)
            options[f"{prefix}rope_theta"] = source.number(key, base)
            options[f"{prefix}rope_scaling"] = read_scaling(table, positions)
        for key in tables:
            if key not in (GLOBAL, WINDOWED):
                raise tables.error(key, f"is not supported; use a table for {GLOBAL} and one for {WINDOWED}")
        if has_rope_scaling and list(scaling := settings.table("rope_scaling")):
            if options["rope_scaling"] is not None:
                raise settings.error("rope_scaling", "is set together with rope_parameters; remove one of them")
            options["rope_scaling"] = read_scaling(scaling, positions)
        return options

    def write(config: ModelConfig) -> Values:
        same = config.window_rope_theta is None
        thetas = (config.rope_theta, config.rope_theta if same else config.window_rope_theta)
        scalings = (config.rope_scaling, config.rope_scaling if same else config.window_rope_scaling)
        written: Values = dict(zip(reversed(keys), reversed(thetas), strict=True))
        # transformers 5 reads a key that both kinds of layers share for those without a window only.
        is_read_by_all = keys[0] != keys[1] or thetas == tuple(bases)
        if has_rope_scaling and scalings[1] is None and is_read_by_all:
            return written | ({} if scalings[0] is None else {"rope_scaling": write_scaling(scalings[0])})
        if scalings != (None, None) or not is_read_by_all:
            written["rope_parameters"] = {
                kind: {"rope_theta": theta, **(write_scaling(scaling) or {"rope_type": "default"})}
                for kind, theta, scaling in zip((GLOBAL, WINDOWED), thetas, scalings, strict=True)
            }
        return written

    known = ("rope_parameters", *keys, *(("rope_scaling",) if has_rope_scaling else ()))
    return ConfigRule(known, read, write, free=("window_rope_theta", "window_rope_scaling"))


_LENGTH, _FRACTION = "original_max_position_embeddings", "partial_rotary_factor"


def _read_phi_rope(settings: ForeignConfig, values: Values) -> Values:
    table = settings.table("rope_parameters")
    table = table if list(table) else settings.table("rope_scaling")
    renamed = {"su": "longrope", "yarn": "longrope"}  # names of earlier versions, as transformers reads them
    kind = table.raw("rope_type") or table.raw("type") or "default"
    keys = {key: table.raw(key) for key in table}
    keys["rope_type"] = renamed.get(kind, kind) if isinstance(kind, str) else kind
    if keys["rope_type"] not in ("default", "longrope"):
        key = "rope_type" if "rope_type" in table else "type"
        raise table.error(key, "is not supported for phi3; use longrope")
    if keys["rope_type"] == "longrope":
        keys[_LENGTH] = settings.integer(_LENGTH, table.integer(_LENGTH, 4096))
    scaling_table = ForeignConfig(settings.path, keys, "rope_scaling.")
    scaling = read_scaling(scaling_table, values["max_positions"], (_FRACTION, _LENGTH))
    return {
        "rope_theta": table.number("rope_theta", settings.number("rope_theta", ROPE_BASE)), "rope_scaling": scaling,
        "rotary_fraction": table.number(_FRACTION, settings.number(_FRACTION, 1.0)),
    }  # fmt: skip


PHI_ROPE = ConfigRule(  # longrope or no scaling, on a fraction of each head
    ("rope_theta", "rope_scaling", "rope_parameters", _LENGTH, _FRACTION),
    _read_phi_rope,
    lambda config: {
        "rope_theta": config.rope_theta, "rope_scaling": write_scaling(config.rope_scaling),
        _LENGTH: config.rope_scaling.original_length if config.rope_scaling else config.positions_length,
        _FRACTION: config.rotary_fraction,
    },
    obstacles=unless(
        lambda c: not c.rope_scaling or c.rope_scaling.kind == "longrope",
        'rope_scaling.kind = "longrope" instead of "{0.rope_scaling.kind}"',
    ),
    free=("rotary_fraction",),
)  # fmt: skip
