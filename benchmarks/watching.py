"""Cost of monitoring: the guard's verdict relative to a step, and layer statistics every train.watch_every steps.

Verdicts, statistics and steps alternate, so that a noisy machine slows all of them. Measures a small and a larger model, on the
CPU unless there is a GPU. The share falls with larger batches, since the statistics read one sequence for any batch.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from machine import describe
from planned import beside, plan_of, print_beside

from bessemer.guard.detection import GuardReference
from bessemer.guard.policy import GuardState, judge
from bessemer.guard.trends import Trends
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import MICRO_BATCH_TOKENS_ON, resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import Guard, parse
from bessemer.run.directory import RunDirectory
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train.layer_metrics import LayerMonitor
from bessemer.train.metrics import MetricsLog
from bessemer.train.trainer import Trainer

MODELS = {
    "demo": {"layers": 4, "width": 128, "heads": 4, "mlp_width": 384, "batch": 1024},
    "10M": {"layers": 6, "width": 384, "heads": 6, "mlp_width": 1024, "batch": 4096},
}

WINDOW = 300  # steps, more than any window of the guard


def measure(model: dict[str, int], rounds: int) -> dict[str, Any]:
    """Return the median seconds of a step and of the statistics, taken in turns."""
    asked = parse(
        f"""
            run.name = "watching"
            tokens.sequence_length = 256
            train.steps = 1000
            train.global_batch_tokens = {model["batch"]}
            train.optimizer.learning_rate = 0.001
            [model]
            layers = {model["layers"]}
            width = {model["width"]}
            heads = {model["heads"]}
            mlp_width = {model["mlp_width"]}
            """,
        "benchmark",
    )
    cuda = torch.cuda.is_available()
    recipe = resolve(asked, 8192, micro_batch_tokens=MICRO_BATCH_TOKENS_ON[cuda])
    config, device = model_config(recipe, 8192), devices.choose(recipe.train)
    devices.keep_freed_memory()
    plan = plan_of(recipe, config, device)
    devices.reset_peak_resident()
    trainer = Trainer(recipe, build_model(config, 0), device, 0, 1)
    assert recipe.train.global_batch_tokens is not None
    sequences = recipe.train.global_batch_tokens // config.sequence_length
    tokens = np.random.default_rng(0).integers(0, 8192, (sequences, config.sequence_length + 1))
    batch = Batch.next_token(0, tokens, np.zeros(sequences, dtype=np.int64))
    plain, looks, verdicts = [], [], []
    guard, state, reference = Guard(), GuardState(), GuardReference(math.log(8192), 1.0)
    noise = np.random.default_rng(1).normal(0.0, 0.05, (WINDOW, 2)).tolist()
    for number, (loss, norm) in enumerate(noise, start=1):  # until the guard's windows are full
        state = judge(guard, state, number, 3.0 + loss, math.exp(norm), reference).state
    with TemporaryDirectory() as folder, MetricsLog(RunDirectory(Path(folder)), [], 0, tensorboard=False) as log:
        around = LayerMonitor(trainer, log, Trends(None), 1)
        for _ in range(rounds):
            devices.synchronize(device)
            started = perf_counter()
            gradients = trainer.forward_backward(batch)
            trainer.update(0, gradients.grad_norm)
            devices.synchronize(device)
            between = perf_counter()
            with around(1, batch, gradients.skip_flag()):
                entered = perf_counter()
                trainer.update(0, gradients.grad_norm)
                devices.synchronize(device)
                left = perf_counter()
            devices.synchronize(device)
            plain.append(between - started)
            asked_at = perf_counter()
            judge(guard, state, WINDOW + 1, 3.0, 1.0, reference)
            verdicts.append(perf_counter() - asked_at)
            looks.append(perf_counter() - left + entered - between)
    step_seconds, look_seconds = median(plain[2:]), median(looks[2:])
    every = recipe.train.watch_every
    return {
        "parameters": config.parameters,
        "tokens_a_step": recipe.train.global_batch_tokens,
        "step_seconds": step_seconds,
        "look_seconds": look_seconds,
        "watch_every": every,
        "share": look_seconds / (every * step_seconds),
        "guard_seconds": median(verdicts),
        "guard_share": median(verdicts) / step_seconds,
        "planned_against_measured": beside(plan, plain[2:], devices.memory_in_use(device)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    result = {"machine": describe(threads=torch.get_num_threads()), "models": {}}
    for name, model in MODELS.items():
        found = result["models"][name] = measure(model, given.rounds)
        print(
            f"{name:<6} step {1e3 * found['step_seconds']:.1f} ms, statistics {1e3 * found['look_seconds']:.1f} ms: "
            f"{found['share']:.2%} of the time if every {found['watch_every']} steps; "
            f"guard {1e6 * found['guard_seconds']:.0f} us: {found['guard_share']:.2%} of a step"
        )
        print_beside(name, found["planned_against_measured"])
    if given.json:
        given.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
