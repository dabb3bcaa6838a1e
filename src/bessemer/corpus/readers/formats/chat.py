"""Conversations in JSONL, JSON and Parquet files (see corpus/conversation.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bessemer.corpus.document import Document
from bessemer.corpus.readers.base import File, Part
from bessemer.corpus.readers.formats.jsonl import JsonlReader
from bessemer.corpus.readers.formats.parquet import ParquetReader


class ChatReader(JsonlReader, ParquetReader):
    """A reader of JSON and Parquet files whose records are conversations."""

    suffixes = (".jsonl", ".ndjson", ".json", *ParquetReader.suffixes)
    is_compressible = True
    is_guessed = False

    def split(self, file: File) -> Iterable[Part]:
        """Split a file as Parquet or as JSON, by its name."""
        return (ParquetReader if ParquetReader.matches(file.path) else JsonlReader).split(self, file)

    def read(self, part: Part) -> Iterator[Document]:
        """Read a part as Parquet or as JSON, by the name of its file."""
        return (ParquetReader if ParquetReader.matches(part.path) else JsonlReader).read(self, part)
