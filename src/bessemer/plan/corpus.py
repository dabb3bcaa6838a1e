"""What a corpus of a given size takes: core-hours, shuffle, storage, machines, money, from measured rates.

The arithmetic is a flow: the input expands, becomes text, and shrinks at each stage; a stage costs the bytes that reach it
divided by its rate. Rates, shares and sizes stand in a file with their origin (corpus_rates.json); measure your own with
benchmarks/corpus.py and pass it. docs/scale.md works one example out.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from bessemer.errors import InputError

UNITS = {"B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTPE", 1)}}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTPE", 1)}

FLOW = ("input", "raw", "text", "in_language", "passed", "kept")
"""What is left along the way, each a share of the one before."""

PARTITION_BYTES = 64 << 20
BUCKET_BYTES = 64 << 20
"""As bessemer.corpus.partition cuts the work, which this room may not import; a test holds them together."""

LINK_MEMORY_SHARE = 0.75
"""Of a machine's memory that linking duplicates may take."""


@dataclass(frozen=True)
class StageCost:
    """One stage: the bytes it reads, its rate, and what that comes to."""

    stage: str
    bytes_in: float
    megabytes_per_cpu_second: float
    core_hours: float
    share: float
    """Of all core-hours."""


@dataclass(frozen=True)
class CorpusPlan:
    """The whole. Bytes, core-hours, hours and money of the unit that the price is in."""

    rates_date: str
    rates_machine: str
    flow_bytes: dict[str, float]
    documents: dict[str, float]
    tokens: float
    stages: tuple[StageCost, ...]
    core_hours: float
    machines: int
    cores_per_machine: int
    compute_hours: float
    """Wall time of the stages when all cores work."""
    transfer_hours: float
    """Wall time to bring the input in over the machines' networks; it goes on while they work."""
    hours: float
    shuffle_bytes: float
    """What is written in one order and read in another: cleaned rows and signatures."""
    row_groups: float
    """Pieces the merge reads: partitions x buckets. Beyond some 10^8 it needs a level in between (docs/scale.md)."""
    storage_bytes: dict[str, float]
    link_bytes: float
    """Memory that linking duplicates on one machine takes."""
    links_fit: bool
    largest_linked_bytes: float
    """Input whose duplicates one machine links in memory; beyond it, by ranges of keys (docs/scale.md)."""
    compute_money: float
    storage_money: float
    """Of the peak of the storage, for a month."""


def plan(
    input_bytes: float,
    rates: dict[str, Any],
    *,
    machines: int = 16,
    cores: int = 64,
    memory_bytes: float = 256e9,
    network_bytes_per_second: float = 1.25e9,
    price: float = 0.05,
    storage_price: float = 0.023,
) -> CorpusPlan:
    """Work out a corpus of `input_bytes` of compressed crawl.

    rates: as `load_rates` gives them. price: of a core for an hour; storage_price: of 10^9 bytes for a month. Raises
    InputError for numbers that make no sense.
    """
    for name, value in {
        "SIZE": input_bytes,
        "--machines": machines,
        "--cores": cores,
        "--memory": memory_bytes,
    }.items():
        if not value > 0:
            raise InputError(f"{name}: {value:g} is not a number above 0")
    if price < 0 or storage_price < 0:
        raise InputError("--price, --storage-price: a price is not below 0")
    shares, sizes = _values(rates["shares"]), _values(rates["sizes"])
    flow = {"input": float(input_bytes)}
    for before, after in pairwise(FLOW):
        flow[after] = flow[before] * shares[f"{after}_per_{before}"]
    documents = {name: flow[name] / sizes["document_bytes"] for name in ("text", "in_language", "passed", "kept")}
    tokens = flow["kept"] / sizes["bytes_per_token"]
    stages, storage = _stages(flow, rates), _storage(flow, documents, tokens, sizes)
    core_hours = sum(stage.bytes_in / (1e6 * stage.megabytes_per_cpu_second) for stage in stages) / 3600
    cleaned = flow["passed"] * sizes["parquet_per_text"] + documents["passed"] * sizes["signature_bytes"]
    link, room = documents["passed"] * sizes["link_bytes"], LINK_MEMORY_SHARE * memory_bytes
    compute_hours = core_hours / (machines * cores)
    transfer_hours = flow["input"] / (machines * network_bytes_per_second) / 3600
    partitions, buckets = (math.ceil(flow["input"] / each) for each in (PARTITION_BYTES, BUCKET_BYTES))
    return CorpusPlan(
        rates_date=rates["date"],
        rates_machine=rates["machine"],
        flow_bytes=flow,
        documents=documents,
        tokens=tokens,
        stages=stages,
        core_hours=core_hours,
        machines=machines,
        cores_per_machine=cores,
        compute_hours=compute_hours,
        transfer_hours=transfer_hours,
        hours=max(compute_hours, transfer_hours),
        shuffle_bytes=cleaned + storage["signatures while linking"],
        row_groups=float(partitions * min(buckets, 4096)),
        storage_bytes=storage,
        link_bytes=link,
        links_fit=link <= room,
        largest_linked_bytes=flow["input"] * room / link,
        compute_money=core_hours * price,
        storage_money=sum(storage.values()) / 1e9 * storage_price,
    )


def _stages(flow: dict[str, float], rates: dict[str, Any]) -> tuple[StageCost, ...]:
    """Core-hours of each stage, by the bytes that reach it."""
    seconds = {row["stage"]: flow[row["of"]] / (1e6 * row["megabytes_per_cpu_second"]) for row in rates["stages"]}
    total = sum(seconds.values())
    return tuple(
        StageCost(name, flow[row["of"]], row["megabytes_per_cpu_second"], seconds[name] / 3600, seconds[name] / total)
        for row in rates["stages"]
        for name in (row["stage"],)
    )


