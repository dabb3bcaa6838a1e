"""The catalogue of devices: what each can compute, hold, move, send and cost, with the source of every figure.

The figures stand in devices.toml beside this file; a user's own file of the same form adds to it or replaces entries.
A CPU is not in it: CPUs of one name differ too much, and it is measured.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bessemer.errors import InputError
from bessemer.recipe.parallel import FASTEST
from bessemer.terminal import text_table

CATALOGUE = Path(__file__).with_name("devices.toml")
GENERATIONS = {
    "Ampere": ("A100", "A800"),
    "Hopper": ("H100", "H200", "H800", "GH200"),
    "Blackwell": ("B200", "GB200", "B300", "GB300"),
}
"""Devices that are taken for one kind, since one of them being measured says what the others do; any other is its own."""
UNMEASURED_MATMUL = 0.80  # of the peak, where none was measured: Hopper's and Ampere's lie at 0.80 to 0.87
NEAR = 0.65
"""Similarity (difflib) from which a name may be meant by a wrong one."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, eq=False, kw_only=True)
class DeviceSpec:
    """An accelerator (or a CPU), in FLOP/s, bytes and bytes/s; devices.toml says what each figure is. Compared by identity, so
    that it can be a key of a cache. Zero: not known; scale_up_domain: per_node; torus: links to a switch.
    """

    name: str
    flops: Mapping[str, float]
    matmul: float | None = None
    memory: float
    bandwidth: float
    intra_bandwidth: float
    inter_bandwidth: float
    per_node: int
    watts: float = 0.0
    price: float | None = None
    price_date: str | None = None
    source: str
    matmul_fp8: float | None = None
    scale_up_domain: int = 0
    torus: int = 0
    framework: str = "bessemer"
    multiprocessors: int = 0
    sustained: float = 1.0
    storage_bandwidth: float = 2e9
    aliases: tuple[str, ...] = ()

    @property
    def generation(self) -> str | None:
        """One of GENERATIONS, by the first word of the name; None: it is of none."""
        first = self.name.split()[0]
        return next((name for name, devices in GENERATIONS.items() if first in devices), None)

    def peak(self, precision: str) -> float:
        """Peak in FLOP/s. Raises InputError where the device does not compute in that precision."""
        if precision not in self.flops:
            raise InputError(f"{self.name}: has no peak for {precision}; it computes in {', '.join(self.flops)}")
        return self.flops[precision]

    def achievable_flops(self, precision: str) -> float:
        """What the best large matmul reaches, in FLOP/s."""
        of_fp8 = self.matmul_fp8 if precision == "fp8" else None
        return self.peak(precision) * (of_fp8 or self.matmul or UNMEASURED_MATMUL)


REQUIRED = [each.name for each in fields(DeviceSpec) if each.default is MISSING]
KEYS = [each.name for each in fields(DeviceSpec)]
# Of keys of a file that are scaled.
RATES = ("memory", "bandwidth", "intra_bandwidth", "inter_bandwidth", "storage_bandwidth")
FACTORS = {**dict.fromkeys(RATES, 1e9), "watts": 1.0}
PEAK_FACTOR = 1e12
# Of keys of a file: the unit, and a value far above that of any device, which was written in another unit.
MOST = {
    "memory": ("GB", 5_000), "bandwidth": ("GB/s", 200_000), "intra_bandwidth": ("GB/s", FASTEST),
    "inter_bandwidth": ("GB/s", FASTEST), "storage_bandwidth": ("GB/s", FASTEST), "watts": ("W", 100_000),
    "flops": ("TFLOP/s", 200_000),
}  # fmt: skip


def catalogue(extra: Path | None = None) -> dict[str, DeviceSpec]:
    """All devices by name. extra: a user's file in the form of devices.toml, whose entries add or replace; what replaces an entry
    keeps its other names.

    Raises InputError with file and entry on what cannot be read, is missing, unknown, or not above zero.
    """
    devices = dict(_own())
    if extra is not None:
        theirs = {name: _with_measured(device, devices) for name, device in _read(extra).items()}
        taken = {each for device in theirs.values() for each in (device.name, *device.aliases)}
        for name in theirs.keys() & devices.keys():
            kept = [each for each in devices[name].aliases if each not in taken]
            devices[name] = replace(theirs[name], aliases=(*theirs.pop(name).aliases, *kept))
        devices = {**theirs, **devices}
    return devices


