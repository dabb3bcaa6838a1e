"""Memory of weights, gradients and optimizer on each process, measured, against the formula of each ZeRO stage.

Live tensor bytes on 1, 2 and 4 processes of this machine (gloo): between steps, after the backward passes, and at the peak of
a step of two micro-batches. Two formulas stand beside them. The paper's (Rajbhandari et al. 2020, "ZeRO", section 5) in our
widths: w bytes for a weight that is computed with (4, or 2 in bf16), 4 for a gradient, K = 12 for fp32 master and two moments
(8 in plain copies, which have no master beside the weight):

    0: (8 + 8) P    1: w P + 4 P + 12 P / N    2: w P + (4 + 12) P / N    3: (4 + 12) P / N

and the plan's (layout/memory.py), which adds the buffers of the blocks that are gathered and added up (the paper's C_B,
section 6.2).

    python benchmarks/zero_memory.py --json FILE
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from time import sleep
from typing import Any

import torch
from machine import describe

from bessemer.defaults import derived_keys
from bessemer.layout.communication import ElementBytes
from bessemer.layout.memory import optimizer_bytes, state_bytes
from bessemer.layout.pipeline_stages import PartParameters, pipeline_ranks
from bessemer.model.transformer import meta_model
from bessemer.parallel.mesh import join, leave
from bessemer.recipe import Parallel, Recipe
from bessemer.recipe.load import parse
from bessemer.train import simulate, split
from bessemer.train.device import choose
from bessemer.train.task import config_of, task_of

VOCABULARY = 256
TEXT = """
run = {name = "zero"}
model = {layers = 24, width = 64, heads = 4, mlp_width = 192}
tokens = {sequence_length = 32, document_mask = false}
"""
STATES = ("weights", "gathered", "gradients", "optimizer")
MOMENTS = {"between steps": "between", "after backward": "after_backward", "peak": "states_peak"}


def recipe_of(stage: int, processes: int, precision: str) -> Recipe:
    divided = {"shard": processes, "zero": stage} if stage else {"replicate": processes}
    resolved = derived_keys.resolve(parse(TEXT, "zero_memory"), VOCABULARY)
    train = {"micro_batch": 1, "global_batch_tokens": 2 * 32 * processes, "steps": 4, "precision": precision}
    changed = resolved.train.model_copy(update={**train, "recompute": "full", "device": "cpu"})
    return resolved.model_copy(update={"parallel": Parallel(**divided), "train": changed})  # type: ignore[arg-type]


def measured(recipe: Recipe) -> dict[str, dict[str, int]]:
    """Bytes by owner at the moments of a step, on this process of the group."""
    config, mesh = config_of(recipe, VOCABULARY, 0), join(recipe.parallel, torch.device("cpu"))
    task, device = task_of(recipe.train, recipe.tokens.document_mask, config, 0), choose(recipe.train)
    weights, shell = split.initial_weights(config, 1), meta_model(config)
    built = split.build(recipe.train, shell, mesh, task, device, config.layers, weights)
    held = asdict(
        simulate.watch_step(recipe.train, recipe.parallel, config, *built, in_buckets=recipe.parallel.uses_ddp)
    )
    return {moment: {owner: held[name][owner] for owner in STATES} for moment, name in MOMENTS.items()}


def expected(recipe: Recipe, stage: int) -> dict[str, dict[str, float]]:
    """Bytes by the paper's formula and by the plan's, at each moment."""
    config, layout = config_of(recipe, VOCABULARY, 0), recipe.parallel
    number, ways, w = config.parameters, layout.shard, 2 if recipe.train.precision == "bf16" else 4
    params = PartParameters.of(config, pipeline_ranks(config, layout)[0], 1)
    optimizer = optimizer_bytes(recipe.train, config) / ways
    state = state_bytes(layout, params, params, ElementBytes(w, cast=w), 2)
    held = state.weights + state.unsharded_weights + state.gradients + optimizer  # unsharded: 0 without FSDP2
    if layout.world == 1 or not stage:
        whole = 16.0 * number
        paper, between = whole, whole if layout.replicate > 1 else 12.0 * number
        return {
            "between steps": {"paper": between, "plan": between},
            "after backward": {"paper": whole, "plan": whole},
            "peak": {"paper": whole, "plan": held},
        }
    paper = {
        1: (w + 4) * number + 12 * number / ways,
        2: w * number + 16 * number / ways,
        3: 16 * number / ways,
    }[stage]
    divided = 16 * number / ways
    return {
        "between steps": {"paper": 12 * number / ways, "plan": 12 * number / ways},
        "after backward": {"paper": divided, "plan": divided},  # our stages 1 and 2 give back before the update
        "peak": {"paper": paper, "plan": held},
    }


def on_processes(stage: int, processes: int, precision: str, attempts: int = 3) -> list[dict[str, dict[str, int]]]:
    """Measure on a group of processes; by rank. Tried again when another program took the port meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--member", str(stage), str(processes), precision]
    started = []
    for rank in range(processes):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        environment = {**os.environ, **place, **where}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
        sleep(0.2)
    failed = any(process.poll() for process in started)
    for process in started:
        process.kill()
    told = [process.communicate()[0] for process in started]
    if failed and attempts > 1:
        return on_processes(stage, processes, precision, attempts - 1)
    if failed:
        sys.exit(f"a process of zero {stage} on {processes} failed, see above")
    return [json.loads(text.splitlines()[-1]) for text in told]


def compared(stage: int, processes: int, precision: str) -> list[dict[str, Any]]:
    """A row a moment: the fullest process's bytes, and what each formula says."""
    recipe = recipe_of(stage, processes, precision)
    found, formula = on_processes(stage, processes, precision), expected(recipe, stage)
    rows = []
    for moment in MOMENTS:
        fullest = max((member[moment] for member in found), key=lambda held: sum(held.values()))
        rows.append({
            "zero": stage, "processes": processes, "precision": precision, "moment": moment, **fullest,
            "bytes": sum(fullest.values()), **{name: round(value) for name, value in formula[moment].items()},
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--member", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.member:
        print(json.dumps(measured(recipe_of(int(given.member[0]), int(given.member[1]), given.member[2]))))
        leave()
        return
    rows = []
    for precision in given.precision:
        for processes in (1, 2, 4):
            for stage in (0, 1, 2, 3) if processes > 1 else (0,):
                for row in compared(stage, processes, precision):
                    rows.append(row)
                    print(
                        f"{precision} zero {stage} on {processes}, {row['moment']:<15} {row['bytes'] / 1e6:>7.2f} MB, "
                        f"of the paper's {row['bytes'] / row['paper']:.3f}, of the plan's {row['bytes'] / row['plan']:.3f}"
                    )
    parameters = config_of(recipe_of(0, 1, "fp32"), VOCABULARY, 0).parameters
    if given.json:
        told = {"machine": describe(), "parameters": parameters, "rows": rows}
        given.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
