"""Streaming decompression by member, with bounded memory: gzip, bzip2, xz and Zstandard.

Members (gzip member, bzip2 or xz stream, Zstandard frame) decompress independently, so that damage is local. Everything decoded
before damage is yielded first.
"""

from __future__ import annotations

import bz2
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

BLOCK_BYTES = 1 << 20  # bytes yielded at a time, at the most (Zstandard: 32 MiB, see FEED_BYTES)
# Compressed bytes per decoder call. bzip2 decodes blocks of 900 kB; small calls yield the block before a damaged one.
# xz loses what it decoded before damage. Zstandard has no output limit: a block of 4 bytes or more holds at most 128
# KiB (RFC 8878, section 3.1.1.2), so at most 32 MiB here.
FEED_BYTES = {"gzip": 1 << 16, "bzip2": 1 << 12, "xz": 1 << 10, "zstd": 1 << 10}
XZ_MEMORY_BYTES = 256 << 20  # memory that an xz stream may ask for: `xz -9` takes 65 MiB
ZSTD_WINDOW_BYTES = 1 << 31  # the largest of the format (`zstd --long=31`), which large dumps use
MAX_EXPANSION = 100  # a compressed file may expand this many times; text reaches 3 to 10, a bomb 1000
SUSPECT_BYTES = 1 << 20  # less than this is no bomb, however small it was before
SCAN_BYTES = 1 << 20

_STARTS = {
    "gzip": re.compile(rb"\x1f\x8b\x08[\x00-\x1f]"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
    "xz": re.compile(rb"\xfd7zXZ\0\0[\x00\x01\x04\x0a]"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
}
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")


class Damaged(ValueError):
    """Compressed data that cannot be decoded (further); the message says why."""


class CompressedMember:
    """One member of a compressed file, from a given offset."""

    def __init__(self, file: BinaryIO, offset: int, compression: str) -> None:
        self.file, self.offset, self.compression = file, offset, compression
        self.end = offset
        """The byte after it, once all of it was decoded; before, the byte after what was read."""

    def blocks(self, max_expansion: float = MAX_EXPANSION) -> Iterator[bytes]:
        """The decompressed content. Raises Damaged, after everything before the damage; OSError."""
        self.file.seek(self.offset)
        produced = 0
        for block in self._decoded():
            produced += len(block)
            if produced > max(SUSPECT_BYTES, max_expansion * (self.end - self.offset)):
                raise Damaged(f"expands more than {max_expansion} times")
            yield block

    def _decoded(self) -> Iterator[bytes]:
        decoder = before = self._decoder()
        is_deflate = self.compression == "gzip"
        limit = () if self.compression == "zstd" else (BLOCK_BYTES,)
        while not decoder.eof:
            data = getattr(decoder, "unconsumed_tail", b"")
            hungry = not data and getattr(decoder, "needs_input", True)
            if hungry:
                data = self.file.read(FEED_BYTES[self.compression])
                self.end += len(data)
            if is_deflate:
                before = decoder.copy()
            try:
                block = decoder.decompress(data, *limit)
            except MemoryError:
                raise
            except Exception as error:  # each library has errors of its own
                if is_deflate:  # what comes before the damage, fed byte by byte
                    with suppress(zlib.error):
                        for byte in data:
                            yield before.decompress(bytes([byte]))
                reason = (str(error) or type(error).__name__).splitlines()[0][:200]
                raise Damaged(f"cannot be expanded: {reason}") from None
            if block:
                yield block
            elif hungry and not data:
                raise Damaged("cut short: the file ends within the compressed data")
        self.end -= len(decoder.unused_data)

    def _decoder(self) -> Any:
        if self.compression == "gzip":
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        if self.compression == "bzip2":
            return bz2.BZ2Decompressor()
        if self.compression == "xz":
            return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
        import zstandard

        return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()


class InflatedFile(io.RawIOBase):
    """The content of a compressed file as a file. Damage ends it and is kept in `damage`."""

    def __init__(self, file: BinaryIO, compression: str) -> None:
        self.blocks, self.block, self.damage = inflate(file, compression), memoryview(b""), ""
        self.num_bytes, self.end_of_lines = 0, 0  # that were decoded; behind the last line feed among them

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer as far as one block goes."""
        while not self.block:
            try:
                block = next(self.blocks, b"")
            except Damaged as error:
                self.damage, block = str(error), b""
            if not block:
                return 0
            self.block = memoryview(block)
            if (line_end := block.rfind(b"\n")) >= 0:
                self.end_of_lines = self.num_bytes + line_end + 1
            self.num_bytes += len(block)
        count = min(len(buffer), len(self.block))
        buffer[:count], self.block = self.block[:count], self.block[count:]
        return count


def start_of(blocks: Iterator[bytes], limit: int, despite_damage: bool = False) -> bytes:
    """The first `limit` bytes; with `despite_damage` those before the damage where Damaged is raised."""
    head = bytearray()
    try:
        for block in blocks:
            head += block
            if len(head) >= limit:
                break
    except Damaged:
        if not despite_damage:
            raise
    return bytes(head[:limit])


def beginning(file: BinaryIO, compression: str, limit: int = 8000) -> bytes:
    """The first decompressed bytes of a file, at most `limit`; fewer where it is damaged."""
    file.seek(0)
    return start_of(inflate(file, compression), limit, despite_damage=True) if compression else file.read(limit)


def inflate(file: BinaryIO, compression: str, max_expansion: float = MAX_EXPANSION) -> Iterator[bytes]:
    """All members of the file, one after the other. Raises Damaged, after everything before the damage."""
    offset = next_member(file, compression, 0)
    while offset is not None:
        member = CompressedMember(file, offset, compression)
        yield from member.blocks(max_expansion)
        offset = next_member(file, compression, member.end)


def next_member(file: BinaryIO, compression: str, offset: int) -> int | None:
    """Where the next member begins: at `offset`, or behind skippable frames and the zeros that tapes and block devices
    leave; None at the end of the file. Raises Damaged when something else is there."""
    file.seek(offset)
    while head := file.read(16):
        if compression == "zstd" and _SKIPPABLE.match(head):
            offset += 8 + int.from_bytes(head[4:8], "little")
        elif _STARTS[compression].match(head):
            return offset
        elif head[0] == 0:
            offset += len(head) - len(head.lstrip(b"\0"))
        else:
            raise Damaged(f"the bytes at {offset} are no {compression} data")
        file.seek(offset)
    return None


def find_member(file: BinaryIO, compression: str, start: int) -> int | None:
    """Find where reading resumes after damage: the first member from `start` on that has content."""
    position = start
    while True:
        file.seek(position)
        block = file.read(SCAN_BYTES)
        for match in _STARTS[compression].finditer(block):
            offset = position + match.start()
            if start_of(CompressedMember(file, offset, compression).blocks(), 1, despite_damage=True):
                return offset
        if len(block) < SCAN_BYTES:
            return None
        position += len(block) - 15  # a start may lie across the edge; none is longer than 16 bytes
    return None
