"""Measures a machine for as long as it may, and says what it is: for `bessemer plan --calibrate`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

from bessemer.environment import available_memory
from bessemer.errors import InputError
from bessemer.measure import collectives, disk, host, kernels
from bessemer.measure.rounds import Item, measure
from bessemer.plan.machine import PAIRS, WHOLE, AttentionTime, Host, Machine, Pass, Product, Way
from bessemer.terminal import progress
from bessemer.train import device as devices

LEAST_MINUTES = 0.05
BUSY_SECONDS = 0.5  # to see what other programs take of the cores
OF_COLLECTIVES, OF_DISK = 0.06, 0.06  # shares of the time
OF_HOST = 0.1  # of the time that one way gets


def calibrate(minutes: float, folder: Path, kind: str = "auto", clock: Callable[[], float] = perf_counter) -> Machine:
    """Measure this machine for about so many minutes (a few seconds more for processes to start).

    folder: whose disk is measured; kind: cpu, cuda or auto. Raises InputError for less than LEAST_MINUTES and for a device that
    is not there.
    """
    if not minutes >= LEAST_MINUTES:
        raise InputError(
            f"--minutes: {minutes:g} is too little to measure anything; give {LEAST_MINUTES} or more (2 is usual)"
        )
    device = _device(kind)
    started, budget = clock(), 60.0 * minutes
    busy = busy_share()
    threads = torch.get_num_threads()
    if not device.is_cuda:
        devices.keep_freed_memory()
    processes = torch.cuda.device_count() if device.is_cuda else min(os.cpu_count() or 1, 2)
    with progress("calibrating", None, "s") as advance:
        found_disk = disk.measure(folder, OF_DISK * budget)
        all_reduce = collectives.measure(OF_COLLECTIVES * budget, device.place.type, processes)
        names = [WHOLE] if device.is_cuda or threads < 2 else [WHOLE, PAIRS]
        machine = Machine(
            name=_name(device), kind=device.place.type, threads=threads, memory=_memory(device),
            date=datetime.now(UTC).date().isoformat(), torch=torch.__version__, seconds=0.0, busy=busy, ways={},
            all_reduce=all_reduce, disk=found_disk,
        )  # fmt: skip
        for number, name in enumerate(names):
            left = max(budget - (clock() - started), 0.0) / (len(names) - number)
            machine = _with_way(machine, name, device, left, clock, advance)
    return replace(machine, seconds=round(clock() - started, 1), _rates={})


def _with_way(
    machine: Machine,
    name: str,
    device: devices.Device,
    budget: float,
    clock: Callable[[], float],
    advance: Callable[[float], None],
) -> Machine:
    """The machine with one more way measured, for about so many seconds."""
    places = 2 if name == PAIRS else 1
    precisions = ("bf16", "fp32") if device.is_cuda else ("fp32",)
    products: list[Item] = []
    attention: list[Item] = []
    began = clock()
    with kernels.places(places, max(machine.threads // places, 1), device.is_cuda) as everywhere:
        speed = kernels.probe(precisions[0], device.place, places, everywhere, clock)
        sizes = kernels.sizes_for((1.0 - OF_HOST) * budget / len(precisions), speed, device.is_cuda)
        for precision in precisions:
            products += kernels.products(sizes, precision, device.place, places, everywhere)
            attention += kernels.attention(sizes, precision, device.place, places, everywhere)
        passes, moved = kernels.passes(sizes, device.place, places, everywhere)
        rounds = measure([*products, *attention, *passes], (1.0 - OF_HOST) * budget - (clock() - began), clock, advance)
    way = Way(
        tuple(_entry(Product, item) for item in products),
        tuple(_entry(AttentionTime, item) for item in attention),
        tuple(_entry(Pass, item, moved[item.key[0]]) for item in passes),
        Host(0.0, 0.0, 0.0, 0.0),
        max(rounds, 1),
    )
    machine = replace(machine, ways={**machine.ways, name: way}, _rates={})
    if device.is_cuda:  # the host runs ahead of the device, so that its time is in no step that fills the device
        return machine
    steps = host.steps(name, machine.threads)
    measure(steps, max(budget - (clock() - began), 0.0), clock, advance)
    seconds: dict[Any, float] = {item.key: item.timing().seconds for item in steps}
    way = replace(way, host=host.host_of(seconds, name, machine))
    return replace(machine, ways={**machine.ways, name: way}, _rates={})


def _entry(kind: Any, item: Item, *more: int) -> Any:
    """What is stored of an item: its key's parts in order, and its time."""
    return kind(*item.key, *more, item.timing())


def busy_share(seconds: float = BUSY_SECONDS) -> float:
    """Share of the cores that other programs use, over so many seconds; 0 where the kernel does not tell."""
    before = _ticks()
    sleep(seconds)
    after = _ticks()
    if before is None or after is None:
        return 0.0
    spent = [late - early for early, late in zip(before, after, strict=True)]
    return round(1.0 - (spent[3] + spent[4]) / max(sum(spent), 1), 3)


def _ticks() -> list[int] | None:
    """Clock ticks of all cores: user, nice, system, idle, waiting for a disk, and others."""
    found = Path("/proc/stat")
    return [int(part) for part in found.read_text().splitlines()[0].split()[1:9]] if found.exists() else None


def _device(kind: str) -> devices.Device:
    from bessemer.recipe import Train

    return devices.choose(Train(device=kind))  # type: ignore[arg-type]


def _name(device: devices.Device) -> str:
    return machine_name(device.name)


def machine_name(device: str) -> str:
    """A device's name without the number of threads that train/device.py adds to a CPU's."""
    return device.rpartition(", ")[0] if device.endswith(" threads") else device


def _memory(device: devices.Device) -> float:
    if device.is_cuda:
        return float(torch.cuda.get_device_properties(device.place).total_memory)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        return float(available_memory())
