"""Protection of secrets in a recipe: the URL of a webhook, and credentials in URLs."""

from __future__ import annotations

import re
from typing import Any

from bessemer.common.errors import CREDENTIALS, SIGNED, InputError
from bessemer.recipe.schema import Recipe


def require_no_credentials(value: Any, where: str) -> None:
    """Raise InputError if a value of a recipe is a URL with credentials; `where` names it in the error."""
    if CREDENTIALS.search(str(value)) or SIGNED.search(str(value)):
        raise InputError(f"{where}: leave credentials out of the URL; the environment or the machine's role has them")


def without_urls(text: str) -> str:
    """Return a text with its HTTP URLs cut to the host, because the path of a webhook is its secret."""
    return re.sub(r"(https?://[^\s/'\"]+/)[^\s'\"]+", r"\1***", text)


def shareable(value: Any, key: str = "") -> Any:
    """Convert a recipe or a part of one to plain values without secrets, for files, trackers and reports.

    Credentials in URLs, and the whole value if `key`, the recipe key of `value`, is "webhook", are replaced by `***`.
    """
    if isinstance(value, Recipe):
        value = value.model_dump(mode="json", exclude_none=True, by_alias=True)
    if isinstance(value, dict):
        return {name: shareable(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [shareable(inner) for inner in value]
    if key == "webhook" and not str(value).isidentifier():  # a URL, from another version
        return "***"
    return CREDENTIALS.sub("***@", value) if isinstance(value, str) else value
