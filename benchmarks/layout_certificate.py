"""Losses and weights of one small model under every parallel layout, compared with one process.

Weights, batches and schedule are the same everywhere. Only `[parallel]` differs, and `micro_batch` where a rank's share of the
batch is smaller. In exact arithmetic all losses and final weights would be equal: the differences come from the order of sums.

    python benchmarks/layout_certificate.py --folder runs/layouts      # 100 minutes on two cores; finished runs are kept
    python benchmarks/layout_certificate.py --docs                     # only the picture, from the results file
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import platform
import re
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from process_group import ALONE, run_group, work_as_member

from bessemer import __version__
from bessemer.checkpoint import latest, save
from bessemer.common.console import progress
from bessemer.common.environment import num_cores
from bessemer.distributed.mesh import ProcessMesh
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model, meta_model
from bessemer.recipe import Parallel, Recipe, parse
from bessemer.run.files import read_json, write_json
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train.parallelize import initial_weights
from bessemer.train.trainer import Trainer

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "layouts.json"
REFERENCE = "1"
SEED, VOCABULARY, END_OF_TEXT, MAX_BYTES = 7, 256, 0, 400_000
LONGEST = 40  # tokens of the longest ragged document; the shortest has one
SECONDS = 3600.0  # time limit of one layout with all its runs
PRECISIONS = ("fp64", "fp32", "bf16")
TARGETS = {"fp64": 1e-9, "fp32": 1e-5}  # largest accepted difference of losses, nats per token; bf16 has no target

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
    "ep2": {"replicate": 2, "expert": 2},
    "fsdp4, ep2": {"shard": 4, "expert": 2},
    "hsdp 2 x 2, ep4": {"replicate": 2, "shard": 2, "expert": 4},
    "fsdp2 x tp2, ep2": {"shard": 2, "tensor": 2, "expert": 2},
    "pp2 x fsdp2, ep2": {"pipeline": 2, "shard": 2, "expert": 2},
    "fsdp2 x cp2, ep4": {"shard": 2, "context": 2, "expert": 4},
    "tp2 x cp2, ep2": {"tensor": 2, "context": 2, "expert": 2},
}
MIXTURE = "mixture"  # the case of all layouts with `expert`: documents and batches as in "hard"
EXPERTS = {
    "experts": 8, "experts_per_token": 2, "expert_width": 48, "shared_experts": 1, "dense_layers": 1, "balance": "both",
    "router_z_loss": 1e-3,
}  # fmt: skip


@dataclass(frozen=True)
class Scope:
    """Layouts, cases and precisions to run, and the settings of each run."""

    layouts: tuple[str, ...] = tuple(LAYOUTS)
    cases: tuple[str, ...] = ("plain", "hard")
    precisions: tuple[str, ...] = PRECISIONS
    settings: dict[str, Any] = field(
        default_factory=lambda: {
            "steps": 100, "sequences": 8, "length": 64, "layers": 4, "width": 32, "heads": 8, "kv_heads": 4, "mlp_width": 96,
            "learning_rate": 2e-3,
        }
    )  # fmt: skip


def recipe_of(sizes: dict[str, Any], layout: Parallel, case: str, precision: str) -> Recipe:
    is_hard = case != "plain"
    each = sizes["sequences"] // layout.data
    micro = (1 if is_hard else 2) if layout.pipeline > 1 else each // (2 if is_hard else 1)
    dropout = 0.1 if case == "dropout" else 0.0
    values = {
        "tokens.sequence_length": sizes["length"], **{f"model.{key}": sizes[key] for key in
        ("layers", "width", "heads", "kv_heads", "mlp_width")}, "model.tie_embeddings": is_hard, "train.steps": sizes["steps"],
        "train.global_batch_tokens": sizes["sequences"] * sizes["length"], "train.micro_batch": micro,
        "train.precision": precision, "train.compile": "off", "train.dropout.hidden": dropout, "train.dropout.attention": dropout,
        "train.optimizer.learning_rate": sizes["learning_rate"],
        "train.schedule.warmup_steps": max(sizes["steps"] // 10, 1), "run.name": "layouts",
        **{f"model.{key}": value for key, value in EXPERTS.items() if case == MIXTURE},
    }  # fmt: skip
    recipe = resolve(parse("", "layouts", [f"{key}={json.dumps(value)}" for key, value in values.items()]), VOCABULARY)
    return recipe.changed(parallel=layout)


@lru_cache(maxsize=1)
def python_text() -> npt.NDArray[np.uint8]:
    """Return bytes of the standard library's modules, in an order independent of their subjects."""
    text = bytearray()
    paths = Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    for file in sorted(paths, key=lambda path: hashlib.blake2b(path.name.encode()).digest()):
        if len(text) >= MAX_BYTES:
            break
        text += file.read_bytes().replace(b"\0", b"") + bytes([END_OF_TEXT])
    return np.frombuffer(bytes(text[: len(text) * 9 // 10]), dtype=np.uint8)


def batch_of(sizes: dict[str, Any], case: str, number: int) -> Batch:
    """Return the global batch of a step."""
    length, sequences, text = sizes["length"], sizes["sequences"], python_text()
    begins = np.random.default_rng(number).integers(0, len(text) - length, sequences)
    tokens = np.stack([text[begin : begin + length + 1] for begin in begins]).astype(np.int64)
    whole = Batch.next_token(number * sequences, tokens, np.zeros(sequences, dtype=np.int64))
    if case == "plain":
        return whole
    inputs, targets = whole.inputs.copy(), whole.targets.copy()
    starts, real = np.zeros(inputs.shape, dtype=np.bool_), np.full(len(inputs), length, dtype=np.int64)
    draw = np.random.default_rng((number, 1))
    for row in range(len(inputs)):
        ends = np.cumsum(draw.integers(1, LONGEST + 1, length))
        ends = ends[ends < length]
        starts[row, 0], starts[row, ends], targets[row, ends - 1] = True, True, -1
        if row % 3 == 0 and len(ends):  # padding follows the last document that fits
            real[row], inputs[row, ends[-1] :], targets[row, ends[-1] :] = ends[-1], END_OF_TEXT, -1
    return Batch(whole.first, inputs, targets, whole.source, starts, real)


def train(sizes: dict[str, Any], layout: Parallel, case: str, precision: str, mesh: ProcessMesh, folder: Path) -> None:
    """Train this process's part, and save the weights and losses in `folder`."""
    recipe = recipe_of(sizes, layout, case, precision)
    config = model_config(recipe, VOCABULARY)
    model = build_model(config, SEED) if mesh.is_single else meta_model(config)
    device = devices.choose(recipe.train.changed(deterministic="on"))
    devices.set_deterministic(device)
    trainer = Trainer(recipe, model, device, END_OF_TEXT, 1, mesh, initial_weights(config, SEED))
    losses, targets, loads = list[float](), list[int](), list[list[list[float]]]()
    for number in range(sizes["steps"]):
        results = trainer.forward_backward(batch_of(sizes, case, number).part(mesh.data_rank, mesh.layout.data))
        trainer.update(number, results.grad_norm)
        [stats] = trainer.read([results])
        losses.append(stats.loss)
        targets.append(sum(stats.targets))
        loads.append(stats.load[:, :-1].tolist())
    named = {name: parameter.detach() for name, parameter in owned_parameters(trainer.model)}
    save(folder, sizes["steps"], {"model": named}, {}, 1, mesh)
    if mesh.is_main:
        write_json(folder / "run.json", {"losses": losses, "targets": targets, "loads": loads})


def member(folder: Path, name: str, runs: Sequence[str]) -> None:
    """Run the given trainings as one process of a layout."""
    warnings.simplefilter("ignore")
    sizes, layout = read_json(folder / "settings.json"), Parallel(**LAYOUTS.get(name, {}))

    def work(mesh: ProcessMesh) -> None:
        for each in runs:
            if mesh.is_main:
                place(folder, name, each).mkdir(parents=True, exist_ok=True)
            mesh.barrier()
            case, precision = each.split("-")
            train(sizes, layout, case, precision, mesh, place(folder, name, each))
            gc.collect()  # a wrapped model and its hooks refer to each other
            mesh.barrier()

    work_as_member(layout, torch.device("cpu"), work)


def runs_of(scope: Scope, name: str) -> list[str]:
    """Return the runs of a layout, as "case-precision"."""
    is_reference, is_mixture = name == REFERENCE, "expert" in LAYOUTS.get(name, {})
    cases = (*(() if is_mixture else scope.cases), *((MIXTURE,) if is_mixture or is_reference else ()))
    return [f"{case}-{precision}" for case, precision in product(cases, scope.precisions)]


def place(folder: Path, name: str, run: str) -> Path:
    return folder / "runs" / name / run


def certify(scope: Scope, folder: Path) -> dict[str, Any]:
    """Run the missing trainings in `folder`, and compare all of them with one process.

    Returns:
        Settings, targets, cases, date and machine, and `rows`, one per layout, case and precision. A row has `loss`, the largest
        difference over the steps, and `weight`, the largest at the end, or `why`, the reason that there are none. If a token near
        a tie went to another expert, it has `equal_steps`, the steps before that, and `equal_loss`, their largest difference.
    """
    settings = folder / "settings.json"
    if settings.exists() and read_json(settings) != scope.settings:
        shutil.rmtree(folder / "runs", ignore_errors=True)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    write_json(settings, scope.settings)
    failures = dict[str, str]()
    with progress("layouts", len(scope.layouts) + 1, "layouts") as advance:
        for name in (REFERENCE, *scope.layouts):
            missing = [run for run in runs_of(scope, name) if not (place(folder, name, run) / "run.json").exists()]
            processes = ALONE if name == REFERENCE else Parallel(**LAYOUTS[name]).world
            arguments = (str(Path(__file__).resolve()), "--member", str(folder.resolve()), name, *missing)
            variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            if missing and (
                why := run_group(arguments, processes, folder / "logs" / name, seconds=SECONDS, variables=variables)
            ):
                failures[name] = why
            advance(1, note=name)
    if REFERENCE in failures:
        raise SystemExit(f"the run on one process failed: {failures[REFERENCE]}")
    rows = []
    for name, run in ((layout, run) for layout in scope.layouts for run in runs_of(scope, layout)):
        case, precision = run.split("-")
        row = {"layout": name, "processes": Parallel(**LAYOUTS[name]).world, "case": case, "precision": precision}
        rows.append(row | ({"why": failures[name]} if name in failures else differences(folder, name, run)))
    made = {"day": str(datetime.now(UTC).date()), "bessemer": __version__, "torch": str(torch.__version__),
            "python": platform.python_version(), "machine": f"{num_cores()} CPU cores, gloo"}  # fmt: skip
    return {**asdict(scope), "targets": TARGETS, "rows": rows, "made": made}


def differences(folder: Path, name: str, run: str) -> dict[str, float]:
    """Return the largest differences of losses and weights between a layout's run and that of one process."""
    places = place(folder, name, run), place(folder, REFERENCE, run)
    ours, theirs = (read_json(each / "run.json") for each in places)
    assert ours["targets"] == theirs["targets"], "the layouts read different batches"
    losses = np.abs(np.array(ours["losses"], dtype=float) - np.array(theirs["losses"], dtype=float))
    found, wanted = (checkpoint.tensors("model") for each in places if (checkpoint := latest(each)) is not None)
    assert found.keys() == wanted.keys(), "the layouts save different tensors"
    weight = max(float((found[key].double() - wanted[key].double()).abs().max()) for key in wanted)
    losses = np.nan_to_num(losses, nan=np.inf)
    row = {"loss": float(losses.max()), "weight": weight}
    equal = next((step for step, loads in enumerate(ours["loads"]) if loads != theirs["loads"][step]), None)
    return row if equal is None else row | {"equal_steps": equal, "equal_loss": float(losses[:equal].max(initial=0.0))}


def missed(results: dict[str, Any]) -> list[str]:
    """Return a line for each row that failed or exceeds its target."""
    return [
        f"{row['layout']}, {row['case']}, {row['precision']}: "
        + (row.get("why") or f"{row['loss']:.1e} exceeds the target")
        for row in results["rows"]
        if "why" in row or not row.get("equal_loss", row["loss"]) <= results["targets"].get(row["precision"], np.inf)
    ]


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the largest difference of losses per layout; equal losses are at the left edge."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "bessemer", "none"
    names = list(dict.fromkeys(row["layout"] for row in results["rows"]))
    figure = Figure(figsize=(8.5, 0.27 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    for precision, colour in {"fp64": "#1f6feb", "fp32": "#0f8a5f", "bf16": "#c2570c"}.items():
        worst = dict.fromkeys(names, 0.0)
        for row in results["rows"]:
            if row["precision"] == precision:
                worst[row["layout"]] = max(worst[row["layout"]], row.get("loss", np.inf))
        axes.plot([max(worst[name], 1e-17) for name in names], names, "o", color=colour, label=precision)
        if precision in results["targets"]:
            axes.axvline(results["targets"][precision], color=colour, linestyle="--")
    axes.set(xscale="log", xlim=(5e-18, 0.1), xlabel="largest difference of a step's loss from one process, nats per token; "
             "dashed: the targets")  # fmt: skip
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(drawn := StringIO(), format="svg", metadata={"Date": None})
    # The site accepts only pictures without external references.
    text = re.sub(r"<!DOCTYPE[^>]*>\s*|<metadata>.*?</metadata>\s*", "", drawn.getvalue(), flags=re.DOTALL)
    path.write_text(text.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/layouts"), help="folder for the runs")
    parser.add_argument("--docs", action="store_true", help="only draw the picture of the documentation")
    given = parser.parse_args()
    if not given.docs:
        write_json(RESULTS, certify(Scope(), given.folder))
    results = read_json(RESULTS)
    draw(results, ROOT / "docs" / "layouts.svg")
    sys.exit("\n".join(missed(results)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        member(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    main()
