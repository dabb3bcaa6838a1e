"""Bessemer trains language models, from raw text to a verified, exported model."""

import importlib
from typing import Any

__version__ = "0.1.0"
# Public names, each loaded when it is first used
EXPORTS = {
    "Document": "bessemer.corpus.document:Document",
    "Filter": "bessemer.corpus.filters.base:Filter",
    "Reject": "bessemer.corpus.document:Reject",
    "filters": "bessemer.corpus.filters.rules.sets:",
}


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = EXPORTS[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
