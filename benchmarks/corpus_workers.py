"""Wall time of a corpus and its token shards with one worker and with two, and a check that the files are equal.

Runs the commands of corpus.py, from JSONL to token shards, in turns and takes medians. Each turn waits for idle cores, at most
--idle seconds, and records which share of the machine other processes used meanwhile. Free cores bound the gain of two workers,
so a turn on a busy machine says nothing about them.

    python benchmarks/corpus_workers.py [FOLDER ...] --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from corpus import corpus_of, megabytes, prepared
from machine import describe, ticks, wait_until_idle

COMMANDS = ("corpus", "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument(
        "--megabytes", type=float, default=60, help="MB of text before copies of a quarter of it are added"
    )
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=float, default=30, help="seconds to wait for idle cores before a turn")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    records = corpus_of(given.folders, given.megabytes)
    size = megabytes(records)
    rows: dict[str, Any] = {
        str(workers): {name: {"wall": [], "cpu": [], "others": []} for name in COMMANDS} for workers in given.workers
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        recipe = prepared(work, records, None)
        runs = work / "benchmark"
        made = set()
        run(["corpus", str(recipe)])  # compiles kernels once
        for number in range(given.rounds):
            for workers in given.workers if number % 2 == 0 else given.workers[::-1]:
                shutil.rmtree(runs)
                for name in COMMANDS:
                    wait_until_idle(given.idle)
                    found = run([name, str(recipe), "--set", f"{name}.workers={workers}"])
                    for kind, value in zip(("wall", "cpu", "others"), found, strict=True):
                        rows[str(workers)][name][kind].append(round(value, 2))
                made.add(outcome(runs))
    same = len(made) == 1
    print(f"{size:.1f} MB of text, {len(records)} documents, {given.rounds} rounds; equal files in every round: {same}")
    gains = {}
    for name in COMMANDS:
        one, many = (rows[str(workers)][name] for workers in given.workers)
        gains[name] = round(median(one["wall"]) / median(many["wall"]), 2)
        print(
            f"{name:<8} {median(one['wall']):7.1f} s of wall time with {given.workers[0]} worker, "
            f"{median(many['wall']):7.1f} s with {given.workers[1]}: {gains[name]:.2f} times as fast "
            f"(CPU {median(one['cpu']):.1f} and {median(many['cpu']):.1f} s; other "
            f"work took {median(one['others']):.0%} and {median(many['others']):.0%} of the machine)"
        )
    if given.json:
        result = {"machine": describe(megabytes=size, documents=len(records)), "same_files": same, "gains": gains}
        given.json.write_text(json.dumps({**result, "workers": rows}, indent=1) + "\n")


def run(arguments: list[str]) -> tuple[float, float, float]:
    """Run a command and return its wall seconds, CPU seconds with children, and the share of all cores that others used."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, machine, started = resource.getrusage(resource.RUSAGE_CHILDREN), ticks(), perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bessemer", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    wall, after, later = perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN), ticks()
    if done.returncode:
        raise SystemExit(f"{arguments}: {done.stderr[-2000:]}")
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    if machine is None or later is None:
        return wall, cpu, float("nan")
    spent = [late - early for early, late in zip(machine, later, strict=True)]
    busy = (sum(spent) - spent[3] - spent[4]) / os.sysconf("SC_CLK_TCK")  # without idle time and waiting for the disk
    return wall, cpu, max(busy - cpu, 0.0) / (wall * (os.cpu_count() or 1))


def outcome(runs: Path) -> str:
    """Return a hash over documents, rejects and shards."""
    found = sha256()
    for place in ("corpus/documents", "corpus/rejected", "tokens"):
        for path in sorted((runs / place).iterdir()):
            if path.suffix in (".parquet", ".bin", ".idx"):
                found.update(path.name.encode() + sha256(path.read_bytes()).digest())
    return found.hexdigest()


if __name__ == "__main__":
    main()