def _storage(
    flow: dict[str, float], documents: dict[str, float], tokens: float, sizes: dict[str, float]
) -> dict[str, float]:
    """Bytes of each thing that is stored."""
    cleaned = flow["passed"] * sizes["parquet_per_text"] + documents["passed"] * sizes["signature_bytes"]
    return {
        "input": flow["input"],
        "cleaned partitions": cleaned + (documents["text"] - documents["passed"]) * sizes["reject_bytes"],
        "signatures while linking": documents["passed"] * sizes["signature_bytes"],
        "documents": flow["kept"] * sizes["parquet_per_text"],
        "rejected": (documents["text"] - documents["kept"]) * sizes["reject_bytes"],
        "token shards": tokens * sizes["token_bytes"],
    }


def load_rates(path: Path | None = None) -> dict[str, Any]:
    """Rates from a file, or the ones that come along. Raises InputError for a file that lacks what the plan needs."""
    if path is None:
        text, where = (resources.files("bessemer.plan") / "corpus_rates.json").read_text(encoding="utf-8"), "shipped"
    else:
        where = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise InputError(f"--rates: {path}: cannot be read: {error}") from None
    try:
        rates: dict[str, Any] = json.loads(text)
        shares, sizes = _values(rates["shares"]), _values(rates["sizes"])
        needed = {f"{after}_per_{before}" for before, after in pairwise(FLOW)}
        numbers = [*(shares[name] for name in needed), *sizes.values()]
        numbers += [row["megabytes_per_cpu_second"] for row in rates["stages"]]
        known = all(row["of"] in FLOW and row["stage"] for row in rates["stages"]) and rates["stages"]
        if not known or not rates["date"] or not rates["machine"] or not all(number > 0 for number in numbers):
            raise ValueError("a stage of something unknown, or a number that is not above 0")
        missing = _SIZES - set(sizes)
        if missing:
            raise ValueError(f"no {', '.join(sorted(missing))} in sizes")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"--rates: {where}: not a file of rates ({type(error).__name__}: {error}); see plan/corpus_rates.json for one"
        ) from None
    return rates


_SIZES = {
    "document_bytes", "parquet_per_text", "signature_bytes", "reject_bytes", "bytes_per_token", "token_bytes", "link_bytes",
}  # fmt: skip


def _values(table: dict[str, Any]) -> dict[str, float]:
    return {name: float(entry["value"]) for name, entry in table.items()}


def parse_bytes(text: str) -> float:
    """A size as people write it: 100TB, 1.5PB, 250GiB, 1000. Raises InputError."""
    found = re.fullmatch(r"\s{0,8}(\d{1,18}(?:\.\d{1,9})?)\s{0,8}([A-Za-z]{0,3})\s{0,8}", text)
    units = {name.lower(): size for name, size in UNITS.items()} | {"": 1}
    if found is None or found[2].lower() not in units:
        raise InputError(f"{text!r} is not a size; write it like 100TB, 1.5PB or 250GiB")
    return float(found[1]) * float(units[found[2].lower()])


def to_dict(of: CorpusPlan) -> dict[str, Any]:
    """For --json."""
    return asdict(of)


def table(of: CorpusPlan) -> str:
    """For people."""
    lines = [f"{'stage':<18}{'reads':>12}{'MB/CPU-s':>11}{'core-hours':>13}{'share':>8}"]
    for row in of.stages:
        lines.append(
            f"{row.stage:<18}{_size(row.bytes_in):>12}{row.megabytes_per_cpu_second:>11.1f}{row.core_hours:>13,.0f}{row.share:>8.1%}"
        )
    lines.append(f"{'all':<18}{'':>12}{'':>11}{of.core_hours:>13,.0f}{1:>8.1%}")
    flow = " -> ".join(f"{name.replace('_', ' ')} {_size(of.flow_bytes[name])}" for name in FLOW)
    days = f"{of.hours / 24:.1f} days" if of.hours >= 48 else f"{of.hours:.1f} hours"
    storage = ", ".join(f"{name} {_size(size)}" for name, size in of.storage_bytes.items())
    fits = "fits" if of.links_fit else "does not fit: link by ranges of keys (docs/scale.md)"
    lines += [
        "",
        f"flow        {flow}",
        f"documents   {of.documents['text']:.3g} read, {of.documents['passed']:.3g} pass, {of.documents['kept']:.3g} kept",
        f"tokens      {of.tokens:.3g}",
        f"time        {days} on {of.machines} machines of {of.cores_per_machine} cores "
        f"({of.compute_hours:.1f} h of work, {of.transfer_hours:.1f} h to bring the input in)",
        f"shuffle     {_size(of.shuffle_bytes)} in {of.row_groups:.2g} pieces",
        f"storage     {storage}",
        f"duplicates  {_size(of.link_bytes)} to link them on one machine, which {fits}; one machine links up to "
        f"{_size(of.largest_linked_bytes)} of input",
        f"money       {of.compute_money:,.0f} for the cores, {of.storage_money:,.0f} a month for the storage",
        f"rates       {of.rates_date}, {of.rates_machine}",
    ]
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    for unit in ("EB", "PB", "TB", "GB", "MB", "KB"):
        if num_bytes >= UNITS[unit]:
            return f"{num_bytes / UNITS[unit]:.1f} {unit}"
    return f"{num_bytes:.0f} B"
