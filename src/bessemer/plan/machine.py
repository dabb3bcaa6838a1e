"""What one machine was measured to do: rates by size, with their spread; kept in a file, read by the plan.

`bessemer plan --calibrate` (the room `measure`) writes it. Rates between measured sizes are interpolated on logarithmic
axes, exact where something was measured; beyond the sizes measured the nearest rate holds.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from itertools import product as combinations
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.layout.devices import Device
from bessemer.run import write_atomic

FORMAT = 1  # of the file; another one is measured anew
WHOLE, PAIRS = "whole", "pairs"
TRANSPOSES = ("nt", "nn", "tn")  # of the operands, as BLAS names them: y = x W^T, dx = dy W, dW = dy^T x

Grid = Mapping[tuple[int, ...], float]


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call, and the interquartile range as a share of them."""

    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class Product:
    """An m x k matrix times a k x n one. transpose: how the operands lie in memory, of TRANSPOSES."""

    precision: str
    transpose: str
    m: int
    n: int
    k: int
    timing: Timing

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return 2.0 * self.m * self.n * self.k / self.timing.seconds


@dataclass(frozen=True)
class AttentionTime:
    """Causal attention, forward and backward, of so many heads over all sequences together."""

    precision: str
    heads: int
    length: int
    head_dim: int
    timing: Timing

    @property
    def rate(self) -> float:
        """FLOP/s of the causal half (attention_flops)."""
        return self.heads * attention_flops(self.length, self.head_dim) / self.timing.seconds


@dataclass(frozen=True)
class Pass:
    """An element-wise operation over so many elements. moved: bytes of memory an element reads and writes."""

    name: str
    elements: int
    moved: int
    timing: Timing


@dataclass(frozen=True)
class Host:
    """Seconds of a step that no operation accounts for: Python, autograd and launches.

    block: of one block, both ways, of one micro-batch; micro_batch: of the rest of it; update_block, update: of the optimizer,
    for each block and once.
    """

    block: float
    micro_batch: float
    update_block: float
    update: float


@dataclass(frozen=True)
class Way:
    """Rates of one way to use the device. whole: one operation at a time with all threads; pairs: two at a time with half of
    the threads each, seconds of either; so a step of several micro-batches runs on a CPU (train/engine.py). rounds: in which
    everything was timed, at least 1; of fewer than 3 the spread says nothing."""

    products: tuple[Product, ...]
    attention: tuple[AttentionTime, ...]
    passes: tuple[Pass, ...]
    host: Host
    rounds: int = 1


@dataclass(frozen=True)
class AllReduce:
    """A sum over processes of this machine of a tensor of so many bytes."""

    processes: int
    backend: str
    size: int
    timing: Timing


@dataclass(frozen=True)
class Disk:
    """Bytes/s of a folder: writing until it is on the disk, reading back, and reading tokens at random from a mapped file (of
    the cache, where the file fits)."""

    write: float
    read: float
    mapped: float


