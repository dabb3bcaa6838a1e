"""Errors of the planner's step times against published measurements by set, and the cost of its layout choices.

planner_sets.py reads the sets from a folder that is not part of this repository. Scores are separated by the use of each set.
Fitted: constants were fitted to the set. In view: its errors were known while the arithmetic was written, when its terms were
chosen and constants were rounded. Blind: cases of `--cases DIR` (format in planner_cases.py), which no author of the planner has
seen. After calibration: three cases of a set are measured steps for planner_calibrated.py and the other cases are predicted with
the calibrated constants, over several draws of the three.

    python benchmarks/planner_accuracy.py FOLDER [--draws 5] [--cases DIR] [--print SET] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

import planner_cases
import planner_intervals
import planner_layouts
import planner_memory
import planner_sets
import planner_vendor
from machine import describe
from planner_calibrated import calibrate
from planner_intervals import FITTED
from planner_layouts import Regret, regrets
from planner_sets import Case

from bessemer.common.errors import InputError
from bessemer.plan.estimate.job import PHYSICS, Physics
from bessemer.plan.estimate.step import refuse, step

KINDS = ("fitted", "in view", "blind")
FEWEST = 6  # fewest cases of a set for a calibration on three of them


@dataclass(frozen=True)
class Errors:
    """Errors of the cases of a set, relative to the measurements.

    Attributes:
        n: Number of cases.
        median: Signed median.
        mean_absolute: Mean absolute error.
        ninetieth: 90th percentile of the absolute errors.
        worst: The three worst cases by name.
        kind: One of KINDS.
        calibrated: Mean absolute error after calibration.
    """

    set: str
    n: int
    median: float
    mean_absolute: float
    ninetieth: float
    worst: tuple[tuple[str, float], ...]
    kind: str = "in view"
    calibrated: float | None = None


def errors(name: str, found: Sequence[tuple[str, float]], **more: float | str | None) -> Errors:
    """Return the errors of a set from (case, predicted over measured minus 1)."""
    sizes = sorted(abs(error) for _, error in found)
    worst = tuple(sorted(found, key=lambda each: -abs(each[1]))[:3])
    signed = median(error for _, error in found)
    return Errors(name, len(found), signed, fmean(sizes), percentile(sizes, 0.9), worst, **more)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that a `share` of them does not exceed."""
    return values[max(ceil(share * len(values) - 1e-9), 1) - 1]


def time_errors(cases: Iterable[Case], draws: int) -> list[Errors]:
    """Return the errors of each set's step times; `calibrated` is the mean over the draws for the cases not drawn."""
    by_set: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        if case.seconds is not None and not case.left_out and refuse(case.job) is None:
            by_set[case.set].append(case)
    rows = []
    for name, members in by_set.items():
        found = [(case.name, off(case)) for case in members]
        after = after_calibration(members, draws) if draws and len(members) >= FEWEST else None
        rows.append(errors(name, found, kind=kind_of(name), calibrated=after))
    return rows


def kind_of(name: str) -> str:
    """Return the kind of a set: fitted or in view."""
    return "fitted" if name in FITTED else "in view"


def off(case: Case, how: Physics = PHYSICS) -> float:
    """Return predicted over measured seconds, minus 1."""
    assert case.seconds is not None
    return step(case.job, how).seconds / case.seconds - 1


def after_calibration(cases: Sequence[Case], draws: int) -> float:
    """Return the mean absolute error of the remaining cases after calibration on three drawn ones."""
    chance, means = random.Random(0), []
    for _ in range(draws):
        three = chance.sample(range(len(cases)), 3)
        how = calibrate([(cases[i].job, cases[i].seconds or 0.0) for i in three])
        means.append(fmean(abs(off(case, how)) for i, case in enumerate(cases) if i not in three))
    return fmean(means)


