"""`bessemer plan --calibrate` and `bessemer plan RECIPE --measured RUN`: the plan held to this machine, or to a run."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bessemer.errors import InputError
from bessemer.terminal import duration, rate, size

if TYPE_CHECKING:
    from bessemer.plan.estimate.points import MeasuredRun
    from bessemer.plan.machine import Machine
    from bessemer.stages import Session

MINUTES = 2.0
OPTIONS = ("minutes", "disk")  # that only --calibrate has a use for
# Of a step's time carried from one model to another of the same machine: by FLOPs alone the share of the peak is taken to stay,
# for which so much is a judgement and not a measurement; through a calibration the prediction's own error stays.
BY_FLOPS = 0.3


def add_arguments(plan: Any) -> None:
    """Those of `bessemer plan` that are about calibration."""
    group = plan.add_argument_group("calibration")
    group.add_argument(
        "--calibrate", action="store_true", help="measure this machine and keep what was found, for later plans"
    )
    group.add_argument("--minutes", type=float, metavar="M", help=f"to measure for, at the most (default {MINUTES:g})")
    group.add_argument("--disk", metavar="DIR", help="a folder of the disk to measure (default: the working folder)")
    group.add_argument(
        "--calibration",
        metavar="FILE",
        help="where it is kept (default: machine.toml in the user's configuration folder)",
    )
    group.add_argument("--measured", metavar="RUN", help="scale the plan by what this run took beside its own plan")


def wanted(given: argparse.Namespace) -> bool:
    """Whether the command is one of those here. Raises InputError for options that belong to --calibrate without it."""
    for name in OPTIONS:
        if getattr(given, name) is not None and not given.calibrate:
            raise InputError(f"plan: --{name} is for --calibrate; add it, or leave --{name} out")
    return bool(given.calibrate) or given.measured is not None


def plan(given: argparse.Namespace, session_of: Callable[..., Session]) -> Any:
    """Do what was asked; `wanted` says whether it is for here."""
    return _calibrate(given) if given.calibrate else _by_run(given, session_of)


def _calibrate(given: argparse.Namespace) -> dict[str, Any]:
    from bessemer.measure.calibrate import calibrate
    from bessemer.plan import machine as machines

    if given.recipe is not None or given.measured is not None:
        raise InputError("plan: --calibrate measures the machine and takes no recipe and no run; plan afterwards")
    path = Path(given.calibration) if given.calibration else machines.default_path()
    machine = calibrate(MINUTES if given.minutes is None else given.minutes, Path(given.disk or "."))
    machines.save(machine, path)
    found = {"file": path, **_facts(machine)}
    if not given.json:
        print("\n".join(table(machine)))
        print(f"{'kept in':<12} {path}")
    return found


def _facts(machine: Machine) -> dict[str, Any]:
    """The calibration in a few figures."""
    latency, sent = machine.collective
    return {
        "device": machine.name, "threads": machine.threads, "torch": machine.torch, "date": machine.date,
        "seconds": machine.seconds, "busy": machine.busy, "memory_bytes": machine.memory,
        "matmul_flops": {name: machine.peak(name) for name in machine.precisions()}, "memory_bandwidth": machine.bandwidth,
        "collective": None if not machine.all_reduce else {"latency_seconds": latency, "bytes_per_second": sent},
        "disk": None if machine.disk is None else vars(machine.disk),
        "spread": {
            way: {part: machine.spread_of(part, way) for part in ("products", "attention", "passes")} for way in machine.ways
        },
        "rounds": {way: found.rounds for way, found in machine.ways.items()},
    }  # fmt: skip


def table(machine: Machine) -> list[str]:
    """What a person reads of a calibration."""
    from bessemer.plan.machine import WHOLE

    shown = [
        ("device", f"{machine.name}, {machine.threads} thread{'s' * (machine.threads > 1)}, torch {machine.torch}")
    ]
    precision = machine.precisions()[0]
    for way in machine.ways:
        sizes = sorted({entry.m for entry in machine.ways[way].products})
        rates = ", ".join(f"{n} {rate(machine.matmul_rate(n, n, n, precision, way=way))}" for n in sizes)
        each = "" if way == WHOLE else " each"
        shown.append(("products" if way == WHOLE else "two at once", f"{precision}, n x n x n: {rates}{each}"))
    sizes = sorted({entry.length for entry in machine.ways[WHOLE].attention})
    width = max(entry.head_dim for entry in machine.ways[WHOLE].attention)
    grid = {(entry.length, entry.head_dim): entry.rate for entry in machine.ways[WHOLE].attention}
    shown.append(("attention", f"heads of {width}: " + ", ".join(f"{n} tokens {rate(grid[n, width])}" for n in sizes)))
    shown.append(("memory", f"{size(machine.bandwidth)}/s, {size(machine.memory)} in all"))
    host = machine.ways[WHOLE].host
    each = f"{1e6 * host.block:.0f} us a block, {1e6 * host.micro_batch:.0f} us a micro-batch"
    shown.append(("host", f"{each}, {1e6 * host.update:.0f} us an update"))
    if machine.all_reduce:
        latency, sent = machine.collective
        first = machine.all_reduce[0]
        shown.append(
            (
                "all-reduce",
                f"{first.processes} processes, {first.backend}: {1e6 * latency:.0f} us, {size(sent)}/s from each",
            )
        )
    if machine.disk is not None:
        disk = machine.disk
        shown.append(
            ("disk", f"writes {size(disk.write)}/s, reads {size(disk.read)}/s, mapped tokens {size(disk.mapped)}/s")
        )
    for way, found in machine.ways.items():
        spread = ", ".join(f"{part} {machine.spread_of(part, way):.0%}" for part in ("products", "attention", "passes"))
        few = "; too few rounds to tell the spread" if found.rounds < 3 else ""
        shown.append(("spread", f"{spread} of the median, {found.rounds} round{'s' * (found.rounds > 1)}{few}"))
    if machine.busy > 0.2:
        shown.append(
            (
                "noise",
                f"other programs used {machine.busy:.0%} of the cores at the start: measure again when it is quiet",
            )
        )
    shown.append(("measured in", duration(machine.seconds)))
    return [f"{name:<12} {value}" for name, value in shown]


def _by_run(given: argparse.Namespace, session_of: Callable[[argparse.Namespace], Session]) -> dict[str, Any]:
    """The plan of a recipe, scaled by a run's measured over planned step."""
    from bessemer import forecast
    from bessemer.plan.estimate import points
    from bessemer.recipe import load
    from bessemer.run import RunFolder
    from bessemer.screens import print_plan

    if given.recipe is None:
        raise InputError("plan: --measured RUN scales the plan of a recipe; name the recipe as well")
    run = RunFolder(Path(given.measured))
    if not run.recipe.exists():
        raise InputError(f"{run.path}: no run lies here (recipe.toml is missing); --measured takes the folder of a run")
    found, calibration = points.of_run(run), Path(given.calibration) if given.calibration else None
    its, its_recipe = forecast.plan_only(load(run.recipe), run, calibration, measure=False)
    session = session_of(given)
    told, recipe = forecast.plan_only(session.recipe, session.run, calibration, measure=False)
    scaled = by_run(told, recipe.train.global_batch_tokens or 1, its, its_recipe.train.global_batch_tokens or 1, found)
    scaled["calibrated_on"] |= {"run": run.path}
    if not given.json:
        print_plan(scaled, recipe)
        on = scaled["calibrated_on"]
        said = f"{found.steps:,} steps, {on['step_ratio']:.3f} of their plan's time, spread {found.spread:.0%}"
        print(f"{'calibration':<14} {run.path}: {said}")
        if on["memory_ratio"] is not None:
            print(f"{'':<14} memory {on['memory_ratio']:.3f} of its plan's")
    return scaled


