"""Requests to the planner: `--gpus`, `--params`, `--what-if` and other short names, translated to recipe keys.

`--gpus 2048xH100 --params 70B` and `--what-if gpus=1024,precision=fp8` work the same way: each short name sets one or
two recipe keys, so the recipe remains the only description of a run.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import tomli_w

from bessemer.common.errors import InputError
from bessemer.model.config import ModelConfig
from bessemer.plan import devices, shapes
from bessemer.plan.plan_result import PlanResult
from bessemer.recipe import Parallel, Recipe, keys, parse
from bessemer.recipe.parallel import AXES

SIZES = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocabulary")
# Short names with their recipe key and the form of the value: a whole number, a price, or a word.
PLAIN = {
    **{name: (f"model.{name}", "count") for name in SIZES if name != "head_dim"},
    "tokens": ("train.tokens", "count"),
    "seq": ("tokens.sequence_length", "count"),
    "batch": ("train.global_batch_tokens", "count"),
    "micro_batch": ("train.micro_batch", "count"),
    "precision": ("train.precision", "word"),
    "recompute": ("train.recompute", "word"),
    "device": ("cluster.device", "word"),
    "per_node": ("cluster.devices_per_node", "count"),
    "price": ("cluster.price", "price"),
    "framework": ("cluster.framework", "word"),
    "catalogue": ("cluster.catalogue", "word"),
    **{name: (f"parallel.{name}", "count") for name in (*AXES, "virtual")},
    "schedule": ("parallel.schedule", "word"),
    "zero": ("parallel.zero", "count"),
}
ALIASES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "shard", "sequence": "seq", "devices": "gpus"}
OWN = ("model", "params", "gpus")  # short names that set several keys
EMPTY_RECIPE = '[run]\nname = "plan"\n'
DEFAULT_SEQUENCE, DEFAULT_VOCABULARY = 4096, 128_256
DEFAULT_SIZES = f"[tokens]\nsequence_length = {DEFAULT_SEQUENCE}\n[model]\nvocabulary = {DEFAULT_VOCABULARY}\n"
SEQUENCES = "tokens.sequence_length"
OPENED = ("replicate", "shard")  # keys that the planner chooses if a recipe's layout does not fill the devices


@dataclass(frozen=True)
class PlanRequest:
    """A request to the planner.

    Attributes:
        recipe: The recipe to plan, as a draft.
        model: A published shape with options that recipes have no keys for; None: the recipe's model.
        notes: Assumptions and changes that a reader of the plan must know.
        is_open: True if the request comes without a recipe file.
        given: Recipe keys that the command line sets.
        values: Tables of the recipe before its layout was left to the planner.
    """

    recipe: Recipe
    model: ModelConfig | None = None
    notes: tuple[str, ...] = ()
    is_open: bool = False
    given: frozenset[str] = frozenset()
    values: Mapping[str, Any] = field(default_factory=dict)


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


READ = {"count": count, "price": dollars}


def from_options(asked: Mapping[str, str], overrides: tuple[str, ...] = ()) -> PlanRequest:
    """Build a request from short names (see PLAIN, OWN) and `key=value` overrides, without a recipe."""
    require_one_value(asked, overrides)
    plain = _spelled_out(asked)
    named = {override.partition("=")[0] for override in overrides}
    if "model" in plain:
        shapes.model(plain["model"])
    if not {"gpus", "device"} & set(plain) and "cluster.device" not in named:
        raise InputError("plan: on what? add --gpus 2048xH100; `bessemer plan --devices` lists the devices")
    if not {"model", "params", "layers"} & set(plain) and not any(name.startswith("model.") for name in named):
        raise InputError(f"plan: which model? add --params 70B, --model llama-3-70b, or {shapes.DIMENSIONS}")
    if "parallel.auto" not in named:
        overrides = (*overrides, "parallel.auto=true")  # keeps the given layout fields and chooses the others
    text = EMPTY_RECIPE if {"model", "params"} & set(plain) else EMPTY_RECIPE + DEFAULT_SIZES
    return replace(_made(tomllib.loads(text), None, asked, overrides), is_open=True)


def with_changes(of: PlanRequest, asked: Mapping[str, str], overrides: tuple[str, ...] = ()) -> PlanRequest:
    """Build a changed request from short names or recipe keys with their values.

    `model` and `params` replace [model], except keys of it that the command line sets. They keep the sequence length of
    the command line or the recipe.
    """
    require_one_value(asked, overrides)
    values, kept = {**(of.values or _tables(of.recipe))}, frozenset[str]()
    if {"model", "params"} & {_plain_name(name) for name in asked}:
        kept = frozenset(key for key in of.given if key.startswith("model."))
        values["model"] = {key: value for key, value in values.get("model", {}).items() if f"model.{key}" in kept}
        if SEQUENCES in of.given or (not of.is_open and "sequence_length" in values.get("tokens", {})):
            kept |= {SEQUENCES}
    made = _made(values, of.model, asked, overrides, kept, of.given)
    before, after = of.recipe.cluster, made.recipe.cluster
    notes = of.notes
    if before.price is not None and "cluster.price" not in made.given and before.device not in (None, after.device):
        notes = (*notes, f"the price is the catalogue's, if any, of {after.device}; --price sets one")
        made = replace(made, recipe=made.recipe.changed(cluster={"price": None}))
    return replace(made, is_open=of.is_open, notes=notes, given=of.given | made.given)


def from_recipe(
    read: Callable[[Sequence[str], bool], Recipe], asked: Mapping[str, str], overrides: Sequence[str] = ()
) -> PlanRequest:
    """Build a request from a recipe with short names and `key=value` overrides on top.

    `read` loads the recipe with some of the overrides, as a draft if others follow.
    """
    require_one_value(asked, tuple(overrides))
    is_shaped = bool({"model", "params"} & {_plain_name(name) for name in asked})
    # [model] overrides of the command line apply to the shape that it names, and may contradict the recipe's model.
    on_top = [one for one in overrides if _key(one) in _WITH_DEVICES or (is_shaped and _key(one).startswith("model."))]
    others = [one for one in overrides if one not in on_top]
    changes = {**asked, **{_key(one): one.partition("=")[2] for one in on_top}}
    recipe = read(others, bool(changes))
    return with_changes(PlanRequest(recipe, given=frozenset(map(_key, others))), changes)


# Keys that are validated only when the devices are known.
_WITH_DEVICES = {
    *(f"parallel.{axis}" for axis in AXES), "cluster.devices", "train.global_batch_tokens", "train.micro_batch",
}  # fmt: skip


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _tables(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True, by_alias=True)


def _made(
    values: Mapping[str, Any], model: ModelConfig | None, asked: Mapping[str, str], overrides: tuple[str, ...],
    kept: frozenset[str] = frozenset(), given: frozenset[str] = frozenset(),
) -> PlanRequest:  # fmt: skip
    """Build a request from changed recipe tables.

    `model` is the shape before the changes, `kept` has the keys that `model` and `params` do not replace, and `given`
    those that the command line set before.
    """
    asked = _spelled_out(asked)
    typed = recipe_keys(asked) | {_key(one): one.partition("=")[2] for one in overrides}

    def value_of(key: str) -> Any:
        section, _, leaf = key.partition(".")
        return typed.get(key, values.get(section, {}).get(leaf))

    def number_of(key: str) -> int | None:
        found = value_of(key) if key in typed or key in kept else None
        return None if found is None else count(str(found), key)

    shape = next((name for name in ("model", "params") if name in asked), None)
    if shape is not None:
        what = asked[shape] if shape == "model" else number(asked[shape], shape)
        model = shapes.model(what, number_of("model.vocabulary"), number_of(SEQUENCES))
    if "batch" in asked:
        length = number_of(SEQUENCES) or (model.sequence_length if model is not None else None)
        asked["batch"] = str(_batch(asked["batch"], length or value_of(SEQUENCES) or DEFAULT_SEQUENCE))
    set_keys = {key: value for key, value in recipe_keys(asked, model).items() if key in typed or key not in kept}
    changes = [f"{key}={value}" for key, value in set_keys.items()]
    opened = _opened(value_of, typed.keys() | given, "cluster.nodes" in typed or "nodes" in values.get("cluster", {}))
    tables = {**values}
    if opened is not None:
        changes.append("parallel.auto=true")
        tables["parallel"] = {key: value for key, value in values.get("parallel", {}).items() if key not in opened}
    recipe = parse(tomli_w.dumps(tables), "plan", [*changes, *overrides])
    closed = _tables(recipe)
    if opened is not None:
        parallel = {key: value for key, value in closed["parallel"].items() if key != "auto"}
        closed["parallel"] = {**values.get("parallel", {}), **parallel}
    if model is not None:
        sizes = {key: getattr(recipe.model, key) for key in SIZES if getattr(recipe.model, key) is not None}
        options = _block_options(typed.keys() | (kept if shape is not None else set()), recipe)
        length = recipe.tokens.sequence_length
        if model.max_positions and "max_positions" not in options:
            options["max_positions"] = max(model.max_positions, length)
        model = model.with_changes(**sizes, **options, sequence_length=length)
    return PlanRequest(recipe, model, given=frozenset(typed), values=closed)


def _opened(value_of: Callable[[str], Any], typed: set[str], has_nodes: bool) -> list[str] | None:
    """Return the keys of [parallel] that the planner chooses again, or None if the layout stays unchanged.

    The planner also chooses all keys that are not given. A layout is left to the planner if it is empty, or does not
    fill the devices. A layout with `shard` or `replicate` is kept, unless the command line changes the devices.
    """
    if "parallel.auto" in typed or value_of("parallel.auto"):
        return None
    sizes = {axis: size for axis in AXES if (size := value_of(f"parallel.{axis}")) is not None}
    count, world = value_of("cluster.devices"), math.prod(map(int, sizes.values()))
    if count is None:
        return [] if has_nodes and not sizes else None
    if sizes and world == int(count):
        return None
    named = {f"parallel.{axis}" for axis in AXES} | {"cluster.devices"}
    if set(OPENED) & sizes.keys() and not named & typed:
        return None
    opened = list(OPENED)
    if len(sizes) == len(AXES):  # a resolved recipe of a run, whose default values nobody asked for
        opened += [key for key, default in Parallel().model_dump().items() if value_of(f"parallel.{key}") == default]
    return [key for key in opened if f"parallel.{key}" not in typed]


def _block_options(names: Iterable[str], recipe: Recipe) -> dict[str, object]:
    """Return the options of a shape's block that recipe keys change, such as model.window.

    Raises InputError for keys that replace a whole block.
    """
    plain = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    if whole := {"family", "from"} & set(plain):
        raise InputError(f"model.{min(whole)}: --model and --params have their own block; give {shapes.DIMENSIONS}")
    known = {each.name for each in fields(ModelConfig)} - set(SIZES) - {"rope_scaling", "window_rope_scaling"}
    return {name: getattr(recipe.model, name) for name in plain if name in known}


def require_one_value(asked: Mapping[str, str], overrides: tuple[str, ...] = ()) -> None:
    """Raise InputError if short names, recipe keys and `key=value` overrides set one thing twice."""
    setters: dict[str, str] = {}
    rows = [(f"{name}={text}", {_plain_name(name): text}) for name, text in asked.items()]
    rows += [(f"--set {one}", {_key(one): one.partition("=")[2]}) for one in overrides]
    for spelled, setting in rows:
        name = next(iter(setting))
        is_short = name in PLAIN or name == "gpus"
        for key in ("model",) if name in ("model", "params") else recipe_keys(setting) if is_short else (name,):
            if key in setters and not (spelled.startswith("--set") and setters[key].startswith("--set")):
                raise InputError(f"plan: {setters[key]} and {spelled} set the same thing; give one of the two")
            setters[key] = spelled


def _spelled_out(asked: Mapping[str, str]) -> dict[str, str]:
    """Replace aliases by their full names; `dp` is all data-parallel ranks, so it sets `replicate` to 1."""
    found = {_plain_name(name): text for name, text in asked.items()}
    return {**found, **({"replicate": "1"} if "dp" in asked and "replicate" not in found else {})}


def _plain_name(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _batch(text: str, length: int) -> int:
    """Return the tokens of a batch, in whole sequences if the text is rounded.

    A rounded number such as 4M becomes the nearest power of two of sequences if that is within a tenth, as usually
    intended. A text that ends in a digit stays unchanged.
    """
    tokens = count(text, "batch")
    if text.strip()[-1].isdigit():
        return tokens
    power = length << max(round(math.log2(tokens / length)), 0)
    return power if abs(power / tokens - 1) < 0.1 else max(round(tokens / length), 1) * length


def recipe_keys(asked: Mapping[str, str], model: ModelConfig | None = None) -> dict[str, str]:
    """Translate the options of `bessemer plan` to recipe keys with TOML values.

    The names of `asked` are options, such as `tp`, or whole recipe keys. `model` is the model that the option `model` or
    `params` selects. Raises InputError for unknown names.
    """
    found: dict[str, str] = {}
    if model is not None and {"model", "params"} & set(asked):
        found = {f"model.{key}": str(getattr(model, key)) for key in SIZES}
        found |= {SEQUENCES: str(model.sequence_length)}
        found |= {"model.tie_embeddings": str(model.tie_embeddings).lower(), "model.family": '"llama"'}
    for name, text in asked.items():
        if name in PLAIN:
            key, kind = PLAIN[name]
            found[key] = str(READ[kind](text, name)) if kind in READ else f'"{text}"'
        elif name == "gpus":
            number_of, device = devices_of(text)
            found |= {"cluster.devices": str(number_of)} | ({"cluster.device": f'"{device}"'} if device else {})
        elif name in OWN:
            continue
        elif name in keys():
            found[name] = text
        else:
            known = ", ".join([*PLAIN, *ALIASES, *OWN])
            raise InputError(f"{name}: no such setting; possible: {known}, or a recipe key")
    return found


def devices_of(text: str) -> tuple[int, str | None]:
    """Parse `2048xH100` to number and device name, or `1024` to the number alone.

    Raises InputError that shows the form.
    """
    found = _GPUS.fullmatch(text.strip())
    if found is None:
        raise InputError(f"gpus: {text!r} has no number of devices in front of one kind of device; write it as 8xH100")
    return count(found[1], "gpus"), found[2]


_GPUS = re.compile(r"([0-9][0-9_,.]*(?:e[0-9]+)?[kKmM]?)\s*(?:[x×*]\s*([^,;+]*[^,;+\s]))?")


def is_device(text: str) -> bool:
    """Return True for the name of a device without a number in front."""
    return _GPUS.fullmatch(text.strip()) is None and devices.match(text, devices.catalogue()) is not None


def with_what_if(asked: PlanRequest, text: str) -> PlanRequest:
    """Change a request by `name=value,name=value`. Raises InputError that names the what-if."""
    with _named(text):
        return with_changes(asked, _changes(text))


def plan_what_ifs(
    requests: Sequence[PlanRequest], texts: Sequence[str], plan: Callable[[PlanRequest], PlanResult]
) -> list[PlanResult]:
    """Return the plan of each request. Raises InputError that names the what-if if one is impossible."""
    found = []
    for request, text in zip(requests, texts, strict=True):
        with _named(text):
            found.append(plan(request))
    return found


def _changes(text: str) -> dict[str, str]:
    """Parse `name=value,name=value` to a dictionary."""
    changes: dict[str, str] = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = one.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise InputError("write it as name=value,name=value, for example gpus=1024,precision=fp8")
        if name.strip() in changes:
            raise InputError(f"{name.strip()} stands there twice; give it once")
        changes[name.strip()] = value.strip()
    if not changes:
        raise InputError("what? for example gpus=1024, or precision=fp8,tp=4")
    return changes


@contextmanager
def _named(text: str) -> Iterator[None]:
    """Prefix an InputError with the what-if that caused it."""
    try:
        yield
    except InputError as error:
        what = str(error).removeprefix("plan: ").removeprefix(f"{text.strip()}: ")
        raise InputError(f"{f'--what-if {text.strip()}'.rstrip()}: {what}") from None
