"""`bessemer plan --calibrate`: measure this machine's matmuls, memory, collectives and disk, and keep them as an entry of the
catalogue of devices (plan/devices.toml), so that `bessemer plan --catalogue FILE --gpus NxNAME` plans for more of it.

`python -m bessemer.plan.calibration FILE cpu|cuda` is one process of the measured all-reduce;
launch/process_group.py starts them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import tomli_w
import torch
import torch.distributed as dist

from bessemer.common import interrupt
from bessemer.common.console import size
from bessemer.common.environment import num_cores, total_memory
from bessemer.common.errors import InputError
from bessemer.distributed.mesh import join, leave
from bessemer.plan.devices import catalogue, match
from bessemer.recipe import Parallel, Train
from bessemer.run.files import write_atomic
from bessemer.train import device as devices

COPIED_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}
REDUCED_BYTES = {"cpu": (8, 1 << 24), "cuda": (8, 1 << 28)}  # of an all-reduce: its latency, its bandwidth
REPEATS = 20
COPY_SECONDS = 0.5
START_SECONDS = 90.0  # for the processes of the all-reduce, on a busy machine
SHARED = "a device is one of the processes that share this machine's memory and cores equally"  # on a CPU
MEASURED = "measured by `bessemer plan --calibrate`"  # in each file that it writes
BLOCK_BYTES, MIN_DISK_BYTES, MAX_DISK_BYTES, DISK_SECONDS = 1 << 22, 1 << 23, 400_000_000, 2.0


def device_entry(kind: str, disk: dict[str, float]) -> dict[str, Any]:
    """This machine's device in the form of plan/devices.toml: TFLOP/s, GB, GB/s. What is not measured here (links between
    nodes, watts, prices) is the catalogue's, where the device is in it. On a CPU a device is one of the node's processes, which
    share the machine's memory and cores equally."""
    chosen = devices.choose(Train(device=kind))  # type: ignore[arg-type]
    known = match(chosen.name, catalogue()) if chosen.is_cuda else None
    precisions = ("bf16", "fp16", "tf32", "fp32") if chosen.is_cuda else ("fp32",)
    measured = {}
    for precision in precisions:
        with contextlib.suppress(InputError):  # one that the device does not have
            measured[precision] = devices.matmul_rate(devices.choose(Train(device=kind, precision=precision)))  # type: ignore[arg-type]
    cores = num_cores()
    processes = torch.cuda.device_count() if chosen.is_cuda else min(cores, 2)
    if not chosen.is_cuda:  # whose threads, of all processes together, have no more than the cores
        share = min(cores / (torch.get_num_threads() * processes), 1.0)
        measured = {precision: share * rate for precision, rate in measured.items()}
    bandwidth = memory_bandwidth(chosen)
    link = all_reduce_bandwidth(chosen.torch_device.type, processes) or bandwidth
    half, place = next(iter(measured)), chosen.torch_device
    memory = torch.cuda.get_device_properties(place).total_memory if chosen.is_cuda else total_memory() / processes
    peak = dict(known.flops) if known else measured
    reads = ", ".join(f"{verb} {size(disk[verb])}/s" for verb in disk) + ("" if chosen.is_cuda else f"; {SHARED}")
    return {
        "name": known.name if known else _name(chosen.name),
        "flops": {name: round(value / 1e12, 4) for name, value in peak.items()},
        "matmul": min(round(measured[half] / peak[half], 3), 1.0),
        "memory": round(memory / 1e9, 2),
        "bandwidth": round(bandwidth / 1e9, 2),
        "intra_bandwidth": round(link / 1e9, 3),
        "inter_bandwidth": round((known.inter_bandwidth if known else link) / 1e9, 3),
        "storage_bandwidth": round(disk["writes"] / 1e9, 3),
        "per_node": known.per_node if known else processes,
        **({"watts": known.watts, "multiprocessors": known.multiprocessors} if known else {}),
        **({"price": known.price, "price_date": known.price_date} if known and known.price else {}),
        "source": f"{MEASURED} on {datetime.now(UTC).date()}, torch {torch.__version__}; disk {reads}",
    }


def write(path: Path, entry: dict[str, Any]) -> None:
    """Write a catalogue of the one entry, atomically."""
    try:
        write_atomic(path, tomli_w.dumps({"device": [entry]}))
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); name another file") from None


def memory_bandwidth(device: devices.Device) -> float:
    """Bytes/s of a copy, reading and writing together."""
    place = device.torch_device
    source = torch.ones(COPIED_BYTES[place.type] // 4, device=place)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes / devices.fastest(lambda: target.copy_(source), device, COPY_SECONDS)


def _timed(work: Callable[[], object], kind: str) -> float:
    began = perf_counter()
    work()
    if kind == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - began


def _name(device: str) -> str:
    """A device's name without the number of threads that train/device.py adds to a CPU's."""
    return device.rpartition(", ")[0] if device.endswith((" thread", " threads")) else device


def disk_rates(folder: Path) -> dict[str, float]:
    """Bytes/s of a folder's disk: writing until it is on the disk, and reading back (from the disk where the kernel drops
    the file from its cache when asked, as Linux does). Raises InputError where it cannot be written."""
    data = os.urandom(BLOCK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(prefix=".bessemer-", dir=folder, buffering=0) as file:
            written, began = 0, perf_counter()
            while written < MIN_DISK_BYTES or (written < MAX_DISK_BYTES and perf_counter() - began < DISK_SECONDS):
                written += file.write(data)
            os.fsync(file.fileno())
            writes = written / (perf_counter() - began)
            with contextlib.suppress(AttributeError, OSError):  # not on macOS
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            began = perf_counter()
            while file.read(BLOCK_BYTES):
                pass
            return {"writes": writes, "reads": written / (perf_counter() - began)}
    except OSError as error:
        raise InputError(
            f"{folder}: the disk cannot be measured there ({error.strerror}); name a file in another folder"
        ) from None


def all_reduce_bandwidth(kind: str, processes: int) -> float | None:
    """Bytes/s that each process of this machine sends in an all-reduce, over gloo or NCCL; None where it could not be timed.

    A ring sends 2 (p - 1) / p of the tensor from each process (Patarasuk and Yuan 2009, section 3).
    """
    if processes < 2:
        return None
    with tempfile.TemporaryDirectory(prefix="bessemer-") as folder:
        result = Path(folder) / "seconds.json"
        line = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}",
            "-m", "bessemer.plan.calibration", str(result), kind,
        ]  # fmt: skip
        variables = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(line, env=variables, capture_output=True, timeout=START_SECONDS, check=False)
        if not result.exists():
            return None
        latency, seconds = json.loads(result.read_text(encoding="utf-8"))
    sent = 2.0 * (processes - 1) / processes * REDUCED_BYTES[kind][1]
    return float(sent / max(seconds - latency, 1e-9))


def main() -> None:
    """One process of the group; the first writes the median seconds of each size."""
    interrupt.end_with_parent(signal.SIGKILL)
    file, kind = Path(sys.argv[1]), sys.argv[2]
    place = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(place)
    mesh = join(Parallel(shard=int(os.environ["WORLD_SIZE"])), place)
    medians = []
    for num_bytes in REDUCED_BYTES[kind]:
        tensor = torch.zeros(num_bytes // 4, device=place)
        seconds = [_timed(lambda tensor=tensor: dist.all_reduce(tensor), kind) for _ in range(REPEATS)]  # type: ignore[misc]
        medians.append(median(seconds[3:]))
    if mesh.is_main:
        file.write_text(json.dumps(medians), encoding="utf-8")
    mesh.barrier()
    leave()


if __name__ == "__main__":
    main()