@dataclass(frozen=True)
class Machine:
    """A device and what was measured on it. memory: bytes; seconds: that measuring took; busy: share of the cores that other
    programs used just before, where the kernel tells."""

    name: str
    kind: str
    threads: int
    memory: float
    date: str
    torch: str
    seconds: float
    busy: float
    ways: Mapping[str, Way]
    all_reduce: tuple[AllReduce, ...] = ()
    disk: Disk | None = None
    _rates: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def matmul_rate(
        self, m: int, n: int, k: int, precision: str = "fp32", *, way: str = WHOLE, transpose: str = ""
    ) -> float:
        """FLOP/s of an m x k matrix times a k x n one; without a transpose, of a layer's three products one after another.

        Raises InputError for a precision that was not measured, naming those that were.
        """
        if not transpose:
            each = [self.matmul_rate(m, n, k, precision, way=way, transpose=name) for name in TRANSPOSES]
            return len(each) / sum(1.0 / rate for rate in each)
        grid = self._grid(way, "products", (precision, transpose))
        return interpolated(grid, (m, n, k))

    def attention_seconds(
        self, heads: int, length: int, head_dim: int, precision: str = "fp32", *, way: str = WHOLE
    ) -> float:
        """Seconds of causal attention, forward and backward; heads: over all sequences together."""
        grid = self._grid(way, "attention", (precision,))
        return heads * attention_flops(length, head_dim) / interpolated(grid, (length, head_dim))

    def pass_seconds(self, name: str, elements: float, *, way: str = WHOLE) -> float:
        """Seconds of an element-wise operation; below the smallest size measured it takes as long as that."""
        grid = self._grid(way, "passes", (name,))
        least = min(grid)[0]
        size = max(elements, least)
        return size / interpolated(grid, (size,))

    def spread_of(self, part: str, way: str = WHOLE) -> float:
        """Median spread of what was timed for a part: products, attention or passes."""
        found = sorted(entry.timing.spread for entry in getattr(self.ways[way], part))
        return found[len(found) // 2] if found else 0.0

    @cached_property
    def bandwidth(self) -> float:
        """Bytes/s of memory, reading and writing together: of the largest copy."""
        copies = [entry for entry in self.ways[WHOLE].passes if entry.name == "copy"]
        largest = max(copies, key=lambda entry: entry.elements)
        return largest.elements * largest.moved / largest.timing.seconds

    @cached_property
    def collective(self) -> tuple[float, float]:
        """Latency in seconds and bytes/s that each process sends in an all-reduce of this machine's processes.

        A ring sends 2 (p - 1) / p of the tensor from each process (Patarasuk and Yuan 2009, section 3). Zero and infinity
        where only one process was measured.
        """
        if not self.all_reduce:
            return 0.0, math.inf
        small = min(self.all_reduce, key=lambda entry: entry.size)
        large = max(self.all_reduce, key=lambda entry: entry.size)
        sent = 2.0 * (large.processes - 1) / large.processes * large.size
        return small.timing.seconds, sent / max(large.timing.seconds - small.timing.seconds, 1e-9)

    def precisions(self) -> tuple[str, ...]:
        """Precisions that products were measured in."""
        return tuple(dict.fromkeys(entry.precision for entry in self.ways[WHOLE].products))

    def peak(self, precision: str) -> float:
        """FLOP/s of the fastest product measured in a precision; of two at a time, both together."""
        self._grid(WHOLE, "products", (precision, "nt"))
        return max(
            entry.rate * (2 if name == PAIRS else 1)
            for name, way in self.ways.items()
            for entry in way.products
            if entry.precision == precision
        )

    def device(self) -> Device:
        """The machine as an entry of the device catalogue: the fastest product measured stands as its peak."""
        peaks = {name: self.peak(name) for name in self.precisions()}
        _, sent = self.collective
        processes = max((entry.processes for entry in self.all_reduce), default=1)
        link = sent if math.isfinite(sent) else self.bandwidth
        return Device(
            name=f"{self.name}, measured", flops=peaks, matmul=1.0, memory=self.memory, bandwidth=self.bandwidth, intra=link,
            inter=link, per_node=processes, watts=0.0, price=None, price_date=None,
            source=f"measured by `bessemer plan --calibrate` on {self.date}",
        )  # fmt: skip

    def is_of(self, name: str, threads: int, torch: str) -> bool:
        """Whether it was measured on such a device, with as many threads and this torch."""
        return (self.name, self.threads, self.torch) == (name, threads, torch)

    def _grid(self, way: str, part: str, key: tuple[str, ...]) -> dict[tuple[int, ...], float]:
        """Rates by size of what has these names."""
        place = way, part, key
        if place not in self._rates:
            entries = getattr(self.ways[way if way in self.ways else WHOLE], part)
            known: dict[tuple[str, ...], dict[tuple[int, ...], float]] = {}
            for entry in entries:
                names, size, rate = _placed(entry)
                known.setdefault(names, {})[size] = rate
            if key not in known:
                there = ", ".join(dict.fromkeys("/".join(names) for names in known))
                raise InputError(
                    f"calibration: {part} of {'/'.join(key)} were not measured on {self.name}; there are: {there}"
                )
            self._rates[place] = known[key]
        found: dict[tuple[int, ...], float] = self._rates[place]
        return found


def _placed(entry: Product | AttentionTime | Pass) -> tuple[tuple[str, ...], tuple[int, ...], float]:
    """What an entry is of, its size, and its rate."""
    if isinstance(entry, Product):
        return (entry.precision, entry.transpose), (entry.m, entry.n, entry.k), entry.rate
    if isinstance(entry, AttentionTime):
        return (entry.precision,), (entry.length, entry.head_dim), entry.rate
    return (entry.name,), (entry.elements,), entry.elements / entry.timing.seconds


def attention_flops(length: int, head_dim: int) -> float:
    """FLOPs of one head's causal attention, forward and backward: six products of the causal half (plan/cost.py)."""
    return 6.0 * length * (length + 1) * head_dim


def interpolated(grid: Grid, at: tuple[float, ...]) -> float:
    """A positive value between those of a full grid: linear in the logarithms of value and axes, clamped at the ends.

    Exact at the grid's points; along each axis it lies between the neighbours, so it is monotone where they are.
    """
    axes = _axes(frozenset(grid))
    corners: list[list[tuple[int, float]]] = []
    for axis, value in zip(axes, at, strict=True):
        value = min(max(value, axis[0]), axis[-1])
        above = next(index for index, level in enumerate(axis) if level >= value)
        if axis[above] == value:
            corners.append([(axis[above], 1.0)])
            continue
        low, high = axis[above - 1], axis[above]
        share = math.log(value / low) / math.log(high / low)
        corners.append([(low, 1.0 - share), (high, share)])
    if all(len(corner) == 1 for corner in corners):
        return grid[tuple(corner[0][0] for corner in corners)]
    total = 0.0
    for ends in combinations(*corners):
        total += math.prod(share for _, share in ends) * math.log(grid[tuple(level for level, _ in ends)])
    return math.exp(total)


@lru_cache(maxsize=256)
def _axes(points: frozenset[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(set(levels))) for levels in zip(*points, strict=True))


def default_path() -> Path:
    """Where a calibration is kept: machine.toml in the user's configuration folder."""
    folder = os.environ.get("XDG_CONFIG_HOME")
    return (Path(folder) if folder else Path.home() / ".config") / "bessemer" / "machine.toml"


def save(machine: Machine, path: Path) -> None:
    """Write a machine as TOML, atomically. Raises InputError where the folder cannot be made or written."""
    import tomli_w

    values = {item.name: getattr(machine, item.name) for item in fields(machine) if not item.name.startswith("_")}
    plain: dict[str, Any] = {"format": FORMAT}
    plain |= {name: value for name, value in values.items() if isinstance(value, str | int | float)}
    plain["ways"] = {name: _way_to_plain(way) for name, way in machine.ways.items()}
    plain["all_reduce"] = [_row(entry) for entry in machine.all_reduce]
    if machine.disk is not None:
        plain["disk"] = asdict(machine.disk)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, tomli_w.dumps(plain))
    except OSError as error:
        raise InputError(
            f"{path}: the calibration cannot be written ({error.strerror}); name another file with --calibration FILE"
        ) from None


