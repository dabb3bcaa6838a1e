"""How long `bessemer --help` and its like take: whole processes, median of 20."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

from machine import describe

LIMIT = 0.5  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    program = str(Path(sys.executable).with_name("bessemer"))
    rows = {}
    for arguments in (["--help"], ["--version"], ["recipe"], ["recipe", "--explain", "train.steps"]):
        seconds = []
        for _ in range(given.runs + 1):
            started = perf_counter()
            subprocess.run([program, *arguments], capture_output=True, check=True)
            seconds.append(perf_counter() - started)
        rows[" ".join(arguments)] = middle = median(seconds[1:])
        verdict = "under" if middle < LIMIT else "OVER"
        print(f"bessemer {' '.join(arguments):<32} {middle:.3f} s, {verdict} {LIMIT} s")
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(runs=given.runs), "seconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
