"""Overhead of the parallel path: a training step in a process group of one compared with no group.

Both sides use the same model, batch and optimizer in one process and take turns in alternating order. The ratio is the median of
the ratios per round. On a CPU the group is a gloo group, each side computes its micro-batches in sequence, and the ratio is one
of CPU seconds, which other processes disturb less than wall time; --clock wall measures wall time on an idle machine. With
--device cuda a third side is the same model with FSDP2 on a mesh of one GPU, and MFU is printed.

    python benchmarks/parallel_overhead.py --json FILE
    python benchmarks/parallel_overhead.py --device cuda --json FILE
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from machine import describe

from bessemer.distributed import context, data
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh, join, leave
from bessemer.model import recipe_defaults
from bessemer.model.config import ModelConfig
from bessemer.model.flops import flops_per_token
from bessemer.model.transformer import build_model, meta_model
from bessemer.plan import local_plan
from bessemer.recipe import Parallel, Recipe
from bessemer.recipe.load import parse
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train import optimizer as optimizers
from bessemer.train import parallelize, precision
from bessemer.train.engine import DataParallel
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer

SIZES = {  # layers, width, heads, mlp_width, tokens per sequence, sequences per micro-batch and per batch, vocabulary
    "cpu": (6, 256, 4, 704, 256, 4, 8, 4096),
    "cuda": (24, 2048, 16, 5632, 4096, 2, 4, 65_536),
}


def recipe_of(kind: str) -> tuple[Recipe, ModelConfig]:
    layers, width, heads, hidden, length, micro, batch, vocabulary = SIZES[kind]
    text = f"""
    run = {{name = "overhead"}}
    model = {{layers = {layers}, width = {width}, heads = {heads}, mlp_width = {hidden}}}
    tokens = {{sequence_length = {length}, document_mask = false}}
    train = {{steps = 1000, micro_batch = {micro}, global_batch_tokens = {batch * length}, device = "{kind}"}}
    """
    resolved = recipe_defaults.resolve(parse(text, "parallel_overhead"), vocabulary)
    return resolved, config_of(resolved, vocabulary, 0)


def wrapped(recipe: Recipe, config: ModelConfig, device: devices.Device, mesh: ProcessMesh) -> Trainer:
    """Build a trainer on the parallel path with FSDP2 around the blocks, on a mesh of one."""
    trainer = Trainer(recipe, meta_model(config), device, 0, 1, mesh, parallelize.initial_weights(config, 1))
    autocast = functools.partial(precision.autocast, device.precision, device.torch_device)
    read = functools.partial(context.read_batch, mesh, trainer.task, recipe.train.dropout)
    root = context.ModelWithLoss(trainer.model, trainer.task, autocast, read)
    data.apply_fsdp(root, list(trainer.model.blocks), mesh, device.precision.autocast)
    trainer.engine = DataParallel(trainer.model, root, mesh, device)
    trainer.optimizer = optimizers.build(trainer.model, recipe.train.optimizer)
    return trainer


def one_step(trainer: Trainer, batch: Batch, device: devices.Device, clock: Callable[[], float]) -> float:
    devices.synchronize(device)
    started = clock()
    found = trainer.forward_backward(batch)
    trainer.update(0, found.grad_norm)
    devices.synchronize(device)
    return clock() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--clock", choices=("cpu", "wall"), default="cpu", help="CPU seconds or wall time (on an idle machine)"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    clock = perf_counter if given.device == "cuda" or given.clock == "wall" else process_time
    torch.set_num_threads(given.threads)
    devices.keep_freed_memory()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **where})
    recipe, config = recipe_of(given.device)
    device = devices.choose(recipe.train)
    mesh = join(Parallel(), device.torch_device)
    weights = parallelize.initial_weights(config, 1)
    sides = {
        "none": Trainer(recipe, build_model(config, 1), device, 0, 1, SINGLE_PROCESS),
        "group of one": Trainer(recipe, meta_model(config), device, 0, 1, mesh, weights),
    }
    if device.is_cuda:
        sides["fsdp2 of one"] = wrapped(recipe, config, device, mesh)
    draw = np.random.default_rng(0)
    rows = (recipe.train.global_batch_tokens or 0) // config.sequence_length
    batch = Batch.next_token(
        0, draw.integers(0, config.vocabulary, (rows, config.sequence_length + 1)), np.zeros(rows, np.int64)
    )
    for _ in range(3):
        for step in sides.values():
            one_step(step, batch, device, clock)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(given.rounds):
        for name in list(sides) if turn % 2 == 0 else list(reversed(sides)):
            seconds[name].append(one_step(sides[name], batch, device, clock))
    leave()
    flops = flops_per_token(config) * rows * config.sequence_length
    told: dict[str, dict[str, Any]] = {}
    for name, taken in seconds.items():
        ratio = median(one / none for one, none in zip(taken, seconds["none"], strict=True))
        told[name] = {"seconds": taken, "median": median(taken), "of_none": ratio}
        line = f"{name:<14} {1e3 * median(taken):>8.1f} ms, {ratio - 1:+.2%}"
        if device.is_cuda:
            told[name]["mfu"] = flops / median(taken) / local_plan.peak_rate(device)
            line += f", MFU {told[name]['mfu']:.1%}"
        print(line)
    if given.json:
        machine = describe(threads=given.threads, device=device.name, clock="wall" if clock is perf_counter else "cpu")
        given.json.write_text(json.dumps({"machine": machine, "sides": told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
