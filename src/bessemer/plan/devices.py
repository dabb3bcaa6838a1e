"""The device catalogue: peak FLOP/s, memory, links, power and price of accelerators.

devices.toml has the figures with their sources. A user's file in the same form adds or replaces entries. CPUs are
measured instead, since CPUs of one name differ too much.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from pydantic.dataclasses import dataclass

from bessemer.common.console import text_table
from bessemer.common.errors import InputError
from bessemer.recipe.parallel import FASTEST, Cluster

CATALOGUE = Path(__file__).with_name("devices.toml")
GENERATIONS = {
    "Ampere": ("A100", "A800"),
    "Hopper": ("H100", "H200", "H800", "GH200"),
    "Blackwell": ("B200", "GB200", "B300", "GB300"),
}
"""Device names by generation. A measurement of one device of a generation applies to all of it. Any other device is a class by
itself."""
UNMEASURED_MATMUL = 0.80  # share of the peak if no matmul was measured; Hopper and Ampere reach 0.80 to 0.87
NEAR = 0.65
"""Least similarity (difflib) at which an error suggests a device name."""
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")

# The upper limits are above any real device, so they detect values in the wrong unit.
Peak = Annotated[float, Field(gt=0, le=20_000e12)]
Rate = Annotated[float, Field(gt=0, le=200_000e9)]
Link = Annotated[float, Field(gt=0, le=FASTEST * 1e9)]
Share = Annotated[float, Field(gt=0, le=1)]


@dataclass(frozen=True, eq=False, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class DeviceSpec:
    """An accelerator, or a CPU, of the catalogue.

    Compared by identity, so that it can be a key of a cache. devices.toml explains and sources each figure in its own
    units.

    Attributes:
        name: Full name, as in output.
        flops: Dense peak FLOP/s, by precision.
        matmul: Share of the 16-bit peak that the best large matmul reaches; None: not measured.
        memory: Bytes.
        bandwidth: Bytes/s of the memory.
        intra_bandwidth: Bytes/s that one device sends to others of its node, one way.
        inter_bandwidth: Bytes/s that one device sends out of its node, one way.
        per_node: Devices of a typical node.
        watts: Power limit of the board; 0: not known.
        price: Dollars per device-hour; None: not known.
        price_date: Date of the price.
        source: Sources of the figures.
        matmul_fp8: Share of the fp8 peak that the best large matmul reaches; None: same as `matmul`.
        scale_up_domain: Devices that reach each other at `intra_bandwidth`; 0: those of a node.
        torus: Axes of the torus that links the devices of a domain; 0: a switch links them.
        framework: Training program whose profile is the default for this device.
        multiprocessors: Streaming multiprocessors or compute units; 0: not known.
        sustained: Share of the matmul rate that holds over whole training steps.
        storage_bandwidth: Bytes/s between a node and the storage.
        aliases: Other spellings of the name.
    """

    name: str
    flops: Annotated[dict[Annotated[str, Field(pattern=f"^({'|'.join(PRECISIONS)})$")], Peak], Field(min_length=1)]
    matmul: Share | None = None
    memory: Annotated[float, Field(gt=0, le=5_000e9)]
    bandwidth: Rate
    intra_bandwidth: Link
    inter_bandwidth: Link
    per_node: PositiveInt
    watts: Annotated[float, Field(ge=0, le=100_000)] = 0.0
    price: PositiveFloat | None = None
    price_date: str | None = None
    source: str
    matmul_fp8: Share | None = None
    scale_up_domain: NonNegativeInt = 0
    torus: NonNegativeInt = 0
    framework: str = "bessemer"
    multiprocessors: NonNegativeInt = 0
    sustained: Share = 1.0
    storage_bandwidth: Link = 2e9
    aliases: tuple[str, ...] = ()

    @property
    def generation(self) -> str | None:
        """Key of `GENERATIONS` for this device, by the first word of its name, or None."""
        first = self.name.split()[0]
        return next((name for name, devices in GENERATIONS.items() if first in devices), None)

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s in a precision.

        Raises:
            InputError: The device does not compute in that precision.
        """
        if precision not in self.flops:
            raise InputError(f"{self.name}: has no peak for {precision}; it computes in {', '.join(self.flops)}")
        return self.flops[precision]

    def achievable_flops(self, precision: str) -> float:
        """Return the FLOP/s that the best large matmul reaches."""
        of_fp8 = self.matmul_fp8 if precision == "fp8" else None
        return self.peak(precision) * (of_fp8 or self.matmul or UNMEASURED_MATMUL)