def load(path: Path) -> Machine:
    """Read a machine. Raises InputError for a file that is damaged, of another version, or without a full grid of sizes."""
    again = "measure anew with `bessemer plan --calibrate`"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such calibration; `bessemer plan --calibrate` makes one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path}: the calibration cannot be read: {error}; {again}") from None
    if found.pop("format", None) != FORMAT:
        raise InputError(
            f"{path}: a calibration of another version of Bessemer (this one reads format {FORMAT}); {again}"
        )
    try:
        ways = {name: _way_of(value) for name, value in found.pop("ways").items()}
        all_reduce = tuple(_entry(AllReduce, row) for row in found.pop("all_reduce"))
        disk = Disk(**found.pop("disk")) if "disk" in found else None
        machine = Machine(**found, ways=ways, all_reduce=all_reduce, disk=disk)
        _check(machine)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: the calibration is damaged ({error}); {again}") from None
    return machine


def load_if_there(path: Path | None = None) -> Machine | None:
    """The calibration at a path, or the user's; None when there is none."""
    place = path or default_path()
    return load(place) if path is not None or place.exists() else None


def _check(machine: Machine) -> None:
    """Raise ValueError unless every rate is a positive number and every group of sizes a full grid."""
    for name, least in (("threads", 1), ("memory", 1), ("seconds", 0), ("busy", 0)):
        value = getattr(machine, name)
        if not isinstance(value, int | float) or not (least <= value < math.inf):
            raise ValueError(f"{name} = {value!r}")
    for entry in machine.all_reduce:
        if not (0 < entry.timing.seconds < math.inf and entry.size > 0 and entry.processes > 1):
            raise ValueError(f"all_reduce: {entry.timing.seconds} s for {entry.size} bytes")
    if WHOLE not in machine.ways:
        raise ValueError(f"ways.{WHOLE} is missing")
    for name, way in machine.ways.items():
        if not all(0 <= value < math.inf for value in asdict(way.host).values()):
            raise ValueError(f"ways.{name}.host: a time below zero")
        for part in ("products", "attention", "passes"):
            sizes: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
            for entry in getattr(way, part):
                if not (entry.timing.seconds > 0 and math.isfinite(entry.timing.seconds) and entry.timing.spread >= 0):
                    raise ValueError(f"ways.{name}.{part}: {entry.timing.seconds} s is no time")
                names, size, rate = _placed(entry)
                if not (min(size) > 0 and math.isfinite(rate)):
                    raise ValueError(f"ways.{name}.{part}: {size} is no size")
                sizes.setdefault(names, set()).add(size)
            if not sizes:
                raise ValueError(f"ways.{name}.{part} is empty")
            for names, points in sizes.items():
                if len(points) != math.prod(len(axis) for axis in _axes(frozenset(points))):
                    raise ValueError(f"ways.{name}.{part}: sizes of {'/'.join(names)} are missing")


