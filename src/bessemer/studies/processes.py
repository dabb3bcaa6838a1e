"""Studies that train on several processes: memory by rank under ZeRO, and the parallel efficiency of the textbook.

`python -m bessemer.studies.processes FOLDER`, with the environment of torchrun where there is more than one process, trains the
recipe in FOLDER for a few steps; each rank writes what it measured into rank-N.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import torch

from bessemer.errors import BessemerError
from bessemer.launch import group
from bessemer.model.huggingface.config import model_config
from bessemer.model.transformer import build_model, meta_model
from bessemer.parallel.dtensors import local
from bessemer.parallel.mesh import ProcessMesh
from bessemer.recipe import Recipe, dump, load
from bessemer.run import read_json, write_json
from bessemer.studies import text
from bessemer.studies.base import LENGTH, MAX_BYTES, Row, Rows, Variation, shape
from bessemer.terminal import size
from bessemer.train import device as devices
from bessemer.train.split import initial_weights
from bessemer.train.trainer import Trainer

UNMEASURED = 3  # first steps, which set things up
FIELDS = ("weight_bytes", "gradient_bytes", "moment_bytes", "memory_bytes", "step_seconds", "backward_seconds", "loss")


def on_processes(recipe: Recipe, alone: bool = False, *, is_timed: bool = False) -> Row:
    """Train a recipe on as many processes as its layout has; the largest value of the ranks. alone: outside of any group."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "recipe.toml").write_text(dump(recipe))
        processes = group.ALONE if alone else recipe.parallel.world
        # Large blocks are mapped one by one, so that resident memory is that of tensors, without holes between them.
        blocks = {} if is_timed else {"MALLOC_MMAP_THRESHOLD_": "65536"}
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **blocks}
        arguments = ("-m", "bessemer.studies.processes", str(folder))
        why = group.run_group(arguments, processes, folder / "log", seconds=300.0, variables=variables)
        if why is not None:
            raise BessemerError(f"a group of {max(processes, 1)} processes failed: {why}")
        ranks = [read_json(path) for path in sorted(folder.glob("rank-*.json"))]
    return {"ranks": ranks, "processes": len(ranks), **{key: max(rank[key] for rank in ranks) for key in FIELDS}}


def _train(recipe: Recipe, folder: Path, mesh: ProcessMesh) -> None:
    config, device = model_config(recipe, text.VOCABULARY), devices.choose(recipe.train)
    devices.release_unused(device)
    held = devices.resident_bytes()
    model = build_model(config, 0) if mesh.is_single else meta_model(config)
    trainer = Trainer(recipe, model, device, text.END_OF_TEXT, 1, mesh, initial_weights(config, 0))
    del model
    whole, halves, loss, gradients = list[float](), list[float](), 0.0, 0
    for step in range(recipe.train.steps or 0):
        batch = text.batch(step, *shape(recipe), MAX_BYTES).part(mesh.data_rank, mesh.layout.data)
        started = perf_counter()
        results = trainer.forward_backward(batch)
        halves.append(perf_counter() - started)
        gradients = _bytes(p.grad for p in trainer.model.parameters() if p.grad is not None)
        trainer.update(step, results.grad_norm)
        whole.append(perf_counter() - started)
        loss = results.loss
        if step + 1 == UNMEASURED:
            devices.reset_peak_resident()
    states = (value for state in trainer.optimizer.state.values() for value in state.values())
    moments = (value for value in states if isinstance(value, torch.Tensor))
    row = {
        "weight_bytes": _bytes(trainer.model.parameters()), "gradient_bytes": gradients, "moment_bytes": _bytes(moments),
        "memory_bytes": devices.peak_resident_bytes() - held, "step_seconds": min(whole[UNMEASURED:]),
        "backward_seconds": min(halves[UNMEASURED:]), "loss": loss,
    }  # fmt: skip
    write_json(folder / f"rank-{mesh.rank}.json", row)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


# --- ZeRO -------------------------------------------------------------------------------------------------------------


