"""The families of models by the names of recipe/model.py."""

from __future__ import annotations

from typing import get_args

from bessemer.model.huggingface.families import decoders, encoders
from bessemer.model.huggingface.family import Family
from bessemer.recipe.model import FamilyName

_MODULES = vars(decoders) | vars(encoders)
FAMILIES: dict[str, Family] = {name: _MODULES[name.upper()] for name in get_args(FamilyName)}
