"""Units to records, by format. Whatever is wrong with a record costs that record, which is then counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

from bessemer.corpus import extract, mediawiki, record_files, storage, tables, warc, webpage
from bessemer.corpus.document import Record
from bessemer.corpus.encodings import decode_html, decode_text, foreign_format, unicode_of
from bessemer.corpus.inflate import Damaged, inflate
from bessemer.corpus.rules.table import against
from bessemer.corpus.tables import MAX_RECORD_BYTES, not_utf8
from bessemer.corpus.units import Piece, Unit, stamp
from bessemer.recipe import Extract, Rules
from bessemer.recipe.endings import NEVER_COMPRESSED, TOPICS, compression_of

BINARY_BYTES = 8000
"""A file of code with a NUL among its first bytes is none; git looks at as many."""

CHANGED = "changed since the files were listed; run the command again to read it as it is now"


def read(unit: Unit, rules: Rules, settings: Extract | None = None) -> Iterator[tuple[Piece, Record]]:
    """The records of a unit, each with its piece. Never raises for bad data.

    A missing, unreadable or changed file yields one rejected record per piece. Raises BessemerError when an object
    store fails, InputError when the library of [corpus.extract] is not installed.
    """
    settings = settings or Extract()
    if unit.format in ("html", "warc"):
        webpage.check_engine(settings)
    for piece in unit.pieces:
        access = storage.Access(unit.anonymous, unit.endpoint)
        key = f"{piece.start}!"
        whole = unit.format in WHOLE_FILES
        try:
            if _changed(piece, access):
                yield piece, Record(key, piece.size, reason="unreadable", detail=CHANGED)
                continue
            records = _read_piece(unit, piece, rules, settings, access)
            if whole:  # few and small: looked at before they are handed out
                records = iter(list(records))
                if _changed(piece, access):
                    records = iter([Record(key, piece.size, reason="unreadable", detail=CHANGED)])
            for record in records:
                record.label = record.label or unit.label
                yield piece, record
            if not whole and _changed(piece, access):
                yield piece, Record(f"{piece.start}~", 0, reason="unreadable", detail=CHANGED)
        except OSError as error:
            yield piece, Record(key, 0, reason="unreadable", detail=error.strerror or str(error))


WHOLE_FILES = ("text", "code", "html", "descriptions")


def _changed(piece: Piece, access: storage.Access) -> bool:
    return bool(piece.stamp) and piece.stamp != stamp(*storage.version(piece.path, access))


def _read_piece(unit: Unit, piece: Piece, rules: Rules, settings: Extract, access: storage.Access) -> Iterator[Record]:
    if piece.damage:
        yield Record(f"{piece.start}!", piece.size, reason=piece.reason, detail=piece.damage)
        return
    fields = tables.Fields(unit.text_key, unit.label_key, unit.encoding)
    if unit.format == "parquet" and not storage.is_remote(piece.path):
        yield from tables.row_group(piece.path, piece.start, piece.size, fields)
        return
    with storage.open_file(piece.path, access) as file:
        compression = compression_of(piece.path)
        if unit.format == "parquet":
            yield from tables.row_group(file, piece.start, piece.size, fields)
        elif unit.format == "jsonl" and piece.layout != "lines":
            yield from record_files.read(file, piece.layout, fields)
        elif unit.format == "jsonl":
            yield from tables.jsonl(file, piece.start, piece.end, piece.offset, fields)
        elif unit.format == "warc":
            yield from _until_damage(
                warc.read(file, piece.start, piece.end, compression, settings, piece.prefix), piece
            )
        elif unit.format == "mediawiki":
            limit = 4 * rules.max_characters  # marks and boxes take half of an article, and seldom three quarters
            pages = mediawiki.read(file, piece.start, piece.end, compression, limit, piece.prefix)
            yield from _until_damage(pages, piece)
        else:
            yield from _whole(file, unit, piece, rules, settings)


def _until_damage(records: Iterator[Record], piece: Piece) -> Iterator[Record]:
    """The records; damage that leaves no way to go on is counted as one more."""
    try:
        yield from records
    except ValueError as error:
        yield Record(f"{piece.start}!", 0, reason="bad_record", detail=str(error)[:300])


def _whole(file: BinaryIO, unit: Unit, piece: Piece, rules: Rules, settings: Extract) -> Iterator[Record]:
    """A file that is one document, or a few."""
    # A character takes at most 4 bytes: with more than this no file could pass the rule on its length.
    limit = max(MAX_RECORD_BYTES, 4 * rules.max_characters)
    if unit.format == "html":
        limit = webpage.max_html_bytes(settings)
    compression = compression_of(piece.path) if unit.format not in NEVER_COMPRESSED else ""
    try:
        raw = _up_to(limit + 1, inflate(file, compression)) if compression else file.read(limit + 1)
    except Damaged as error:
        yield Record("", piece.size, reason="bad_record", detail=str(error))
        return
    if len(raw) > limit:
        detail = f"more than {limit} bytes, unpacked" if compression else against(piece.size, limit) + " bytes"
        yield Record("", piece.size, reason="too_long", detail=detail)
    elif foreign := foreign_format(raw):
        yield Record("", piece.size, reason="wrong_format", detail=foreign)
    elif unit.format == "html":
        share = settings.max_undecodable_share
        yield _text(
            raw,
            lambda page: decode_html(page, unit.encoding or None, share),
            lambda html: webpage.page_text(html, settings),
        )
    elif unit.format == "descriptions" and piece.name.endswith(TOPICS):
        yield from _topics(raw)
    elif unit.format == "descriptions" and piece.name.endswith("METADATA"):
        yield _text(raw, decode_text, extract.description)
    elif unit.format == "code" and not unicode_of(raw)[0] and (nul := raw.find(0, 0, BINARY_BYTES)) >= 0:
        yield Record("", len(raw), reason="binary", detail=f"a NUL at byte {nul}")
    else:
        yield _text(raw, lambda file: decode_text(file, unit.encoding), str)


def _up_to(limit: int, blocks: Iterator[bytes]) -> bytes:
    """The beginning of a compressed file."""
    head = bytearray()
    for block in blocks:
        head += block
        if len(head) >= limit:
            break
    return bytes(head[:limit])


def _text(raw: bytes, decode: Callable[[bytes], str], extracted: Callable[[str], str]) -> Record:
    """A whole file as one record."""
    try:
        return Record("", len(raw), extracted(decode(raw)))
    except UnicodeDecodeError as error:
        return not_utf8("", raw, error)
    except extract.NotText as error:
        return Record("", len(raw), reason="bad_record", detail=str(error))
    except Exception as error:  # a parser of foreign code on foreign data: any failure is this document's
        return Record("", len(raw), reason="bad_record", detail=f"{type(error).__name__}: {error}"[:300])


def _topics(raw: bytes) -> Iterator[Record]:
    try:
        found = extract.topics(raw.decode())
    except UnicodeDecodeError as error:
        yield not_utf8("", raw, error)
    except extract.NotText as error:
        yield Record("", len(raw), reason="bad_record", detail=str(error))
    else:
        for name, text in found.items():
            yield Record(name, len(text.encode("utf-8", "surrogatepass")), text, metadata={"topic": name})
