"""The parts of a step of the recipe `demo` in fp32 on this CPU: forward and backward passes of two micro-batches, and the update.

Call it in turns on two commits to compare them. The first passes are not timed.

    PYTHONPATH=src python benchmarks/cpu_fp32.py
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import numpy as np

from bessemer.model.transformer import build_model
from bessemer.recipe import load
from bessemer.train import device as devices
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer
from bessemer.workflow import derive

WARMUP, TIMED = 5, 20
SEQUENCES = 8  # two micro-batches, which run at the same time


def main() -> None:
    recipe = load("demo").changed(train={"precision": "fp32", "steps": 400, "minutes": None})
    resolved = derive.resolve(recipe, 2048, 0, 400)
    config = config_of(resolved, 2048, 0)
    trainer = Trainer(resolved, build_model(config, 0), devices.choose(resolved.train), 0, 1)
    batch = trainer.task.synthetic_batch(np.random.default_rng(0), SEQUENCES, config)
    passes, updates = list[float](), list[float]()
    for _ in range(WARMUP + TIMED):
        started = perf_counter()
        norm = trainer.forward_backward(batch).grad_norm
        between = perf_counter()
        trainer.update(0, norm)
        passes.append(between - started)
        updates.append(perf_counter() - between)
    print(f"passes {median(passes[WARMUP:]):.4f} s, update {median(updates[WARMUP:]):.4f} s")


if __name__ == "__main__":
    main()
