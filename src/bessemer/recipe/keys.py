"""List the keys of a recipe, and describe the mistakes in one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from operator import eq
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bessemer.recipe.rules import Limits
from bessemer.recipe.schema import Recipe
from bessemer.recipe.section import DESCRIPTIONS
from bessemer.recipe.uses import Location, item_name, settings_at

OTHER_NAMES = DESCRIPTIONS["other_names"]  # other programs' names of keys, by the last part or the whole of the name
MAY_CHANGE, EXTENDS = DESCRIPTIONS["resume"]["may_change"], DESCRIPTIONS["resume"]["extends"]
FEW = 30  # an error lists all known keys if there are fewer
ALIKE = 0.75  # similarity (difflib) above which a name counts as a misspelling of another


def keys() -> dict[str, FieldInfo]:
    """Return every key of the recipe, tables included.

    Returns:
        A dict from dotted name to pydantic field. Keys in arrays of tables have names like `corpus.sources.name`.
    """
    return dict(_fields(Recipe, "", Limits))


def keys_and_limits() -> dict[str, FieldInfo]:
    """Return the keys of `keys`, plus those in the tables of rule sets, such as `corpus.rules.c4.min_sentences`."""
    return dict(_fields(Recipe, ""))


def did_you_mean(key: str, known: Sequence[str]) -> str:
    """Return the end of an error about an unknown key, which suggests a known key or the command that lists them.

    Args:
        key: The unknown key.
        known: The known keys.
    """
    if near := nearest(key, known):
        return f"; did you mean {near}?"
    table = max((f" {name}" for name in known if key.startswith(f"{name}.")), key=len, default="")
    explain = f"`bessemer recipe --explain{table}` lists the keys"
    return "; " + (f"there are {', '.join(known)}" if len(known) < FEW else explain)


def nearest(key: str, known: Sequence[str]) -> str | None:
    """Return the key that a wrong key most likely means: misspelt, in another table, or as other programs call it.

    Args:
        key: The wrong key.
        known: The known keys.

    Returns:
        A known key; None if none is similar.
    """
    table, _, last = key.rpartition(".")
    for other in (OTHER_NAMES.get(key), OTHER_NAMES.get(last)):  # before similar names, as hidden_dim is not head_dim
        if other in known:
            return str(other)
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == table}
    if near := difflib.get_close_matches(last, siblings, 1, ALIKE):
        return siblings[near[0]]
    others = [name for name in known if table not in (name, name.rpartition(".")[0])]
    return next(iter(difflib.get_close_matches(key, others, 1, ALIKE)), None)


def _fields(
    section: type[BaseModel], prefix: str, closed: tuple[type, ...] | type = ()
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted name, field) for each key of a section and of its tables; `prefix` is put before all names.

    Keys of tables whose class is in `closed` are left out.
    """
    for field, info in section.model_fields.items():
        name = info.alias or field
        yield prefix + name, info
        inner = section_of(info.annotation)
        if inner is not None and not issubclass(inner, closed):
            yield from _fields(inner, f"{prefix}{name}.", closed)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the class of the table that a type stands for, such as that of an optional table; None if there is none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for part in get_args(annotation) if (section := section_of(part))), None)


SHOULD_BE = {  # pydantic's error types in terms of TOML
    "tuple_type": 'a list, as ["a", "b"], or of tables, as [[corpus.sources]]', "model_type": "a table of keys",
    "string_type": "a text in quotes",
    "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "bool_type": "true or false",
}  # fmt: skip


def complaints(
    error: ValidationError, values: dict[str, Any], text: str, where: str, overrides: Sequence[str]
) -> Iterator[str]:  # fmt: skip
    """Yield an error line for each invalid value of a recipe, with the `--set` overrides that may have caused it.

    Args:
        error: The errors of pydantic.
        values: The values that were validated: the TOML `text` with the overrides.
        text: The text of the recipe.
        where: Name of the recipe in errors.
        overrides: The overrides.
    """
    known = keys_and_limits()
    for item in error.errors(include_url=False):
        location = item["loc"]
        key = _key(location, values)
        line = line_of(text, location)
        source = f"{where}:{line}" if line else where
        what = _what(item, location, known, settings_at(values, location))
        related = [f"--set {override}" for override in overrides if _overlaps(override, key, _declared(location))]
        yield f"{source}: {key}{': ' if key else ''}{what}" + f" (with {' '.join(related)})" * bool(related)


def _overlaps(override: str, *keys: str) -> bool:
    """Return True if an override KEY=VALUE sets one of `keys`, a table that contains one, or a key within one."""
    parts = override.partition("=")[0].strip().split(".")
    return any(not key or all(map(eq, parts, key.split("."))) for key in keys)


def _what(item: ErrorDetails, location: Location, known: dict[str, Any], settings: list[Location]) -> str:
    """Return the text of an error of pydantic at a location.

    `known` maps all keys to their fields. `settings` are the valid locations of settings if the key is one of an extension.
    """
    declared = _declared(location)
    about = known[declared].description if declared in known else None
    kind, message = item["type"], item["msg"][0].lower() + item["msg"][1:]
    if kind == "extra_forbidden":
        return f"unknown key{did_you_mean(declared, [*map(_declared, settings)] or list(known))}"
    if kind == "missing":
        return f"missing; {about or 'it is required'}"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind in SHOULD_BE:
        message = f"should be {SHOULD_BE[kind]}"
    return f"{message}, got {item['input']!r}"


def _declared(location: Location) -> str:
    """Return the dotted key of a location without indices in arrays of tables, such as corpus.sources.name."""
    return ".".join(str(part) for part in location if not isinstance(part, int))


def _key(location: Location, values: dict[str, Any]) -> str:
    """Return the dotted key of a location as --set names it, such as corpus.sources.web.weight for the source web."""
    names: list[str] = []
    value: Any = values
    for part in location:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
        name = part if isinstance(part, str) else item_name(value) if isinstance(value, dict) else None
        if isinstance(name, str):
            names.append(name)
    return ".".join(names)


def line_of(text: str, location: Location) -> int | None:
    """Return the line of TOML text that sets a key, else the line of its table; None for the whole recipe."""
    lines: dict[Location, int] = {}
    items: dict[Location, int] = {}  # arrays of tables, with the index of the current item
    table: Location = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if match := re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?", line):
            table, parts = (), [part.strip() for part in match[2].split(".")]
            for index, part in enumerate(parts, start=1):
                table = (*table, part)
                if match[1] == "[[" and index == len(parts):
                    items[table] = items.get(table, -1) + 1
                if table in items:
                    table = (*table, items[table])
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([A-Za-z0-9_.\-]+)\s*=", line):
            lines.setdefault((*table, *key[1].split(".")), number)
    return next((lines[location[:end]] for end in range(len(location), 0, -1) if location[:end] in lines), None)
