"""Explanations of the keys of a recipe."""

from __future__ import annotations

import json

from pydantic.fields import FieldInfo

from bessemer.common.errors import InputError
from bessemer.recipe.keys import did_you_mean, keys_and_limits, section_of

DEFAULT_WIDTH = 16  # width of the column of defaults


def explain(key: str) -> str:
    """Return the explanation of a key: type, default and meaning; for a table, its keys.

    Args:
        key: A dotted name.

    Raises:
        InputError: When there is no such key.
    """
    known = keys_and_limits()
    if key not in known:
        raise InputError(f"{key}: no such recipe key" + did_you_mean(key, list(known)))
    info = known[key]
    inner = [name for name in known if name.startswith(key + ".") and "." not in name[len(key) + 1 :]]
    if inner:
        lines = [f"[{key}]  {info.description}", ""]
        width = max(len(name) for name in inner)
        shown = {name: "" if section_of(known[name].annotation) else _default_of(known[name]) for name in inner}
        lines += [f"  {name:<{width}}  {shown[name]:<{DEFAULT_WIDTH}}  {known[name].description}" for name in inner]
        return "\n".join(lines)
    return f"{key}\n  type     {_shown_type(info)}\n  default  {_default_of(info)}\n  {info.description}"


def _default_of(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    return "derived, or none" if value is None else json.dumps(value)


def _shown_type(info: FieldInfo) -> str:
    shown = info.annotation.__name__ if isinstance(info.annotation, type) else str(info.annotation)
    return shown.replace("typing.", "").replace(" | None", "").replace("NoneType", "none")
