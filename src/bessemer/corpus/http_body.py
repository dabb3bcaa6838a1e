"""Bodies of archived HTTP responses without their transfer and content codings (RFC 9112, section 7; RFC 9110, section 8.4).

Crawlers store what came over the wire: cut connections, irregular chunks, headers of codings that were already removed.
What came before a cut is kept, and no body is decoded further than the caller reads.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator

from bessemer.corpus.extract import NotText
from bessemer.corpus.inflate import CompressedMember, Damaged, inflate

FEED_BYTES = 4096
MAX_CODINGS = 4  # that are detected, one within the other
DETECTED = "detected"
DECODED = ("gzip", "deflate", "br", "zstd")
CUT_CHUNKS, IRREGULAR_CHUNKS = "chunked body cut short", "irregular chunks"
# A line with the size of a chunk, after the line end of the chunk before; extensions and padding are allowed
_SIZE = re.compile(rb"(?:\r?\n){0,2}[ \t]{0,9}([0-9a-fA-F]{1,16})[ \t]{0,99}(?:;[^\r\n]{0,999})?\r?\n")
_SIZE_WITHIN = re.compile(rb"\r?\n([0-9a-fA-F]{1,8})[ \t]{0,99}(?:;[^\r\n]{0,999})?\r?\n")
_CUT_SIZE = re.compile(rb"[\r\n]{0,4}([0-9a-fA-F]{0,16})[ \t]{0,99}(?:;[^\r\n]{0,999})?\r?\Z")
_TRAILERS = re.compile(rb"(?:[\w-]{1,99}:[^\r\n]{0,999}\r?\n){0,9}[\r\n]{0,9}\Z")


def decode_body(raw: bytes, codings: list[str], limit: int) -> tuple[bytes, str]:
    """Remove the codings, which are in the order in which the server applied them.

    A coding that the body does not have is skipped. Returns at most `limit` + 1 bytes, and what is wrong with the body
    ("" for nothing). Raises NotText where the body cannot be decoded and is no HTML.
    """
    damage = ""
    for name in [*reversed(codings), *[DETECTED] * MAX_CODINGS]:
        name = name.strip().lower().removeprefix("x-")
        if name == DETECTED:
            name = "chunked" if _is_chunked(raw) else "gzip" if raw.startswith(b"\x1f\x8b\x08") else ""
        if name == "chunked":
            raw, problem = _without_chunks(raw)
        elif name in DECODED:
            raw, problem = _inflated(raw, name, limit)
        elif name in ("identity", "") or _is_html(raw):
            continue
        else:
            raise NotText(f"the content coding {name[:40]!r} is unknown")
        damage = damage or problem
    return raw[: limit + 1], damage


def _inflated(raw: bytes, name: str, limit: int) -> tuple[bytes, str]:
    """The decoded body up to the limit, and what is wrong with it; the body as it is where it is stored decoded."""
    if name == "br":
        blocks = _brotli(raw)
    elif name == "deflate":  # often sent without the zlib wrapper
        has_wrapper = len(raw) > 1 and raw[0] & 15 == 8 and int.from_bytes(raw[:2], "big") % 31 == 0
        blocks = CompressedMember(io.BytesIO(raw), 0, "zlib" if has_wrapper else "deflate").blocks(math.inf)
    else:
        blocks = inflate(io.BytesIO(raw), name, max_expansion=math.inf)
    body = bytearray()
    try:
        for block in blocks:
            body += block
            if len(body) > limit:
                break
    except Damaged as error:
        if raw and not body and not _is_html(raw):
            raise NotText(f"the body is no {name} data: {error}") from None
        return (bytes(body), f"{name} body cut short or damaged") if body else (raw, "")
    return bytes(body), ""


def _is_html(raw: bytes) -> bool:
    return b"<" in raw[:1024] and b"\0" not in raw[:1024]


def _brotli(raw: bytes) -> Iterator[bytes]:
    """Decode RFC 7932. Raises Damaged, after everything before the damage."""
    import brotli

    decoder = brotli.Decompressor()
    for start in range(0, len(raw), FEED_BYTES):
        try:
            yield decoder.process(raw[start : start + FEED_BYTES], output_buffer_limit=FEED_BYTES)
            while not decoder.can_accept_more_data():
                yield decoder.process(b"", output_buffer_limit=FEED_BYTES)
        except brotli.error as error:
            raise Damaged(str(error)) from None
        if decoder.is_finished():
            return
    raise Damaged("cut short")


def _is_chunked(raw: bytes) -> bool:
    """Return whether a body without the header is chunked: the first chunk ends where it says, and another follows."""
    first = _SIZE.match(raw)
    end = first.end() + int(first[1], 16) if first else len(raw)
    return raw[end : end + 1] in (b"\r", b"\n") and _SIZE.match(raw, end) is not None


def _without_chunks(raw: bytes) -> tuple[bytes, str]:
    """The data of the chunks, and what is wrong with them. A body that does not begin with a size is not chunked."""
    parts: list[bytes] = []
    damage = ""
    found = _SIZE.match(raw)
    if found is None:
        return (b"", CUT_CHUNKS) if _CUT_SIZE.match(raw) else (raw, "")
    while found is not None:
        start, size = found.end(), int(found[1], 16)
        if size == 0:
            break
        end = start + size
        found = _SIZE.match(raw, end)
        if found and found[0][0] not in b"\r\n" and not _ends_as_said(raw, found):
            found = None  # a word that looks like a size
        if found is None and end <= len(raw) and (cut := _CUT_SIZE.match(raw, end)):
            damage = damage or ("" if int(cut[1] or b"1", 16) == 0 else CUT_CHUNKS)
        elif found is None:
            damage = damage or (CUT_CHUNKS if end > len(raw) else IRREGULAR_CHUNKS)
            found = _next_size(raw, start, size)
            end, damage = (found.start(), IRREGULAR_CHUNKS) if found else (len(raw), damage)
        parts.append(raw[start:end])
    return b"".join(parts), damage


def _next_size(raw: bytes, start: int, size: int) -> re.Match[bytes] | None:
    """The next line with a size, behind a chunk that does not end where its own size says.

    Its own chunk must end where it says; or the chunk before has its size if line ends are counted as two bytes.
    """
    last, line_ends = start, 0
    for found in _SIZE_WITHIN.finditer(raw, start):
        line_ends += raw.count(b"\n", last, found.start())
        last = found.start()
        if abs(last - start + line_ends - size) <= 1 or _ends_as_said(raw, found):
            return found
    return None


def _ends_as_said(raw: bytes, found: re.Match[bytes]) -> bool:
    """Return whether the chunk behind a size is followed by the next size, or is the last one."""
    end = found.end() + int(found[1], 16)
    return (_TRAILERS if end == found.end() else _SIZE).match(raw, end) is not None
