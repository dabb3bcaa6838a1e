"""Training step on a CPU compared with nanoGPT, litgpt and the Hugging Face Trainer, in fp32 or bf16 autocast.

Each side is a separate process that stays alive. The sides take turns of a few steps in a rotated order, so that a change in the
machine's speed affects them equally. 6 layers of width 384, 10.6M parameters without embeddings, vocabulary 8,192, 16 x 256
tokens per step, fused AdamW, clipping at 1: the same matrix products on every side.

    python benchmarks/step_cpu.py --nanogpt CHECKOUT --litgpt-python PYTHON --trainer-python PYTHON --json FILE

With --precision bf16, Bessemer in fp32 is a further side. A peer whose option is missing is skipped. The environment of each
Python must have the same torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from machine import describe, wait_until_idle
from planned import beside, print_beside

TOKENS = 16 * 256


class Side:
    """A worker process that takes the steps of one side."""

    def __init__(self, name: str, python: str, *arguments: str) -> None:
        self.name = name
        # All sides use the short spin that the command line sets. With OpenMP's default, other load on a core makes any side
        # several times slower, and the ratio would measure that load.
        environment = {**os.environ, "GOMP_SPINCOUNT": "1000", "HF_HUB_OFFLINE": "1"}
        command = [python, str(Path(__file__).with_name("step_worker.py")), *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.facts: dict[str, Any] = self._read()
        self.seconds: list[float] = []
        self.rounds: list[float] = []
        self.peak_bytes = 0

    def take(self, steps: int) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        found = self._read()
        self.peak_bytes = found["peak_bytes"]
        return list(found["seconds"])

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: the process ended; run benchmarks/step_worker.py directly to see the error")
        return json.loads(line)


def take_turns(sides: list[Side], rounds: int, steps: int, wait_idle: float) -> None:
    """Let the sides take `steps` steps each in every round, and append their seconds, and the tokens/s of the round."""
    for number in range(rounds):
        turn = number % len(sides)
        for side in sides[turn:] + sides[:turn]:
            if wait_idle:
                wait_until_idle(wait_idle)
            taken = side.take(steps)
            side.seconds += taken
            side.rounds.append(TOKENS / median(taken))
        print(f"round {number + 1}: " + ", ".join(f"{side.name} {side.rounds[-1]:.0f}" for side in sides), flush=True)


def matmul_rate(threads: int, precision: str) -> float:
    """Return the FLOP/s of a 1024^3 product, the best of several."""
    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(20):
        started = perf_counter()
        torch.mm(a, b)
        best = min(best, perf_counter() - started)
    return 2 * 1024**3 / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", help="checkout of nanoGPT")
    parser.add_argument("--litgpt-python", help="Python with litgpt")
    parser.add_argument("--trainer-python", help="Python with transformers and accelerate")
    parser.add_argument("--compiled", action="store_true", help="also run each side compiled")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="steps per turn")
    parser.add_argument("--wait-idle", type=float, default=0.0, help="seconds to wait for idle cores before each turn")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    wanted = [("Bessemer", sys.executable, ["bessemer"])]
    if given.nanogpt:
        wanted.append(("nanoGPT", sys.executable, ["nanogpt", "--nanogpt", given.nanogpt]))
    if given.litgpt_python:
        wanted.append(("litgpt", given.litgpt_python, ["litgpt"]))
    if given.trainer_python:
        wanted.append(("HF, bare loop", given.trainer_python, ["bare"]))
        wanted.append(("HF Trainer", given.trainer_python, ["trainer"]))
    sides = []
    for compiled in (False, True) if given.compiled else (False,):
        for name, python, arguments in wanted:
            more = [
                "--threads",
                str(given.threads),
                "--precision",
                given.precision,
                *(["--compile"] if compiled else []),
            ]
            sides.append(Side(name + ", compiled" * compiled, python, *arguments, *more))
    if given.precision != "fp32":
        sides.append(Side("Bessemer, fp32", sys.executable, "bessemer", "--threads", str(given.threads)))
    peak = matmul_rate(given.threads, given.precision)
    for side in sides:
        side.facts["first_step_seconds"] = side.take(1)[0]
    take_turns(sides, given.rounds, given.steps, given.wait_idle)
    flops = sides[0].facts["flops_per_token"]
    rows, compared = [], {}
    print(f"\nmatmul rate {peak / 1e9:.0f} GFLOP/s on {given.threads} threads; {flops / 1e6:.1f} MFLOP per token")
    print(
        f"{'side':<24} {'tokens/s':>9} {'best':>7} {'of matmul':>10} {'Bessemer / side':>16} {'peak MB':>8} {'ratio':>6}"
    )
    for side in sides:
        ratio = median(ours / theirs for ours, theirs in zip(sides[0].rounds, side.rounds, strict=True))
        middle, best = TOKENS / median(side.seconds), TOKENS / min(side.seconds)
        share, memory = middle * flops / peak, sides[0].peak_bytes / side.peak_bytes
        print(
            f"{side.name:<24} {middle:>9.0f} {best:>7.0f} {share:>10.0%} {ratio:>16.2f} {side.peak_bytes / 1e6:>8.0f} "
            f"{memory:>6.0%}"
        )
        if "plan" in side.facts:
            compared[side.name] = side.facts["planned_against_measured"] = beside(
                side.facts["plan"], side.seconds, side.peak_bytes
            )
        rows.append(
            {
                "side": side.name, "tokens_per_second_median": middle, "tokens_per_second_best": best,
                "share_of_matmul_rate": share, "bessemer_over_side_median": ratio, "peak_bytes": side.peak_bytes,
                "bessemer_peak_over_side": memory, "rounds": side.rounds, **side.facts,
            }
        )  # fmt: skip
    for name, told in compared.items():
        print_beside(name, told)
    if given.json:
        machine = describe(
            threads=given.threads, precision=given.precision, matmul_flops=peak, rounds=given.rounds, steps=given.steps
        )
        given.json.write_text(json.dumps({"machine": machine, "sides": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
