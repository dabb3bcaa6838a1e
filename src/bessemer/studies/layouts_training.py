"""One process of the study `layouts`: trains the study's model as one of a group, under every setting asked for.

`python -m bessemer.studies.layouts_training FOLDER LAYOUT CASE:PRECISION...`, with the environment of torchrun where the
layout has more than one process or is asked for in a group. Rank 0 writes FOLDER/runs/LAYOUT/CASE-PRECISION.json, with the
loss of each step, beside a checkpoint of the weights at the end.
"""

from __future__ import annotations

import gc
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from bessemer.checkpoint import save
from bessemer.launch.group import work_as_member
from bessemer.model.huggingface.config import model_config
from bessemer.model.transformer import build_model, meta_model
from bessemer.parallel.mesh import ProcessMesh
from bessemer.parallel.tied import owned_parameters
from bessemer.recipe import Parallel, Recipe
from bessemer.run import read_json, write_json
from bessemer.studies import text
from bessemer.tokens.loader import Batch
from bessemer.train import device as devices
from bessemer.train.split import initial_weights
from bessemer.train.trainer import Trainer

SEED = 7
MAX_BYTES = 400_000
LONGEST = 40  # tokens of a ragged document; the shortest has one


@dataclass(frozen=True)
class Case:
    """What is trained besides the layout. accumulated: two micro-batches where there is no pipeline, and of one sequence each
    where there is, else one, or of two sequences each; ragged: several documents of unequal lengths in a sequence, the last
    token of each without a target, and padding; tied: one matrix for embedding and head; dropout: share dropped of everything
    that can be; qk_clip: of the optimizer, in a model without QK-norm."""

    accumulated: bool = False
    ragged: bool = False
    tied: bool = False
    dropout: float = 0.0
    qk_clip: float | None = None


CASES = {
    "plain": Case(),
    "hard": Case(accumulated=True, ragged=True, tied=True),
    "dropout": Case(accumulated=True, ragged=True, tied=True, dropout=0.1),
    "clip": Case(accumulated=True, ragged=True, tied=True, qk_clip=2.0),
}


@dataclass(frozen=True)
class CertificateRun:
    """The model and its training; steps: of each run."""

    steps: int = 100
    sequences: int = 8
    length: int = 64
    layers: int = 4
    width: int = 32
    heads: int = 8
    kv_heads: int = 4
    mlp_width: int = 96
    learning_rate: float = 2e-3


def recipe_of(sizes: CertificateRun, layout: Parallel, case: Case, precision: str) -> Recipe:
    each = sizes.sequences // layout.data
    micro = (1 if case.accumulated else 2) if layout.pipeline > 1 else each // (2 if case.accumulated else 1)
    recipe = text.study_recipe("study layouts", {
        "tokens.sequence_length": sizes.length, "model.layers": sizes.layers, "model.width": sizes.width,
        "model.heads": sizes.heads, "model.kv_heads": sizes.kv_heads, "model.mlp_width": sizes.mlp_width,
        "model.tie_embeddings": case.tied, "train.steps": sizes.steps,
        "train.global_batch_tokens": sizes.sequences * sizes.length, "train.micro_batch": micro,
        "train.precision": precision, "train.compile": "off", "train.dropout.hidden": case.dropout,
        "train.dropout.attention": case.dropout, "train.optimizer.learning_rate": sizes.learning_rate,
        "train.schedule.warmup_steps": max(sizes.steps // 10, 1),
        **({} if case.qk_clip is None else {"train.optimizer.qk_clip": case.qk_clip, "model.qk_norm": "none"}),
    })  # fmt: skip
    return recipe.changed(parallel=layout)


def batch_of(sizes: CertificateRun, case: Case, number: int, mesh: ProcessMesh) -> Batch:
    """This process's part of the batch of a step."""
    whole = text.batch(number, sizes.sequences, sizes.length, MAX_BYTES)
    if not case.ragged:
        return whole.part(mesh.data_rank, mesh.layout.data)
    inputs, targets = whole.inputs.copy(), whole.targets.copy()
    starts, real = np.zeros(inputs.shape, dtype=np.bool_), np.full(len(inputs), sizes.length, dtype=np.int64)
    draw = np.random.default_rng((number, 1))
    for row in range(len(inputs)):
        ends = np.cumsum(draw.integers(1, LONGEST + 1, sizes.length))
        ends = ends[ends < sizes.length]
        starts[row, 0], starts[row, ends], targets[row, ends - 1] = True, True, -1
        if row % 3 == 0 and len(ends):  # what comes after the last document that fits is padding
            real[row], inputs[row, ends[-1] :], targets[row, ends[-1] :] = ends[-1], text.END_OF_TEXT, -1
    ragged = Batch(whole.first, inputs, targets, whole.source, starts, real)
    return ragged.part(mesh.data_rank, mesh.layout.data)


def train(
    sizes: CertificateRun, layout: Parallel, case: Case, precision: str, mesh: ProcessMesh, folder: Path
) -> dict[str, Any]:
    """Train, and save the weights in `folder`.

    Returns `losses` and `targets` of each step, and `seconds` a step (mean over the run).
    """
    recipe = recipe_of(sizes, layout, case, precision)
    config = model_config(recipe, text.VOCABULARY)
    model = build_model(config, SEED) if mesh.is_single else meta_model(config)
    device = devices.choose(recipe.train)
    trainer = Trainer(recipe, model, device, text.END_OF_TEXT, 1, mesh, initial_weights(config, SEED))
    losses, targets, started = [], [], perf_counter()
    for number in range(sizes.steps):
        results = trainer.forward_backward(batch_of(sizes, case, number, mesh))
        trainer.update(number, results.grad_norm)
        losses.append(results.loss)
        targets.append(sum(results.targets))
    seconds = (perf_counter() - started) / sizes.steps
    named = {name: parameter.detach() for name, parameter in owned_parameters(trainer.model)}
    save(folder, sizes.steps, {"model": named}, {}, 1, mesh)
    return {"losses": losses, "targets": targets, "seconds": seconds}


def main() -> None:
    warnings.simplefilter("ignore")
    folder, name = Path(sys.argv[1]), sys.argv[2]
    given = read_json(folder / "settings.json")
    sizes, layout = CertificateRun(**given["settings"]), Parallel(**given["layouts"][name])
    devices.make_deterministic()

    def work(mesh: ProcessMesh) -> None:
        for each in sys.argv[3:]:
            case, precision = each.split(":")
            place = folder / "runs" / name / f"{case}-{precision}"
            if mesh.is_main:
                place.mkdir(parents=True, exist_ok=True)
            mesh.barrier()
            results = train(sizes, layout, CASES[case], precision, mesh, place)
            if mesh.is_main:
                write_json(place / "run.json", results)
            gc.collect()  # a wrapped model and its hooks hold each other
            mesh.barrier()

    work_as_member(layout, torch.device("cpu"), work)


if __name__ == "__main__":
    main()
