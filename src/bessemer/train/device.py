"""The training device: its choice, precision, peak FLOP/s and memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
import torch.utils.deterministic
from torch import Tensor

from bessemer.common.console import counted
from bessemer.common.environment import available_memory
from bessemer.common.errors import InputError
from bessemer.model.kernels import linear_kernel, prefers_onednn
from bessemer.recipe import Train
from bessemer.train.precision import Precision, apply_flags, chosen

CPU_MATMUL_EDGES = (256, 512, 1024)
MATMUL_SECONDS, MAX_REPEATS = 0.06, 300  # limits for each matmul size and library


@dataclass(frozen=True)
class Device:
    """A device and its precision.

    Attributes:
        torch_device: The device of torch.
        name: The name of the processor or GPU.
        precision: The precision of matmuls.
        compile: True if blocks are compiled.
        deterministic: True if kernels give the same bits in each run.
    """

    torch_device: torch.device
    name: str
    precision: Precision
    compile: bool
    deterministic: bool = True

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and, except in fp8, of matmul operands."""
        return self.precision.dtype

    def send(self, values: Tensor) -> Tensor:
        """Copy a host tensor to the device without waiting."""
        pinned = values.pin_memory() if self.is_cuda else values
        return pinned.to(self.torch_device, non_blocking=True)

    def read(self, values: Tensor) -> Tensor:
        """Copy a tensor to the host and wait for it. Nothing else in a training step waits for the device."""
        return values.cpu()


def choose(train: Train, local_rank: int = 0) -> Device:
    """Return the device and precision that a recipe requests. Raises InputError if they are not available.

    `local_rank` is the number of this process on its machine, which selects its GPU.
    """
    has_cuda = torch.cuda.is_available()
    if train.device == "cuda" and not has_cuda:
        raise InputError("train.device: torch finds no CUDA device; use cpu or auto")
    kind = "cuda" if has_cuda and train.device != "cpu" else "cpu"
    torch_device, name = torch.device(kind), cpu_name()
    if kind == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(f"parallel: this machine has no GPU for its process {local_rank}; start fewer here")
        torch.cuda.set_device(local_rank)
        torch_device, name = torch.device("cuda", local_rank), torch.cuda.get_device_name(local_rank)
    compiled = train.compile == "on" or (train.compile == "auto" and kind == "cuda")
    deterministic = train.deterministic == "on" or (train.deterministic == "auto" and kind == "cpu")
    return Device(torch_device, name, chosen(train.precision, torch_device, name), compiled, deterministic)


def require_devices(device: Device, processes: int) -> None:
    """Raise InputError if this machine has fewer GPUs than processes."""
    if device.is_cuda and processes > torch.cuda.device_count():
        there = torch.cuda.device_count()
        raise InputError(f"parallel: {processes} processes, but this machine has {there} GPUs; use `bessemer launch`")


def cpu_name() -> str:
    """Return the processor's name and torch's number of threads."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        match = re.search(r"^model name\s*:\s*(.*?)\s*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        name = match[1] if match else name
    return f"{name}, {counted(torch.get_num_threads(), 'thread')}"


def set_deterministic(device: Device) -> None:
    """Make torch use deterministic kernels, if the device is deterministic, or the fastest kernels."""
    if device.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # `use_deterministic_algorithms` would load the compiler, which takes half a second.
    torch.set_deterministic_debug_mode("warn" if device.deterministic else "default")
    # Filling memory would cost time, and no uninitialised memory is read.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (a property of the module)


HUGE_PAGE, MADV_HUGEPAGE = 2 << 20, 14  # bytes; the constant of sys/mman.h


def keep_freed_memory() -> None:
    """Make glibc keep freed memory instead of returning it to the kernel after each large tensor, and use huge pages.

    Otherwise every step page-faults its buffers again, up to a third of a CPU step's time, and 4 kB pages cost another 5% for
    address translation. One arena serves all threads, so that they reuse each other's memory. No effect with another C library.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        mmap_max, trim_threshold, top_pad, arena_max = -4, -1, -2, -8  # malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)  # -1 never trims the heap
        libc.mallopt(top_pad, 64 * 1024 * 1024)
        libc.mallopt(arena_max, 1)
        global _keeps
        _keeps = True
        _ask_for_huge_pages(libc)


