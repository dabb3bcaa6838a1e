"""What a corpus of a given size takes: core-hours, shuffle, storage, machines, money, from measured rates.

The arithmetic is a flow: the input expands, becomes text, and shrinks at each stage; a stage costs the bytes that reach it
divided by its rate. Rates, shares and sizes stand in a file with their origin (corpus_rates.json); measure your own with
benchmarks/corpus.py and pass it. docs/scale.md works one example out.
"""

from __future__ import annotations

import json
import math
import re
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from bessemer.errors import InputError
from bessemer.terminal import size, text_table

UNITS = {"B": 1, **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTPE", 1)}}
UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGTPE", 1)}

FLOW = ("input", "raw", "text", "in_language", "passed", "kept")
"""What is left along the way, each a share of the one before."""

PARTITION_BYTES, LARGE_PARTITION_BYTES, MANY_PARTITIONS = 64 << 20, 1 << 30, 400_000
BUCKET_BYTES, LARGE_BUCKET_BYTES, MANY_BUCKETS = 64 << 20, 8 << 30, 4096
RANGES, MAX_RANGE_BUCKETS = 256, 512
"""As bessemer.corpus.partition cuts the work, which this room may not import; a test holds them together."""

NETWORK_BYTES_PER_SECOND = 1.25e9  # of a machine


def plan(
    input_bytes: float, rates: dict[str, Any], *, machines: int = 16, cores: int = 64, price: float | None = None,
    storage_price: float | None = None, repeats: dict[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a corpus of `input_bytes` of compressed crawl (WARC) takes, as plain values: bytes, core-hours, hours, and money in
    the currency of the prices.

    A stage that runs `on` one machine or one core is not divided among more; hours_on: of the stages on each.

    rates: as `load_rates` gives them. repeats: which stages of an option ("paragraphs", "spans") count, by its value. price:
    of a core for an hour; storage_price: of 10^9 bytes for a month, of the peak of the storage (None: those of the rates).
    transfer_hours: to bring the input in over the machines' networks, while they work; partitions, buckets, row_groups: how
    the work and the rows in between are cut (docs/scale.md). Raises InputError for numbers that make no sense, and a value of
    an option that has no rate.
    """
    for name, value in {"SIZE": input_bytes, "--machines": machines, "--cores": cores}.items():
        if not value > 0:
            raise InputError(f"{name}: {value:g} is not a number above 0")
    prices = _prices(rates, price, storage_price)
    shares, sizes = _values(rates["shares"]), _values(rates["sizes"])
    flow = {"input": float(input_bytes)}
    for before, after in pairwise(FLOW):
        flow[after] = flow[before] * shares[f"{after}_per_{before}"]
    documents = {name: flow[name] / sizes["document_bytes"] for name in FLOW[2:]}
    tokens = flow["kept"] / sizes["bytes_per_token"]
    partitions, ranges, buckets = cut(flow["input"])
    is_merged = buckets > ranges
    steps = _stages(rates["stages"], is_merged, repeats or {})
    cutting = [row for row in steps if "option" in row]
    seconds = [flow[row["of"]] / (1e6 * row["megabytes_per_cpu_second"]) for row in steps]
    stages = [
        {
            "stage": row["stage"], "bytes_in": flow[row["of"]], "megabytes_per_cpu_second": row["megabytes_per_cpu_second"],
            "core_hours": spent / 3600, "share": spent / sum(seconds),
        }
        for row, spent in zip(steps, seconds, strict=True)
    ]  # fmt: skip
    cleaned = flow["passed"] * sizes["parquet_per_text"] + documents["passed"] * sizes["signature_bytes"]
    exchanged = documents["passed"] * sizes["dedup_bytes"]
    rows_between = cleaned + (documents["text"] - documents["passed"]) * sizes["reject_bytes"]
    storage = {
        "input": flow["input"],
        "cleaned partitions": rows_between,
        **({"merged buckets": rows_between} if is_merged else {}),
        "exchange of duplicates": exchanged,
        **({"exchange of repeats": flow["kept"] * max(row["exchanged"] for row in cutting)} if cutting else {}),
        "documents": flow["kept"] * sizes["parquet_per_text"],
        "rejected": (documents["text"] - documents["kept"]) * sizes["reject_bytes"],
        "token shards": tokens * sizes["token_bytes"],
    }
    core_hours = sum(seconds) / 3600
    hours = _hours_on(steps, seconds, machines, cores)
    compute_hours = sum(hours.values())
    transfer_hours = flow["input"] / (machines * NETWORK_BYTES_PER_SECOND) / 3600
    return {
        "assumed": {**shares, "document_bytes": sizes["document_bytes"]},
        "rates_date": rates["date"],
        "rates_machine": rates["machine"],
        "flow_bytes": flow,
        "documents": documents,
        "tokens": tokens,
        "stages": stages,
        "core_hours": core_hours,
        "machines": machines,
        "cores_per_machine": cores,
        "compute_hours": compute_hours,
        "hours_on": hours,
        "transfer_hours": transfer_hours,
        "hours": max(compute_hours, transfer_hours),
        "shuffle_bytes": cleaned + exchanged + flow["kept"] * sum(row["exchanged"] for row in cutting),
        "partitions": partitions,
        "buckets": buckets,
        "row_groups": partitions * ranges + buckets * is_merged,
        "storage_bytes": storage,
        "compute_money": core_hours * prices["core_hour"]["value"],
        "storage_money": sum(storage.values()) / 1e9 * prices["gigabyte_month"]["value"],
        "prices": prices,
    }


def _hours_on(steps: list[dict[str, Any]], seconds: list[float], machines: int, cores: int) -> dict[str, float]:
    """Hours of the stages on the cluster, on one machine and on one core, which each takes so many CPU-seconds."""
    at_once = {"cluster": machines * cores, "machine": cores, "core": 1}
    hours = dict.fromkeys(at_once, 0.0)
    for row, spent in zip(steps, seconds, strict=True):
        on = row.get("on", "cluster")
        hours[on] += spent / 3600 / at_once[on]
    return hours


def _prices(rates: dict[str, Any], price: float | None, storage_price: float | None) -> dict[str, Any]:
    """Currency, and each price with where it is from. Raises InputError for one below 0."""
    prices: dict[str, Any] = dict(rates.get("prices") or load_rates()["prices"])
    for name, value, option in (
        ("core_hour", price, "--price"), ("gigabyte_month", storage_price, "--storage-price"),
    ):  # fmt: skip
        if value is not None:
            prices[name] = {"value": value, "why": option}
        if prices[name]["value"] < 0:
            raise InputError("--price, --storage-price: a price is not below 0")
    return prices


def _stages(rows: list[dict[str, Any]], is_merged: bool, wanted: dict[str, str]) -> list[dict[str, Any]]:
    """The stages that count. wanted: values of options, each of which must have a stage. Raises InputError."""
    for option, value in wanted.items():
        if not any((row.get("option"), row.get("value")) == (option, value) for row in rows):
            raise InputError(
                f"--{option} {value}: these rates have no such stage; measure it with benchmarks/corpus_rates.py"
            )
    return [
        row
        for row in rows
        if (is_merged or row["stage"] != "merge") and wanted.get(row.get("option", "")) == row.get("value")
    ]


def cut(num_bytes: float) -> tuple[int, int, int]:
    """Partitions, ranges and buckets of a source of so many bytes; where a range holds several buckets it is merged."""
    partition_bytes = max(PARTITION_BYTES, min(num_bytes / MANY_PARTITIONS, LARGE_PARTITION_BYTES))
    partitions = math.ceil(num_bytes / partition_bytes)
    buckets = max(min(math.ceil(num_bytes / BUCKET_BYTES), MANY_BUCKETS), math.ceil(num_bytes / LARGE_BUCKET_BYTES))
    in_range = min(-(-buckets // RANGES), MAX_RANGE_BUCKETS)
    return partitions, -(-buckets // in_range), buckets


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
        numbers += [row["exchanged"] for row in rates["stages"] if "option" in row]
        places = {row.get("on", "cluster") for row in rates["stages"]} <= {"cluster", "machine", "core"}
        known = places and all(row["of"] in FLOW and row["stage"] for row in rates["stages"]) and rates["stages"]
        if not known or not rates["date"] or not rates["machine"] or not all(number > 0 for number in numbers):
            raise ValueError("a stage of something unknown, or a number that is not above 0")
        missing = _SIZES - set(sizes)
        if missing:
            raise ValueError(f"no {', '.join(sorted(missing))} in sizes")
        if (prices := rates.get("prices")) is not None:
            _values({name: prices[name] for name in ("core_hour", "gigabyte_month")})
            if not all(prices[name]["why"] for name in ("core_hour", "gigabyte_month")) or not prices["currency"]:
                raise ValueError("a price without its source or currency")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"--rates: {where}: not a file of rates ({type(error).__name__}: {error}); see plan/corpus_rates.json for one"
        ) from None
    return rates


_SIZES = {
    "document_bytes", "parquet_per_text", "signature_bytes", "reject_bytes", "bytes_per_token", "token_bytes", "dedup_bytes",
}  # fmt: skip


def _values(table: dict[str, Any]) -> dict[str, float]:
    return {name: float(entry["value"]) for name, entry in table.items()}


def parse_bytes(text: str) -> float:
    """A size above zero as people write it: 100TB, 1.5PB, 1e3TB, 250GiB. Raises InputError."""
    number = r"\d{1,18}(?:\.\d{1,9})?(?:e[+-]?\d{1,2})?"
    found = re.fullmatch(rf"\s{{0,8}}(-?)({number})\s{{0,8}}([a-z]{{0,3}})\s{{0,8}}", text, re.IGNORECASE)
    units = {name.lower(): unit for name, unit in UNITS.items()}
    if found is None or found[3].lower() not in {*units, ""}:
        raise InputError(f"{text!r} is not a size; write it like 100TB, 1.5PB or 250GiB")
    sign, number, unit = found.groups()
    if sign or not float(number):
        raise InputError(f"{text!r} is not a size: it must be above zero; write it like 100TB, 1.5PB or 250GiB")
    if not unit:
        raise InputError(f"{text!r} is not a size: {number} of what? write it with a unit, as {number}TB or {number}GB")
    return float(number) * float(units[unit.lower()])


def table(of: dict[str, Any]) -> str:
    """For people."""
    stages = [
        (row["stage"], size(row["bytes_in"]), f"{row['megabytes_per_cpu_second']:.1f}", f"{row['core_hours']:,.0f}",
         f"{row['share']:.1%}")
        for row in of["stages"]
    ]  # fmt: skip
    stages.append(("all", "", "", f"{of['core_hours']:,.0f}", "100.0%"))
    lines = text_table(("stage", "reads", "MB/CPU-s", "core-hours", "share"), stages)
    flow = " -> ".join(f"{name.replace('_', ' ')} {size(of['flow_bytes'][name])}" for name in FLOW)
    days = f"{of['hours'] / 24:.1f} days" if of["hours"] >= 48 else f"{of['hours']:.1f} hours"
    documents = of["documents"]
    names = {"cluster": "all of them", "machine": "one", "core": "one core"}
    where = ", ".join(f"{spent:.1f} h on {names[on]}" for on, spent in of["hours_on"].items() if spent)
    core, stored = of["prices"]["core_hour"], of["prices"]["gigabyte_month"]
    currency = of["prices"]["currency"]
    rows = {
        "flow": f"{flow}; the input is compressed WARC",
        "documents": f"{documents['text']:.3g} read, {documents['passed']:.3g} pass, {documents['kept']:.3g} kept",
        "tokens": f"{of['tokens']:.3g}",
        "assumed": ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in of["assumed"].items())
        + "; give your crawl's own by --rates FILE, a copy of corpus_rates.json",
        "time": f"{days} on {of['machines']} machines of {of['cores_per_machine']} cores "
        f"({where}; {of['transfer_hours']:.1f} h to bring the input in)",
        "shuffle": f"{size(of['shuffle_bytes'])} in {of['row_groups']:.2g} row groups, of {of['partitions']:,} partitions; "
        f"{of['buckets']:,} buckets",
        "storage": ", ".join(f"{name} {size(held)}" for name, held in of["storage_bytes"].items()),
        "money": f"{of['compute_money']:,.0f} {currency} for the cores, {of['storage_money']:,.0f} {currency} a month for the "
        f"storage; {core['value']:g} a core-hour ({core['why']}), {stored['value']:g} a gigabyte and month ({stored['why']})",
        "rates": f"{of['rates_date']}, {of['rates_machine']}",
    }
    return "\n".join([*lines, "", *(f"{name:<11} {value}" for name, value in rows.items())])
