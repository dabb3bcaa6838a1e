"""What is asked of the planner without a recipe, or otherwise than a recipe has it: short names, turned into recipe keys.

`--gpus 2048xH100 --params 70B` and `--what-if gpus=1024,precision=fp8` go the same way: each short name stands for a key or
two of the recipe, and the recipe stays the one form in which a run is described.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import tomli_w

from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.model.config import ModelConfig
from bessemer.plan import shapes
from bessemer.plan.request import PlanRequest, to_be_filled, with_layout
from bessemer.recipe import Recipe, keys, parse
from bessemer.recipe.parallel import AXES
from bessemer.recipe.section import Section
from bessemer.terminal import amount

# Short names of recipe keys, by the form of their value: a whole number, a price, a share, a ZeRO stage, or a word.
PLAIN = {
    **{
        name: (f"model.{name}", "count") for name in ("layers", "width", "heads", "kv_heads", "mlp_width", "vocabulary")
    },
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
    "headroom": ("cluster.headroom", "share"),
    "catalogue": ("cluster.catalogue", "word"),
    **{name: (f"parallel.{name}", "count") for name in (*AXES, "virtual")},
    "schedule": ("parallel.schedule", "word"),
    "zero": ("parallel.zero", "stage"),
}
ALIASES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "shard", "sequence": "seq", "devices": "gpus"}
OWN = ("model", "params", "gpus")  # stand for several keys
BUDGETS = ("flops", "days", "money")  # of which model and tokens are proposed
# Options that all what-ifs share with the first plan, and what they decide of it.
OF_FIRST_PLAN = {
    "odds": "the model and the tokens that the first plan has by the budget and its odds",
    "unique": "the tokens that differ in the first plan",
}
SIZES = ("layers", "width", "heads", "kv_heads", "head_dim", "mlp_width", "vocabulary")
EMPTY_RECIPE = '[run]\nname = "plan"\n'
DEFAULT_SEQUENCE, DEFAULT_VOCABULARY = 4096, 128_256
DEFAULT_SIZES = f"[tokens]\nsequence_length = {DEFAULT_SEQUENCE}\n[model]\nvocabulary = {DEFAULT_VOCABULARY}\n"
SEQUENCES = "tokens.sequence_length"


def number(text: str, name: str) -> float:
    """A number above 0 as people write it: 70e9, 70B, 1.4T, 16k. Raises InputError that names the setting."""
    try:
        return shapes.count_of(text)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None


def count(text: str, name: str) -> int:
    """A whole number as people write it. Raises InputError."""
    value = number(text, name)
    if value != round(value):
        raise InputError(f"{name}: {text} is not a whole number")
    return int(value)


def share(text: str, name: str) -> float:
    """A share from 0 to below 1, as 0.1 or 10%. Raises InputError."""
    plain = text.strip()
    try:
        value = float(plain.removesuffix("%")) / (100 if plain.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise InputError(
            f"{name}: {text!r} is no share of a device's memory; write it as 0.1 or 10%, from 0 to below 100%"
        )
    return value


def dollars(text: str, name: str) -> float:
    """A number of dollars above 0, with or without the sign: 2.5, $2M. Raises InputError."""
    return _dollars(text, name, "no number of dollars above zero; write it as 500k or $2M")


def price(text: str, name: str) -> float:
    """Dollars of one device for an hour, above 0: 2.5, $2.50, $2.50/h. Raises InputError."""
    plain = re.sub(r"\s*(?:/|per)\s*(?:(?:gpu|device)[- ]?)?(?:h|hr|hour)$", "", text.strip(), flags=re.IGNORECASE)
    return _dollars(plain, name, "no price; write dollars per device-hour, above zero, as 2.5 or $2.50/h", text)


def _dollars(plain: str, name: str, advice: str, text: str | None = None) -> float:
    """The number of `plain`. text: what was typed, where that is another. Raises InputError with the advice."""
    try:
        return shapes.count_of(plain.strip().removeprefix("$"))
    except InputError:
        raise InputError(f"{name}: {plain if text is None else text!r} is {advice}") from None


def days(text: str, name: str) -> float:
    """A number of days above 0, as 30, 0.5 or 30d. Raises InputError, for units of counts too: 1m would be a million."""
    found = re.fullmatch(r"(-?[0-9][0-9_,.]*(?:e[+-]?[0-9]+)?)\s*(?:d|days?)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise InputError(f"{name}: {text!r} is no number of days; write it as 30, 0.5 or 30d")
    return number(found[1], name)


def stage(text: str, name: str) -> int:
    """A ZeRO stage. Raises InputError."""
    if text.strip() not in ("1", "2", "3"):
        raise InputError(f"{name}={text}: give 1 (optimizer state is divided), 2 (gradients too) or 3 (weights too)")
    return int(text)


READ = {"count": count, "price": price, "share": share, "stage": stage}


def alone(asked: Mapping[str, str], overrides: tuple[str, ...] = ()) -> PlanRequest:
    """What short names (see PLAIN, OWN) and `key=value` overrides say without a recipe."""
    require_one_value(asked, overrides)
    plain = _spelled_out(asked)
    named = {override.partition("=")[0] for override in overrides}
    if "model" in plain:
        shapes.model(plain["model"])
    if not {"gpus", "device"} & set(plain) and "cluster.device" not in named:
        raise InputError(
            "plan: on what? add --gpus 2048xH100, or --gpus 8xA100-80GB; `bessemer plan --devices` lists them"
        )
    if not {"model", "params", "layers"} & set(plain) and not any(name.startswith("model.") for name in named):
        raise InputError(
            "plan: which model? add --params 70B, --model llama-3-70b, or its dimensions, as --set model.layers=32 "
            "--set model.width=4096 --set model.heads=32"
        )
    if "parallel.auto" not in named:
        overrides = (*overrides, "parallel.auto=true")  # what is given of a layout is kept, the rest is chosen
    text = EMPTY_RECIPE if {"model", "params"} & set(plain) else EMPTY_RECIPE + DEFAULT_SIZES
    return with_layout(replace(_made(text, None, asked, overrides), is_open=True))


def with_changes(of: PlanRequest, asked: Mapping[str, str], overrides: tuple[str, ...] = ()) -> PlanRequest:
    """The same with other settings: short names or recipe keys to their values. `model` and `params` replace [model], but for
    what the command line sets of it, and not the sequences of the command line or of the recipe."""
    require_one_value(asked, overrides)
    recipe, own = of.written or of.recipe, of.own
    values = recipe.model_dump(mode="json", exclude_unset=True, exclude_none=True, by_alias=True)
    if not {"model", "params"} & {_plain_name(name) for name in asked}:
        made, notes = _made(tomli_w.dumps(values), of.model, asked, overrides), of.notes
    else:
        of_model = {".".join(key.split(".")[:2]) for key in of.given if key.startswith("model.")}
        values["model"] = {key: value for key, value in values.get("model", {}).items() if f"model.{key}" in of_model}
        has_sequences = own is not None and "sequence_length" in own.tokens.model_fields_set
        kept = of_model | (of.given & {SEQUENCES}) | ({SEQUENCES} if has_sequences else set())
        made = _made(tomli_w.dumps(values), of.model, asked, overrides, frozenset(kept))
        notes = _replaced(of, made, asked)
    made = _without_price_of_another(of, made)
    return with_layout(
        replace(made, is_open=of.is_open, own=own, notes=(*notes, *made.notes), given=of.given | made.given)
    )


def _without_price_of_another(of: PlanRequest, made: PlanRequest) -> PlanRequest:
    """Without the price that was given of another device: the new one's own is in the catalogue, or it has none."""
    before, after = of.recipe.cluster, made.recipe.cluster
    if before.price is None or "cluster.price" in made.given or before.device in (None, after.device):
        return made
    given = f"${before.price:g} is of {before.device}"
    note = f"the price is the catalogue's, if any, of {after.device}, since {given}; --price sets one"
    return replace(made, recipe=made.recipe.changed(cluster={"price": None}), notes=(*made.notes, note))


