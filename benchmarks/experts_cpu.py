"""Training step of a mixture of experts on a CPU, compared with a dense model and with Qwen3-MoE of transformers.

Both models of Bessemer have the same active parameters without the router: 6 layers of width 384, and an MLP of 1,024 hidden
units, or 8 experts of 512 of which each token uses 2. The sides take turns of a few steps in a rotated order, and each step
has other tokens, because the experts' loads vary in training.

    python benchmarks/experts_cpu.py --precision bf16 --json FILE

The peer computes in autocast, with its auxiliary loss, as its users train it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median

from machine import describe
from planned import beside, print_beside
from step_cpu import TOKENS, Side, take_turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps per turn")
    parser.add_argument("--warm-up", type=int, default=10, help="steps of each side before the first turn")
    parser.add_argument("--wait-idle", type=float, default=0.0, help="seconds to wait for idle cores before each turn")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = ["--threads", str(given.threads), "--precision", given.precision]
    wanted = {
        "sparse": ["bessemer", "--sparse"],
        "dense": ["bessemer"],
        "Qwen3-MoE of transformers": ["bare", "--sparse"],
    }
    sides = [Side(name, sys.executable, *arguments, *options) for name, arguments in wanted.items()]
    for side in sides:
        side.take(given.warm_up)
    take_turns(sides, given.rounds, given.steps, given.wait_idle)
    rows = []
    for side in sides:
        ratio = median(ours / theirs for ours, theirs in zip(sides[0].rounds, side.rounds, strict=True))
        print(
            f"{side.name:<26} {median(side.seconds):.3f} s, {TOKENS / median(side.seconds):,.0f} tokens/s, "
            f"{ratio:.2f} x sparse, peak {side.peak_bytes / 1e6:,.0f} MB"
        )
        row = {
            "side": side.name, "step_seconds_median": median(side.seconds), "seconds_over_sparse_median": ratio,
            "peak_bytes": side.peak_bytes, "rounds": side.rounds, **side.facts,
        }  # fmt: skip
        if "plan" in side.facts:
            row["planned_against_measured"] = told = beside(side.facts["plan"], side.seconds, side.peak_bytes)
            print_beside(side.name, told)
        rows.append(row)
    if given.json:
        machine = describe(threads=given.threads, precision=given.precision, rounds=given.rounds, steps=given.steps)
        given.json.write_text(json.dumps({"machine": machine, "sides": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
