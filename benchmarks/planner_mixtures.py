"""Planned steps of mixtures of experts against published ones. No constant was fitted to any of them.

    python benchmarks/planner_mixtures.py [FOLDER] [--json FILE]

FOLDER has the reference sets (planner_sets.py). Its b200.json has nine cases of DeepSeek's models cut to four layers, with time
and memory. This file has the other rows: NVIDIA's table in release 26.02 of Megatron Bridge's performance summary, whose balance
is forced ("we force-balance the token distribution among experts"), and the training of DeepSeek-V3.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any
from unittest.mock import patch

from bessemer.plan import devices, shapes
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout
from bessemer.plan.estimate.memory import memory
from bessemer.plan.estimate.step import step
from bessemer.plan.intervals import interval, residuals

# Rows of Megatron Bridge's performance summary for MoE models with a known shape: model, device, devices, batch in sequences,
# micro-batch, tensor, pipeline, virtual, expert, tokens/s per device. Sequences of 4,096, fp8 (MXFP8 on Blackwell).
BRIDGE = (
    ("deepseek-v3", "GB300", 256, 4096, 2, 1, 2, 8, 32, 4976),
    ("deepseek-v3", "GB200", 256, 4096, 1, 1, 4, 4, 64, 4256),
    ("deepseek-v3", "B300", 256, 4096, 2, 1, 8, 1, 8, 3440),
    ("deepseek-v3", "B200", 256, 4096, 1, 1, 8, 2, 32, 3328),
    ("qwen3-30b-a3b", "GB300", 8, 512, 8, 1, 1, 1, 8, 31232),
    ("qwen3-30b-a3b", "GB200", 8, 512, 4, 1, 1, 1, 8, 26112),
    ("qwen3-30b-a3b", "B300", 8, 512, 8, 1, 1, 1, 8, 30720),
    ("qwen3-30b-a3b", "B200", 8, 512, 4, 1, 1, 1, 8, 27136),
    ("qwen3-30b-a3b", "H100", 16, 1024, 1, 1, 1, 1, 16, 8960),
    ("qwen3-235b-a22b", "GB300", 256, 8192, 2, 1, 4, 12, 32, 6992),
    ("qwen3-235b-a22b", "GB200", 256, 8192, 1, 1, 8, 3, 32, 5696),
    ("qwen3-235b-a22b", "B300", 256, 8192, 2, 1, 8, 1, 8, 5984),
    ("qwen3-235b-a22b", "B200", 256, 8192, 1, 1, 8, 1, 8, 3776),
    ("qwen3-235b-a22b", "H100", 256, 8192, 1, 2, 8, 4, 32, 1696),
    ("kimi-k2", "GB300", 256, 4096, 2, 1, 4, 4, 64, 5344),
)
# DeepSeek-AI 2024, DeepSeek-V3, table 1 and section 3.2: 2,664,000 H800-hours of pre-training on 14.8T tokens; 2,048 H800,
# pipelines of 16, experts over 64, ZeRO-1, fp8, 15,360 sequences. Its multi-token prediction is not planned.
DEEPSEEK_HOURS, DEEPSEEK_TOKENS = 2.664e6, 14.8e12
SHORT = {"deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3"}


@dataclass(frozen=True)
class MixtureRow:
    """One comparison: seconds per step, or bytes of allocated tensors."""

    set: str
    name: str
    planned: float
    measured: float
    job: Job

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


def bridge() -> list[MixtureRow]:
    """Return the step times of NVIDIA's table."""
    framework, rows = replace(frameworks.find("megatron-core"), imbalance=1.0), []
    for name, device, count, batch, micro_batch, tensor, pipeline, virtual, expert, rate in BRIDGE:
        model = shapes.find(name).config.with_changes(sequence_length=4096)
        layout = Layout(
            shard=count // tensor // pipeline, tensor=tensor, pipeline=pipeline, virtual=virtual, expert=expert, zero=1,
            schedule="interleaved" if virtual > 1 else "1f1b", micro_batch=micro_batch,
        )  # fmt: skip
        job = Job(model, layout, ClusterSpec.of(devices.find(device), count), batch, "fp8", framework)
        rows.append(
            MixtureRow("Megatron Bridge", f"{name} {count}x{device}", step(job).seconds, job.tokens / rate / count, job)
        )
    return rows