def _with_measured(device: DeviceSpec, known: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """A user's entry with the shares of the peak that were measured on the device that its name means, where it gives none."""
    same = match(device.name, known)
    if same is None or device.matmul is not None:
        return device
    of_fp8 = device.matmul_fp8 or (same.matmul_fp8 if "fp8" in device.flops else None)
    sustained = same.sustained if device.sustained == 1.0 else device.sustained
    counted = device.multiprocessors or same.multiprocessors
    return replace(device, matmul=same.matmul, matmul_fp8=of_fp8, sustained=sustained, multiprocessors=counted)


def find(name: str, extra: Path | None = None) -> DeviceSpec:
    """The device that a spelling means: its name here, its driver's name or a short one. Raises InputError with near names."""
    devices = catalogue(extra)
    found = match(name, devices)
    if found is None:
        spellings = {
            _plain(each): device.name for device in devices.values() for each in (device.name, *device.aliases)
        }
        said = " ".join(word for word in _plain(name).split() if word not in _NOISE)
        near = difflib.get_close_matches(said, list(spellings), n=3, cutoff=NEAR)
        # One that begins otherwise is another device: "lab3090" is no B300, as alike as their letters are.
        names = list(dict.fromkeys(spellings[each] for each in near if each[0] == said[0]))
        meant = f"did you mean {' or '.join(names)}?" if names else "`bessemer plan --devices` lists those that are."
        where = f" nor in {extra}" if extra is not None else ""
        raise InputError(
            f"device {name!r}: not in the catalogue{where}; {meant} A device of your own is planned from a file that describes "
            "it (--catalogue)"
        )
    return found


def match(name: str, devices: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
    """The device that a spelling fits best, the earlier of equals, else the one whose letters and digits it has; None: none."""
    said, best, most = _words(name), None, 0
    for device in devices.values():
        size = str(round(device.memory / 1e9))
        for spelling in (device.name, *device.aliases):
            words = _words(spelling)
            if words <= said and said - words <= _NOISE | {size} and len(words | (said & {size})) > most:
                best, most = device, len(words | (said & {size}))
    return best or next((device for device in devices.values() if _compact(name) in _compact_names(device)), None)


_NOISE = frozenset({
    "nvidia", "amd", "google", "cloud", "tesla", "geforce", "instinct", "tensor", "core", "gpu", "graphics", "dgx", "hgx", "oam",
    "hbm", "hbm2", "hbm2e", "hbm3", "hbm3e", "gb",
})  # fmt: skip


def _words(name: str) -> frozenset[str]:
    """A spelling's words: without case and punctuation, sxm4 as sxm, 80gb as 80."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return frozenset(re.sub(r"^(sxm|pcie)\d$", r"\1", re.sub(r"^(\d+)gi?b$", r"\1", word)) for word in words)


def _compact(name: str) -> str:
    """A spelling's letters and digits alone: h-100 and H 100 are h100."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _compact_names(device: DeviceSpec) -> Iterator[str]:
    """Names of a device, each with the size of its memory as well."""
    size = round(device.memory / 1e9)
    for each in (device.name, *device.aliases):
        yield from (_compact(each), f"{_compact(each)}{size}", f"{_compact(each)}{size}gb")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", " ", name.lower()).strip()


@lru_cache(maxsize=1)
def _own() -> Mapping[str, DeviceSpec]:
    """The catalogue's own file, read once."""
    return _read(CATALOGUE)


def _read(path: Path) -> Mapping[str, DeviceSpec]:
    """Devices of a file, by name."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = (
            f"no UTF-8: {error.reason} at byte {error.start}"
            if isinstance(error, UnicodeError)
            else error.strerror or error
        )
        raise InputError(
            f"{path}: cannot be read ({why}); it should be a TOML file of [[device]] tables, saved as UTF-8"
        ) from None
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path}: not TOML ({error}); see layout/devices.toml for the form") from None
    tables = parsed.get("device")
    if set(parsed) != {"device"} or not isinstance(tables, list):
        raise InputError(
            f"{path}: holds {sorted(parsed) or 'nothing'}; it should hold [[device]] tables, as layout/devices.toml"
        )
    devices = [_device(table, f"{path}: device {number}") for number, table in enumerate(tables, 1)]
    counts = Counter(device.name for device in devices)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise InputError(f"{path}: has {repeated[0]} {counts[repeated[0]]} times; keep one")
    return MappingProxyType({device.name: device for device in devices})


def _device(table: Any, where: str) -> DeviceSpec:
    """One entry, checked."""
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise InputError(f'{where}: has no name; give name = "..."')
    where = f"{where} ({table['name']})"
    for key in table:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            raise InputError(f"{where}: {key} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    if missing := [key for key in REQUIRED if key not in table]:
        raise InputError(f"{where}: lacks {', '.join(missing)}")
    flops, aliases = table["flops"], table.get("aliases", [])
    if not isinstance(flops, dict) or not flops or any(key not in PRECISIONS for key in flops):
        raise InputError(f"{where}: flops must be TFLOP/s by precision ({', '.join(PRECISIONS)})")
    shares, counts = ("matmul", "matmul_fp8", "sustained"), ("per_node", "scale_up_domain", "torus", "multiprocessors")
    numbers = {f"flops.{key}": value for key, value in flops.items()}
    numbers |= {key: table[key] for key in (*FACTORS, "per_node", *shares, "price") if key in table}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise InputError(f"{where}: {key} = {value!r}, but it must be a number above zero")
        _require_unit(key, value, where)
    for key in shares:
        if table.get(key, 0) > 1:
            raise InputError(f"{where}: {key} = {table[key]}, but it is a share of the peak, at most 1")
    for key in counts:
        if type(table.get(key, 0)) is not int or table.get(key, 0) < 0:  # a bool is an int
            raise InputError(f"{where}: {key} = {table[key]!r}, but it must be a whole number, 0 or more")
    for key in ("source", "framework", "price_date"):
        if not isinstance(table.get(key, ""), str):
            raise InputError(f"{where}: {key} = {table[key]!s}, but it must be a text; write it in quotes")
    for key, needed in (("price_date", table.get("price")), ("matmul_fp8", flops.get("fp8"))):
        if key in table and needed is None:
            raise InputError(
                f"{where}: {key} says nothing without {'price' if key == 'price_date' else 'flops.fp8'}; give both"
            )
    if not isinstance(aliases, list) or not all(isinstance(each, str) for each in aliases):
        raise InputError(f"{where}: aliases must be a list of spellings")
    _require_balance(flops, table["bandwidth"], where)
    scaled = {key: table[key] * unit for key, unit in FACTORS.items() if key in table}
    peaks = MappingProxyType({key: value * PEAK_FACTOR for key, value in flops.items()})
    return DeviceSpec(**{**table, **scaled, "flops": peaks, "aliases": tuple(aliases)})


def _require_unit(key: str, value: float, where: str) -> None:
    """Raises InputError for a value that no device has, with the one that is meant where it is in the unit without a prefix."""
    name = key.partition(".")[0]
    unit, most = MOST.get(name, ("", math.inf))
    if value <= most:
        return
    meant = value / (PEAK_FACTOR if name == "flops" else FACTORS[name])
    advice = f"; write {key} = {meant:g}" if meant < value and meant > 0.1 else ""
    raise InputError(f"{where}: {key} = {value:g} is in {unit}, and no device has more than {most:,}{advice}")


MOST_FLOPS_A_BYTE = 10_000
"""Ten times what any device of the catalogue computes in the time in which its memory moves a byte."""


def _require_balance(flops: Mapping[str, float], bandwidth: float, where: str) -> None:
    """Raises InputError for peaks that no memory could feed: GFLOP/s, or a bandwidth in TB/s."""
    precision = max(flops, key=lambda name: flops[name])
    each = flops[precision] * PEAK_FACTOR / (bandwidth * FACTORS["bandwidth"])
    if each > MOST_FLOPS_A_BYTE:
        raise InputError(
            f"{where}: flops.{precision} = {flops[precision]:g} TFLOP/s with bandwidth = {bandwidth:g} GB/s are {each:,.0f} FLOP "
            f"for each byte that the memory moves, and no device has {MOST_FLOPS_A_BYTE:,}; one of them is in another unit"
        )


def peak_flops(device_name: str) -> float | None:
    """Published dense bf16 peak of a device by the name its driver gives it (layout/devices.toml); None when it is not listed."""
    device = match(device_name, catalogue())
    return device.flops.get("bf16") if device else None


def devices_table(devices: Sequence[DeviceSpec]) -> str:
    """The catalogue."""
    rows = []
    for one in devices:
        peaks = [f"{one.flops[kind] / 1e12:.0f}" if kind in one.flops else "-" for kind in ("bf16", "fp8")]
        price = f"{one.price:.2f}" if one.price is not None else "-"
        rows.append(
            (one.name, *peaks, f"{one.memory / 1e9:.0f}", f"{one.bandwidth / 1e9:,.0f}", f"{one.intra_bandwidth / 1e9:.0f}",
             f"{one.inter_bandwidth / 1e9:.1f}", str(one.per_node), f"{one.watts:.0f}" if one.watts else "-", price,
             one.price_date or "")
        )  # fmt: skip
    titles = ("device", "bf16", "fp8", "GB", "GB/s", "intra", "inter", "node", "watts", "$/h", "asked")
    units = "TFLOP/s dense; memory, its bandwidth and links one way, GB and GB/s; sources in layout/devices.toml"
    return "\n".join([*text_table(titles, rows, "lrrrrrrrrrl"), "", units])
