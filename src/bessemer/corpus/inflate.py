"""Compressed files, member by member, with bounded memory: gzip, bzip2, xz and Zstandard.

A member (gzip member, bzip2 or xz stream, Zstandard frame) is what can be decompressed on its own. Crawls are written
with one record a member, Wikipedia dumps with a hundred pages a member, so a file can be entered in its middle and
outlives damage in one place. What was decoded before a damage is handed out first.
"""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 20
"""Bytes handed out at a time, at the most (Zstandard: 32 MiB, see ZSTD_FEED)."""

GZIP_FEED, BZIP2_FEED = 1 << 16, 1 << 12
"""Compressed bytes taken at a time. bzip2 decodes a block of 900 kB at once: with little fed at a time, a damaged
block is never reached in the call that hands out the block before it."""

XZ_FEED = 1 << 10
"""Compressed bytes given to xz at a time: what it decoded of those before a damage is lost."""

XZ_MEMORY_BYTES = 256 << 20
"""Memory that an xz stream may ask for: `xz -9` takes 65 MiB."""

ZSTD_FEED = 1 << 10
"""Compressed bytes given to Zstandard at a time, which knows no limit of its output: a block takes 4 bytes or more
and holds 128 KiB at the most (RFC 8878, section 3.1.1.2), so that this gives 32 MiB at the most."""

MAX_EXPANSION = 100
"""A compressed file may expand this many times; text reaches 3 to 10, a bomb 1000."""

SUSPECT_BYTES = 1 << 20
"""Less than this is no bomb, however small it was before."""

