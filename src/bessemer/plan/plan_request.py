"""Requests to the planner: `--gpus`, `--params` and other short names, translated to recipe keys.

Each short name sets one or two recipe keys, so the recipe remains the only description of a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import tomli_w

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan import devices, shapes
from bessemer.recipe import Parallel, Recipe, parse
from bessemer.recipe.model import MIXTURE
from bessemer.recipe.parallel import AXES

# Short names with their recipe key and the form of the value: a whole number, a price, or a word.
KEYS = {
    "tokens": ("train.tokens", "count"),
    "seq": ("tokens.sequence_length", "count"),
    "batch": ("train.global_batch_tokens", "count"),
    "micro_batch": ("train.micro_batch", "count"),
    "precision": ("train.precision", "word"),
    "recompute": ("train.recompute", "word"),
    "price": ("cluster.price", "price"),
    "framework": ("cluster.framework", "word"),
    "catalogue": ("cluster.catalogue", "word"),
    "dp": ("parallel.shard", "count"),
    "tp": ("parallel.tensor", "count"),
    "pp": ("parallel.pipeline", "count"),
    "cp": ("parallel.context", "count"),
    "ep": ("parallel.expert", "count"),
    "zero": ("parallel.zero", "count"),
}
SHAPES = ("model", "params")  # short names that set the sizes of the model
SHORT_NAMES = (*SHAPES, "gpus", *KEYS)
SIZES = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocabulary")
DEFAULT_LENGTH, DEFAULT_IDS = "[tokens]\nsequence_length = 4096\n", "[model]\nvocabulary = 128_256\n"
IDS = {"tokenizer.vocabulary", "tokenizer.path"}  # keys that set the number of ids
SEQUENCES, BATCH = "tokens.sequence_length", "train.global_batch_tokens"
REOPENED = ("replicate", "shard")  # keys that the planner chooses if a recipe's layout does not fill the devices


@dataclass(frozen=True)
class PlanRequest:
    """A request to the planner.

    Attributes:
        recipe: The recipe to plan, in which values may be missing.
        model: A published model (shapes.py) with options that recipes have no keys for; None: the recipe's model.
        notes: Assumptions and changes that a reader of the plan must know.
        is_open: True if the request comes without a recipe file.
        set_keys: Recipe keys that the command line sets.
    """

    recipe: Recipe
    model: ModelConfig | None = None
    notes: tuple[str, ...] = ()
    is_open: bool = False
    set_keys: frozenset[str] = frozenset()


def number(text: str, name: str) -> float:
    """Parse a positive number such as 70e9, 70B, 1.4T or 16k. Raises InputError that names the setting."""
    try:
        return shapes.count_of(text)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def count(text: str, name: str) -> int:
    """Parse a positive whole number such as 70B or 16k. Raises InputError that names the setting."""
    value = number(text, name)
    if value != round(value):
        raise InputError(f"{name}: {text} is not a whole number")
    return int(value)


def dollars(text: str, name: str) -> float:
    """Parse positive dollars, with or without the sign: 2.5, $2M. Raises InputError that names the setting."""
    return number(text.strip().removeprefix("$"), name)


READ: dict[str, Callable[[str, str], object]] = {
    "count": count, "price": dollars, "word": lambda text, _: f'"{text}"',
}  # fmt: skip


def from_options(options: Mapping[str, str], overrides: Sequence[str] = ()) -> PlanRequest:
    """Build a request without a recipe, from command-line options and `key=value` overrides.

    `options` has values by short name, such as "gpus", "params" or "tp" (KEYS).
    """
    changes = {**options, **dict(map(_split, overrides))}
    if "model" in changes:
        shapes.model(changes["model"])
    if not {"gpus", "cluster.device"} & changes.keys():
        raise InputError("plan: no devices are given; add --gpus 2048xH100 (`bessemer plan --devices` lists devices)")
    if not names_model(changes):
        raise InputError(f"plan: no model is given; add --params 70B, --model llama-3-70b, or {shapes.DIMENSIONS}")
    sizes = DEFAULT_LENGTH + DEFAULT_IDS * IDS.isdisjoint(changes)
    text = '[run]\nname = "plan"\n' + sizes * set(SHAPES).isdisjoint(changes)
    # `auto` keeps the given layout fields and chooses the others.
    return with_changes(PlanRequest(parse(text, "plan"), is_open=True), {"parallel.auto": "true", **changes})


def from_recipe(
    read: Callable[[Sequence[str], bool], Recipe], options: Mapping[str, str], overrides: Sequence[str] = ()
) -> PlanRequest:
    """Build a request from a recipe, changed by command-line options (short name to value) and `key=value` overrides.

    `read(overrides, is_draft)` loads the recipe with some of the overrides; as a draft, values may be missing that the
    other changes fill in.
    """
    recipe_keys({**options, **dict(map(_split, overrides))})  # raises InputError for a value that is set twice
    is_shaped = bool(set(SHAPES) & options.keys())
    # [model] overrides of the command line apply to the shape that it names, and may contradict the recipe's model.
    keys = {_split(one)[0] for one in overrides}
    on_top = {key for key in keys if key in _WITH_DEVICES or (is_shaped and key.startswith("model."))}
    others = [one for one in overrides if _split(one)[0] not in on_top]
    changes = {**options, **{key: text for key, text in map(_split, overrides) if key in on_top}}
    return with_changes(PlanRequest(read(others, bool(changes)), set_keys=frozenset(keys - on_top)), changes)


# Keys that are validated only when the devices are known.
_WITH_DEVICES = {*(f"parallel.{axis}" for axis in AXES), "cluster.devices", BATCH, "train.micro_batch"}


def _split(override: str) -> tuple[str, str]:
    """Return the key and the value of an override."""
    key, _, text = override.partition("=")
    return key.strip(), text


def names_model(changes: Iterable[str]) -> bool:
    """Return True if any of these short names and recipe keys sets a model's size."""
    return not {*SHAPES, *(f"model.{name}" for name in ("layers", "width", "heads", "depth", "from"))}.isdisjoint(
        changes
    )


