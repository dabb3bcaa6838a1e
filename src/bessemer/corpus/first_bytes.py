"""What a file is by its first bytes, whatever its name says: encodings with a byte order mark, and binary formats."""

from __future__ import annotations

import codecs

BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark it begins with
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

BINARY_FORMATS = (
    (b"PK\x03\x04", "a zip archive (or an office document): unpack it and name the folder"),
    (b"%PDF-", "a PDF: convert it to text first"),
    (b"\x1f\x8b\x08", "gzip data: name the file .gz"),
    (b"BZh91AY&SY", "bzip2 data: name the file .bz2"),
    (b"\xfd7zXZ\0", "xz data: name the file .xz"),
    (b"\x28\xb5\x2f\xfd", "Zstandard data: name the file .zst"),
    (b"PAR1", "a Parquet file: set format = 'parquet'"),
    (b"ARROW1", "an Arrow file: write it as Parquet"),
    (b"SQLite format 3", "an SQLite database: export its table as JSONL"),
    (b"\xd0\xcf\x11\xe0", "an old office document: convert it to text first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it and name the folder"),
    (b"Rar!\x1a\x07", "a rar archive: unpack it and name the folder"),
)
"""How files of formats that are often met begin, and what to do with them."""


def foreign_format(head: bytes) -> str:
    """What a file is that holds no text, with what to do; "" for any other."""
    return next((f"the file is {what}" for magic, what in BINARY_FORMATS if head.startswith(magic)), "")


def bom_of(raw: bytes) -> str:
    """The encoding that a byte order mark at the beginning names; "" for none."""
    return next((name for mark, name in BOMS if raw.startswith(mark)), "")


def decode_text(raw: bytes) -> str:
    """UTF-8, or what a byte order mark says. Raises UnicodeDecodeError."""
    for mark, name in BOMS:
        if raw.startswith(mark):
            return raw[len(mark) :].decode(name)
    return raw.decode()
