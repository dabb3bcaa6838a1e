"""Safetensors files written, hashed and read back in one pass, without torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 4 << 20  # read, hashed, checked and written at a time

DTYPES = {
    "torch.uint64": "U64", "torch.int64": "I64", "torch.float64": "F64", "torch.complex64": "C64", "torch.float32": "F32",
    "torch.uint32": "U32", "torch.int32": "I32", "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.uint16": "U16",
    "torch.int16": "I16", "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.int8": "I8",
    "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip
"""The format's names of types, in the order in which the library writes them: so each tensor is aligned."""

_ORDER = {name: number for number, name in enumerate(DTYPES.values())}
# The bits that are all set in what is not finite. numpy knows the other types.
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F8_E5M2": ("u1", 0x7C), "F8_E4M3": ("u1", 0x7F)}
_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8"}

# Name of a tensor, its type, some of its bytes; two empty names for what is no tensor's.
Block = tuple[str, str, memoryview]


class Scan(NamedTuple):
    """What a pass over a file found. nonfinite: the first tensor with a value that is not finite."""

    bytes: int
    sha256: str
    nonfinite: str | None = None

    @property
    def fingerprint(self) -> dict[str, Any]:
        """As a manifest has it."""
        return {"bytes": self.bytes, "sha256": self.sha256}


class ArraySource(NamedTuple):
    """A tensor to write. dtype: the format's name; data: returns its bytes, when they are written."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    data: Callable[[], NDArray[np.uint8]]


def file_header(tensors: Mapping[str, ArraySource]) -> bytes:
    """Return the beginning of a safetensors file with these tensors in order."""
    begin, header = 0, {}
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_dtypes(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the format's name of each tensor's type in a file; empty for a file without a valid header. Raises OSError."""
    with open(path, "rb") as file:
        return {name: dtype for name, dtype, _ in _header(file)[1]}


def save_file(tensors: Mapping[str, ArraySource], path: str | os.PathLike[str]) -> Scan:
    """Write a new file, synced, one tensor in memory at a time. The file is not complete where a value is not finite."""

    def blocks() -> Iterator[Block]:
        in_order = dict(sorted(tensors.items(), key=lambda one: (_ORDER[one[1].dtype], one[0])))
        yield "", "", memoryview(file_header(in_order))
        for name, tensor in in_order.items():
            data = tensor.data()
            for at in range(0, len(data), BLOCK_BYTES):
                yield name, tensor.dtype, data[at : at + BLOCK_BYTES].data

    with open(path, "xb", buffering=0) as file:
        found = _pass(blocks(), file)
        os.fsync(file.fileno())
    return found


def scan(path: str | os.PathLike[str]) -> Scan:
    """Hash a file and look for values that are not finite. Raises OSError."""
    with open(path, "rb") as file:
        return _pass(_blocks(file), None)


def _pass(blocks: Iterable[Block], target: Any) -> Scan:
    """Hash, check and, where there is a target, write blocks up to a value that is not finite. A thread hashes meanwhile."""
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
    """The blocks of a file; two buffers take turns, so that a block is valid until the next but one is read. A file without a
    valid header is one of bytes."""
    buffers = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(2)]
    head, tensors = _header(file)
    yield "", "", memoryview(head)
    turn = 0
    for name, dtype, nbytes in [*tensors, ("", "", sys.maxsize)]:  # after the last tensor nothing should follow
        while nbytes and (count := file.readinto(buffers[1 - turn][:nbytes])):
            turn = 1 - turn
            yield (
                name,
                dtype if count == min(nbytes, BLOCK_BYTES) else "",
                buffers[turn][:count],
            )  # else the file ends here
            nbytes -= count


def _header(file: Any) -> tuple[bytes, list[tuple[str, str, int]]]:
    """The beginning of a file up to its first tensor, and its tensors in order: name, dtype, bytes; none where it is damaged."""
    head = bytes(file.read(8))
    length, rest = int.from_bytes(head, "little"), os.fstat(file.fileno()).st_size - 8
    if length > rest:
        return head, []
    head += file.read(length)
    tensors, end = [], 0
    try:
        header = json.loads(head[8:])
        for name, of in sorted(header.items(), key=lambda one: one[1]["data_offsets"]):
            begin, stop = of["data_offsets"]
            if begin != end or not isinstance(stop, int) or of["dtype"] not in _ORDER or stop < begin:
                return head, []
            if stop - begin != prod(of["shape"]) * _item_bytes(of["dtype"]):
                return head, []
            tensors.append((name, of["dtype"], stop - begin))
            end = stop
    except (ValueError, KeyError, TypeError, AttributeError):
        return head, []
    return head, tensors


def _item_bytes(dtype: str) -> int:
    """Bytes of an element, which the format's name of a type says in bits."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1  # BOOL


def _is_finite(dtype: str, block: memoryview) -> bool:
    if dtype in _FLOATS:
        values = np.frombuffer(block, _FLOATS[dtype])
        # One fast pass: a sum of finite values is finite unless it overflows, in which case the second pass decides.
        with np.errstate(all="ignore"):
            return (dtype != "F16" and bool(np.isfinite(values.sum()))) or bool(np.isfinite(values).all())
    if dtype not in _EXPONENTS:
        return True
    kind, mask = _EXPONENTS[dtype]
    bits = np.frombuffer(block, kind)
    chunks = (bits[at : at + (1 << 16)] & mask for at in range(0, len(bits), 1 << 16))  # in the processor's cache
    return not any((chunk == mask).any() for chunk in chunks)
