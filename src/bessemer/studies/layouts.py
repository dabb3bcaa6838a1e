"""The certificate of layouts: one small model trained on every way to split it, against one process.

The same weights, batches and schedule everywhere; only `[parallel]` differs, and `micro_batch` where a part of the batch is
smaller. What one process loses at each step is held against what the layout loses, and the weights at the end against its
weights, both through checkpoints. In exact arithmetic every difference would be 0: what is left is the order of sums.

Every finished run is kept in the study's folder, so that the same command goes on where it was stopped.
"""

from __future__ import annotations

import platform
import shutil
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bessemer import __version__
from bessemer.checkpoint import latest
from bessemer.environment import num_cores
from bessemer.errors import BessemerError
from bessemer.launch import group
from bessemer.launch.group import run_group
from bessemer.recipe import Parallel
from bessemer.report.plan_figures import themed
from bessemer.run import read_json, write_json
from bessemer.studies import layouts_page
from bessemer.studies.layouts_page import table as table  # `bessemer study` prints it
from bessemer.studies.layouts_training import CASES, CertificateRun
from bessemer.terminal import progress

FOLDER = Path("runs/study-layouts")
ALONE = "1"
expected = (
    "In exact arithmetic every layout trains alike: what differs is the order of sums, less than 1e-9 nats in fp64."
)
PRECISIONS = ("fp64", "fp32", "bf16")
TARGETS = {"fp64": 1e-9, "fp32": 1e-5}  # of the largest difference of losses, nats a token; bf16 is stated

LAYOUTS: dict[str, dict[str, Any]] = {
    "1, in a group": {},
    "dp2": {"replicate": 2},
    "dp4": {"replicate": 4},
    "fsdp2, zero 1": {"shard": 2, "zero": 1},
    "fsdp2, zero 2": {"shard": 2, "zero": 2},
    "fsdp2, zero 3": {"shard": 2},
    "fsdp4": {"shard": 4},
    "hsdp 2 x 2": {"replicate": 2, "shard": 2},
    "tp2": {"tensor": 2},
    "tp4": {"tensor": 4},
    "pp2, gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "pp2, 1f1b": {"pipeline": 2},
    "pp2, interleaved": {"pipeline": 2, "schedule": "interleaved"},
    "pp2, zbv": {"pipeline": 2, "schedule": "zbv"},
    "pp2, dualpipev": {"pipeline": 2, "schedule": "dualpipev"},
    "pp4, 1f1b": {"pipeline": 4},
    "cp2": {"context": 2},
    "cp4": {"context": 4},
    "fsdp2 x tp2": {"shard": 2, "tensor": 2},
    "pp2 x cp2": {"pipeline": 2, "context": 2},
    "pp2 x fsdp2": {"pipeline": 2, "shard": 2},
    "dp2 x tp2 x pp2": {"replicate": 2, "tensor": 2, "pipeline": 2},
    "fsdp2 x tp2 x cp2": {"shard": 2, "tensor": 2, "context": 2},
}
SHORT = ("dp2", "fsdp2, zero 3", "tp2", "pp2, 1f1b", "cp2")
SECONDS = 3600.0  # that one layout may take, with all its runs


@dataclass(frozen=True)
class Scope:
    """What is run: names of LAYOUTS, CASES and PRECISIONS."""

    layouts: tuple[str, ...] = tuple(LAYOUTS)
    cases: tuple[str, ...] = ("plain", "hard")
    precisions: tuple[str, ...] = PRECISIONS
    settings: CertificateRun = field(default_factory=CertificateRun)


def run(short: bool = False, folder: Path | None = None) -> dict[str, Any]:
    """The study, in `folder`; short: five layouts in fp64, for a few steps."""
    scope = Scope(SHORT, ("hard", "dropout"), ("fp64",), CertificateRun(steps=4)) if short else Scope()
    return certify(scope, folder or FOLDER.with_name("study-layouts-short" if short else "study-layouts"))


def certify(scope: Scope, folder: Path) -> dict[str, Any]:
    """Run what has not been run in `folder`, and hold all of it against one process.

    Returns `settings`, `targets`, `cases`; `rows`, one a layout, case and precision: loss (largest difference over the steps,
    nats a token), weight (largest difference at the end), sent (bytes of all processes in a step by kind), seconds (a step) or
    `why` there is none; `missed`, what is over its target or failed, in words; `made`: day, versions and machine. Writes it
    into layouts.json, layouts.md and layouts.svg there.
    """
    given = _begin(scope, folder)
    wanted = [f"{case}:{precision}" for case, precision in product(scope.cases, scope.precisions)]
    failures: dict[str, str] = {}
    names = [ALONE, *scope.layouts]
    with progress("study layouts", len(names) * len(wanted), "runs") as advance:
        for name in names:
            layout = Parallel(**LAYOUTS.get(name, {}))
            missing = [one for one in wanted if not _place(folder, name, one).joinpath("run.json").exists()]
            advance(len(wanted) - len(missing), note=name)
            if missing:
                why = _train(folder, name, layout.world, missing)
                if why is not None and name == ALONE:
                    raise BessemerError(f"study layouts: one process failed: {why}")
                failures |= {} if why is None else {name: why}
                advance(len(missing), note=name)
    rows = [
        _row(scope, folder, name, case, precision, failures.get(name))
        for name, case, precision in product(scope.layouts, scope.cases, scope.precisions)
    ]
    results: dict[str, Any] = {
        **given, "targets": TARGETS, "rows": rows,
        "missed": [sentence for row in rows if (sentence := _missed(row)) is not None],
        "made": _made(),
    }  # fmt: skip
    write_json(folder / "layouts.json", results)
    (folder / "layouts.md").write_text(layouts_page.page(results))
    (folder / "layouts.svg").write_text(layouts_page.picture(results))
    return {**results, "folder": str(folder)}


