"""HTML pages of the response records of crawl archives (WARC 1.0 and 1.1, ISO 28500).

Damage costs only the records hit. (fastwarc's ArchiveIterator stops at the first damage, checks no Content-Length, and has no
offsets within a member, so fastwarc only parses single records.)

A document's key is its member's byte offset (as in Common Crawl's index), with "+N" for a record at byte N of a member.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from bessemer.corpus import webpage
from bessemer.corpus.document import Record
from bessemer.corpus.encodings import decode_html
from bessemer.corpus.extract import NotText
from bessemer.corpus.http_body import decode_body
from bessemer.corpus.inflate import SCAN_BYTES, CompressedMember, Damaged, dictionary_of, find_member, next_member
from bessemer.recipe import Extract

MAX_BLOCK_BYTES = 64 << 20  # a longer record is not read into memory
MAX_HEADER_BYTES = 64 << 10
MEMBER_BYTES = 8 << 20  # of a member that holds more, only as much is unpacked as is asked for
MAX_FIELD_CHARACTERS = 2000  # of a header, as it is kept in `metadata`
PAGES = ("response", "resource", "conversion")  # types of records that hold one; conversion: its text, as in WET files
HTML_TYPES = ("text/html", "application/xhtml+xml")
_LOOKS_LIKE_HTML = re.compile(rb"\s{0,99}(<!--.{0,999}?-->\s{0,99})?<(!doctype html|html|head|body)\b", re.I | re.S)
_VERSION = re.compile(rb"WARC/\d\.\d{1,2}\r?\n")
_CONTENT_LENGTH = re.compile(rb"^content-length[ \t]{0,9}:[ \t]{0,9}(\d{1,18})[ \t]{0,9}\r?$", re.I | re.M)
_TYPE = re.compile(rb"^warc-type[ \t]{0,9}:[ \t]{0,9}([a-z]{1,20})[ \t]{0,9}\r?$", re.I | re.M)


@dataclass
class Frame:
    """A record as it lies in the archive, or what lies there instead."""

    offset: int
    size: int
    header: bytes = b""
    block: bytes = b""
    problem: str = ""


def read(
    file: BinaryIO, end: int | None, compression: str, settings: Extract, passed_over: Counter[str] | None = None
) -> Iterator[Record]:
    """The documents of the records in about the first `end` bytes of the unpacked archive (None: all).

    Records of other types than PAGES are counted by type in `passed_over`; pages that hold no text and damaged records are
    rejected. OSError when unreadable.
    """
    passed_over = Counter() if passed_over is None else passed_over
    if compression:
        framed = _members(file, end, compression)
    else:
        framed = ((f"{frame.offset}", frame) for frame in frames(file, end))
    for key, frame in framed:
        kind = _TYPE.search(frame.header)
        if kind is not None and (name := kind[1].lower().decode()) not in PAGES:
            passed_over[name] += 1
        elif frame.problem:
            yield Record(key, frame.size, reason="bad_record", detail=frame.problem)
        else:
            yield _document(frame, key, settings)


def _members(file: BinaryIO, end: int | None, compression: str) -> Iterator[tuple[str, Frame]]:
    """The records of the members, with their keys, until `end` bytes were unpacked; a large member is cut there."""
    dictionary = dictionary_of(file) if compression == "zstd" else b""
    position: int | None = 0
    unpacked, is_cut = 0, False
    while position is not None and not is_cut and (end is None or unpacked < end):
        try:
            following = next_member(file, compression, position)
        except Damaged:
            found = find_member(file, compression, position + 1, b"WARC/", dictionary)
            skipped = (file.seek(0, io.SEEK_END) if found is None else found) - position
            problem = f"{skipped} bytes between the records are no {compression} data"
            yield f"{position}", Frame(0, skipped, problem=problem)
            position = found
            continue
        if following is None:
            return
        position = following
        member = CompressedMember(file, position, compression, dictionary)
        damage = ""
        with tempfile.SpooledTemporaryFile(max_size=MAX_BLOCK_BYTES) as spool:
            try:
                for block in member.blocks():
                    unpacked += spool.write(block)
                    is_cut = end is not None and unpacked >= end and spool.tell() > MEMBER_BYTES
                    if is_cut:
                        break
            except Damaged as error:
                damage = str(error)
            last: Frame | None = None
            for frame in frames(cast(BinaryIO, spool), spool.tell()):
                if last is not None:
                    yield _key(position, last), last
                last = frame
        if damage:  # it hit the last record, which is the only one as a rule
            last = Frame(last.offset if last else 0, member.end - position, problem=damage)
        if last is not None and not is_cut:
            yield _key(position, last), last
        position = find_member(file, compression, position + 1, b"WARC/", dictionary) if damage else member.end


def _key(member: int, frame: Frame) -> str:
    """The key of a record within a member."""
    return f"{member}+{frame.offset}" if frame.offset else f"{member}"


def frames(file: BinaryIO, end: int | None) -> Iterator[Frame]:
    """The records of an uncompressed archive that begin before `end` (None: all)."""
    position: int | None = 0
    while position is not None and (end is None or position < end):
        file.seek(position)
        line = file.readline(1024)
        if not line:
            return
        if not line.strip(b"\r\n\0"):
            position += len(line)
        elif _VERSION.fullmatch(line):
            frame, following = _frame(file, position, line)
            yield frame
            position = find_record(file, position + len(line)) if following is None else following
        else:
            found = find_record(file, position + 1)
            size = (file.seek(0, io.SEEK_END) if found is None else found) - position
            yield Frame(position, size, problem=f"{size} bytes between the records")
            position = found


def _frame(file: BinaryIO, position: int, line: bytes) -> tuple[Frame, int | None]:
    """The record at `position`, whose first line was read, and where the next begins; None when that is not known."""
    header = bytearray(line)
    while line.strip(b"\r\n"):
        line = file.readline(MAX_HEADER_BYTES)
        header += line
        if not line or len(header) > MAX_HEADER_BYTES:
            return Frame(position, len(header), problem="a header without an end"), None
    found = _CONTENT_LENGTH.search(header)
    if found is None:
        return Frame(position, len(header), problem="a header without Content-Length"), None
    length, following = int(found[1]), position + len(header) + int(found[1])
    frame = Frame(position, len(header) + length, bytes(header))
    is_long = length > MAX_BLOCK_BYTES
    if is_long:
        file.seek(following)
        frame.problem = f"a record of {length} bytes"
    else:
        frame.block = file.read(length)
    is_cut = not is_long and len(frame.block) < length
    tail = b"" if is_cut else file.read(4)
    if is_cut or (is_long and not tail):
        frame.problem = f"Content-Length is {length}, but the file ends earlier"
    elif tail.strip(b"\r\n") and not tail.startswith((b"\r\n", b"\n")):
        # The next record does not begin where this one says: do not trust it, nor lose the ones it would swallow.
        frame.problem = f"Content-Length is {length}, but the record does not end there"
    else:
        return frame, following
    return frame, None


def find_record(file: BinaryIO, start: int) -> int | None:
    """Where the next record of an uncompressed archive begins, at `start` or behind it."""
    position = max(start - 1, 0)
    while True:
        file.seek(position)
        block = file.read(SCAN_BYTES)
        for found in _VERSION.finditer(block):
            offset = position + found.start()
            if offset < start:
                continue
            file.seek(offset)
            head = file.read(4096).split(b"\r\n\r\n")[0].split(b"\n\n")[0]
            if not _TYPE.search(head):
                continue
            if offset == 0 or block[max(found.start() - 1, 0) : found.start()] == b"\n":
                return offset
            # Damage may hide the line's beginning: a record is one that ends where it says.
            file.seek(offset)
            frame, following = _frame(file, offset, file.readline(1024))
            if following is not None and not frame.problem:
                return offset
        if len(block) < SCAN_BYTES:
            return None
        position += len(block) - 16  # a mark may lie across the edge


def _document(frame: Frame, key: str, settings: Extract) -> Record:
    """A response as a document, or with the reason why it is none."""
    record = Record(key, frame.size, metadata={"byte": key})
    try:
        _fill(record, frame, settings)
    except NotText as error:
        record.reject("bad_record", str(error))
    except UnicodeDecodeError as error:
        record.reject("not_utf8", f"the charset is unknown: {error.reason} at byte {error.start}")
    except Exception as error:  # a parser of foreign code on foreign data: any failure is this document's
        record.reject("bad_record", f"{type(error).__name__}: {error}"[:300])
    return record


def _fill(record: Record, frame: Frame, settings: Extract) -> None:
    """Fill in a document from a response, or the reason why it is none."""
    from fastwarc.warc import WarcRecord

    archived = WarcRecord.from_bytes(frame.header + frame.block)
    headers = archived.headers
    for name, header in (("url", "WARC-Target-URI"), ("date", "WARC-Date"), ("record_id", "WARC-Record-ID")):
        if value := headers.get(header):
            record.metadata[name] = value.strip("<>")[:MAX_FIELD_CHARACTERS]
    archived_type = headers.get("Content-Type") or ""
    if not archived_type.lower().startswith("application/http"):
        is_page = (headers.get("WARC-Type") or "").lower() != "response"
        return _fill_from_block(record, frame.block, archived_type if is_page else "", settings)
    archived.parse_http(auto_decode="none", quirks_mode=True)
    status = archived.http_headers.status_code
    content_type = archived.http_headers.get("Content-Type") or headers.get("WARC-Identified-Payload-Type") or ""
    record.metadata["content_type"] = content_type.strip()[:200]
    if status != 200:
        return record.reject("http_status", str(status or "no status"))
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type and media_type not in HTML_TYPES:
        return record.reject("not_html", media_type[:200])
    limit = webpage.max_html_bytes(settings)
    codings = _codings(archived.http_headers)
    raw, damage = decode_body(archived.reader.read(), codings, limit)
    if truncated := headers.get("WARC-Truncated"):
        damage = damage or f"truncated by the crawler: {truncated[:40]}"
    if damage:
        record.metadata[webpage.DAMAGE] = damage
        raw = _whole_characters(raw)
    if not media_type and not _LOOKS_LIKE_HTML.match(raw[:2048]):
        return record.reject("not_html", "no content type")
    if len(raw) > limit:
        return record.reject("too_long", f"more than {limit} bytes of HTML")
    html = decode_html(raw, archived.http_charset, settings.max_undecodable_share)
    record.text = webpage.page_text(html, settings, record.metadata)
    return None


def _fill_from_block(record: Record, raw: bytes, content_type: str, settings: Extract) -> None:
    """Fill in a document from a page that was archived without HTTP, or from text that was taken out of one."""
    media_type, _, parameters = content_type.partition(";")
    charset = parameters.partition("charset=")[2].strip(" \"'") or None
    media_type = media_type.strip().lower()
    if media_type not in (*HTML_TYPES, "text/plain"):
        return record.reject("not_html", content_type[:200] or "no HTTP response")
    text = decode_html(raw, charset, settings.max_undecodable_share)
    record.metadata["content_type"] = content_type.strip()[:200]
    record.text = text if media_type == "text/plain" else webpage.page_text(text, settings, record.metadata)
    return None


def _codings(headers: Any) -> list[str]:
    """The codings of a body in the order in which the server applied them."""
    fields = [(name.lower(), value) for name, value in headers.items()]
    return [
        coding
        for wanted in ("content-encoding", "transfer-encoding")
        for name, value in fields
        if name == wanted
        for coding in value.split(",")
    ]


def _whole_characters(raw: bytes) -> bytes:
    """A body that was cut, without half a character of UTF-8 at its end."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return raw[: error.start]
    return raw