def with_changes(request: PlanRequest, changes: Mapping[str, str]) -> PlanRequest:
    """Return the request with changed values, by short name (KEYS) or recipe key.

    The short names `model` and `params` replace the [model] table, except those of its keys that the command line set
    before. The sequence length stays that of the command line or the recipe.
    """
    before, typed = request.recipe, recipe_keys(changes)
    if {"cluster.devices", "cluster.nodes"} <= typed.keys() | request.set_keys:
        raise InputError("cluster.nodes: --gpus sets the number of devices; set cluster.devices_per_node instead")
    tables = before.model_dump(mode="json", exclude_unset=True, exclude_none=True, by_alias=True)
    model, kept, of_shape = request.model, set[str](), dict[str, str]()

    def value_of(key: str) -> Any:
        section, _, leaf = key.partition(".")
        return typed.get(key, tables.get(section, {}).get(leaf))

    def given_number(key: str) -> int | None:
        return count(str(value_of(key)), key) if key in typed or key in kept else None

    if shape := next((name for name in SHAPES if name in changes), None):
        kept = {key for key in request.set_keys if key.startswith("model.") or key in IDS}
        _require_sizes(typed.keys() | kept)
        tables["model"] = {key: value for key, value in tables.get("model", {}).items() if f"model.{key}" in kept}
        kept |= {SEQUENCES} if "sequence_length" in tables.get("tokens", {}) else set()
        what = changes[shape] if shape == "model" else number(changes[shape], shape)
        ids = given_number("model.vocabulary") or given_number("tokenizer.vocabulary")
        model = shapes.model(what, ids, given_number(SEQUENCES))
        of_shape = {key: text for key, text in _shape_keys(model).items() if key not in kept}
    if "batch" in changes:
        length = of_shape.get(SEQUENCES) if SEQUENCES not in typed else typed[SEQUENCES]
        typed[BATCH] = str(rounded_batch(changes["batch"], int(length or before.tokens.sequence_length)))
    has_nodes = "cluster.nodes" in typed or "nodes" in tables.get("cluster", {})
    reopened = _reopened(value_of, typed.keys() | request.set_keys, has_nodes)
    if reopened is not None:
        typed["parallel.auto"] = "true"
        tables["parallel"] = {key: value for key, value in tables.get("parallel", {}).items() if key not in reopened}
    recipe = parse(tomli_w.dumps(tables), "plan", [f"{key}={text}" for key, text in {**of_shape, **typed}.items()])
    if model is not None:
        sizes = {key: getattr(recipe.model, key) for key in SIZES if getattr(recipe.model, key) is not None}
        options = _block_options(typed.keys() | kept, recipe)
        positions = recipe.tokens.sequence_length
        if model.max_positions and "max_positions" not in options:
            options["max_positions"] = max(model.max_positions, positions)
        model = model.with_changes(**sizes, **options, sequence_length=positions)
    notes, device = request.notes, recipe.cluster.device
    if (
        before.cluster.price is not None
        and "cluster.price" not in typed
        and before.cluster.device not in (None, device)
    ):
        notes = (*notes, f"the price is the catalogue's, if any, of {device}; --price sets one")
        recipe = recipe.changed(cluster={"price": None})
    return replace(request, recipe=recipe, model=model, notes=notes, set_keys=request.set_keys | typed.keys())