def _replaced(of: PlanRequest, made: PlanRequest, asked: Mapping[str, str]) -> tuple[str, ...]:
    """What `model` or `params` replaces, and what of the command line it leaves as it is."""
    named = {_plain_name(name): text for name, text in asked.items()}
    name = named.get("model") or f"{named['params']} by rule"
    own, recipe, before = of.own, made.recipe, (of.written or of.recipe).tokens.sequence_length
    length, notes = recipe.tokens.sequence_length, list[str]()
    keeps = length == before and SEQUENCES not in of.given | made.given
    if own is not None and (keys_of := [key for key in _set_keys(own.model) if f"model.{key}" not in of.given]):
        sequences = f", with the recipe's sequences of {length:,}" if keeps else ""
        notes.append(f"the model is {name} in place of the recipe's [model] ({', '.join(keys_of)}){sequences}")
    if length != before and SEQUENCES not in made.given:
        notes.append(f"sequences of {length:,}, as {name} has them, in place of {before:,}")
    if kept := sorted(key for key in of.given - made.given if key.startswith("model.")):
        notes.append(f"{' and '.join(kept)} of the command line stay{'s' * (len(kept) == 1)}")
    return tuple(notes)


def of_recipe(
    read: Callable[[Sequence[str], bool], Recipe], asked: Mapping[str, str], overrides: Sequence[str] = ()
) -> PlanRequest:
    """A recipe with short names and `key=value` overrides on top of it. read: loads it with some of the overrides, as a draft
    where others follow."""
    require_one_value(asked, tuple(overrides))
    is_shaped = bool({"model", "params"} & {_plain_name(name) for name in asked})
    # [model] of the command line is of the shape that it names, and need not go with the recipe's.
    on_top = [one for one in overrides if _key(one) in _WAYS or (is_shaped and _key(one).startswith("model."))]
    others = [one for one in overrides if one not in on_top]
    changes = {**asked, **{_key(one): one.partition("=")[2] for one in on_top}}
    recipe = read(others, bool(changes))
    start = PlanRequest(recipe, own=recipe, given=frozenset(map(_key, others)))
    return with_changes(start, changes) if changes else with_layout(start)


