"""Streaming decompression of gzip, bzip2, xz and Zstandard files with any number of members, in bounded memory.

All content before damaged data is yielded, except for that of the last FEED_BYTES of compressed data.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

COMPRESSIONS = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
}  # file name ending -> compression
EXPANSION = 4  # assumed ratio of uncompressed to compressed size
BLOCK_BYTES = 1 << 20  # maximum bytes yielded at a time (Zstandard: 32 MiB, see FEED_BYTES)
# Compressed bytes per decoder call; a call that finds damage loses its output. Zstandard has no output limit. A block of at
# least 4 bytes holds at most 128 KiB (RFC 8878, section 3.1.1.2), so a call returns at most 32 MiB.
FEED_BYTES = 1 << 10
XZ_MEMORY_BYTES = 256 << 20  # memory limit of an xz stream; `xz -9` takes 65 MiB
ZSTD_WINDOW_BYTES = 1 << 31  # the format's maximum (`zstd --long=31`), which large dumps use
MAX_EXPANSION = 100  # maximum ratio of uncompressed to compressed size; text reaches 3 to 10, a bomb 1000
SUSPECT_BYTES = 1 << 20  # smaller content is never treated as a bomb


def compression_of(path: str) -> str:
    """Return the compression of a file, such as "gzip", from the ending of its name; "" for none."""
    return COMPRESSIONS.get(os.path.splitext(path)[1].lower(), "")


def without_compression(name: str) -> str:
    """Return a file name without the ending of a compression, such as .gz, if it has one."""
    return os.path.splitext(name)[0] if compression_of(name) else name


def unpacked_size(path: str, size: int) -> int:
    """Return the estimated uncompressed size of a file of `size` bytes."""
    return size * (EXPANSION if compression_of(path) else 1)


class Damaged(OSError):
    """Compressed data that cannot be decoded any further."""


def _decoder(compression: str) -> Any:
    if compression == "gzip":
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    if compression == "bzip2":
        return bz2.BZ2Decompressor()
    if compression == "xz":
        return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES)
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()


def inflate(file: BinaryIO, compression: str) -> Iterator[bytes]:
    """Yield the decompressed content of a file in blocks. A file may have several members, with zeros between them.

    `compression` is a value of COMPRESSIONS. Raises Damaged after all content before the damage has been yielded.
    """
    file.seek(0)
    decoder: Any = None
    data, start, num_read, num_written = b"", 0, 0, 0
    limit = () if compression == "zstd" else (BLOCK_BYTES,)
    while True:
        is_hungry = not data and getattr(decoder, "needs_input", True)
        if is_hungry:
            data = file.read(FEED_BYTES)
            num_read += len(data)
        is_end = is_hungry and not data
        if decoder is None:
            data = data.lstrip(b"\0")
            if is_end:
                return
            if not data:
                continue
            decoder, start = _decoder(compression), num_read - len(data)
        try:
            block = decoder.decompress(data, *limit)
        except MemoryError:
            raise
        except Exception as error:  # each library raises different types
            reason = (str(error) or type(error).__name__).splitlines()[0][:200]
            where = f"{compression} data from byte {start} on, after {num_written} bytes of content"
            raise Damaged(f"cannot expand the {where}: {reason}") from None
        num_written += len(block)
        if num_written > max(SUSPECT_BYTES, MAX_EXPANSION * num_read):
            raise Damaged(f"expands more than {MAX_EXPANSION} times")
        if block:
            yield block
        if decoder.eof:
            decoder, data = None, decoder.unused_data
        elif is_end and not block:
            raise Damaged(f"cut short: the compressed data ends after {num_written} bytes of content")
        else:
            data = getattr(decoder, "unconsumed_tail", b"")


class InflatedFile(io.RawIOBase):
    """A readable binary file with the content of a compressed file. Raises Damaged where it cannot be decoded further."""

    def __init__(self, file: BinaryIO, compression: str) -> None:
        self.blocks, self.block = inflate(file, compression), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Copy at most the rest of the current block into the buffer and return the number of bytes; 0 at the end."""
        self.block = self.block or memoryview(next(self.blocks, b""))
        count = min(len(buffer), len(self.block))
        buffer[:count], self.block = self.block[:count], self.block[count:]
        return count


def beginning(file: BinaryIO, compression: str, limit: int) -> bytes:
    """Return the first `limit` bytes of a file's decompressed content, or fewer if the file is shorter or damaged.

    `compression` is a value of COMPRESSIONS, or "" for a file that is not compressed.
    """
    if not compression:
        return file.read(limit)
    head = b""
    with suppress(Damaged):
        for block in inflate(file, compression):
            head += block
            if len(head) >= limit:
                break
    return head[:limit]
