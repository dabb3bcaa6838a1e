"""Compressed files: everything decodable is decoded, damage is reported, and expansion is bounded."""

import bz2
import collections
import gzip
import io
import lzma
import tracemalloc
from functools import partial

import pytest
import zstandard

from bessemer.corpus.readers.inflate import FEED_BYTES, Damaged, InflatedFile, beginning

PACK = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": partial(lzma.compress, preset=1),
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
GARBAGE = b"garbage" * 9
TEXT = " ".join(map(str, range(400_000))).encode()


def all_of(data: bytes, compression: str) -> tuple[bytes, str]:
    """Return the decoded bytes and the damage."""
    content, decoded = InflatedFile(io.BytesIO(data), compression), b""
    try:
        while block := content.read(1 << 20):
            decoded += block
    except Damaged as error:
        return decoded, str(error)
    return decoded, ""


@pytest.mark.parametrize("compression", PACK)
def test_concatenated_members_are_decoded(compression: str) -> None:
    pack = PACK[compression]
    data = pack(b"one ") + pack(b"") + bytes(1000) + pack(TEXT) + pack(b"\nend")
    assert all_of(data, compression) == (b"one " + TEXT + b"\nend", "")
    assert all_of(data + bytes(5000), compression) == (b"one " + TEXT + b"\nend", "")
    assert all_of(b"", compression) == (b"", "")
    assert beginning(io.BytesIO(data), compression, 6) == b"one 0 "
    lines = InflatedFile(io.BytesIO(data), compression)
    assert io.BufferedReader(lines).readlines() == [b"one " + TEXT + b"\n", b"end"]


def test_skippable_frames_and_large_windows_of_zstandard_are_read() -> None:
    skip = b"\x50\x2a\x4d\x18\x05\0\0\0hello"
    assert all_of(skip + zstandard.compress(b"one") + skip + zstandard.compress(b"two"), "zstd") == (b"onetwo", "")
    block = ((1000 << 3) | 1).to_bytes(3, "little") + TEXT[:1000]
    for power in (27, 30, 31):  # as written by `zstd --long=31`: no content size, and one raw block (RFC 8878, 3.1.1)
        assert all_of(b"\x28\xb5\x2f\xfd\0" + bytes([(power - 10) << 3]) + block, "zstd") == (TEXT[:1000], "")


@pytest.mark.parametrize("compression", PACK)
def test_data_decoded_before_damage_is_kept(compression: str) -> None:
    data = PACK[compression](TEXT)
    middle = len(data) // 2
    broken = data[:middle] + bytes(byte ^ 0x55 for byte in data[middle : middle + 40]) + data[middle + 40 :]
    assert all_of(data + GARBAGE, compression)[0] == TEXT
    before = all_of(data[: middle - FEED_BYTES], compression)[0]
    assert TEXT.startswith(before) and before
    for damaged, problem in (
        (data[:middle], "cut short"), (data[:-3], "cut short"), (broken, f"the {compression} data from byte 0"),
        (data + GARBAGE, f"the {compression} data from byte {len(data)} on"), (GARBAGE, "data from byte 0 on"),
    ):  # fmt: skip
        decoded, damage = all_of(damaged, compression)
        assert problem in damage
        assert decoded.startswith(before) or damaged == GARBAGE
    broken = data[:-6] + bytes([data[-6] ^ 1]) + data[-5:]  # a checksum, or its position
    assert all_of(broken, compression)[1]


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.fault(30)
def test_a_decompression_bomb_is_stopped_in_bounded_memory(compression: str) -> None:
    content = InflatedFile(io.BytesIO(PACK[compression](bytes(120_000_000))), compression)
    tracemalloc.start()
    with pytest.raises(Damaged, match="expands more than 100 times"):
        collections.deque(iter(partial(content.read, 1 << 20), b""), maxlen=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80_000_000
