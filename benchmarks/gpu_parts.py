"""Parts of `make gpu` that train small models and compare the results.

    python benchmarks/gpu_parts.py PART --out FILE [--tiny]

losses      the same steps of ten recipes on the CPU and on the GPU in fp32: losses and gradient norms agree
precisions  bf16, fp16, tf32, fp8 and fp8-rowwise against fp32 on the same batches, eager and compiled
memory      activation recomputation and 8-bit moments: the same losses, less memory
waits       steps whose statistics are read one by one and ten at a time: the same losses, and the time of each
profile     a step of half a billion parameters under torch's profiler: the kernels that take longest

Each part prints a table and writes its rows; the exit code is 1 if a comparison fails. --tiny runs the same code with tiny models
on any device, where a CPU replaces the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bessemer.common.errors import BessemerError
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model
from bessemer.recipe import parse
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train.task import config_of
from bessemer.train.trainer import Trainer

VOCABULARY = 1024
RECIPE = """
run.name = "gpu"
[tokens]
sequence_length = 256
[model]
layers = 4
width = 256
heads = 4
mlp_width = 512
[train]
steps = 100
micro_batch = 4
global_batch_tokens = 2048
optimizer.learning_rate = 0.003
"""
# Keys added to RECIPE: every family that computes differently, and the optimizers, objectives and masks.
RECIPES: dict[str, tuple[str, ...]] = {
    "llama": ("model.family=llama",),
    "qwen3, grouped": ("model.family=qwen3", "model.kv_heads=2"),
    "gemma2": ("model.family=gemma2",),
    "gpt2": ("model.family=gpt2",),
    "olmo2, Muon": ("model.family=olmo2", "train.optimizer.kind=muon", "train.optimizer.learning_rate=0.01"),
    "llama, Lion": ("model.family=llama", "train.optimizer.kind=lion", "train.optimizer.learning_rate=0.0003"),
    "modernbert, masked": ("model.family=modernbert", "train.objective=masked"),
    "document mask": ("model.family=llama", "tokens.document_mask=true"),
    "z-loss, tied": ("train.z_loss=1e-4", "model.tie_embeddings=true"),
    "recomputed": ("model.family=llama", "train.recompute=full"),
}
LARGE = ("model.layers=24", "model.width=1280", "model.heads=10", "model.mlp_width=3456", "tokens.sequence_length=2048",
         "train.micro_batch=4", "train.global_batch_tokens=16384")  # fmt: skip
SMALL = ("model.layers=1", "model.width=64", "model.heads=2", "model.mlp_width=128", "tokens.sequence_length=64",
         "train.micro_batch=2", "train.global_batch_tokens=256")  # fmt: skip
# Largest difference of losses after a few steps, relative to the loss: of fp32 on a GPU from fp32 on a CPU, and of narrower types
# from fp32.
EQUAL, CLOSE = 1e-4, {"tf32": 2e-3, "bf16": 2e-2, "fp16": 2e-2, "fp8": 6e-2, "fp8-rowwise": 6e-2}
STEPS = 4

Rows = list[dict[str, Any]]


def built(keys: tuple[str, ...], tiny: bool, device: str = "cuda") -> tuple[Trainer, Batch]:
    """Build a trainer of the recipe with these keys, and the batch that every step trains on.

    Args:
        keys: Overrides of RECIPE.
        tiny: Use a tiny model on the CPU.
        device: Device of the trainer; ignored in a tiny run.
    """
    device = "cpu" if tiny else device
    overrides = [*keys, *(SMALL if tiny else ()), f"train.device={device}"]
    recipe = resolve(parse(RECIPE, "gpu", overrides), VOCABULARY)
    config = config_of(recipe, VOCABULARY, 0)
    trainer = Trainer(recipe, build_model(config, 0), devices.choose(recipe.train), 0, 1)
    rows = (recipe.train.global_batch_tokens or 0) // config.sequence_length
    return trainer, trainer.task.synthetic_batch(np.random.default_rng(0), rows, config)


def stepped(
    keys: tuple[str, ...], tiny: bool, device: str = "cuda", steps: int = STEPS
) -> tuple[Rows, list[float], int]:
    """Train and return the loss and gradient norm of each step, the seconds of each step, and the peak bytes on the GPU."""
    trainer, batch = built(keys, tiny, device)
    found, seconds = [], []
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        began = perf_counter()
        stats = trainer.forward_backward(batch)
        trainer.update(step, stats.grad_norm)
        devices.synchronize(trainer.device)
        seconds.append(perf_counter() - began)
        found.append({"loss": float(stats.loss), "grad_norm": float(stats.grad_norm)})
    return found, seconds, torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def apart(one: Rows, other: Rows, key: str = "loss") -> float:
    """Return the largest relative difference between the steps of two trainings."""
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(one, other, strict=True))


def losses(tiny: bool) -> Rows:
    rows: Rows = []
    for name, keys in RECIPES.items():
        exact = (*keys, "train.precision=fp32", "train.compile=off")
        on_cpu, on_gpu = stepped(exact, tiny, "cpu")[0], stepped(exact, tiny)[0]
        loss, norm = apart(on_gpu, on_cpu), apart(on_gpu, on_cpu, "grad_norm")
        ok = loss < EQUAL and norm < 50 * EQUAL
        rows.append({"recipe": name, "loss": loss, "grad_norm": norm, "ok": ok, "cpu": on_cpu, "gpu": on_gpu})
        print(f"{name:<24} loss apart {loss:.1e}, gradient norm {norm:.1e}{'' if ok else '   NOT EQUAL'}", flush=True)
    return rows


def precisions(tiny: bool) -> Rows:
    keys, steps = ("model.family=llama", "tokens.document_mask=true"), 10
    exact, rows = stepped((*keys, "train.precision=fp32", "train.compile=off"), tiny, steps=steps)[0], []
    for compile_ in ("off",) if tiny else ("off", "on"):
        for precision in ("bf16", "fp16") if tiny else CLOSE:
            row: dict[str, Any] = {"precision": precision, "compile": compile_}
            rows.append(row)
            try:
                found, seconds, peak = stepped(
                    (*keys, f"train.precision={precision}", f"train.compile={compile_}"), tiny, steps=steps
                )
            except (BessemerError, RuntimeError) as error:
                row |= {"ok": False, "failed": str(error)[:500]}
                print(f"{precision:<12} compile {compile_:<4} failed: {str(error).splitlines()[0][:120]}", flush=True)
                continue
            loss = apart(found, exact)
            row |= {
                "loss": loss,
                "ok": loss < CLOSE[precision],
                "first": seconds[0],
                "step": median(seconds[3:]),
                "peak": peak,
            }
            print(
                f"{precision:<12} compile {compile_:<4} loss apart {loss:.1e}{'' if row['ok'] else '   TOO FAR'}, first step "
                f"{seconds[0]:.1f} s, then {1e3 * row['step']:.1f} ms", flush=True,
            )  # fmt: skip
    return rows


def memory(tiny: bool) -> Rows:
    cases = {"none": (), "selective": ("train.recompute=selective",), "full": ("train.recompute=full",),
             "8bit": ("train.optimizer.state=8bit",)}  # fmt: skip
    size = (
        "model.layers=12",
        "model.width=1024",
        "model.heads=8",
        "model.mlp_width=2816",
        "tokens.sequence_length=1024",
    )
    rows: Rows = []
    for name, more in cases.items():
        found, seconds, peak = stepped((*size, "train.precision=bf16", "train.compile=off", *more), tiny)
        first = rows[0]["steps"] if rows else found
        equal = apart(found, first)
        ok = equal < (1e-2 if name == "8bit" else 1e-6) and (tiny or not rows or peak < rows[0]["peak"])
        rows.append({"case": name, "loss": equal, "ok": ok, "peak": peak, "step": median(seconds[1:]), "steps": found})
        print(
            f"{name:<12} loss apart {equal:.1e}, peak {peak / 1e9:.2f} GB, step {1e3 * rows[-1]['step']:.0f} ms"
            f"{'' if ok else '   WRONG'}", flush=True,
        )  # fmt: skip
    return rows


def waits(tiny: bool) -> Rows:
    """Time the same steps of one model with statistics read one by one and ten at a time, in alternating rounds."""
    keys = ("model.layers=12", "model.width=1024", "model.heads=8", "model.mlp_width=2816", "tokens.sequence_length=1024",
            "train.precision=bf16", f"train.compile={'off' if tiny else 'on'}")  # fmt: skip
    steps, rounds = 3 if tiny else 20, 2 if tiny else 5
    cases = {"one by one": (*built(keys, tiny), 1), "ten at a time": (*built(keys, tiny), 10)}

    def run(trainer: Trainer, batch: Batch, every: int) -> list[float]:
        losses, enqueued = [], []
        for step in range(1, steps + 1):
            enqueued.append(trainer.forward_backward(batch))
            trainer.update(0, enqueued[-1].grad_norm, 1.0, enqueued[-1].skip_flag())
            if step % every == 0 or step == steps:
                losses += [stats.loss for stats in trainer.read(enqueued)]
                enqueued = []
        return losses

    seconds: dict[str, list[float]] = {name: [] for name in cases}
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):  # the first round compiles
        for name, (trainer, batch, every) in cases.items():
            devices.synchronize(trainer.device)
            began = perf_counter()
            found[name] += run(trainer, batch, every)
            devices.synchronize(trainer.device)
            seconds[name].append((perf_counter() - began) / steps)
    pairs = zip(*found.values(), strict=True)
    loss = max(abs(one - two) / abs(two) for one, two in pairs)
    rows: Rows = [
        {"case": name, "step": median(each[1:]), "rounds": each[1:], "loss": loss, "ok": loss < 1e-6}
        for name, each in seconds.items()
    ]
    for row in rows:
        print(f"{row['case']:<10} {1e3 * row['step']:.2f} ms per step", flush=True)
    print(f"losses apart {loss:.1e}, {rows[0]['step'] / rows[1]['step']:.3f} times as fast ten at a time")
    return rows


def profile(tiny: bool) -> Rows:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    trainer, data = built((*LARGE, "train.precision=bf16", f"train.compile={'off' if tiny else 'on'}"), tiny)
    for _ in range(3):
        trainer.update(0, trainer.forward_backward(data).grad_norm)
    on_gpu = torch.cuda.is_available() and not tiny
    with profiled(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as found:
        trainer.update(0, trainer.forward_backward(data).grad_norm)
        devices.synchronize(trainer.device)
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    entries = sorted(found.key_averages(), key=lambda one: -getattr(one, key))
    total = sum(getattr(one, key) for one in entries)
    rows: Rows = [
        {
            "name": one.key,
            "calls": one.count,
            "us": getattr(one, key),
            "share": getattr(one, key) / max(total, 1),
            "ok": True,
        }
        for one in entries[:30]
    ]
    for row in rows[:15]:
        print(f"{row['share']:>6.1%} {row['us'] / 1e3:>9.2f} ms {row['calls']:>6} x {row['name'][:80]}")
    return rows


PARTS: dict[str, Callable[[bool], Rows]] = {
    "losses": losses, "precisions": precisions, "memory": memory, "waits": waits, "profile": profile,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="tiny models, on any device")
    given = parser.parse_args()
    if not given.tiny and not torch.cuda.is_available():
        sys.exit("torch finds no CUDA device; --tiny runs the same code on a CPU")
    torch.manual_seed(0)
    rows = PARTS[given.part](given.tiny)
    given.out.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
