"""Conversions from Python values and objects to the tables and keys of a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from bessemer.common import extensions
from bessemer.common.errors import InputError
from bessemer.launch.cluster_files import merge
from bessemer.recipe import Recipe, parse
from bessemer.recipe.uses import ExtensionBase
from bessemer.tokens.tokenizer.choice import resolve_tokenizer

Tables = dict[str, Any]


def write_overrides(keys: Mapping[str, Any]) -> list[str]:
    """Return keys as `key=value` overrides for `--set`. Raises InputError for a value that a recipe cannot hold."""
    try:
        return [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    except TypeError as error:
        raise InputError(f"keys: a recipe cannot hold this value: {error}") from None


def with_keys(tables: Mapping[str, Any], keys: Mapping[str, Any]) -> Tables:
    """Return a copy of the tables of a recipe with the values of dotted keys set.

    A value that is a table is merged into the existing one, and so are list entries with the same name.
    """
    changed = dict(tables)
    for key, value in keys.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        changed = merge(changed, value)
    return changed


def run_table(path: Path) -> Tables:
    """Return the tables of a recipe that only names the run directory `path`: `run.name` and `run.dir`."""
    folder = path.absolute()
    return {"run": {"name": folder.name, "dir": str(folder.parent)}}


def make_recipe(tables: Mapping[str, Any], where: str = "recipe", *, is_trusted: bool = True) -> Recipe:
    """Parse and check a recipe given as tables.

    Args:
        tables: Tables of the recipe.
        where: Name of the recipe in error messages.
        is_trusted: True to run code that the recipe names.

    Raises:
        InputError: A key or value is invalid.
    """
    try:
        text = tomli_w.dumps(tables)
    except TypeError as error:
        raise InputError(f"{where}: a recipe cannot hold this value: {error}") from None
    return resolve_tokenizer(parse(text, where, loads_code=True, is_trusted=is_trusted))


def require_part(kind: str, part: object) -> None:
    """Raise InputError unless `part` is an instance of a valid extension class.

    `kind` names the type of extension, such as filters, and so the base class that the class has to subclass.
    """
    target = type(part)
    if isinstance(part, type):
        raise InputError(f"{kind}: {part.__name__} is a class; pass an instance, {part.__name__}()")
    extensions.check_class(target, extensions.base_of(kind), f"{kind}: {target.__module__}")


def use_of(kind: str, part: ExtensionBase) -> Tables:
    """Return the recipe entry for an extension object: `use`, a reference to its class, and the options set on it.

    `kind` names the type of extension, such as filters. A class that other processes cannot import is registered under a
    name that only this process can resolve. Raises InputError for a class that cannot be used.
    """
    require_part(kind, part)
    target = type(part)
    known = {reference: name for name, reference in extensions.built_in_names(kind).items()}
    refer = extensions.reference_to if extensions.is_importable(target) else extensions.keep_in_process
    name = known.get(f"{target.__module__}:{target.__qualname__}") or refer(target)
    return {"use": name, **part.model_dump(mode="json", exclude_unset=True, exclude_none=True)}