_keeps = False  # True once glibc keeps freed memory


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
    """Request huge pages for the next part of the heap, a quarter of the machine's memory, without touching it."""
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    address = libc.malloc(num_bytes)
    if address:
        first = -(-address // HUGE_PAGE) * HUGE_PAGE
        libc.madvise(first, (address + num_bytes - first) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE)
        libc.free(address)


def release_unused(device: Device) -> None:
    """Return freed memory of a CPU process to the system: Python's garbage, Arrow's pools and the C library's heap.

    The settings of `keep_freed_memory` remain active.
    """
    if device.is_cuda:
        return
    gc.collect()
    if (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.default_memory_pool().release_unused()
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        if _keeps:
            _ask_for_huge_pages(libc)


def freeze_loaded() -> None:
    """Exclude all loaded objects from garbage collection, after collecting existing garbage.

    With the libraries' objects each pass takes tenths of a second, and a training makes several, at its start and around each
    validation.
    """
    gc.collect()
    gc.freeze()


def fastest(work: Callable[[], object], device: Device, budget: float, min_repeats: int = 3) -> float:
    """Return the seconds of the fastest of repeated calls of `work`, repeated for about `budget` seconds.

    The fastest call is taken because other programs only slow work down.
    """
    seconds: list[float] = []
    while len(seconds) < min_repeats or (len(seconds) < MAX_REPEATS and sum(seconds) < budget):
        synchronize(device)
        started = perf_counter()
        work()
        synchronize(device)
        seconds.append(perf_counter() - started)
    return min(seconds)


def matmul_rate(device: Device) -> float:
    """Return the FLOP/s of square matmuls in the device's precision (bf16 for fp8): the best of several sizes and repeats.

    On a CPU this is the peak for MFU, with the libraries and threads of a step. The best is taken because other programs on the
    cores only slow a matmul down.
    """
    apply_flags(device.precision)
    generator = torch.Generator(device.torch_device).manual_seed(0)  # separate from the generator of the training
    libraries = (linear_kernel, torch.mm) if not device.is_cuda and prefers_onednn() else (torch.mm,)
    best = 0.0
    for n in (8192,) if device.is_cuda else CPU_MATMUL_EDGES:
        a, b = (torch.randn(n, n, device=device.torch_device, generator=generator).to(device.dtype) for _ in range(2))
        for product in libraries:
            seconds = fastest(partial(product, a, b), device, MATMUL_SECONDS)
            best = max(best, 2.0 * n**3 / seconds)
        if not device.is_cuda and seconds > MATMUL_SECONDS:  # narrow dtypes that the CPU emulates
            break
    return best


def synchronize(device: Device) -> None:
    """Wait for a GPU to finish; do nothing on a CPU."""
    if device.is_cuda:
        torch.cuda.synchronize()


def memory_in_use(device: Device) -> int:
    """Return the peak bytes so far: allocated on the GPU, or resident in this process on a CPU."""
    return int(torch.cuda.max_memory_allocated()) if device.is_cuda else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak resident bytes of this process since the last `reset_peak_resident`.

    Pages of files mapped since then, such as token shards, do not count: the system reclaims them when memory is short.
    """
    if (peak := _status_bytes("VmHWM")) is not None:
        return peak - max((_status_bytes("RssFile") or 0) - _mapped_at_reset, 0)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status_bytes(field: str) -> int | None:
    """Return a field of Linux's /proc/self/status in bytes; None if it is missing."""
    status = Path("/proc/self/status")
    match = re.search(rf"^{field}:\s*(\d+)", status.read_text(), re.MULTILINE) if status.exists() else None
    return int(match[1]) * 1024 if match else None


def resident_bytes() -> int:
    """Return the resident bytes of this process now."""
    resident = _status_bytes("VmRSS")
    return peak_resident_bytes() if resident is None else resident


def available_bytes(device: Device) -> int:
    """Return the bytes that a run can still allocate on the device."""
    if device.is_cuda:
        unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # cached by torch's allocator
        return int(torch.cuda.mem_get_info()[0]) + unused
    return available_memory()


_mapped_at_reset = 0


def reset_peak_resident() -> None:
    """Reset the peak of resident memory, if the kernel supports it (Linux, clear_refs 5)."""
    global _mapped_at_reset
    _mapped_at_reset = _status_bytes("RssFile") or 0
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
