"""HTML pages in response records of crawl archives (WARC 1.0 and 1.1, ISO 28500), read by fastwarc.

Reading stops at the first damaged record. The rest of the file is one rejected document with the position and the bytes lost.

The key of a document is the byte offset of its record in the archive, plus "+N" for the Nth further record at that offset. In
a compressed archive it is the offset of the member, as in Common Crawl's index.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from bessemer.common.errors import NotText
from bessemer.corpus.document import Document
from bessemer.corpus.extract import webpage
from bessemer.corpus.readers.base import Part, Reader
from bessemer.corpus.readers.formats.text import failure
from bessemer.corpus.readers.inflate import MAX_EXPANSION, SUSPECT_BYTES, Damaged
from bessemer.recipe import Extract
from bessemer.storage import filesystem

MAX_BLOCK_BYTES = 64 << 20  # longer records are not read into memory
MAX_FIELD_CHARACTERS = 2000  # maximum length of a header in `metadata`
# Types of records that hold pages; `conversion` is extracted text (WET files)
PAGES = ("response", "resource", "conversion")
HTML_TYPES = ("text/html", "application/xhtml+xml")
CUT_BODY, CUT_CHUNKS, CUT_CODING = "body cut short", "chunked body cut short or damaged", "compressed body damaged"
GZIP = b"\x1f\x8b\x08"
Coding = Literal["none", "transfer", "content"]
CODINGS: tuple[tuple[Coding, str, str], ...] = (
    ("transfer", "Transfer-Encoding", CUT_CHUNKS), ("content", "Content-Encoding", CUT_CODING),
)  # fmt: skip
STEP_BYTES = 64  # decode a damaged body in small steps, to lose little before the damage
_LOOKS_LIKE_HTML = re.compile(rb"\s{0,99}(<!--.{0,999}?-->\s{0,99})?<(!doctype html|html|head|body)\b", re.I | re.S)
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s{0,999}<")
_UNNAMED_CODING = re.compile(rb"\x1f\x8b\x08|[0-9a-f]{1,8}[ \t]{0,9}(;[^\r\n]{0,99})?\r?\n\s{0,99}<", re.I)


class WarcReader(Reader):
    """A reader of WARC archives from beginning to end."""

    suffixes = (".warc", ".wet")
    is_web = True
    may_hang = True
    is_stream = True

    def read(self, part: Part) -> Iterator[Document]:
        """Yield a document for each page of the archive."""
        with filesystem.open_file(part.path, self.context.source) as file:
            yield from self.read_archive(file, part.end)

    def read_archive(self, file: BinaryIO, end: int | None) -> Iterator[Document]:
        """Yield the documents of the records in about the first `end` bytes of the decompressed archive, or of all if None.

        Records of types other than PAGES are counted by type in `passed_over`. Pages without text are rejected. A record is
        valid only if the next one begins where it ends, so damage also loses the record before it. Raises OSError if the file
        cannot be read.
        """
        from fastwarc.warc import ArchiveIterator

        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        limit = max(SUSPECT_BYTES, MAX_EXPANSION * size)
        unpacked, position, number = 0, 0, -1
        waiting: Document | None = None
        try:
            for archived in ArchiveIterator(file, parse_http=False):
                if waiting is not None:
                    yield waiting
                    waiting = None
                if end is not None and unpacked >= end:
                    return
                number = number + 1 if archived.stream_pos == position else 0
                position = archived.stream_pos
                headers = sum(len(name) + len(value) + 4 for name, value in archived.headers.items())
                unpacked += archived.content_length + headers
                if unpacked > limit:
                    raise Damaged(f"the file expands more than {MAX_EXPANSION} times")
                kind, key = str(archived.record_type), f"{position}+{number}" if number else f"{position}"
                waiting = _record(archived, key, kind in PAGES, self.context.corpus.extract)
                if waiting is None:
                    self.context.passed_over[kind] += 1
        except OSError as error:
            if error.errno is not None:  # an error of the disk, not of the archive
                raise
            lost = size - position
            detail = f"{str(error)[:100]}: {lost} of {size} bytes, from {position} on, were not read"
            waiting = Document(f"{position}!", lost, reason="bad_record", detail=detail)
        if waiting is not None:
            yield waiting


def _record(archived: Any, key: str, is_page: bool, settings: Extract) -> Document | None:
    """Convert a WARC record to a document, or to a rejected one; None if its type holds no page (`is_page` is False).

    `archived` is the record of fastwarc. Raises Damaged if it is cut short or has no length.
    """
    if not (archived.headers.get("Content-Length") or "").strip().isdecimal():
        raise Damaged("a record without Content-Length")
    length = archived.content_length
    is_long = length > MAX_BLOCK_BYTES
    block = archived.reader.read() if is_page and not is_long else b""
    num_bytes = len(block) + archived.reader.consume()
    if num_bytes < length:
        raise Damaged(f"a record of {length} bytes ends after {num_bytes}")
    if not is_page:
        return None
    record = Document(key, length, metadata={"byte": key})
    try:
        if is_long:
            raise NotText(f"a record of {length} bytes")
        _fill(record, archived.headers, block, settings)
    except UnicodeDecodeError as error:
        record.reject("not_utf8", f"the charset is unknown: {error.reason} at byte {error.start}")
    except Exception as error:  # parsers may fail on arbitrary data in any way, which must affect only this document
        record.reject("bad_record", failure(error))
    return record


def _fill(record: Document, headers: Any, block: bytes, settings: Extract) -> None:
    """Set the text and metadata of a document from an archived HTTP response, or reject it.

    `headers` are those of the WARC record, and `block` is its content.
    """
    for name, header in (("url", "WARC-Target-URI"), ("date", "WARC-Date"), ("record_id", "WARC-Record-ID")):
        if value := headers.get(header):
            record.metadata[name] = value.strip("<>")[:MAX_FIELD_CHARACTERS]
    archived_type = headers.get("Content-Type") or ""
    if not archived_type.lower().startswith("application/http"):
        is_page = (headers.get("WARC-Type") or "").lower() != "response"
        return _fill_from_block(record, block, archived_type if is_page else "", settings)
    response = _parse_http(block, "none")
    fields = response.http_headers
    content_type = (fields and fields.get("Content-Type")) or headers.get("WARC-Identified-Payload-Type") or ""
    record.metadata["content_type"] = content_type.strip()[:200]
    if fields is None or fields.status_code != 200:
        return record.reject("http_status", str((fields and fields.status_code) or "no status"))
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type and media_type not in HTML_TYPES:
        return record.reject("not_html", media_type[:200])
    limit = settings.max_html_bytes
    raw, damage = _decode_body(block, fields, limit)
    if truncated := headers.get("WARC-Truncated"):
        damage = damage or f"truncated by the crawler: {truncated[:40]}"
    if damage:
        record.metadata[webpage.DAMAGE] = damage
        raw = _whole_characters(raw)
    if not media_type and not _LOOKS_LIKE_HTML.match(raw[:2048]):
        return record.reject("not_html", "no content type")
    if len(raw) > limit:
        return record.reject("too_long", f"more than {limit} bytes of HTML")
    html = webpage.decode_html(raw, response.http_charset, settings.max_undecodable_share)
    record.text = webpage.page_text(html, settings, record.metadata)
    return None


def _fill_from_block(record: Document, raw: bytes, content_type: str, settings: Extract) -> None:
    """Set the text of a document from a page that was archived without HTTP headers, or from extracted text (WET files).

    `raw` is this content. The document is rejected if `content_type` is neither HTML nor plain text.
    """
    media_type, _, parameters = content_type.partition(";")
    charset = parameters.partition("charset=")[2].strip(" \"'") or None
    media_type = media_type.strip().lower()
    if media_type not in (*HTML_TYPES, "text/plain"):
        return record.reject("not_html", content_type[:200] or "no HTTP response")
    text = webpage.decode_html(raw, charset, settings.max_undecodable_share)
    record.metadata["content_type"] = content_type.strip()[:200]
    record.text = text if media_type == "text/plain" else webpage.page_text(text, settings, record.metadata)
    return None


def _parse_http(block: bytes, coding: Coding) -> Any:
    """Return the parsed HTTP response in `block`, whose reader decodes the body.

    `coding` says which codings of the body it decodes: "transfer", "content" or "none". Raises OSError for an invalid
    block.
    """
    from fastwarc.warc import ArchiveIterator

    header = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\n"
    header += b"Content-Length: %d\r\n\r\n" % len(block)
    # A record from an iterator is decoded while it is read. One made from bytes would be decoded at once, and a compression
    # bomb would fill the memory.
    response = next(iter(ArchiveIterator(io.BytesIO(header + block), parse_http=False)))
    response.parse_http(auto_decode=coding, quirks_mode=True)
    return response


def _decode_body(block: bytes, headers: Any, limit: int) -> tuple[bytes, str]:
    """Return at most `limit` + 1 bytes of a response's decoded body, and a description of damage or "".

    Crawlers store decoded bodies with the headers of their codings, so a coding that does not fit is skipped if the
    body is markup. Content before the damage is kept. Raises NotText if the body cannot be decoded at all.
    """
    match = _BLANK_LINE.search(block)
    start = match.end() if match else len(block)
    head, body, damage, problem = block[:start], block[start:], "", ""
    length = headers.get("Content-Length") or ""
    if length.isdecimal() and len(body) < int(length) and not headers.get("Transfer-Encoding"):
        damage = CUT_BODY
    for coding, name, kind in CODINGS:
        if not headers.get(name):
            continue
        decoded, error = _read_body(head + body, coding, limit if coding == "content" else len(block))
        if error and not decoded:
            problem = error
            continue
        is_cut = body[:3] == GZIP and len(decoded) <= limit and int.from_bytes(body[-4:], "little") != len(decoded)
        damage = damage or (kind if error or (coding == "content" and is_cut) else "")
        body = decoded
    if (problem and not _MARKUP.match(body)) or _UNNAMED_CODING.match(body):
        raise NotText(f"the body cannot be decoded: {problem or 'it is coded, which no header says'}")
    return body[: limit + 1], damage


def _read_body(block: bytes, coding: Coding, limit: int) -> tuple[bytes, str]:
    """Decode one kind of codings of a body up to about `limit` bytes. Returns the body and the error that ended it, or ""."""
    body, problem = bytearray(), ""
    for step in (limit + 1, STEP_BYTES):  # an error loses the whole step, so retry in small ones
        body.clear()
        try:
            reader = _parse_http(block, coding).reader
            while len(body) <= limit and (part := reader.read(step)):
                body += part
            return bytes(body), ""
        except OSError as error:
            problem = str(error)[:100]
    return bytes(body), problem


def _whole_characters(raw: bytes) -> bytes:
    """Remove an incomplete UTF-8 character at the end of a truncated body."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return raw[: error.start]
    return raw
