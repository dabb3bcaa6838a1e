"""The planner against published measurements: how far its steps lie from them, set by set, and what its choice of layout costs.

The sets are read by planner_sets.py, from a folder that is not part of this repository. Constants were fitted to the sets
marked so. The others were in view while the arithmetic was written: which terms it has, and constants rounded within what the
fits leave open, were chosen with their errors on the screen, so that they are not blind tests. After calibration: three cases
of a set are measured steps for planner_calibrated.py and the others are predicted with what it finds, over several draws of
the three.

    python benchmarks/planner_accuracy.py FOLDER [--draws 5] [--cases SET] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from statistics import fmean, median

import planner_layouts
import planner_memory
import planner_models
import planner_sets
from machine import describe
from planner_calibrated import calibrate
from planner_layouts import Regret, regrets
from planner_sets import Case

from bessemer.errors import InputError
from bessemer.layout import devices
from bessemer.layout.flops import flops_per_token
from bessemer.plan.estimate import frameworks
from bessemer.plan.estimate.job import ClusterSpec, Job, Layout, Physics
from bessemer.plan.estimate.step import refuse, step

# Of the sweep two models were fitted to, and the network of its cluster with them; of the single node all compute constants; of
# MPT's A100 rows the rate of FlashAttention's first version.
FITTED = {"A100 single node", "MPT A100 SXM 80GB", "MPT A100 SXM 40GB", "nanotron 1.34B", "nanotron 8.86B"}
FEWEST = 6  # cases of a set from which three are taken for a calibration


@dataclass(frozen=True)
class Errors:
    """Errors of a set: n cases, the signed median, the mean of the sizes, nine tenths of the cases below, the worst by name."""

    set: str
    n: int
    median: float
    mean_absolute: float
    ninetieth: float
    worst: tuple[tuple[str, float], ...]
    fitted: bool = False
    calibrated: float | None = None


def errors(name: str, found: Sequence[tuple[str, float]], **more: float | bool | None) -> Errors:
    """Of (case, predicted over measured less 1)."""
    sizes = sorted(abs(error) for _, error in found)
    worst = tuple(sorted(found, key=lambda each: -abs(each[1]))[:3])
    signed = median(error for _, error in found)
    return Errors(name, len(found), signed, fmean(sizes), percentile(sizes, 0.9), worst, **more)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that this share of them does not exceed."""
    return values[max(ceil(share * len(values) - 1e-9), 1) - 1]


def time_errors(cases: Iterable[Case], draws: int) -> list[Errors]:
    """Of each set's step times; calibrated: the mean over the draws, of the cases that were not drawn."""
    by_set: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.seconds is not None and refuse(case.job) is None:
            by_set[case.set].append(case)
    rows = []
    for name, members in by_set.items():
        found = [(case.name, off(case)) for case in members]
        after = after_calibration(members, draws) if draws and len(members) >= FEWEST else None
        rows.append(errors(name, found, fitted=name in FITTED, calibrated=after))
    return rows


def off(case: Case, how: Physics | None = None) -> float:
    """Predicted seconds over measured ones, less 1."""
    assert case.seconds is not None
    return step(case.job, how).seconds / case.seconds - 1


def after_calibration(cases: Sequence[Case], draws: int) -> float:
    """Mean absolute error of the cases left when three are drawn and calibrated to."""
    chance, means = random.Random(0), []
    for _ in range(draws):
        three = chance.sample(range(len(cases)), 3)
        how = calibrate([(cases[i].job, cases[i].seconds or 0.0) for i in three])
        means.append(fmean(abs(off(case, how)) for i, case in enumerate(cases) if i not in three))
    return fmean(means)