_WAYS = {
    *(f"parallel.{axis}" for axis in AXES),
    "train.global_batch_tokens",
    "train.micro_batch",
}  # read once devices are known


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _made(
    text: str, model: ModelConfig | None, asked: Mapping[str, str], overrides: tuple[str, ...],
    kept: frozenset[str] = frozenset(),
) -> PlanRequest:  # fmt: skip
    """A recipe's text with changes. model: the shape that it has had; kept: keys of the text that `model` and `params` leave."""
    written = {_plain_name(name): name for name in asked}
    asked = _spelled_out(asked)
    texts, notes, before = dict(asked), tuple[str, ...](), tomllib.loads(text)
    typed = overrides_of(asked) | {_key(one): one.partition("=")[2] for one in overrides}

    def number_of(key: str) -> int | None:
        section, _, leaf = key.partition(".")
        found = typed.get(key, before.get(section, {}).get(leaf) if key in kept else None)
        return None if found is None else count(str(found), key)

    shape = next((name for name in ("model", "params") if name in asked), None)
    if shape is not None:
        what = asked[shape] if shape == "model" else number(asked[shape], shape)
        model = shapes.model(what, number_of("model.vocabulary"), number_of(SEQUENCES))
        notes = shapes.namesakes(model.parameters) if shape == "params" else ()
    if "batch" in asked:
        length = number_of(SEQUENCES) or (model.sequence_length if model is not None else None)
        asked["batch"] = str(_batch(asked["batch"], length or _length(before)))
    set_keys = {key: value for key, value in overrides_of(asked, model).items() if key in typed or key not in kept}
    changes = [f"{key}={value}" for key, value in set_keys.items()]
    try:
        recipe = parse(text, "plan", [*changes, *overrides])
    except InputError as error:
        if (to_fill := to_be_filled(text, [*changes, *overrides], typed)) is None:
            said = str(error)  # of keys that these names set
            for name in asked:
                for key, value in overrides_of({name: asked[name]}, model).items():
                    spelled = f"{written[name]}={texts[name]}" if name in written else ""
                    said = said.replace(f"--set {key}={value}", spelled).replace(" : ", ": ")
            raise InputError(said) from None
        recipe = to_fill
    if model is not None:
        sizes = {key: getattr(recipe.model, key) for key in SIZES if getattr(recipe.model, key) is not None}
        options = _block_options(typed.keys() | (kept if shape is not None else set()), recipe)
        length = recipe.tokens.sequence_length
        if model.max_positions and "max_positions" not in options:
            options["max_positions"] = max(model.max_positions, length)
        shaped, model = model, model.with_changes(**sizes, **options, sequence_length=length)
        if shape == "params" and abs(model.parameters / shaped.parameters - 1) > 0.01:
            notes = (
                *notes,
                f"the shape by rule has {amount(shaped.parameters)} parameters; with the dimensions that are set, "
                f"{amount(model.parameters)}",
            )
    return PlanRequest(recipe, model, notes, given=frozenset(typed))


def _set_keys(section: Section) -> list[str]:
    """Keys that a recipe gives of a table, by its names."""
    return [info.alias or name for name, info in type(section).model_fields.items() if name in section.model_fields_set]


def _block_options(names: Iterable[str], recipe: Recipe) -> dict[str, object]:
    """What of a shape's block recipe keys change, as model.window. Raises InputError for keys that stand for a whole block."""
    plain = [name.removeprefix("model.") for name in names if name.startswith("model.")]
    if whole := {"family", "from"} & set(plain):
        raise InputError(
            f"model.{min(whole)}: --model and --params have a block of their own; give the model by its dimensions, as --set "
            "model.layers=32 --set model.width=4096 --set model.heads=32"
        )
    known = {each.name for each in fields(ModelConfig)} - set(SIZES) - {"rope_scaling", "window_rope_scaling"}
    return {name: getattr(recipe.model, name) for name in plain if name in known}


