"""Documents of which a part was removed: the new text, the places, the counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Edit:
    """One document that lost something."""

    row: int
    """Its row in the table that comes with it."""
    removed: tuple[tuple[int, int], ...]
    """Characters [start, end) of the text as it was, ascending, apart from each other."""

    @property
    def removed_characters(self) -> int:
        """How many characters went."""
        return sum(end - start for start, end in self.removed)


@dataclass
class EditStatistics:
    """Counts over the documents that went through."""

    documents: int = 0
    edited: int = 0
    emptied: int = 0
    """Edited documents of which nothing but white space is left."""
    spans: int = 0
    removed_characters: int = 0

    def add(self, table: pa.Table, edits: Sequence[Edit]) -> None:
        """Count one table, after its edits."""
        self.documents += table.num_rows
        self.edited += len(edits)
        for edit in edits:
            self.spans += len(edit.removed)
            self.removed_characters += edit.removed_characters
            self.emptied += not table["text"][edit.row].as_py().strip()

    def to_json(self) -> dict[str, Any]:
        """For statistics.json."""
        return dict(vars(self))


def without(text: str, removed: Sequence[tuple[int, int]]) -> str:
    """The text without the characters [start, end) of each span; spans ascend."""
    pieces, place = [], 0
    for start, end in removed:
        pieces.append(text[place:start])
        place = end
    pieces.append(text[place:])
    return "".join(pieces)


def with_texts(table: pa.Table, texts: list[str]) -> pa.Table:
    """The table with other texts, and their lengths where it has a column of them."""
    import pyarrow as pa

    columns: dict[str, Any] = {"text": pa.array(texts, table.schema.field("text").type)}
    if "characters" in table.column_names:
        columns["characters"] = pa.array([len(text) for text in texts], table.schema.field("characters").type)
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), table.schema.field(name), values)
    return table