def _zero(rows: Rows) -> list[str]:
    replicas, third = rows["2 replicas"], rows["ZeRO 3"]
    kept = {name: sum(row[key] for key in FIELDS[:3]) for name, row in rows.items()}  # all but the memory at the peak
    peaks = [row["memory_bytes"] for name, row in rows.items() if name != "1 process"]
    falls = all(a >= b for a, b in pairwise(peaks))
    return [
        f"Between steps a rank keeps {size(kept['2 replicas'])} of weights, gradients and optimizer state as one of 2 "
        f"replicas, and {size(kept['ZeRO 3'])} where all is sharded: {kept['ZeRO 3'] / kept['2 replicas']:.0%}.",
        f"At the peak it takes {size(replicas['memory_bytes'])} as a replica and {', '.join(map(size, peaks[1:]))} under "
        f"ZeRO 1, 2 and 3: {'less with every stage' if falls else 'not less with every stage here'}.",
        f"ZeRO 3's fastest step takes {third['step_seconds'] / replicas['step_seconds']:.2f} times the replicas', whose "
        f"losses differ from its own by {abs(third['loss'] - replicas['loss']):.0e}.",
    ]


# Two micro-batches a rank: between them ZeRO 1 holds whole gradients, ZeRO 2 its shard.
_SMALL_BATCH = {
    "train.global_batch_tokens": 8 * LENGTH, "train.micro_batch": 2, "train.steps": 10, "model.width": 512, "model.layers": 6,
    "model.heads": 8,
}  # fmt: skip
zero = Variation(
    expected="Of 16 bytes a parameter in fp32, stage 1 shards the optimizer's 8, stage 2 also the gradients' 4, stage 3 also "
    "the weights' 4; stage 3 communicates half as much again (Rajbhandari et al. 2020, sections 5 and 7).",
    variants={
        "1 process": {"alone": True}, "2 replicas": {"parallel.replicate": 2},
        **{f"ZeRO {stage}": {"parallel.shard": 2, "parallel.zero": stage} for stage in (1, 2, 3)},
    },
    conclude=_zero, base=_SMALL_BATCH, train=on_processes, plot_of="memory_bytes",
    measures=("weight_bytes", "gradient_bytes", "moment_bytes", "memory_bytes", "step_seconds"),
)  # fmt: skip


# --- Parallel efficiency ----------------------------------------------------------------------------------------------


def _two(recipe: Recipe) -> Row:
    """The same recipe on one process and on two, and what Amdahl's law says where the update is all that is not divided."""
    alone = recipe.changed(parallel=recipe.parallel.model_copy(update={"replicate": 1}))
    one, two = on_processes(alone, alone=True, is_timed=True), on_processes(recipe, is_timed=True)
    serial = 1.0 - one["backward_seconds"] / one["step_seconds"]
    return {"step_seconds": one["step_seconds"], "two_seconds": two["step_seconds"], "serial": serial,
            "efficiency": one["step_seconds"] / (2 * two["step_seconds"]), "predicted": 1 / (1 + serial)}  # fmt: skip


def _efficiency(rows: Rows) -> list[str]:
    (small, first), *_, (large, last) = rows.items()
    grows = last["efficiency"] > first["efficiency"]
    gap = {name: row["predicted"] - row["efficiency"] for name, row in rows.items()}
    return [
        f"With {small} two processes are {2 * first['efficiency']:.2f} times as fast as one, an efficiency of "
        f"{first['efficiency']:.0%}; with {large}, {2 * last['efficiency']:.2f} times, {last['efficiency']:.0%}.",
        f"Amdahl's law predicts {first['predicted']:.0%} and {last['predicted']:.0%} from the share of a step that every "
        f"process repeats, the update: {first['serial']:.0%} and {last['serial']:.0%}.",
        f"What is missing to it, {gap[small]:.0%} and {gap[large]:.0%}, is communication and what else runs on these cores; "
        f"the larger batch is {'divided better' if grows else 'not divided better here'}.",
    ]


efficiency = Variation(
    expected="The speedup of p processes is at most 1 / (s + (1 - s) / p), s being the serial share (Amdahl 1967); it nears p "
    "as the work of each grows against what they communicate.",
    variants={
        f"{n} sequences": {"train.global_batch_tokens": n * LENGTH, "train.micro_batch": min(n // 2, 32)} for n in (8, 32, 128)
    },
    conclude=_efficiency, base={"parallel.replicate": 2, "train.steps": 18}, train=_two, plot_of="efficiency",
    measures=("step_seconds", "efficiency", "predicted"),
)  # fmt: skip


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        devices.keep_freed_memory()
    folder = Path(sys.argv[1])
    recipe = load(folder / "recipe.toml")
    group.work_as_member(recipe.parallel, torch.device("cpu"), lambda mesh: _train(recipe, folder, mesh))