def show(rows: Sequence[Errors], choices: Sequence[Regret]) -> str:
    """Format the errors by kind of set, then the choices of layout."""
    lines = [f"{'set':<26}{'n':>5}{'median':>9}{'mean':>8}{'90th':>8}{'after 3':>9}  worst cases"]
    for row in sorted(rows, key=lambda row: KINDS.index(row.kind)):
        after = f"{row.calibrated:.1%}" if row.calibrated is not None else "-"
        worst = ", ".join(f"{name} {error:+.0%}" for name, error in row.worst)
        lines.append(
            f"{row.set:<26}{row.n:>5}{row.median:>+9.1%}{row.mean_absolute:>8.1%}{row.ninetieth:>8.1%}{after:>9}  "
            f"{row.kind}; {worst}"
        )
    for kind in KINDS:
        if sets := [row for row in rows if row.kind == kind]:
            count = sum(row.n for row in sets)
            mean = sum(row.n * row.mean_absolute for row in sets) / count
            lines.append(f"{kind}: {count} cases of {len(sets)} sets, mean absolute error {mean:.1%}")
    lines.append("after 3: mean absolute error of the other cases after calibration on three")
    for fitted in (True, False) if choices else ():
        some = [choice for choice in choices if choice.fitted == fitted]
        print_of = f"layout regret, {len(some)} choices, models {'used' if fitted else 'not used'} to set the rules: "
        lines.append(print_of + f"{sum(choice.failed for choice in some)} chosen layouts failed")
        for what, among in (("regret", "all"), ("sound", "layouts of at least half the best rate")):
            sizes = sorted(size for choice in some if (size := getattr(choice, what)) is not None)
            lines.append(f"  among {among}: median {median(sizes):.1%}, 90th {percentile(sizes, 0.9):.1%}")
    return "\n".join(lines)


def with_rows_left_out(cases: Sequence[Case]) -> dict[str, Any]:
    """Return how many rows of the sweep are left out, by reason, and all scores with those rows included."""
    sweep = [case for case in cases if case.set.startswith(planner_layouts.SWEEP)]
    everyone = [replace(case, left_out="") for case in sweep]
    return {
        "rows": len(sweep),
        "left_out": dict(Counter(case.left_out for case in sweep if case.left_out)),
        "time": [asdict(row) for row in time_errors(everyone, 0)],
        "regret": [asdict(choice) for choice in regrets(everyone)],
        "memory": planner_memory.summary(list(planner_memory.peaks(everyone))) if everyone else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path, help="folder of the reference files")
    parser.add_argument(
        "--draws", type=int, default=5, help="draws of three cases for the error after calibration (0 for none)"
    )
    parser.add_argument("--cases", type=Path, help="folder of further cases, scored blind (format in planner_cases.py)")
    parser.add_argument("--print", dest="printed", help="print every case of the sets whose name contains SET")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    cases = planner_sets.read(arguments.folder)
    if not cases:
        raise InputError(
            f"{arguments.folder}: no reference files; it needs at least one of {', '.join(planner_sets.READERS)}"
        )
    cases += planner_vendor.cases()
    further = planner_cases.read(arguments.cases) if arguments.cases else planner_cases.FurtherCases()
    rows, choices = time_errors(cases, arguments.draws), regrets(cases)
    rows += [replace(row, kind="blind") for row in time_errors(further.steps, 0)]
    _, intervals = planner_intervals.table(arguments.folder, cases)
    memory = planner_memory.kept(arguments.folder)
    print(show(rows, choices) + "\n\n" + planner_intervals.show(intervals))
    print("\nmemory\n" + planner_memory.show(memory))
    if arguments.cases:
        print("\nblind\n" + planner_cases.show(further))
    for case in cases if arguments.printed else ():
        if arguments.printed in case.set and case.seconds is not None and refuse(case.job) is None:
            print(f"{case.name:<64}{case.seconds:>10.3f} s{step(case.job).seconds:>10.3f} s{off(case):>+8.1%}")
    if arguments.json:
        kept = {
            "machine": describe(),
            "time": [asdict(row) for row in rows],
            "memory": memory,
            "regret": [asdict(choice) for choice in choices],
            "failures": planner_layouts.failures(cases),
            "with_rows_left_out": with_rows_left_out(cases),
            "intervals": intervals,
        }
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
