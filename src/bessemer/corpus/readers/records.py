"""Conversion of JSON records to documents. A problem with a record affects only that record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bessemer.corpus.conversation import conversation, pair
from bessemer.corpus.document import Document
from bessemer.recipe import Source
from bessemer.recipe.corpus import FIELD, text_keys

# Longer records are rejected unread: no model can use one that long, and it must fit in memory
MAX_RECORD_BYTES = 64 << 20
MAX_FIELD_CHARACTERS = 200
MAX_FIELDS = 16  # maximum number of other fields that are stored in `metadata`
MAX_DEPTH = 4  # error messages list the fields of objects up to this nesting


def record_of(value: object, key: str, size: int, shown: str, position: dict[str, object], source: Source) -> Document:
    """Convert a JSON value to a document, or to a rejected document with the reason.

    Args:
        value: The record.
        key: The key of the document.
        size: Size of the record in bytes.
        shown: Text of the record for a rejected document.
        position: Metadata on the position of the record. Other small fields are added to it.
        source: The source, whose settings name the fields.
    """
    if not isinstance(value, dict):
        return Document(key, size, shown[:4000], "bad_record", f"not an object but {type(value).__name__}")
    keys = text_keys(source.text_key)
    pairs = [field_in(value, key) for key in keys]
    holder, name = next((field for field in pairs if field[0] is not None), (None, ""))
    if holder is None:
        return Document(key, size, shown[:4000], "no_text_key", no_text("field", keys[0], named(value)))
    text = _joined([fields and fields[at] for fields, at in pairs], source) if source.joins_fields else holder.pop(name)
    if source.format == "chat":
        try:
            if source.pair_keys is None and isinstance(text, str) and text.lstrip()[:1] == "[":
                text = json.loads(text)  # the conversation is a string of JSON
            elif source.pair_keys is not None:
                parts = (field_in(value, name) for name in source.pair_keys[:-1])
                text = pair([None if fields is None else fields[field] for fields, field in parts], text)
            rest = {name: field for name, field in {**value, **holder}.items() if name not in (source.pair_keys or ())}
            text = conversation(text, rest)
        except (ValueError, TypeError, RecursionError) as error:  # a Parquet date raises TypeError
            detail = f"field {', '.join(source.pair_keys or keys)!r}: {error}"
            return Document(key, size, shown[:4000], "bad_record", detail[:300])
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        return Document(key, size, shown[:4000], "bad_record", f"field {source.text_key!r} is {kind}, not text"[:300])
    record = Document(key, size, text, metadata={**position, **_small(value, position)})
    if source.label_key:
        labelled, name = field_in(value, source.label_key)
        set_label(record, f"field {source.label_key!r}", labelled[name] if labelled else None)
    return record


def _joined(values: list[object], source: Source) -> object:
    """Join the values of the fields that `text_key` names: separated by empty lines, or filled into its template.

    Returns the first value that is not text, if there is one.
    """
    if isinstance(source.text_key, str):
        strange = [value for value in values if not isinstance(value, str | int | float)]
        return strange[0] if strange else FIELD.sub(lambda _: str(values.pop(0)), source.text_key)
    strange = [value for value in values if not isinstance(value, str | None)]
    return strange[0] if strange else "\n\n".join(value for value in values if isinstance(value, str) and value.strip())


def field_in(value: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """Return the object that holds a field and the field's name in it; the object is None if there is no such field.

    A dot in `key` descends into an object, unless a field has the whole key as its name.
    """
    if key in value:
        return value, key
    first, dot, rest = key.partition(".")
    inner = value.get(first)
    return field_in(inner, rest) if dot and isinstance(inner, dict) else (None, key)


def named(fields: Mapping[str, object], depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield the names of a record's fields as a recipe writes them, with dotted names for fields of nested objects.

    Objects are opened down to `depth` levels.
    """
    for name, value in fields.items():
        if depth > 1 and isinstance(value, dict) and value:
            yield from (f"{name}.{inner}" for inner in named(value, depth - 1))
        else:
            yield name


def no_text(kind: str, text_key: str, names: Iterable[str]) -> str:
    """Return the message for a missing text field or column, with the existing names and advice.

    `kind` is "field" or "column", and `text_key` the name that is missing.
    """
    fix = '; set text_key (for conversations with format = "chat"; or pair_keys), or exclude the file'
    return f"no {kind} {text_key!r}; there are: {', '.join([*names][:20]) or 'none'}"[: 280 - len(fix)] + fix


def set_label(record: Document, where: str, value: object) -> None:
    """Set the label of a document from a string, an integer or a boolean. The document is rejected for any other value.

    `where` names the field or column in the detail of the rejection.
    """
    plain = isinstance(value, str | int)
    label = str(value).strip() if plain else ""
    if label and len(label) <= MAX_FIELD_CHARACTERS and label.isprintable():
        record.label = label
        return
    kind = "missing" if value is None else type(value).__name__ if not plain else "empty" if not label else "too long"
    record.reason, record.detail = "no_label", f"{where}: no label ({kind})"[:300]


def _small(fields: dict[str, object], position: dict[str, object]) -> dict[str, object]:
    """Return the fields to store as metadata: at most MAX_FIELDS short strings and numbers with names not in `position`."""
    metadata: dict[str, object] = {}
    for name, value in fields.items():
        small = isinstance(value, str) and len(value) <= MAX_FIELD_CHARACTERS
        small = small or (isinstance(value, float) and math.isfinite(value))
        small = small or (isinstance(value, int) and abs(value) < 1 << 63)
        if small and name not in position and len(name) <= MAX_FIELD_CHARACTERS and len(metadata) < MAX_FIELDS:
            metadata[name] = value
    return metadata
