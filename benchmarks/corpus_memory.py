"""Peak memory of the corpus stage on a generated input of a given size.

    python benchmarks/corpus_memory.py [--gib 1] [--workers 2] [--engine local] [--keep FOLDER]

The input is JSONL of the Python files of this installation, copied with changed words until it has the given size, so that most
copies are neither exact nor near duplicates. Memory is the sum of the proportional set sizes (PSS) of this process and its
children, sampled four times per second: shared pages count once. Time is the CPU time of all processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

GIB = 1 << 30
BUDGET_BYTES = int(1.5 * GIB)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", choices=["local", "ray"], default="local")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    folder = given.keep or Path(tempfile.mkdtemp(prefix="corpus-memory-"))
    try:
        found = measure(folder, int(given.gib * GIB), given.workers, given.engine)
        print(json.dumps(found, indent=2))
    finally:
        if given.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def measure(folder: Path, num_bytes: int, workers: int, engine: str) -> dict[str, object]:
    """Build a corpus from `num_bytes` of input and return its documents, CPU seconds and peak memory."""
    from bessemer.corpus import pipeline
    from bessemer.recipe import parse
    from bessemer.run.directory import RunDirectory

    source = folder / "input"
    if not source.exists():
        write_input(source, num_bytes)
    recipe = parse(
        f"[run]\nname = 'm'\n[model]\ndepth = 2\n[corpus]\nworkers = {workers}\nengine = '{engine}'\n"
        f"[[corpus.sources]]\nname = 's'\nformat = 'jsonl'\npaths = ['{source}']\n",
        "benchmark",
    )
    with Sampler() as sampler:
        before = cpu_seconds()
        started = time.perf_counter()
        done = pipeline.build(recipe, RunDirectory(folder / "run"))
        wall = time.perf_counter() - started
        cpu = cpu_seconds() - before
    return {
        "input_bytes": sum(path.stat().st_size for path in source.iterdir()),
        "documents_in": done["documents_in"],
        "documents_kept": done["documents_kept"],
        "peak_bytes": sampler.peak,
        "peak_gib": round(sampler.peak / GIB, 3),
        "processes_at_peak": sampler.processes,
        "within_budget": sampler.peak <= BUDGET_BYTES,
        "cpu_seconds": round(cpu, 1),
        "wall_seconds": round(wall, 1),
        "megabytes_per_cpu_second": round(done["bytes_in"] / 1e6 / cpu, 2),
    }


def write_input(folder: Path, num_bytes: int) -> None:
    """Write about `num_bytes` of JSONL in files of at most 256 MiB."""
    folder.mkdir(parents=True)
    paths = sysconfig.get_paths()
    texts = []
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"])):
        for path in sorted(Path(root).rglob("*.py")):
            raw = path.read_bytes()
            if 2000 < len(raw) < 200_000:
                texts.append(raw.decode("utf-8", "replace"))
            if sum(map(len, texts)) > 40_000_000:
                break
    word = re.compile(r"[A-Za-z]{4,}")
    written, number, copy = 0, 0, 0
    while written < num_bytes:
        with open(folder / f"{number:03d}.jsonl", "w", encoding="utf-8") as file:
            size = 0
            while size < min(256 << 20, num_bytes - written):
                text = texts[copy % len(texts)]
                turn = copy // len(texts)
                if turn:  # Changed words make another text of the same shape.
                    ending = "".join(random.Random(turn).choices("aeiou", k=2))
                    text = word.sub(lambda found, ending=ending: found[0] + ending, text)
                size += file.write(json.dumps({"text": text, "copy": copy}) + "\n")
                copy += 1
        written += size
        number += 1


class Sampler:
    """Context manager that samples the memory of this process and its descendants and keeps the peak."""

    def __enter__(self) -> Sampler:
        self.peak = self.processes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.25):
            processes = descendants(os.getpid())
            total = sum(map(proportional_bytes, processes))
            if total > self.peak:
                self.peak, self.processes = total, len(processes)


def descendants(pid: int) -> list[int]:
    """Return the process id and those of all its descendants."""
    found = [pid]
    for one in found:
        try:
            for task in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def proportional_bytes(pid: int) -> int:
    """Return a process's proportional set size: private pages plus its share of shared ones. 0 for an ended process."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its ended children."""
    usages = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


if __name__ == "__main__":
    main()
