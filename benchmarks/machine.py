"""Description of the machine a benchmark ran on, and waiting for idle cores."""

from __future__ import annotations

import os
import platform
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, sleep
from typing import Any


def wait_until_idle(seconds: float) -> bool:
    """Wait up to `seconds` for a second in which the cores were 90% idle.

    Returns:
        False if there was none, or if the machine does not report idle time.
    """
    deadline = monotonic() + seconds
    while monotonic() < deadline:
        before = ticks()
        sleep(1.0)
        after = ticks()
        if before is None or after is None:
            return False
        spent = [late - early for early, late in zip(before, after, strict=True)]
        if spent[3] >= 0.9 * sum(spent):
            return True
    return False


def ticks() -> list[int] | None:
    """Return the clock ticks of all cores: user, nice, system, idle and others."""
    found = Path("/proc/stat")
    return [int(part) for part in found.read_text().splitlines()[0].split()[1:9]] if found.exists() else None


def describe(**more: Any) -> dict[str, Any]:
    """Return processor, its flags for narrow matmuls, cores, load, versions and date, with `more` added."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": names[0] if names else platform.processor(),
        "narrow": sorted({"amx_bf16", "avx512_bf16", "bf16"} & {word for line in lines for word in line.split()}),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": version("torch"),
        "bessemer": _version("bessemer"),
        **more,
    }


def _version(package: str) -> str | None:
    """Return a package's version; None if it is not installed, as in a checkout on a machine without a network."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parse_keys(pairs: Iterable[str]) -> dict[str, Any]:
    """Return the keys and values of KEY=VALUE pairs, in which values are TOML; what is no TOML is a string."""
    values = dict[str, Any]()
    for pair in pairs:
        key, _, text = pair.partition("=")
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = text
    return values
