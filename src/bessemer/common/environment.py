"""Facts about the machine and the software of a run, without environment variables, user or host names."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from bessemer import __version__
from bessemer.common.errors import InputError


def describe(device: str, precision: str) -> dict[str, Any]:
    """Return a dict for environment.json: versions of packages, device, git commit, cores and memory."""
    packages = {package.name: package.version for package in distributions()}
    return {
        "bessemer": __version__,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": packages.get("torch"),
        "platform": platform.platform(),
        "device": device,
        "precision": precision,
        "cores": num_cores(),
        "memory_bytes": total_memory(),
        "git": _git(Path.cwd()),
        "packages": packages,
    }


def num_cores() -> int:
    """Return the number of cores that this process may use, by its affinity mask and its Slurm task."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, int(os.environ.get("SLURM_CPUS_PER_TASK") or cores))


def sbatch_path(folder: Path, pattern: str) -> str:
    """Quote a path for an #SBATCH line.

    `pattern` is a file name with symbols of sbatch, such as %j. Raises InputError for characters that sbatch cannot read in a
    path.
    """
    if bad := re.search(r'[\x00-\x1f\x7f"\\]', str(folder)):
        raise InputError(f"{str(folder)!r}: sbatch cannot read a path that contains {bad[0]!r}; choose another folder")
    return f'"{str(folder).replace("%", "%%")}/{pattern}"'


def available_memory() -> int:
    """Return the bytes of memory available without swapping; total memory if the kernel does not report it."""
    information = Path("/proc/meminfo")
    for line in information.read_text().splitlines() if information.exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return total_memory()


def total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _git(folder: Path) -> dict[str, Any] | None:
    """Return the git commit of `folder` and whether it has uncommitted changes, as a dict; None outside of a checkout."""

    def ask(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None
