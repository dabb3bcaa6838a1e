"""Time of a training step on two threads next to a busy process, with OpenMP's default spin and shorter ones.

Runs the step of the demo in a separate process per setting, once alone and once next to a process that keeps one core busy.

    python benchmarks/contention.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from machine import describe

WORKER = """
import json, sys, time
import numpy as np
from bessemer.model.huggingface.config import model_config
from bessemer.model.transformer import build_model
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import load
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train.trainer import Trainer

recipe = resolve(load("demo"), 2048, 1000)
config = model_config(recipe, 2048)
devices.keep_freed_memory()
trainer = Trainer(recipe, build_model(config, 0), devices.choose(recipe.train), 0, 1)
batch = Batch.next_token(0, np.random.default_rng(0).integers(0, 2048, (4, 257)), np.zeros(4, dtype=np.int64))
seconds, end = [], time.perf_counter() + float(sys.argv[1])
while time.perf_counter() < end:
    began = time.perf_counter()
    trainer.update(0, trainer.forward_backward(batch).grad_norm)
    seconds.append(time.perf_counter() - began)
print(json.dumps(seconds[2:] or seconds))
"""
SETTINGS = {
    "default spin": {},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def step_seconds(settings: dict[str, str], seconds: float) -> float:
    inherited = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(seconds)],
        env={**inherited, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return median(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: dict[str, dict[str, list[float]]] = {name: {"alone": [], "beside a busy core": []} for name in SETTINGS}
    for _ in range(given.rounds):
        for situation in ("alone", "beside a busy core"):
            busy = None if situation == "alone" else subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                for name, settings in SETTINGS.items():
                    rows[name][situation].append(step_seconds(settings, given.seconds))
            finally:
                if busy is not None:
                    busy.kill()
    for name, found in rows.items():
        shown = ", ".join(f"{situation} {median(seconds) * 1e3:.0f} ms" for situation, seconds in found.items())
        print(f"{name:<24} {shown} per step")
    if given.json:
        given.json.write_text(json.dumps({"machine": describe(), "step_seconds": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
