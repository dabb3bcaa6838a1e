"""Time of commands that have almost nothing to do: printing, and corpus, tokens and training of a tiny text.

The training runs on one process and on two. Reports medians of wall time and CPU time of whole processes.

    python benchmarks/start_up.py [--other CHECKOUT] --json results/start_up.json

CHECKOUT is the `src` folder of another version, which takes turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from machine import describe, wait_until_idle

LIMIT = 0.5  # seconds for commands that only print
ON_TWO = ["train", "small.toml", "--restart", "--set", "parallel.shard=2"]
PRINTING = (["--help"], ["--version"], ["recipe"], ["recipe", "--explain", "train.steps"])
RECIPE = """
run = { name = "small", dir = "." }
tokenizer.vocabulary = 300
tokens = { sequence_length = 32, held_out = 0.1 }
model = { layers = 2, width = 32, heads = 2, mlp_width = 64 }
train = { steps = 1, global_batch_tokens = 256, micro_batch = 4, device = "cpu", precision = "fp32" }
[[corpus.sources]]
name = "text"
paths = ["text"]
format = "text"
"""


def taken(source: Path, folder: Path, arguments: list[str]) -> tuple[float, float]:
    """Return the wall seconds and CPU seconds of a command of the version in `source`."""
    # Keep byte code as for an installed program, whatever the environment says.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(source), "PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "OMP_NUM_THREADS": "1"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "bessemer", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds, after = perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--other", type=Path, metavar="CHECKOUT")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sources = {
        "this": Path(__file__).parent.parent / "src",
        **({"other": given.other.resolve()} if given.other else {}),
    }
    machine = describe(idle=wait_until_idle(60), runs=given.runs)
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as place:
        for name in sources:
            folder = Path(place) / name
            (folder / "text").mkdir(parents=True)
            (folder / "small.toml").write_text(RECIPE)
            draw = random.Random(0)
            names = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 8))) for _ in range(300)]
            for number in range(40):
                (folder / "text" / f"{number}.txt").write_text(
                    " ".join(draw.choices(names, k=200)).capitalize() + ".\n"
                )
        for turn in range(given.runs + 1):  # the first turn fills caches
            for name, source in sources.items():
                folder = Path(place) / name
                shutil.rmtree(folder / "small", ignore_errors=True)
                for arguments in (
                    *PRINTING,
                    *([stage, "small.toml"] for stage in ("corpus", "tokens", "train")),
                    ON_TWO,
                ):
                    found = taken(source, folder, arguments)
                    if turn:
                        rows.setdefault(" ".join(arguments), {}).setdefault(name, []).append(found)
    shown = {}
    for command, by_source in rows.items():
        shown[command] = row = {
            name: {"seconds": median(one for one, _ in pairs), "cpu_seconds": median(cpu for _, cpu in pairs)}
            for name, pairs in by_source.items()
        }
        line = f"bessemer {command:<32} {row['this']['seconds']:.2f} s, {row['this']['cpu_seconds']:.2f} s of CPU"
        if "other" in row:
            line += (
                f"; the other version {row['other']['cpu_seconds'] / row['this']['cpu_seconds']:.2f} times as much CPU"
            )
        elif command.split() in [list(one) for one in PRINTING]:
            line += f", {'under' if row['this']['seconds'] < LIMIT else 'OVER'} {LIMIT} s"
        print(line, flush=True)
    if given.json:
        given.json.write_text(json.dumps({"machine": machine, "commands": shown}, indent=1) + "\n")


if __name__ == "__main__":
    main()
