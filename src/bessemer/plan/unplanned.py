"""Recipe keys that change a run but that no plan includes (unplanned.toml), for the row `not in the plan`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from typing import Any

from bessemer.recipe import Recipe
from bessemer.recipe.section import Section


@cache
def effects() -> dict[str, Any]:
    """Load unplanned.toml: a dict of lists of recipe keys, and a table `unplanned` from keys to the reason for each."""
    return tomllib.loads((resources.files(__package__) / "unplanned.toml").read_text(encoding="utf-8"))


def entry_of(key: str) -> str | None:
    """Return the longest key of unplanned.toml that is the recipe key or a table above it, or None."""
    table, parts = effects(), key.split(".")
    known = {*table["planned"], *table["apart"], *table["of_bessemer"], *table["unplanned"]}
    starts = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((start for start in starts if start in known), None)


def for_catalogue(recipe: Recipe, framework: str) -> tuple[str, ...]:
    """Return a sentence for each recipe setting that a plan for catalogue devices and this framework does not include."""
    table, reasons = effects(), dict[str, str]()
    for key, value in _set_values(recipe):
        entry = entry_of(key)
        row = table["unplanned"].get(entry, {})
        if value in row.get("same", ()):
            continue
        name = str(entry) if row.get("as_a_whole") else f"{key} = {_written(value)}"
        if framework != "bessemer" and entry in table["of_bessemer"]:
            reasons[name] = f"{name}: the plan is of {framework} as its profile has it"
        elif row:
            reasons[name] = f"{name}: {row['why']}"
    return tuple(reasons.values())


def on_this_machine(recipe: Recipe) -> tuple[str, ...]:
    """Return a sentence for each recipe setting that a plan of this machine does not include."""
    table = effects()
    return tuple(
        f"{key} = {_written(value)}: a plan of this machine times its steps and does not read it"
        for key, value in _set_values(recipe) if key in table["of_catalogue"]
    )  # fmt: skip


def _set_values(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys and values that a recipe sets to other than their defaults.

    An array of tables counts as one key.
    """
    for name, info in type(section).model_fields.items():
        key, value = prefix + (info.alias or name), getattr(section, name)
        if isinstance(value, Section):
            yield from _set_values(value, f"{key}.")
        elif name in section.model_fields_set and value != info.default:
            yield key, value


def _written(value: Any) -> str:
    """Format a value as in a recipe."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_written, value))}]"
    return f"{value:g}" if isinstance(value, float) else str(value)
