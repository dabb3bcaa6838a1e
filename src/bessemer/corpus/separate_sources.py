"""Sources of their own for files whose text stands under other keys, as lines of a recipe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tomli_w

from bessemer.recipe import Source

TEXT_KEY = re.compile(r'; set text_key = "([^"]*)"$')


def separate_sources(sources: Sequence[Source], statistics: dict[str, Any]) -> list[str]:
    """A recipe that reads each file by its own text_key, where one key for all would lose some; none where one is enough.

    statistics: of the corpus, whose examples name the files and the keys that they have instead.
    """
    tables: list[dict[str, Any]] = []
    is_needed = False
    for source, counts in zip(sources, statistics["sources"], strict=True):
        keys: dict[str, list[str]] = {}
        for example in counts["rejected"].get("no_text_key", {"examples": []})["examples"]:
            if (found := TEXT_KEY.search(example["detail"])) and example["path"] not in keys.get(found[1], []):
                keys.setdefault(found[1], []).append(example["path"])
        is_needed |= len(keys) + bool(counts["documents_kept"]) > 1 and bool(keys)
        for key, names in keys.items():
            paths = [str(_on_disk(source, name)) for name in names]
            tables.append({"name": f"{source.name}-{len(tables) + 1}", "paths": paths, "text_key": key})
        own = source.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        own["exclude"] = [*source.exclude, *(Path(name).name for names in keys.values() for name in names)]
        if counts["documents_kept"]:
            tables.append({key: value for key, value in own.items() if value})
    return tomli_w.dumps({"corpus": {"sources": tables}}).strip().splitlines() if is_needed else []


def _on_disk(source: Source, name: str) -> Path:
    """Where a file of a source lies, by its name in the corpus."""
    places = [Path(path).parent / name for path in source.paths]
    return next((place for place in places if place.exists()), Path(name))