def deepseek() -> MixtureRow:
    """Return DeepSeek-V3's training in device-hours, planned with the profile of its own program."""
    layout = Layout(shard=128, pipeline=16, expert=64, zero=1, micro_batch=1)
    cluster = ClusterSpec.of(devices.find("H800"), 2048)
    job = Job(shapes.find("deepseek-v3").config, layout, cluster, 15_360, "fp8", frameworks.find("deepseek-v3"))
    hours = DEEPSEEK_TOKENS / job.tokens * step(job).seconds / 3600 * 2048
    return MixtureRow("DeepSeek-V3", "14.8T tokens on 2048xH800, device-hours", hours, DEEPSEEK_HOURS, job)


def simumax(folder: Path) -> list[MixtureRow]:
    """Return time and allocated memory of four layers of DeepSeek's models on a B200 node (MooreThreads/SimuMax, docs/b200).

    The first layer is dense. According to the repository's guide, overlap is off and balance is forced.
    """
    framework, rows = replace(frameworks.find("megatron-core-sync"), imbalance=1.0), []
    for case in json.loads((folder / "b200.json").read_text(encoding="utf-8"))["cases"]:
        inputs, seen = case["inputs"], case["observed"]
        if inputs["model"] not in SHORT:
            continue
        model = shapes.find(SHORT[inputs["model"]]).config
        model = model.with_changes(layers=inputs["layers"], dense_layers=1, sequence_length=inputs["seq"])
        layout = Layout(
            shard=inputs["dp"], tensor=inputs["tp"], pipeline=inputs["pp"], expert=inputs["ep"], zero=1,
            micro_batch=inputs["micro_batch"],
        )  # fmt: skip
        batch = inputs["dp"] * inputs["micro_batch_count"] * inputs["micro_batch"]
        job = Job(model, layout, ClusterSpec.of(devices.find("B200"), 8), batch, "bf16", framework)
        rows.append(MixtureRow("SimuMax, time", case["case"], step(job).seconds, seen["iter_ms"] / 1000, job))
        rows.append(MixtureRow("SimuMax, memory", case["case"], memory(job).allocated, seen["alloc_gib"] * 2**30, job))
    return rows


def spread(rows: list[MixtureRow]) -> float:
    """Return the root mean square of log(measured / planned) in the set of step times where it is largest."""
    squares: dict[str, list[float]] = {}
    for row in rows:
        if "memory" not in row.set:
            squares.setdefault(row.set, []).append(log(row.measured / row.planned) ** 2)
    return max(map(fmean, squares.values())) ** 0.5


def is_inside(row: MixtureRow, rows: list[MixtureRow]) -> bool:
    """Return True if the measured value is inside the 80% interval that is made without the row's set."""
    others = spread([other for other in rows if other.set != row.set])
    with patch.dict(residuals(), mixture_spread=others):
        found = interval("memory" if "memory" in row.set else "step", row.job, row.planned)
    return found.low <= row.measured <= found.high


def summary(rows: list[MixtureRow]) -> dict[str, Any]:
    """Return the errors of a set."""
    errors = [row.error for row in rows]
    return {
        "n": len(rows), "median": median(errors), "mean_absolute": mean(map(abs, errors)), "lowest": min(errors),
        "highest": max(errors),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [*bridge(), deepseek(), *(simumax(args.folder) if args.folder else [])]
    for row in rows:
        print(f"{row.set:16} {row.name:60} {row.error:+.1%}")
    names = dict.fromkeys(row.set for row in rows)
    sets = {name: summary([row for row in rows if row.set == name]) for name in names}
    for name, found in sets.items():
        found["inside"] = sum(is_inside(row, rows) for row in rows if row.set == name)
        errors = f"median {found['median']:+.1%}, mean absolute {found['mean_absolute']:.1%}"
        print(f"{name}: {found['n']}, {errors}, {found['inside']} inside their 80% interval")
    if args.json:
        listed = [{"set": row.set, "name": row.name, "error": row.error} for row in rows]
        args.json.write_text(json.dumps({"sets": sets, "rows": listed}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