def require_one_value(asked: Mapping[str, str], overrides: tuple[str, ...] = ()) -> None:
    """Raises InputError where short names, recipe keys and `key=value` overrides set one thing twice."""
    setters: dict[str, str] = {}
    rows = [(f"{name}={text}", {_plain_name(name): text}) for name, text in asked.items()]
    rows += [(f"--set {one}", {one.partition("=")[0].strip(): one.partition("=")[2]}) for one in overrides]
    for spelled, setting in rows:
        name = next(iter(setting))
        is_short = name in PLAIN or name == "gpus"
        for key in ("model",) if name in ("model", "params") else overrides_of(setting) if is_short else (name,):
            if key in setters and not (spelled.startswith("--set") and setters[key].startswith("--set")):
                raise InputError(f"plan: {setters[key]} and {spelled} set the same thing; give one of the two")
            setters[key] = spelled


def _spelled_out(asked: Mapping[str, str]) -> dict[str, str]:
    """Aliases as the names they stand for; `dp` is all data-parallel ranks, so that nothing is replicated besides."""
    found = {_plain_name(name): text for name, text in asked.items()}
    return {**found, **({"replicate": "1"} if "dp" in asked and "replicate" not in found else {})}


def _plain_name(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _length(recipe: Mapping[str, Any]) -> int:
    """Tokens of a sequence of a recipe that has not been validated."""
    given = recipe.get("tokens", {}).get("sequence_length")
    return given if isinstance(given, int) and given > 0 else DEFAULT_SEQUENCE


def _batch(text: str, length: int) -> int:
    """Tokens of a batch. A rounded number (4M) is the nearest power of two of sequences, where that is within a tenth, as it is
    usually meant; else whole sequences. An exact one stays as it is."""
    tokens = count(text, "batch")
    if text.strip()[-1].isdigit():
        return tokens
    power = length << max(round(math.log2(tokens / length)), 0)
    return power if abs(power / tokens - 1) < 0.1 else max(round(tokens / length), 1) * length


def overrides_of(asked: Mapping[str, str], model: ModelConfig | None = None) -> dict[str, str]:
    """Recipe keys and their values, as TOML writes them, for short names or recipe keys. model: what `model` or `params` stands
    for. Raises InputError for unknown ones."""
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
            known = [*PLAIN, *ALIASES, *OWN]
            if name in BUDGETS:
                raise InputError(
                    f"{name}: model and tokens are those of the first plan; ask for another budget by itself"
                )
            if name in OF_FIRST_PLAN:
                raise InputError(
                    f"{name}: a what-if keeps {OF_FIRST_PLAN[name]}; for others plan again with --{name} {text}"
                )
            near = difflib.get_close_matches(name, sorted({*known, *keys()}), n=2, cutoff=0.5)
            meant = f"did you mean {' or '.join(near)}?" if near else f"possible: {', '.join(known)}, or a recipe key"
            raise InputError(f"{name}: no such setting; {meant}")
    return found


def devices_of(text: str) -> tuple[int, str | None]:
    """Number and name of 2048xH100, or of 1024 alone. Raises InputError that shows the form."""
    _require_one_kind(text)
    found = _GPUS.fullmatch(text.strip())
    if found is None:
        turned = re.fullmatch(r"(.*\S)\s*[x×*]\s*(\d+)", text.strip())
        meant = f"8x{text.strip()}" if _is_device(text) else "8xH100"
        if turned is not None and _is_device(turned[1]):
            meant = f"{turned[2]}x{turned[1]}"
        raise InputError(f"gpus: {text!r} has no number of devices in front; write it as {meant}")
    return count(found[1], "gpus"), found[2]


def _require_one_kind(text: str) -> None:
    """Raises InputError for 64xH100,64xA100, with a cluster of the slowest of them."""
    groups = _GROUP.findall(text)
    if len(groups) < 2:
        return
    known = devices.catalogue()
    found = [devices.match(name, known) for _, name in groups]
    kinds = [kind for kind in found if kind is not None]
    slowest = min(kinds, key=lambda kind: max(kind.flops.values())).name if len(kinds) == len(groups) else "DEVICE"
    total = sum(count(number_of, "gpus") for number_of, _ in groups)
    raise InputError(
        f"gpus: {text!r} has {len(groups)} groups of devices, and a plan is of one kind of device: plan each group alone, or all "
        f"as the slowest of them, as --gpus '{total}x{slowest}'"
    )


_COUNT = r"[0-9][0-9_,.]*(?:e[0-9]+)?[kKmM]?"
_GROUP = re.compile(rf"({_COUNT})\s*[x×*]\s*(\S.*?)\s*(?=$|(?:[,;+&\s]|\sand\s)\s*{_COUNT}\s*[x×*])")
_GPUS = re.compile(rf"({_COUNT})\s*(?:[x×*]\s*(\S.*))?")


def _is_device(name: str) -> bool:
    return devices.match(name, devices.catalogue()) is not None