def shows(results: dict[str, Any]) -> list[str]:
    rows = [row for row in results["rows"] if "why" not in row]
    precisions = {row["precision"]: max(r["loss"] for r in rows if r["precision"] == row["precision"]) for row in rows}
    worst = max(rows, key=lambda row: (row["precision"] == next(iter(precisions)), row["loss"]), default=None)
    return [
        f"{len(rows)} of {len(results['rows'])} runs ended; {len(results['missed'])} failed or missed their target.",
        f"Largest difference from one process: {', '.join(f'{loss:.1e} nats in {name}' for name, loss in precisions.items())}.",
        "None ran." if worst is None
        else f"The layout furthest from it is {worst['layout']} in {worst['precision']}, by {worst['loss']:.1e} in a loss.",
    ]  # fmt: skip


def plot(results: dict[str, Any]) -> str:
    """The picture of the certificate in the colours of the page."""
    return themed(layouts_page.picture(results))


def _begin(scope: Scope, folder: Path) -> dict[str, Any]:
    """Make the folder with what the processes read, and return settings and cases. Runs of other ones are no longer of use."""
    layouts = {name: Parallel(**LAYOUTS.get(name, {})).model_dump() for name in (ALONE, *LAYOUTS)}
    given = {"settings": asdict(scope.settings), "cases": {case: asdict(CASES[case]) for case in scope.cases}}
    path = folder / "settings.json"
    if path.exists() and {key: read_json(path).get(key) for key in given} != given:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {**given, "layouts": layouts})
    return given


def _place(folder: Path, name: str, one: str) -> Path:
    return folder / "runs" / name / one.replace(":", "-")


def _train(folder: Path, name: str, world: int, missing: list[str]) -> str | None:
    """Do the runs of a layout on a group of processes of their own. Returns what went wrong."""
    (folder / "logs").mkdir(exist_ok=True)
    arguments = ("-m", "bessemer.studies.layouts_training", str(folder), name, *missing)
    variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    processes = group.ALONE if name == ALONE else world
    return run_group(arguments, processes, folder / "logs" / name, seconds=SECONDS, variables=variables)


def _row(scope: Scope, folder: Path, name: str, case: str, precision: str, failure: str | None) -> dict[str, Any]:
    layout = Parallel(**LAYOUTS[name])
    row: dict[str, Any] = {"layout": name, "processes": layout.world, "case": case, "precision": precision}
    place, alone = (_place(folder, of, f"{case}:{precision}") for of in (name, ALONE))
    if not (place / "run.json").exists():
        return {**row, "why": failure or "not run"}
    mine, reference = read_json(place / "run.json"), read_json(alone / "run.json")
    assert mine["targets"] == reference["targets"], "the layouts read other batches"
    ours, theirs = (latest(folder) for folder in (place, alone))
    if ours is None or theirs is None:
        raise BessemerError(f"{place}: its checkpoint is gone; delete the folder, the same command makes it anew")
    mine_by, theirs_by = ours.tensors("model"), theirs.tensors("model")
    assert mine_by.keys() == theirs_by.keys(), "the layouts save other tensors"
    pairs = [(mine_by[key].double(), theirs_by[key].double()) for key in theirs_by]
    return {
        **row,
        "loss": _largest(mine["losses"], reference["losses"]),
        "weight": max(float((a - b).abs().max()) for a, b in pairs),
        "last_loss": mine["losses"][-1],
        "seconds": mine["seconds"],
    }


def _largest(one: list[float], other: list[float]) -> float:
    """Largest difference; infinite where a number is missing on one side alone."""
    return max(abs(a - b) if a is not None and b is not None else float("inf") for a, b in zip(one, other, strict=True))


def _missed(row: dict[str, Any]) -> str | None:
    where = f"{row['layout']}, {row['case']}, {row['precision']}"
    if "why" in row:
        return f"{where}: {row['why']}"
    target = TARGETS.get(row["precision"], float("inf"))
    return f"{where}: {row['loss']:.1e} is over {target:.0e}" if row["loss"] > target else None


def _made() -> dict[str, str]:
    return {
        "day": datetime.now(UTC).strftime("%Y-%m-%d"), "bessemer": __version__, "torch": str(torch.__version__),
        "python": platform.python_version(), "machine": f"{num_cores()} CPU cores, gloo",
    }  # fmt: skip
