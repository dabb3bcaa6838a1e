"""Keys of the recipe as Python values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from bessemer.common.errors import InputError


def write_overrides(keys: Mapping[str, Any]) -> list[str]:
    """Return `key=value` overrides, as `--set` takes them, with the values in TOML. Raises InputError for other values."""
    overrides = []
    for key, value in keys.items():
        try:
            text = tomli_w.dumps({"v": str(value) if isinstance(value, Path) else value})
        except TypeError:
            raise InputError(f"{key}: {value!r} is no value of a recipe") from None
        overrides.append(f"{key}={text.partition(' = ')[2].strip()}")
    return overrides