# Factors from the units of a catalogue file to bytes, bytes/s and FLOP/s.
FACTORS = dict.fromkeys(("memory", "bandwidth", "intra_bandwidth", "inter_bandwidth", "storage_bandwidth"), 1e9)
PEAK_FACTOR = 1e12


def catalogue(extra: Path | None = None) -> dict[str, DeviceSpec]:
    """Load all devices, by name.

    Args:
        extra: A user's file in the form of devices.toml. Its entries add to the catalogue or replace entries, and a
            replaced entry keeps its other names.

    Raises:
        InputError: The file cannot be read, or an entry has a missing, unknown or invalid value.
    """
    devices = dict(_own())
    if extra is not None:
        theirs = {name: _with_measured(device, devices) for name, device in _read(extra).items()}
        for name in theirs.keys() & devices.keys():
            theirs[name] = replace(theirs[name], aliases=(*theirs[name].aliases, *devices.pop(name).aliases))
        devices = {**theirs, **devices}
    return devices


def _with_measured(device: DeviceSpec, known: Mapping[str, DeviceSpec]) -> DeviceSpec:
    """Fill in measured shares of the peak that a user's entry lacks from the catalogue's entry for the same device."""
    same = match(device.name, known)
    if same is None or device.matmul is not None:
        return device
    of_fp8 = device.matmul_fp8 or (same.matmul_fp8 if "fp8" in device.flops else None)
    sustained = same.sustained if device.sustained == 1.0 else device.sustained
    counted = device.multiprocessors or same.multiprocessors
    return replace(device, matmul=same.matmul, matmul_fp8=of_fp8, sustained=sustained, multiprocessors=counted)


def find(name: str, extra: Path | None = None) -> DeviceSpec:
    """Return the device with this name or alias. Raises InputError that suggests similar names."""
    devices = catalogue(extra)
    device = match(name, devices)
    if device is None:
        spellings = {each.upper(): one.name for one in devices.values() for each in (one.name, *one.aliases)}
        close = difflib.get_close_matches(name.upper(), spellings, cutoff=NEAR)
        near = dict.fromkeys(spellings[each] for each in close)
        hint = f"did you mean {' or '.join(near)}?" if near else "`bessemer plan --devices` lists those that are."
        where = f" nor in {extra}" if extra is not None else ""
        raise InputError(f"device {name!r}: not in the catalogue{where}; {hint} --catalogue FILE describes others")
    return device


def of_cluster(cluster: Cluster) -> DeviceSpec | None:
    """Return the device that a recipe names, or None, using the recipe's own catalogue if it has one.

    Raises:
        InputError: The device is unknown, or the catalogue cannot be read.
    """
    if cluster.device is None:
        return None
    return find(cluster.device, Path(cluster.catalogue) if cluster.catalogue else None)


def match(name: str, devices: Mapping[str, DeviceSpec]) -> DeviceSpec | None:
    """Return the device whose name or alias matches a spelling best, or None.

    All words of the alias must be in the spelling; the alias with the most words wins, and the earlier of equal ones.
    Otherwise a device matches if its letters and digits are the same.
    """
    query, best, most = _words(name), None, 0
    for device in devices.values():
        size = str(round(device.memory / 1e9))
        for spelling in (device.name, *device.aliases):
            words = _words(spelling)
            if words <= query and query - words <= _NOISE | {size} and len(words | (query & {size})) > most:
                best, most = device, len(words | (query & {size}))
    return best or next((device for device in devices.values() if _compact(name) in _compact_names(device)), None)


