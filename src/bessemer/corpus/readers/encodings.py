"""Detection of encodings and binary formats from the bytes of a file, regardless of its name."""

from __future__ import annotations

import codecs

from bessemer.corpus.document import Document

BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),  # before UTF-16, whose mark is a prefix of it
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

# Magic bytes of common binary formats, with advice
BINARY_FORMATS = (
    (b"PK\x03\x04", "a zip archive (or an office document): unpack it and name the folder"),
    (b"%PDF-", "a PDF: convert it to text first (pdftotext FILE.pdf FILE.txt)"),
    (b"\x1f\x8b\x08", "gzip data: name the file .gz"),
    (b"BZh91AY&SY", "bzip2 data: name the file .bz2"),
    (b"\xfd7zXZ\0", "xz data: name the file .xz"),
    (b"\x28\xb5\x2f\xfd", "Zstandard data: name the file .zst"),
    (b"PAR1", "a Parquet file: set format = 'parquet'"),
    (b"ARROW1", "an Arrow file: write it as Parquet"),
)
GUESSED_BYTES = 1 << 16  # guess the encoding of a file from its first bytes
# Supersets that browsers use instead, where Python's codec is stricter
_SUPERSETS = {"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949"}


def foreign_format(head: bytes) -> str:
    """Return a description of a binary format with advice; "" if the bytes are of none."""
    return next((f"the file is {what}" for magic, what in BINARY_FORMATS if head.startswith(magic)), "")


def unicode_of(raw: bytes) -> str:
    """Return the name of the Unicode codec that a byte order mark shows; "" without one.

    The codec removes the byte order mark.
    """
    return next((name for mark, name in BOMS if raw.startswith(mark)), "")


def is_utf8(raw: bytes) -> bool:
    """Return whether the beginning of a file, which may end within a character, is UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(raw)
    except UnicodeDecodeError:
        return False
    return True


def decode_text(raw: bytes, encoding: str = "") -> str:
    """Decode a whole file: by its byte order mark if it has one, else as UTF-8, else with `encoding`.

    Raises UnicodeDecodeError if none of them fits.
    """
    name = unicode_of(raw)
    return raw.decode(name) if name else decode(raw, encoding)


def decode(raw: bytes, encoding: str = "") -> str:
    """Decode bytes as UTF-8, or with `encoding` if they are not UTF-8. Raises UnicodeDecodeError if neither fits.

    Text in other encodings is practically never valid UTF-8.
    """
    try:
        return raw.decode()
    except UnicodeDecodeError:
        if not encoding:
            raise
        return raw.decode(encoding)


def not_utf8(key: str, raw: bytes, error: UnicodeDecodeError) -> Document:
    """Return a rejected document for bytes that could not be decoded, with their probable encoding as the detail.

    `key` is the key of the document, and `error` the failure.
    """
    detail = f"byte 0x{raw[error.start]:02x} at {error.start}"
    head = raw[:4000].decode("utf-8", "replace")
    if error.encoding != "utf-8":
        detail = f"not {error.encoding}: {detail}"
    elif (nul := raw[:GUESSED_BYTES].find(0)) >= 0:
        return Document(key, len(raw), head, reason="binary", detail=f"a NUL at byte {nul}, and {detail}")
    elif (likely := detected(raw[:GUESSED_BYTES])) not in (None, "utf-8"):
        detail += f"; probably {likely}"
    return Document(key, len(raw), head, reason="not_utf8", detail=detail)


def codec(label: str | None) -> str | None:
    """Return Python's codec for a web charset label (WHATWG Encoding Standard, section 4.2); None for an unknown label."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    name = map_encoding_to_html5(label or "", fallback_utf8=False)
    return _SUPERSETS.get(name or "", name)


def detected(raw: bytes) -> str | None:
    """Return the probable encoding of bytes by uchardet (in resiliparse); None if it cannot tell."""
    from resiliparse.parse.encoding import detect_encoding

    return codec(detect_encoding(raw, html5_compatible=False))
