"""Safetensors files, written, hashed and read back in one pass without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4 << 20  # the unit of reading, hashing, checking and writing

DTYPES = {
    "torch.uint64": "U64", "torch.int64": "I64", "torch.float64": "F64", "torch.complex64": "C64", "torch.float32": "F32",
    "torch.uint32": "U32", "torch.int32": "I32", "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.uint16": "U16",
    "torch.int16": "I16", "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.int8": "I8",
    "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip
"""torch's dtypes and their safetensors names, in the order that aligns each tensor in a file."""

_ORDER = {name: number for number, name in enumerate(DTYPES.values())}
# Types that numpy lacks, with the exponent bits that are all set in a value that is not finite.
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F8_E5M2": ("u1", 0x7C), "F8_E4M3": ("u1", 0x7F)}
_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8"}

# (name of a tensor, its dtype, some of its bytes). Bytes that belong to no tensor have two empty names.
Block = tuple[str, str, memoryview]


class Scan(NamedTuple):
    """The result of one pass over a file.

    Attributes:
        bytes: The size of the file.
        sha256: Its hash in hex.
        nonfinite: The first tensor with a value that is not finite, or None.
    """

    bytes: int
    sha256: str
    nonfinite: str | None = None

    @property
    def fingerprint(self) -> dict[str, Any]:
        """The size and the hash, as the manifest stores them."""
        return {"bytes": self.bytes, "sha256": self.sha256}


class ArraySource(NamedTuple):
    """A tensor to write, whose bytes are produced on demand.

    Attributes:
        dtype: The safetensors name of the dtype.
        shape: The shape.
        nbytes: The size in bytes.
        data: A function that returns the bytes when they are written.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: Callable[[], NDArray[np.uint8]]


def file_header(tensors: Mapping[str, ArraySource]) -> bytes:
    """Return the header of a safetensors file that holds these tensors in order."""
    begin, header = 0, {}
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_dtypes(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the safetensors dtype of each tensor of a file, or nothing if the header is invalid. Raises OSError."""
    with open(path, "rb") as file:
        return {name: dtype for name, dtype, _ in _header(file)[1]}


def save_file(tensors: Mapping[str, ArraySource], path: str | os.PathLike[str]) -> Scan:
    """Write a new file and sync it, with one tensor in memory at a time.

    Writing stops at a value that is not finite, so the file is then incomplete.
    """

    def blocks() -> Iterator[Block]:
        in_order = dict(sorted(tensors.items(), key=lambda one: (_ORDER[one[1].dtype], one[0])))
        yield "", "", memoryview(file_header(in_order))
        for name, tensor in in_order.items():
            data = tensor.data()
            for at in range(0, len(data), BLOCK_BYTES):
                yield name, tensor.dtype, data[at : at + BLOCK_BYTES].data

    with open(path, "xb", buffering=0) as file:
        scan_result = _pass(blocks(), file)
        os.fsync(file.fileno())
    return scan_result


def scan(path: str | os.PathLike[str]) -> Scan:
    """Hash a file and search it for values that are not finite. Raises OSError."""
    with open(path, "rb") as file:
        return _pass(_blocks(file), None)


def _pass(blocks: Iterable[Block], target: BinaryIO | None) -> Scan:
    """Hash blocks (tensor name, dtype, bytes), check that values are finite, and write the bytes to `target` if not None.

    With a target, the pass stops at the first value that is not finite. A thread computes the hash at the same time.
    """
    digest, size, nonfinite, pending = hashlib.sha256(), 0, None, None
    with ThreadPoolExecutor(1) as hasher:
        for name, dtype, block in blocks:
            if pending is not None:
                pending.result()
            pending = hasher.submit(digest.update, block)
            size += len(block)
            if nonfinite is None and not _is_finite(dtype, block):
                nonfinite = name
                if target is not None:
                    break
            while target is not None and len(block):
                block = block[target.write(block) :]
    return Scan(size, digest.hexdigest(), nonfinite)


def _blocks(file: Any) -> Iterator[Block]:
    """Yield a safetensors file in blocks: (tensor name, dtype, bytes), the header first.

    Two buffers alternate, so a block stays valid until the block after the next is read. A file without a valid header yields
    blocks that belong to no tensor.
    """
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
    head, tensors = _header(file)
    yield "", "", memoryview(head)
    turn = 0
    for name, dtype, nbytes in [*tensors, ("", "", sys.maxsize)]:  # bytes after the last tensor are hashed too
        while nbytes and (count := file.readinto(buffers[1 - turn][:nbytes])):
            turn = 1 - turn
            yield (
                name,
                dtype if count == min(nbytes, BLOCK_BYTES) else "",
                buffers[turn][:count],
            )  # a short block means that the file is truncated, so its values are not checked
            nbytes -= count


def _header(file: BinaryIO) -> tuple[bytes, list[tuple[str, str, int]]]:
    """Return the header bytes of a file and (name, dtype, bytes) of its tensors in order; no tensors if the header is damaged."""
    head = bytes(file.read(8))
    length, rest = int.from_bytes(head, "little"), os.fstat(file.fileno()).st_size - 8
    if length > rest:
        return head, []
    head += file.read(length)
    tensors, end = [], 0
    try:
        header = json.loads(head[8:])
        for name, entry in sorted(header.items(), key=lambda one: one[1]["data_offsets"]):
            begin, stop = entry["data_offsets"]
            if begin != end or not isinstance(stop, int) or entry["dtype"] not in _ORDER or stop < begin:
                return head, []
            if stop - begin != prod(entry["shape"]) * _item_bytes(entry["dtype"]):
                return head, []
            tensors.append((name, entry["dtype"], stop - begin))
            end = stop
    except (ValueError, KeyError, TypeError, AttributeError):
        return head, []
    return head, tensors


def _item_bytes(dtype: str) -> int:
    """Return the bytes of one element; the number in a dtype's name counts bits."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1  # BOOL


def _is_finite(dtype: str, block: memoryview) -> bool:
    if dtype in _FLOATS:
        values = np.frombuffer(block, _FLOATS[dtype])
        # The sum is one fast pass. It is finite for finite values unless it overflows; then the second pass decides.
        with np.errstate(all="ignore"):
            return (dtype != "F16" and bool(np.isfinite(values.sum()))) or bool(np.isfinite(values).all())
    if dtype not in _EXPONENTS:
        return True
    kind, mask = _EXPONENTS[dtype]
    bits = np.frombuffer(block, kind)
    # Each chunk fits the processor's cache.
    chunks = (bits[at : at + (1 << 16)] & mask for at in range(0, len(bits), 1 << 16))
    return not any((chunk == mask).any() for chunk in chunks)
