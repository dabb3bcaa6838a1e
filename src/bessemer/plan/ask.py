"""What is asked of the planner without a recipe, or otherwise than a recipe has it: short names, turned into recipe keys.

`--gpus 2048xH100 --params 70B` and `--what-if gpus=1024,precision=fp8` go the same way: each short name stands for a key or
two of the recipe, and the recipe stays the one form in which a run is described.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from math import isfinite

from bessemer.errors import InputError
from bessemer.plan import shapes
from bessemer.recipe import Recipe, keys, parse

# Short name: the recipe's key, and how its value is read.
PLAIN = {
    "layers": ("model.layers", "count"),
    "width": ("model.width", "count"),
    "heads": ("model.heads", "count"),
    "kv_heads": ("model.kv_heads", "count"),
    "mlp_width": ("model.mlp_width", "count"),
    "vocabulary": ("model.vocabulary", "count"),
    "tokens": ("train.tokens", "count"),
    "seq": ("tokens.sequence_length", "count"),
    "batch": ("train.global_batch_tokens", "count"),
    "micro_batch": ("train.micro_batch", "count"),
    "precision": ("train.precision", "word"),
    "recompute": ("train.recompute", "word"),
    "device": ("cluster.device", "word"),
    "per_node": ("cluster.devices_per_node", "count"),
    "price": ("cluster.price", "number"),
    "stack": ("cluster.stack", "word"),
    "catalogue": ("cluster.catalogue", "word"),
    "replicate": ("parallel.replicate", "count"),
    "shard": ("parallel.shard", "count"),
    "tensor": ("parallel.tensor", "count"),
    "pipeline": ("parallel.pipeline", "count"),
    "context": ("parallel.context", "count"),
    "virtual": ("parallel.virtual", "count"),
    "schedule": ("parallel.schedule", "word"),
    "zero": ("parallel.zero", "count"),
}
ALIASES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "shard", "sequence": "seq", "devices": "gpus"}
OWN = ("model", "params", "gpus")  # stand for several keys
WAYS = ("replicate", "shard", "tensor", "pipeline", "context")
SUFFIXES = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12, "": 1.0}
EMPTY = '[run]\nname = "plan"\n'
DEFAULT_SEQUENCE, DEFAULT_VOCABULARY = 4096, 128_256


def number(text: str, name: str) -> float:
    """A number as people write it: 70e9, 70B, 1.4T, 16k. Raises InputError for what is none, or not above 0."""
    found = re.fullmatch(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([kKmMbBgGtT]?)\s*", text)
    value = float(found[1].replace(",", "").replace("_", "")) * SUFFIXES[found[2].lower()] if found else float("nan")
    if not isfinite(value):
        raise InputError(f"{name}: {text!r} is not a number; write it like 2048, 70e9, 70B or 1.4T")
    if value <= 0:
        raise InputError(f"{name}: {text} must be above 0")
    return value


def count(text: str, name: str) -> int:
    """A whole number as people write it. Raises InputError."""
    value = number(text, name)
    if value != round(value):
        raise InputError(f"{name}: {text} is not a whole number")
    return int(value)


def recipe_of(asked: Mapping[str, str], overrides: tuple[str, ...] = ()) -> Recipe:
    """A recipe that holds only what was asked: short names (see PLAIN, OWN) to their values, and `key=value` overrides."""
    if "gpus" not in asked and "device" not in asked:
        raise InputError(
            "plan: on what? add --gpus 2048xH100, or --gpus 8xA100-80GB; `bessemer plan --devices` lists them"
        )
    if not {"model", "params", "layers"} & set(asked):
        raise InputError("plan: which model? add --params 70B, --model llama3-70b, or --layers, --width and --heads")
    values = overrides_of({"seq": str(DEFAULT_SEQUENCE), "vocabulary": str(DEFAULT_VOCABULARY), **_shape_first(asked)})
    if not {ALIASES.get(name, name) for name in asked} & set(WAYS):
        values["parallel.auto"] = "true"
    recipe = parse(EMPTY, "plan", [*(f"{key}={value}" for key, value in values.items()), *overrides])
    return filled(recipe, {ALIASES.get(name, name) for name in asked})


def overrides_of(asked: Mapping[str, str]) -> dict[str, str]:
    """Recipe keys and their values, as TOML writes them, for short names or recipe keys. Raises InputError for unknown ones."""
    found: dict[str, str] = {}
    for given, text in asked.items():
        name = ALIASES.get(given.replace("-", "_"), given.replace("-", "_"))
        if name in PLAIN:
            key, kind = PLAIN[name]
            found[key] = (
                f'"{text}"'
                if kind == "word"
                else f"{number(text, given)!r}"
                if kind == "number"
                else str(count(text, given))
            )
        elif name == "gpus":
            found |= _gpus(text, given)
        elif name == "model":
            found |= _shape(shapes.by_name(text))
        elif name == "params":
            found |= _shape(shapes.by_parameters(number(text, given), int(asked.get("vocabulary", DEFAULT_VOCABULARY))))
        elif given in keys():
            found[given] = text
        else:
            known = [*PLAIN, *ALIASES, *OWN]
            near = difflib.get_close_matches(given, [*known, *keys()], n=2, cutoff=0.5)
            raise InputError(
                f"{given}: no such setting"
                + (f"; did you mean {' or '.join(near)}?" if near else f"; possible: {', '.join(known)}")
            )
    return found


def filled(recipe: Recipe, asked: set[str]) -> Recipe:
    """The recipe with `shard` so that its layout fills the devices of [cluster], where neither shard nor replicate was asked."""
    layout, devices = recipe.parallel, recipe.cluster.devices
    if layout.auto or devices is None or layout.world == devices or {"shard", "replicate"} & asked:
        return recipe
    rest = layout.tensor * layout.pipeline * layout.context
    if devices % rest:
        raise InputError(
            f"parallel: tensor x pipeline x context = {rest} does not divide {devices:,} devices; take ways whose product is a "
            "divisor, or let the planner choose (parallel.auto = true)"
        )
    copies = layout.replicate if devices % (rest * layout.replicate) == 0 and layout.shard > 1 else 1
    if layout.shard == 1 and layout.replicate > 1:
        changed = {"replicate": devices // rest}
    else:
        changed = {"replicate": copies, "shard": devices // rest // copies}
    return recipe.model_copy(update={"parallel": layout.model_copy(update=changed)})


def _gpus(text: str, name: str) -> dict[str, str]:
    """2048xH100, or 1024 alone."""
    amount, _, device = text.partition("x")
    found = {"cluster.devices": str(count(amount, name))}
    if device:
        found["cluster.device"] = f'"{device.strip()}"'
    return found


def _shape_first(asked: Mapping[str, str]) -> dict[str, str]:
    """The named shape before single dimensions, which change it."""
    return dict(sorted(asked.items(), key=lambda item: item[0] not in ("model", "params")))


def _shape(values: Mapping[str, object]) -> dict[str, str]:
    shown = {True: "true", False: "false"}
    return {
        f"model.{key}": shown[value]
        if isinstance(value, bool)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
        for key, value in values.items()
    }
