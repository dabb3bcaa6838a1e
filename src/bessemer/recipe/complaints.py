"""What is wrong with a recipe, each mistake in a line: where it is (file and line, or --set), what, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from bessemer.recipe.keys import did_you_mean, keys, nearest
from bessemer.recipe.schema import Recipe

Location = tuple[str | int, ...]  # keys of tables, and places in table arrays
SHOULD_BE = {  # pydantic's names of types in TOML's words
    "tuple_type": 'a list, as ["a", "b"]', "list_type": 'a list, as ["a", "b"]', "model_type": "a table of keys",
    "dict_type": "a table of keys", "model_attributes_type": "a table of keys", "string_type": "a text in quotes",
    "int_type": "a whole number", "int_from_float": "a whole number", "int_parsing": "a whole number",
    "float_type": "a number", "bool_type": "true or false",
}  # fmt: skip


def complaints(
    error: ValidationError,
    values: dict[str, Any],
    file: dict[str, Any],
    text: str,
    where: str,
    overrides: Sequence[str],
) -> Iterator[str]:
    """A line for each mistake. values: what was validated; file: what the TOML `text` of `where` says before overrides."""
    known, in_file = keys(), _in_file(file) if overrides else None
    items = error.errors(include_url=False)
    meant = {_meant(tuple(item["loc"]), list(known)) for item in items if item["type"] == "extra_forbidden"}
    for item in items:
        location = tuple(item["loc"])
        if item["type"] == "missing" and location in meant:
            continue  # it is there under a wrong name, which is a complaint of its own
        key, what = _key(location, values), _what(item, location, known)
        if in_file is None or (location, item["msg"]) in in_file:
            line = line_of(text, location)
            place = f"{where}:{line}" if line else where
        else:
            blamed = _blamed(key, what, overrides)
            place = " ".join(f"--set {override}" for override in blamed)
            if [override.partition("=")[0].strip() for override in blamed] == [key]:
                key = ""
        yield f"{place}: {key}{': ' if key else ''}{what}"


def _what(item: ErrorDetails, location: Location, known: dict[str, Any]) -> str:
    declared = _declared(location)
    about = known[declared].description if declared in known else None
    kind, message = item["type"], item["msg"][0].lower() + item["msg"][1:]
    if kind == "extra_forbidden":
        return f"unknown key{did_you_mean(declared, list(known))}"
    if kind == "missing":
        return f"missing; {about or 'it is required'}"
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind in SHOULD_BE:
        message = f"should be {SHOULD_BE[kind]}"
    elif kind == "string_pattern_mismatch" and about:
        message = f"is not written as it should be ({about.rstrip('.')})"
    return f"{message}, got {item['input']!r}"


def _declared(location: Location) -> str:
    """The dotted name of a place, as the keys are listed: without the places in table arrays."""
    return ".".join(str(part) for part in location if not isinstance(part, int))


def _meant(location: Location, known: Sequence[str]) -> Location:
    """The place of the key in the same table that an unknown one stands for; () where there is none."""
    table, _, last = (nearest(_declared(location), known) or "").rpartition(".")
    return (*location[:-1], last) if table == _declared(location[:-1]) else ()


def _in_file(file: dict[str, Any]) -> set[tuple[Location, str]]:
    """The mistakes that a recipe has without its overrides."""
    try:
        Recipe.model_validate(file)
    except ValidationError as error:
        return {(tuple(item["loc"]), item["msg"]) for item in error.errors(include_url=False)}
    return set()


def _blamed(key: str, what: str, overrides: Sequence[str]) -> Sequence[str]:
    """The overrides that a mistake comes from: of the key or its table, else those that are named, else all."""
    names = {override: override.partition("=")[0].strip() for override in overrides}
    same = [override for override, name in names.items() if name == key]
    within = [override for override, name in names.items() if key and f"{name}.".startswith(f"{key}.")]
    around = [override for override, name in names.items() if f"{key}.".startswith(f"{name}.")]
    named = [override for override in within or overrides if names[override].rpartition(".")[2] in what]
    return same or named or within or around or overrides


def _key(location: Location, values: dict[str, Any]) -> str:
    """The dotted key of a place; an item of a table array goes by its own name, as with --set."""
    names: list[str] = []
    place: Any = values
    for part in location:
        inner = isinstance(place, dict | list) and (isinstance(part, int) or part in place)
        place = place[part] if inner else None
        if not isinstance(part, int):
            names.append(part)
        elif isinstance(place, dict) and isinstance(place.get("name"), str):
            names.append(place["name"])
    return ".".join(names)


def line_of(text: str, location: Location) -> int | None:
    """The line of TOML text in which a key stands, or else the table that it belongs to; None for the whole recipe."""
    found: dict[Location, int] = {}
    items: dict[Location, int] = {}  # table arrays, and the item that the lines are in
    table: Location = ()
    for number, line in enumerate(text.splitlines(), start=1):
        if opened := re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?", line):
            table = ()
            parts = [part.strip() for part in opened[2].split(".")]
            for index, part in enumerate(parts, start=1):
                table = (*table, part)
                if opened[1] == "[[" and index == len(parts):
                    items[table] = items.get(table, -1) + 1
                if table in items:
                    table = (*table, items[table])
            found.setdefault(table, number)
        elif key := re.match(r"\s*([A-Za-z0-9_.\-]+)\s*=", line):
            found.setdefault((*table, *key[1].split(".")), number)
    return next((found[location[:end]] for end in range(len(location), 0, -1) if location[:end] in found), None)