_NOISE = frozenset({
    "nvidia", "amd", "google", "cloud", "tesla", "geforce", "instinct", "tensor", "core", "gpu", "graphics", "dgx", "hgx", "oam",
    "hbm", "hbm2", "hbm2e", "hbm3", "hbm3e", "gb",
})  # fmt: skip


def _words(name: str) -> frozenset[str]:
    """Split a spelling into lower-case words without punctuation, with `sxm4` as `sxm` and `80gb` as `80`."""
    words = re.sub(r"[^a-z0-9]+", " ", name.lower()).split()
    return frozenset(re.sub(r"^(sxm|pcie)\d$", r"\1", re.sub(r"^(\d+)gi?b$", r"\1", word)) for word in words)


def _compact(name: str) -> str:
    """Reduce a spelling to its lower-case letters and digits, so that `H-100` and `H 100` become `h100`."""
    return re.sub(r"[^a-z0-9]+", "", name.lower())


def _compact_names(device: DeviceSpec) -> Iterator[str]:
    """Yield the compact names of a device, with and without the size of its memory."""
    size = round(device.memory / 1e9)
    for each in (device.name, *device.aliases):
        yield from (_compact(each), f"{_compact(each)}{size}", f"{_compact(each)}{size}gb")


@lru_cache(maxsize=1)
def _own() -> Mapping[str, DeviceSpec]:
    """Load the built-in catalogue, once."""
    return _read(CATALOGUE)


def _read(path: Path) -> dict[str, DeviceSpec]:
    """Read and validate the devices of a file, by name."""
    try:
        parsed = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not TOML in UTF-8 ({error}); plan/devices.toml shows the form") from None
    tables = parsed.get("device")
    if set(parsed) != {"device"} or not isinstance(tables, list):
        raise InputError(f"{path}: has {sorted(parsed) or 'no keys'}, not [[device]] tables; see plan/devices.toml")
    devices = [_device(table, f"{path}: device {number}") for number, table in enumerate(tables, 1)]
    names = [device.name for device in devices]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"{path}: has {repeated[0]} {names.count(repeated[0])} times; keep one")
    return dict(zip(names, devices, strict=True))


def _device(table: Any, where: str) -> DeviceSpec:
    """Validate one entry of a catalogue file and convert its units."""

    def scaled(value: Any, factor: float) -> Any:
        return value * factor if isinstance(value, int | float) and not isinstance(value, bool) else value

    try:
        values = {key: scaled(value, FACTORS.get(key, 1)) for key, value in table.items()}
        values["flops"] = {key: scaled(value, PEAK_FACTOR) for key, value in values.get("flops", {}).items()}
        return DeviceSpec(**{**values, "aliases": tuple(values.get("aliases", ()))})
    except (AttributeError, TypeError):
        raise InputError(f"{where}: flops must be a table and aliases a list; see plan/devices.toml") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        where = f"{where} ({table.get('name')}): {key}"
        raise InputError(f"{where}: {first['msg']}; plan/devices.toml has the units") from None


def peak_flops(device_name: str) -> float | None:
    """Return the published dense bf16 peak of a device, or None if its driver name is not listed."""
    device = match(device_name, catalogue())
    return device.flops.get("bf16") if device else None


def devices_table(devices: Sequence[DeviceSpec]) -> str:
    """Format the catalogue as a table."""
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
    units = "TFLOP/s dense; memory, its bandwidth and links one way, GB and GB/s; sources in plan/devices.toml"
    return "\n".join([*text_table(titles, rows, "lrrrrrrrrrl"), "", units])
