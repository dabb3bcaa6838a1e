"""Wall time of a corpus and its token shards with one worker and with two, and whether both give the same files.

The commands of corpus.py, from JSONL to token shards, in turns; medians of the rounds. What two workers can gain is bounded
by what the machine has free: beside other work, read the ratio with the CPU seconds, which say how much was done.

    python benchmarks/corpus_workers.py [FOLDER ...] --megabytes 160 --json FILE
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
from machine import describe

COMMANDS = ("corpus", "tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--megabytes", type=float, default=160, help="before a fifth of them is copied in")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 2))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    records = corpus_of(given.folders, given.megabytes)
    size = megabytes(records)
    rows: dict[str, Any] = {
        str(workers): {name: {"wall": [], "cpu": []} for name in COMMANDS} for workers in given.workers
    }
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        recipe = prepared(work, records, None)
        runs = work / "benchmark"
        made = set()
        run(["corpus", str(recipe)])  # compiles once
        for number in range(given.rounds):
            for workers in given.workers if number % 2 == 0 else given.workers[::-1]:
                shutil.rmtree(runs)
                for name in COMMANDS:
                    wall, cpu = run([name, str(recipe), "--set", f"{name}.workers={workers}"])
                    rows[str(workers)][name]["wall"].append(round(wall, 2))
                    rows[str(workers)][name]["cpu"].append(round(cpu, 2))
                made.add(outcome(runs))
    same = len(made) == 1
    print(f"{size:.1f} MB of text, {len(records)} documents, {given.rounds} rounds; the same files every time: {same}")
    gains = {}
    for name in COMMANDS:
        one, many = (rows[str(workers)][name] for workers in given.workers)
        gains[name] = round(median(one["wall"]) / median(many["wall"]), 2)
        print(
            f"{name:<8} {median(one['wall']):7.1f} s of wall time with {given.workers[0]} worker, "
            f"{median(many['wall']):7.1f} s with {given.workers[1]}: {gains[name]:.2f} times as fast "
            f"(CPU {median(one['cpu']):.1f} and {median(many['cpu']):.1f} s)"
        )
    if given.json:
        result = {"machine": describe(megabytes=size, documents=len(records)), "same_files": same, "gains": gains}
        given.json.write_text(json.dumps({**result, "workers": rows}, indent=1) + "\n")


def run(arguments: list[str]) -> tuple[float, float]:
    """Seconds of wall time and of CPU time of a command with its children."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bessemer", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    wall, after = perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{arguments}: {done.stderr[-2000:]}")
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def outcome(runs: Path) -> str:
    """Hash of the documents, the rejects and the shards."""
    found = sha256()
    for place in ("corpus/documents", "corpus/rejected", "tokens"):
        for path in sorted((runs / place).iterdir()):
            if path.suffix in (".parquet", ".bin", ".idx"):
                found.update(path.name.encode() + sha256(path.read_bytes()).digest())
    return found.hexdigest()


if __name__ == "__main__":
    main()