def _way_to_plain(way: Way) -> dict[str, Any]:
    parts = {name: [_row(entry) for entry in getattr(way, name)] for name in ("products", "attention", "passes")}
    return {"host": asdict(way.host), "rounds": way.rounds, **parts}


def _way_of(found: dict[str, Any]) -> Way:
    kinds = {"products": Product, "attention": AttentionTime, "passes": Pass}
    parts = {name: tuple(_entry(kind, row) for row in found[name]) for name, kind in kinds.items()}
    return Way(host=Host(**found["host"]), rounds=int(found["rounds"]), **parts)


def _row(entry: Any) -> list[Any]:
    """An entry's fields in order, its timing as the last two."""
    plain = [getattr(entry, item.name) for item in fields(entry) if item.name != "timing"]
    return [*plain, float(f"{entry.timing.seconds:.5g}"), round(entry.timing.spread, 4)]


def _entry(kind: Any, row: list[Any]) -> Any:
    names = [item.name for item in fields(kind) if item.name != "timing"]
    *plain, seconds, spread = row
    known = dict(zip(names, plain, strict=True))
    for item in fields(kind):
        if item.name != "timing" and not isinstance(known[item.name], str if item.type == "str" else int):
            raise ValueError(f"{item.name} = {known[item.name]!r}")
    return kind(**known, timing=Timing(float(seconds), float(spread)))
