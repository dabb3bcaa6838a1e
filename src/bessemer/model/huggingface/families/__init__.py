"""The families of models: one file each, found by the names of recipe/families.py."""

from __future__ import annotations

from importlib import import_module
from typing import get_args

from bessemer.model.huggingface.family import Family
from bessemer.recipe.families import FamilyName

FAMILIES: dict[str, Family] = {name: import_module(f"{__name__}.{name}").FAMILY for name in get_args(FamilyName)}