def _reopened(value_of: Callable[[str], Any], typed: set[str], has_nodes: bool) -> list[str] | None:
    """Return the keys of [parallel] that the planner chooses instead of the recipe, or None to keep the layout.

    `value_of` returns the requested value of a recipe key, `typed` are the keys on the command line, and `has_nodes` is
    True if the request gives `cluster.nodes`.

    The planner also chooses all keys that are not set. It chooses if the recipe's layout is empty, or does not fill the
    devices. A layout with `shard` or `replicate` is kept, unless the command line changes the devices.
    """
    if "parallel.auto" in typed or value_of("parallel.auto"):
        return None
    sizes = {axis: size for axis in AXES if (size := value_of(f"parallel.{axis}")) is not None}
    devices = value_of("cluster.devices")
    world = math.prod(int(size) for axis, size in sizes.items() if axis != "expert")
    if devices is None:
        return [] if has_nodes and not sizes else None
    if sizes and world == int(devices):
        return None
    named = {f"parallel.{axis}" for axis in AXES} | {"cluster.devices"}
    if set(REOPENED) & sizes.keys() and not named & typed:
        return None
    keys = list(REOPENED)
    if len(sizes) == len(AXES):  # a resolved recipe of a run, whose default values nobody chose
        keys += [key for key, default in Parallel().model_dump().items() if value_of(f"parallel.{key}") == default]
    return [key for key in keys if f"parallel.{key}" not in typed]


def _shape_keys(model: ModelConfig) -> dict[str, str]:
    """Return the recipe keys that describe a published model: its sizes and sequence length, with values as TOML text."""
    sizes = {f"model.{key}": str(getattr(model, key)) for key in SIZES} | {SEQUENCES: str(model.sequence_length)}
    return sizes | {"model.tie_embeddings": str(model.tie_embeddings).lower(), "model.family": '"llama"'}


def _require_sizes(names: set[str]) -> None:
    """Raise InputError for keys that contradict a shape: of the family, `model.from`, experts and another tokenizer."""
    of_shape = {"tokenizer.path", *(f"model.{key}" for key in ("family", "from", "experts", *MIXTURE))}
    if whole := of_shape & names:
        raise InputError(
            f"{min(whole)}: --model and --params set the block of the model; remove them and give {shapes.DIMENSIONS}"
        )


def _block_options(names: set[str], recipe: Recipe) -> dict[str, object]:
    """Return the model options, other than sizes, that the recipe sets with the keys in `names`, such as the window.

    They replace options of a published model.
    """
    plain = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    known = {each.name for each in fields(ModelConfig)} - set(SIZES) - {"rope_scaling", "window_rope_scaling"}
    return {name: getattr(recipe.model, name) for name in plain if name in known}


def rounded_batch(text: str, length: int) -> int:
    """Return the tokens of a batch that `text` gives.

    A number with a suffix, such as 4M, becomes the nearest power of two of sequences of `length` tokens if that is
    within a tenth, else the nearest number of whole sequences. A text that ends in a digit is taken exactly.
    """
    tokens = count(text, "batch")
    if text.strip()[-1].isdigit():
        return tokens
    power = length << max(round(math.log2(tokens / length)), 0)
    return power if abs(power / tokens - 1) < 0.1 else max(round(tokens / length), 1) * length


def recipe_keys(changes: Mapping[str, str]) -> dict[str, str]:
    """Translate changes by short name (KEYS) or recipe key to recipe keys with values as TOML text.

    The short names `model` and `params`, which set many keys, are left out. `dp` is the number of all data-parallel
    ranks, so it sets `shard` to this number and `replicate` to 1. Raises InputError for an unknown name, and if two
    names set the same key.
    """
    values: dict[str, str] = {}
    setters: dict[str, str] = {}
    for name, text in changes.items():
        if name in KEYS:
            key, kind = KEYS[name]
            pairs = {key: str(READ[kind](text, name))}
        elif name == "gpus":
            devices, device = devices_of(text)
            pairs = {"cluster.devices": str(devices)} | ({"cluster.device": f'"{device}"'} if device else {})
        elif name in SHAPES or "." in name:
            pairs = {"model" if name in SHAPES else name: text}
        else:
            raise InputError(f"{name}: no such setting; possible: {', '.join(SHORT_NAMES)}, or a recipe key")
        for key in pairs.keys() & setters.keys():
            raise InputError(f"plan: {setters[key]} and {name} = {text} set the same value; remove one of them")
        values |= pairs
        setters |= dict.fromkeys(pairs, f"{name} = {text}")
    if "dp" in changes:
        values.setdefault("parallel.replicate", "1")
    return {key: text for key, text in values.items() if key != "model"}


def devices_of(text: str) -> tuple[int, str | None]:
    """Parse `2048xH100` to number and device name, or `1024` to the number alone.

    Raises InputError that shows the form.
    """
    parts = _GPUS.fullmatch(text.strip())
    if parts is None:
        raise InputError(f"gpus: {text!r} is not a number of devices of one kind; write it as 8xH100")
    return count(parts[1], "gpus"), parts[2]


_GPUS = re.compile(r"([0-9][0-9_,.]*(?:e[0-9]+)?[kKmM]?)\s*(?:[x×*]\s*([^,;+]*[^,;+\s]))?")


def is_device(text: str) -> bool:
    """Return True for the name of a device without a number in front."""
    return _GPUS.fullmatch(text.strip()) is None and devices.match(text, devices.catalogue()) is not None