_STARTS = {
    "gzip": re.compile(rb"\x1f\x8b\x08[\x00-\x1f]"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\0\0[\x00\x01\x04\x0a]"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
SCAN_BYTES = 1 << 20


class Damaged(ValueError):
    """Compressed data that cannot be decoded (further); the message says why."""


class Member:
    """One member of a compressed file, from a given offset."""

    def __init__(self, file: BinaryIO, offset: int, compression: str, dictionary: bytes = b"") -> None:
        self.file, self.offset, self.compression, self.dictionary = file, offset, compression, dictionary
        self.end = offset
        """The byte after it, once all of it was decoded; before, the byte after what was read."""

    def blocks(self) -> Iterator[bytes]:
        """What it holds. Raises Damaged, after everything before the damage; OSError."""
        self.file.seek(self.offset)
        produced = 0
        decode = {"gzip": self._gzip, "bzip2": self._bzip2, "xz": self._xz, "zstd": self._zstd}[self.compression]
        for block in decode():
            produced += len(block)
            if produced > max(SUSPECT_BYTES, MAX_EXPANSION * (self.end - self.offset)):
                raise Damaged(f"expands more than {MAX_EXPANSION} times")
            yield block

    def _read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.end += len(data)
        return data

    def _gzip(self) -> Iterator[bytes]:
        decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
        while not decoder.eof:
            data = decoder.unconsumed_tail or self._read(GZIP_FEED)
            before = decoder.copy()
            try:
                block = decoder.decompress(data, BLOCK_BYTES)
            except zlib.error as error:
                yield from _until_error(before, data)
                raise Damaged(_reason(error)) from None
            if block:
                yield block
            elif not data and not decoder.eof:
                raise Damaged("cut short: the file ends within the compressed data")
        self.end -= len(decoder.unused_data)

    def _bzip2(self) -> Iterator[bytes]:
        return self._fed(bz2.BZ2Decompressor(), BZIP2_FEED)

    def _xz(self) -> Iterator[bytes]:
        return self._fed(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES), XZ_FEED)

    def _fed(self, decoder: bz2.BZ2Decompressor | lzma.LZMADecompressor, feed: int) -> Iterator[bytes]:
        while not decoder.eof:
            data = self._read(feed) if decoder.needs_input else b""
            if decoder.needs_input and not data:
                raise Damaged("cut short: the file ends within the compressed data")
            try:
                block = decoder.decompress(data, BLOCK_BYTES)
            except (OSError, ValueError, lzma.LZMAError) as error:
                raise Damaged(_reason(error)) from None
            if block:
                yield block
        self.end -= len(decoder.unused_data)

    def _zstd(self) -> Iterator[bytes]:
        import zstandard

        known = zstandard.ZstdCompressionDict(self.dictionary) if self.dictionary else None
        decoder = zstandard.ZstdDecompressor(dict_data=known).decompressobj()
        while not decoder.eof:
            data = self._read(ZSTD_FEED)
            if not data:
                raise Damaged("cut short: the file ends within the compressed data")
            try:
                block = decoder.decompress(data)
            except zstandard.ZstdError as error:
                raise Damaged(_reason(error)) from None
            if block:
                yield block
        self.end -= len(decoder.unused_data)


def inflate(file: BinaryIO, compression: str, start: int = 0) -> Iterator[bytes]:
    """All members from `start` to the end of the file, one after the other. Raises Damaged, after everything
    before the damage."""
    offset = next_member(file, compression, start)
    while offset is not None:
        member = Member(file, offset, compression)
        yield from member.blocks()
        offset = next_member(file, compression, member.end)


def next_member(file: BinaryIO, compression: str, offset: int) -> int | None:
    """Where the member that follows at `offset` begins: there, or behind skippable frames and the zeros that tapes
    and block devices leave; None at the end of the file. Raises Damaged when something else stands there."""
    file.seek(offset)
    while head := file.read(16):
        if compression == "zstd" and _SKIPPABLE.match(head):
            offset += 8 + int.from_bytes(head[4:8], "little")
        elif _STARTS[compression].match(head):
            return offset
        elif not head.strip(b"\0"):
            offset += len(head)
        elif head[0] == 0:
            offset += len(head) - len(head.lstrip(b"\0"))
        else:
            raise Damaged(f"the bytes at {offset} are no {compression} data")
        file.seek(offset)
    return None


def find_member(file: BinaryIO, compression: str, start: int, end: int, prefix: bytes, dictionary: bytes) -> int | None:
    """The first member that begins in [start, end) and whose content begins with `prefix`."""
    for offset in _candidates(file, compression, start, end):
        if _begins_with(Member(file, offset, compression, dictionary), prefix):
            return offset
    return None


def _candidates(file: BinaryIO, compression: str, start: int, end: int) -> Iterator[int]:
    """Where the mark of a member stands."""
    position = start
    while position < end:
        file.seek(position)
        block = file.read(SCAN_BYTES)
        for found in _STARTS[compression].finditer(block):
            if position + found.start() < end:
                yield position + found.start()
        if len(block) < SCAN_BYTES:
            return
        position += len(block) - 15  # a mark may lie across the edge; none is longer than 16 bytes


def _begins_with(member: Member, prefix: bytes) -> bool:
    head = b""
    try:
        for block in member.blocks():
            head += block
            if len(head) >= len(prefix):
                break
    except Damaged:
        pass  # what was decoded decides
    return bool(head) and head.startswith(prefix)


def dictionary_of(file: BinaryIO) -> bytes:
    """The dictionary that a .warc.zst file carries in a skippable frame at its beginning (IIPC's specification of
    Zstandard for WARC, section 3), decompressed if need be; b"" for none. Raises Damaged."""
    file.seek(0)
    head = file.read(8)
    if len(head) < 8 or head[:4] != b"\x5d\x2a\x4d\x18":
        return b""
    raw = file.read(min(int.from_bytes(head[4:], "little"), MAX_DICTIONARY_BYTES))
    if not _STARTS["zstd"].match(raw):
        return raw
    import io

    whole = b""
    for block in Member(io.BytesIO(raw), 0, "zstd").blocks():
        whole += block
        if len(whole) > MAX_DICTIONARY_BYTES:
            raise Damaged(f"a dictionary of more than {MAX_DICTIONARY_BYTES} bytes")
    return whole


MAX_DICTIONARY_BYTES = 16 << 20


def _until_error(decoder: Any, data: bytes) -> Iterator[bytes]:
    """What a gzip decoder gives of `data` before it fails, fed byte by byte."""
    decoded = []
    try:
        for position in range(len(data)):
            decoded.append(decoder.decompress(data[position : position + 1]))
    except zlib.error:
        pass
    yield b"".join(decoded)


def _reason(error: BaseException) -> str:
    return f"cannot be expanded: {(str(error).splitlines() or [type(error).__name__])[0][:200]}"