def by_run(told: dict[str, Any], batch: int, its: dict[str, Any], its_batch: int, found: MeasuredRun) -> dict[str, Any]:
    """A plan with the step's time times what a run took over its own plan.

    told, its: plans of the recipe in hand and of the run's, made the same way; batch, its_batch: tokens of their steps. Where
    only one of them was predicted from a calibration the time is carried over by FLOPs.
    """
    predicted = told["step_interval"] is not None and its["step_interval"] is not None
    if predicted:
        ratio = found.seconds / its["step_seconds"]
        seconds, off = (
            told["step_seconds"] * ratio,
            (told["step_interval"][1] - told["step_interval"][0]) / 2 / told["step_seconds"],
        )
        basis = "predicted from this machine's calibration, scaled by a run"
    else:
        flops = told["flops_per_token"] * batch
        seconds = found.seconds * flops / (its["flops_per_token"] * its_batch)
        ratio, off = seconds / told["step_seconds"], BY_FLOPS
        basis = "a run's FLOP/s"
    off = math.hypot(off, found.spread / 2)
    share = seconds / told["step_seconds"]
    memory = None if found.memory is None else found.memory / its["memory_bytes"]["total"]
    return {
        **told,
        "step_seconds": seconds, "seconds": told["seconds"] * share, "tokens_per_second": told["tokens_per_second"] / share,
        "mfu": told["mfu"] / share, "step_seconds_from": basis, "step_interval": [seconds * (1 - off), seconds * (1 + off)],
        "calibrated_on": {"step_ratio": ratio, "spread": found.spread, "steps": found.steps, "memory_ratio": memory},
    }  # fmt: skip
