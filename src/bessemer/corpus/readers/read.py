"""Units to records, by format. Whatever is wrong with a record costs that record, which is then counted."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, BinaryIO

from bessemer.corpus.document import Document
from bessemer.corpus.extract import packages, webpage
from bessemer.corpus.filters.rules.table import against
from bessemer.corpus.readers import mediawiki, record_files, tables, warc
from bessemer.corpus.readers.encodings import decode_html, decode_text, foreign_format, unicode_of
from bessemer.corpus.readers.inflate import InflatedFile
from bessemer.corpus.readers.tables import MAX_RECORD_BYTES, not_utf8
from bessemer.corpus.readers.units import Piece, Unit, require_unchanged
from bessemer.recipe import Extract, Rules, Source
from bessemer.recipe.file_formats import NEVER_COMPRESSED, TOPICS, compression_of
from bessemer.storage import filesystem
from bessemer.text import normalise

READ_BYTES = 1 << 20
BINARY_BYTES = 8000  # a file of code with a NUL among its first bytes is none; git looks at as many


def read(
    unit: Unit, rules: Rules, settings: Extract | None = None, passed_over: Counter[str] | None = None
) -> Iterator[tuple[Piece, Document]]:
    """The records of a unit, each with its piece. Never raises for bad data. passed_over: counts those that hold no document by
    nature, by type.

    A missing or unreadable file yields one rejected record per piece. Raises FileChanged for a file that is not the one that was
    listed, BessemerError when an object store fails, InputError when the library of [corpus.extract] is not installed.
    """
    settings = settings or Extract()
    if unit.format in ("html", "warc"):
        webpage.check_engine(settings)
    for piece in unit.pieces:
        for record in _read_unchanged(unit, piece, rules, settings, passed_over):
            record.label = record.label or unit.source.label or ""
            yield piece, record


def _read_unchanged(
    unit: Unit, piece: Piece, rules: Rules, settings: Extract, passed_over: Counter[str] | None
) -> Iterator[Document]:
    """The records of a piece, as long as the file is the one that was listed."""
    try:
        require_unchanged(piece, unit.source)
        yield from _read_piece(unit, piece, rules, settings, passed_over)
        with suppress(FileNotFoundError):  # all of it was read before it vanished
            require_unchanged(piece, unit.source)
    except OSError as error:
        yield Document(f"{piece.start}!", piece.size, reason="unreadable", detail=error.strerror or str(error))


def _read_piece(
    unit: Unit, piece: Piece, rules: Rules, settings: Extract, passed_over: Counter[str] | None
) -> Iterator[Document]:
    source, start, end = unit.source, piece.start, piece.end
    if piece.damage:
        yield Document(f"{start}!", piece.size, reason=piece.reason, detail=piece.damage)
        return
    if unit.format == "parquet" and not filesystem.is_remote(piece.path):
        yield from tables.row_group(piece.path, start, piece.size, source)
        return
    with filesystem.open_file(piece.path, source) as file:
        compression = compression_of(piece.path)
        if unit.format == "parquet":
            yield from tables.row_group(file, start, piece.size, source)
        elif unit.format == "jsonl" and compression:
            yield from _unpacked(file, compression, piece, source)
        elif unit.format == "jsonl" and piece.layout != "lines":
            yield from record_files.read(file, piece.layout, source)
        elif unit.format == "jsonl":
            yield from tables.jsonl(file, start, end, source)
        elif unit.format in ("warc", "mediawiki"):
            try:
                if unit.format == "warc":
                    yield from warc.read(file, end, settings, passed_over)
                else:
                    limit = 4 * rules.max_characters  # marks and boxes take half of an article, seldom three quarters
                    yield from mediawiki.read(file, end, compression, limit)
            except ValueError as error:  # damage that leaves no way to go on
                yield Document(f"{start}!", 0, reason="bad_record", detail=str(error)[:300])
        else:
            yield from _whole(file, unit, piece, rules, settings)


def _unpacked(file: BinaryIO, compression: str, piece: Piece, source: Source) -> Iterator[Document]:
    """The records of a compressed file: lines of JSON as it is unpacked, other layouts from a temporary file. What was unpacked
    before damage is read; the line in which it lies is a damaged record too."""
    content = InflatedFile(file, compression)
    if piece.layout == "lines":
        with io.BufferedReader(content, READ_BYTES) as lines:
            yield from tables.jsonl(lines, 0, piece.end, source)
    else:
        with tempfile.TemporaryFile() as plain:
            shutil.copyfileobj(content, plain, READ_BYTES)
            plain.seek(0)
            yield from record_files.read(plain, piece.layout, source)
    if content.damage:
        detail = f"{content.damage}, after {content.num_bytes} bytes" + " of text" * (piece.layout == "lines")
        yield Document(f"{content.num_bytes}!", 0, reason="bad_record", detail=detail)


def _whole(file: BinaryIO, unit: Unit, piece: Piece, rules: Rules, settings: Extract) -> Iterator[Document]:
    """A file that is one document, or a few."""
    # A character takes at most 4 bytes: with more than this no file could pass the rule on its length.
    limit = max(MAX_RECORD_BYTES, 4 * rules.max_characters)
    encoding = unit.source.encoding
    if unit.format == "html":
        limit = webpage.max_html_bytes(settings)
    compression = compression_of(piece.path) if unit.format not in NEVER_COMPRESSED else ""
    content = InflatedFile(file, compression) if compression else None
    raw = io.BufferedReader(content).read(limit + 1) if content else file.read(limit + 1)
    if content and content.damage:
        yield Document("", piece.size, reason="bad_record", detail=content.damage)
        return
    if len(raw) > limit:
        detail = f"more than {limit} bytes, unpacked" if compression else against(piece.size, limit) + " bytes"
        yield Document("", piece.size, reason="too_long", detail=detail)
    elif foreign := foreign_format(raw):
        yield Document("", piece.size, reason="wrong_format", detail=foreign)
    elif unit.format == "html":
        share, metadata = settings.max_undecodable_share, dict[str, Any]()
        page = _text(raw, lambda: webpage.page_text(decode_html(raw, encoding, share), settings, metadata))
        page.metadata |= metadata
        yield page
    elif unit.format == "descriptions" and piece.name.endswith(TOPICS):
        yield from _topics(raw)
    elif unit.format == "descriptions" and piece.name.endswith("METADATA"):
        yield _text(raw, lambda: packages.description(decode_text(raw)))
    elif unit.format == "code" and not unicode_of(raw)[0] and (nul := raw.find(0, 0, BINARY_BYTES)) >= 0:
        yield Document("", len(raw), reason="binary", detail=f"a NUL at byte {nul}")
    else:
        yield _text(raw, lambda: decode_text(raw, encoding or ""))


def _text(raw: bytes, extracted: Callable[[], str]) -> Document:
    """A whole file as one record of what is extracted from it."""
    try:
        return Document("", len(raw), extracted())
    except UnicodeDecodeError as error:
        return not_utf8("", raw, error)
    except normalise.NotText as error:
        return Document("", len(raw), reason="bad_record", detail=str(error))
    except Exception as error:  # a parser of foreign code on foreign data: any failure is this document's
        return Document("", len(raw), reason="bad_record", detail=f"{type(error).__name__}: {error}"[:300])


def _topics(raw: bytes) -> Iterator[Document]:
    """The texts of a pydoc_data/topics.py, each a record under its name."""
    topics: dict[str, str] = {}
    failed = _text(raw, lambda: topics.update(packages.topics(raw.decode())) or "")
    if failed.reason is not None:
        yield failed
    for name, text in topics.items():
        yield Document(name, len(text.encode("utf-8", "surrogatepass")), text, metadata={"topic": name})