def hours(folder: Path) -> list[tuple[str, float]]:
    """GPU-hours of whole runs over those of a plain plan: a band to be in, since restarts, evaluations and layouts are unknown.

    The plan: ZeRO-3 over 64 devices at most and copies of these, a Llama shape of the size, four sequences of 2,048 a device,
    selective recompute.
    """
    path, found = folder / "gpu_hours.json", []
    if not path.is_file():
        return []
    for case in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        inputs = case["inputs"]
        device = devices.match(inputs.get("accel") or "", devices.catalogue())
        if not (inputs.get("params") and inputs.get("tokens") and device and case["observed"].get("accel_hours")):
            continue
        model = planner_models.of_size(inputs["params"], 2048)
        count = -(-(inputs.get("n_accel") or 512) // 8) * 8
        layout = Layout(
            replicate=max(count // 64, 1), shard=min(count, 64), zero=3, micro_batch=4, recompute="selective"
        )
        job = Job(
            model,
            layout,
            ClusterSpec.of(device, layout.devices),
            4 * layout.devices,
            "bf16",
            frameworks.find("torchtitan"),
        )
        rate = step(job).tokens_per_second / layout.devices * flops_per_token(model) / (6 * inputs["params"])
        found.append((case["case"], case["observed"]["accel_hours"] * 3600 * rate / inputs["tokens"]))
    return found


def show(rows: Sequence[Errors], choices: Sequence[Regret], runs: Sequence[tuple[str, float]]) -> str:
    """What a person reads."""
    lines = [f"{'set':<26}{'n':>5}{'median':>9}{'mean':>8}{'90th':>8}{'after 3':>9}  worst cases"]
    for row in rows:
        after = f"{row.calibrated:.1%}" if row.calibrated is not None else "-"
        worst = ", ".join(f"{name} {error:+.0%}" for name, error in row.worst)
        mark = " *" if row.fitted else ""
        lines.append(
            f"{row.set + mark:<26}{row.n:>5}{row.median:>+9.1%}{row.mean_absolute:>8.1%}{row.ninetieth:>8.1%}{after:>9}  {worst}"
        )
    lines.append("* constants were fitted to it; after 3: mean after calibration on three of its cases, of the others")
    for fitted in (True, False) if choices else ():
        some = [choice for choice in choices if choice.fitted == fitted]
        print_of = f"layout regret, {len(some)} choices, models that {'served' if fitted else 'did not serve'} to set the rules: "
        lines.append(print_of + f"{sum(choice.failed for choice in some)} chosen layouts failed")
        for what, among in (("regret", "all"), ("sound", "those of at least half the best rate")):
            sizes = sorted(size for choice in some if (size := getattr(choice, what)) is not None)
            lines.append(f"  among {among}: median {median(sizes):.1%}, 90th {percentile(sizes, 0.9):.1%}")
    if runs:
        ratios = sorted(ratio for _, ratio in runs)
        band = f"{ratios[0]:.2f} to {ratios[-1]:.2f}, median {median(ratios):.2f}"
        lines.append(f"GPU-hours of {len(runs)} whole runs over a plain plan's: {band}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="the reference files")
    parser.add_argument(
        "--draws", type=int, default=5, help="draws of three cases for the error after calibration; 0: none"
    )
    parser.add_argument("--cases", help="print every case of the sets whose name holds this")
    parser.add_argument("--json", type=Path, help="where to keep the figures")
    arguments = parser.parse_args()
    cases = planner_sets.read(arguments.folder)
    if not cases:
        raise InputError(
            f"{arguments.folder}: none of the reference files is there ({', '.join(planner_sets.READERS)})"
        )
    rows, choices, runs = time_errors(cases, arguments.draws), regrets(cases), hours(arguments.folder)
    memory = planner_memory.kept(arguments.folder)
    print(show(rows, choices, runs))
    print("\nmemory\n" + planner_memory.show(memory))
    for case in cases if arguments.cases else ():
        if arguments.cases in case.set and case.seconds is not None and refuse(case.job) is None:
            print(f"{case.name:<64}{case.seconds:>10.3f} s{step(case.job).seconds:>10.3f} s{off(case):>+8.1%}")
    if arguments.json:
        kept = {
            "machine": describe(),
            "time": [asdict(row) for row in rows],
            "memory": memory,
            "regret": [asdict(choice) for choice in choices],
            "failures": planner_layouts.failures(cases),
            "gpu_hours": dict(runs),
        }
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
