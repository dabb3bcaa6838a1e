"""Speed of the CPU step relative to its own matrix products.

Times each distinct product of the step (the model of step_worker.py) alone: forward, gradient of the input and gradient of the
weight, each in the library that the step uses and in torch.mm, and the attention. The ceiling is the tokens/s of a step that
consists only of these. The step itself takes turns with the products, so that both see the same changes in the machine's speed.
With --cpu-time and one thread, seconds are CPU seconds of the thread, which other processes disturb less.

    python benchmarks/step_ceiling.py --threads 2 --json FILE
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch
from machine import describe, wait_until_idle
from planned import beside, print_beside
from step_worker import HEADS, LAYERS, LENGTH, MLP, SEQUENCES, VOCABULARY, WIDTH, bessemer, peak_resident

TOKENS = SEQUENCES * LENGTH
Call = Callable[[], object]


def products(micro_batch: int, dtype: torch.dtype) -> dict[str, tuple[int, int, Call, Call]]:
    """Return by name: how often the product is in a step, its FLOPs, the step's implementation, and torch.mm."""
    from bessemer.distributed.chunks import loss_chunk
    from bessemer.model.kernels import linear_kernel

    rows, passes = micro_batch * LENGTH, SEQUENCES // micro_batch
    chunk = loss_chunk(4096, VOCABULARY, is_cuda=False)
    found: dict[str, tuple[int, int, Call, Call]] = {}
    for name, count, m, inputs, outputs in (
        ("qkv", LAYERS * passes, rows, WIDTH, 3 * WIDTH),
        ("out", LAYERS * passes, rows, WIDTH, WIDTH),
        ("gate_up", LAYERS * passes, rows, WIDTH, 2 * MLP),
        ("down", LAYERS * passes, rows, MLP, WIDTH),
        ("head", TOKENS // chunk, chunk, WIDTH, VOCABULARY),
    ):
        shapes = (m, inputs), (outputs, inputs), (m, outputs)
        x, w, dy = (torch.randn(shape).to(dtype) for shape in shapes)
        dx, dw, y = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        flops = 2 * m * inputs * outputs

        def forward(x: torch.Tensor = x, w: torch.Tensor = w) -> object:
            return linear_kernel(x, w)

        def plain_forward(x: torch.Tensor = x, w: torch.Tensor = w, y: torch.Tensor = y) -> object:
            return torch.mm(x, w.T, out=y)

        def to_input(dy: torch.Tensor = dy, w: torch.Tensor = w) -> object:
            return linear_kernel(dy, w.T)

        def plain_to_input(dy: torch.Tensor = dy, w: torch.Tensor = w, dx: torch.Tensor = dx) -> object:
            return torch.mm(dy, w, out=dx)

        def to_weight(dy: torch.Tensor = dy, x: torch.Tensor = x, dw: torch.Tensor = dw) -> object:
            return torch.mm(dy.T, x, out=dw)

        found[f"{name} forward"] = (count, flops, forward, plain_forward)
        found[f"{name} to input"] = (count, flops, to_input, plain_to_input)
        found[f"{name} to weight"] = (count, flops, to_weight, to_weight)
    return found


def attention(micro_batch: int, dtype: torch.dtype) -> tuple[int, int, Call, Call]:
    """Return the same for attention, forward and backward, with the FLOPs of the causal half."""
    from bessemer.model.attention import attention as attend
    from bessemer.model.attention_scope import AttentionScope, AttentionSpec

    scope = AttentionScope.build(AttentionSpec(), None, LENGTH, torch.device("cpu"))
    size = micro_batch, HEADS, LENGTH, WIDTH // HEADS
    q, k, v = (torch.randn(size).to(dtype).requires_grad_() for _ in range(3))
    upstream = torch.randn(size).to(dtype)

    def ours() -> None:
        attend(q, k, v, scope).backward(upstream)

    def plain() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(upstream)

    flops = 6 * micro_batch * HEADS * LENGTH * (LENGTH + 1) * (WIDTH // HEADS)
    return LAYERS * SEQUENCES // micro_batch, flops, ours, plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu-time", action="store_true", help="measure CPU seconds of the thread; needs --threads 1")
    parser.add_argument("--wait-idle", type=float, default=0.0, help="seconds to wait for idle cores before each round")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.cpu_time and given.threads != 1:
        parser.error("--cpu-time measures one thread: add --threads 1")
    clock = thread_time if given.cpu_time else perf_counter
    torch.set_num_threads(given.threads)
    take, facts = bessemer(0, False, given.precision)
    dtype = torch.bfloat16 if given.precision == "bf16" else torch.float32
    parts = products(facts["micro_batch"], dtype)
    parts["attention"] = attention(facts["micro_batch"], dtype)

    def timed(call: Call, repeats: int = 1) -> float:
        started = clock()
        for _ in range(repeats):
            call()
        return (clock() - started) / repeats

    seconds: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in parts}
    steps: list[float] = []
    for number in range(given.rounds + 1):
        if given.wait_idle:
            wait_until_idle(given.wait_idle)
            take(1)  # wakes the cores, which would otherwise slow the first product
        for name, (_, _, ours, plain) in parts.items():
            pair = timed(ours, 3), timed(plain, 3)
            if number:  # the first round warms up
                seconds[name][0].append(pair[0])
                seconds[name][1].append(pair[1])
        step = timed(lambda: take(1))
        if number:
            steps.append(step)
    print(f"{'product':<20} {'per step':>9} {'GFLOP/s':>8} {'torch.mm':>9} {'ms/step':>10}")
    rows: list[dict[str, Any]] = []
    for name, (count, flops, _, _) in parts.items():
        taken, by_torch = (median(found) for found in seconds[name])
        print(
            f"{name:<20} {count:>9} {flops / taken / 1e9:>8.0f} {flops / by_torch / 1e9:>9.0f} {1e3 * count * taken:>10.1f}"
        )
        rows.append({"product": name, "count": count, "flops": flops, "seconds": taken, "torch_mm_seconds": by_torch})

    def ceiling(which: int, with_attention: bool) -> tuple[list[float], float]:
        """Return the seconds of a step that has only products: per round, and with each product at its best."""
        names = [name for name in parts if with_attention or name != "attention"]
        rounds = [sum(parts[name][0] * seconds[name][which][turn] for name in names) for turn in range(given.rounds)]
        return rounds, sum(parts[name][0] * min(seconds[name][which]) for name in names)

    shares = {
        "of the products alone, in the libraries the step uses": ceiling(0, False),
        "of the products and the attention, likewise": ceiling(0, True),
        "of the products alone, in torch.mm": ceiling(1, False),
    }
    print(f"\nstep {TOKENS / median(steps):.0f} tokens/s (best {TOKENS / min(steps):.0f})")
    found = {}
    for name, (alone, best) in shares.items():
        share = median(a / b for a, b in zip(alone, steps, strict=True))
        found[name] = {
            "tokens_per_second": TOKENS / median(alone), "share_reached": share,
            "tokens_per_second_best": TOKENS / best, "share_reached_best": best / min(steps),
        }  # fmt: skip
        print(
            f"{share:.0%} {name}: {TOKENS / median(alone):.0f} tokens/s (best against best: {best / min(steps):.0%} of "
            f"{TOKENS / best:.0f})"
        )
    told = beside(facts["plan"], steps, peak_resident())
    print_beside("step", told)
    if given.json:
        machine = describe(
            threads=given.threads, precision=given.precision, rounds=given.rounds, cpu_time=given.cpu_time
        )
        result = {
            "machine": machine,
            "tokens_per_second": TOKENS / median(steps),
            "ceilings": found,
            "products": rows,
            "planned_against_measured": told,
        }
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
