"""Compressed files: all that can be decoded is, damage is named, and nothing expands without end."""

import bz2
import collections
import gzip
import io
import lzma
import random
import tracemalloc
import zlib

import pytest
import zstandard

from bessemer.corpus.inflate import Damaged, InflatedFile, find_member, inflate

PACK = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
REFERENCE = {
    "gzip": lambda: zlib.decompressobj(31),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "zstd": lambda: zstandard.ZstdDecompressor().decompressobj(),
}
TEXT = " ".join(map(str, range(200_000))).encode()


def all_of(data: bytes, compression: str) -> tuple[bytes, str]:
    """What was decoded, and the damage."""
    parts = []
    try:
        for block in inflate(io.BytesIO(data), compression):
            parts.append(block)
    except Damaged as error:
        return b"".join(parts), str(error)
    return b"".join(parts), ""


@pytest.mark.parametrize("compression", PACK)
def test_members_follow_each_other(compression: str) -> None:
    pack = PACK[compression]
    data = pack(b"one ") + pack(b"") + pack(TEXT) + pack(b" end")
    assert all_of(data, compression) == (b"one " + TEXT + b" end", "")
    assert all_of(data + bytes(1000), compression)[0] == b"one " + TEXT + b" end"
    assert all_of(b"", compression) == (b"", "")


def test_a_skippable_frame_is_skipped() -> None:
    skip = b"\x50\x2a\x4d\x18\x05\0\0\0hello"
    assert all_of(skip + zstandard.compress(b"one") + skip + zstandard.compress(b"two"), "zstd") == (b"onetwo", "")


@pytest.mark.parametrize("power", [27, 30, 31])
def test_a_zstandard_frame_with_a_large_window_is_read(power: int) -> None:
    """As of `zstd --long=31`: a header without the size of the content, and one raw block (RFC 8878, section 3.1.1)."""
    text = TEXT[:1000]
    block = ((len(text) << 3) | 1).to_bytes(3, "little") + text
    assert all_of(b"\x28\xb5\x2f\xfd\0" + bytes([(power - 10) << 3]) + block, "zstd") == (text, "")


@pytest.mark.parametrize("compression", PACK)
def test_what_was_decoded_before_a_damage_is_kept(compression: str) -> None:
    data = PACK[compression](TEXT)
    for cut in (len(data) // 2, len(data) - 3):
        decoded, damage = all_of(data[:cut], compression)
        assert decoded == REFERENCE[compression]().decompress(data[:cut])
        assert damage.startswith("cut short")
    decoded, damage = all_of(data + b"garbage", compression)
    assert (decoded, damage) == (TEXT, f"the bytes at {len(data)} are no {compression} data")
    broken = bytearray(data)
    for at in range(len(data) // 2, len(data) // 2 + 40):
        broken[at] ^= 0x55
    decoded, damage = all_of(bytes(broken), compression)
    assert damage.startswith("cannot be expanded")
    good = REFERENCE[compression]().decompress(data[: len(data) // 2])  # Zstandard: but for the last kilobyte fed
    assert decoded[: len(good) // 3] == good[: len(good) // 3]
    assert len(decoded) >= len(good) * (compression not in ("xz", "zstd"))


def test_a_bad_gzip_checksum_is_noticed() -> None:
    data = bytearray(gzip.compress(TEXT))
    data[-6] ^= 1
    decoded, damage = all_of(bytes(data), "gzip")
    assert decoded == TEXT
    assert "check" in damage


@pytest.mark.parametrize("compression", PACK)
@pytest.mark.fault(30)
def test_a_bomb_is_cut_off_in_bounded_memory(compression: str) -> None:
    data = PACK[compression](bytes(120_000_000))
    blocks = inflate(io.BytesIO(data), compression)
    tracemalloc.start()
    with pytest.raises(Damaged, match="expands more than 100 times"):
        collections.deque(blocks, maxlen=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80_000_000


@pytest.mark.parametrize("compression", PACK)
def test_the_member_after_damage_is_found(compression: str) -> None:
    draw = random.Random(1)
    parts = [PACK[compression](b"WARC/" + draw.randbytes(draw.randrange(10, 5000))) for _ in range(40)]
    data = b"".join(parts)
    starts = [len(b"".join(parts[:number])) for number in range(40)]
    file = io.BytesIO(data)
    for start in range(0, len(data), 501):
        expected = next((at for at in starts if at >= start), None)
        assert find_member(file, compression, start) == expected


@pytest.mark.parametrize("compression", PACK)
def test_the_content_is_read_as_a_file(compression: str) -> None:
    data = PACK[compression](TEXT) + PACK[compression](b"\none\ntwo")
    assert InflatedFile(io.BytesIO(data), compression).read() == TEXT + b"\none\ntwo"
    cut_short = InflatedFile(io.BytesIO(data + b"garbage"), compression)
    assert io.BufferedReader(cut_short).readlines() == [TEXT + b"\n", b"one\n", b"two"]
    assert cut_short.damage.startswith("the bytes at")
    assert (cut_short.end_of_lines, cut_short.num_bytes) == (len(TEXT) + 5, len(TEXT) + 8)
