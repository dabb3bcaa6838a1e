"""Rules that need whole matrices, with state of other shapes and uneven shards: the same updates in any layout."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bessemer.checkpoint import latest, save
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh, join
from bessemer.distributed.sharded_tensors import as_shard_of, local
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.recipe import Parallel, Recipe
from bessemer.recipe.load import parse
from bessemer.tokens.loader import Batch
from bessemer.train import optimizer as optimizers
from bessemer.train.trainer import Trainer
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.distributed.small_model import trainer_on, whole
from tests.train.optimizer.own_rules import own

SEQUENCES, LENGTH, VOCABULARY = 12, 16, 64
# Matrices (2, 4, 10, 40), (40, 4, 10), (2, 44, 40) and (40, 44): three shards divide none of them, and the third shard of two is
# empty.
RECIPE = """
[run]
name = "t"
[model]
layers = 2
width = 40
heads = 4
kv_heads = 2
mlp_width = 44
qk_norm = "none"
qkv_bias = true
[tokens]
sequence_length = 16
"""
TRAINED = (
    RECIPE
    + """[train]
steps = 6
global_batch_tokens = 192
micro_batch = 2
precision = "fp64"
[train.optimizer]
learning_rate = 1e-2
betas = [0.9, 0.95]
"""
)


def trainer_by_rows(mesh: ProcessMesh, layout: Parallel) -> Trainer:
    recipe = resolve(parse(TRAINED, "test"), VOCABULARY)
    recipe = recipe.changed(parallel=layout, train={"optimizer": {"kind": own("ByRows")}})
    return trainer_on(mesh, recipe, model_config(recipe, VOCABULARY))


def trained(folder: Path, first: int, steps: int, layout: Parallel, mesh: ProcessMesh) -> dict[str, np.ndarray]:
    """Train `steps` steps from the newest checkpoint, save, and return all weights and states unsharded."""
    trainer = trainer_by_rows(mesh, layout)
    if first:
        checkpoint = latest(folder, mesh=mesh)
        assert checkpoint is not None and checkpoint.step == first
        checkpoint.fill("model", trainer.model.named_parameters())
        optimizers.load_state(trainer.model, trainer.optimizer, checkpoint)
    for number in range(first, first + steps):
        draw = np.random.default_rng(number)
        tokens = draw.integers(0, VOCABULARY, (SEQUENCES, LENGTH + 1))
        data = Batch.next_token(number * SEQUENCES, tokens, np.zeros(SEQUENCES, dtype=np.int64))
        trainer.update(number, trainer.forward_backward(data.part(mesh.data_rank, layout.data)).grad_norm)
    parts = {
        "model": {name: weight.detach() for name, weight in owned_parameters(trainer.model)},
        "optimizer": optimizers.state_tensors(trainer.model, trainer.optimizer),
    }
    save(folder, first + steps, parts, {}, keep=9, mesh=mesh)
    return {f"{part} {name}": whole(tensor) for part, named in parts.items() for name, tensor in named.items()}


def on_processes(folder: Path, first: int, steps: int, layout: Parallel) -> dict[str, np.ndarray]:
    return trained(folder, first, steps, layout, join(layout, torch.device("cpu")))


@pytest.mark.parametrize(
    "layout",
    long_but(
        [Parallel(shard=2), Parallel(shard=2, zero=1), Parallel(tensor=2), Parallel(pipeline=2)], Parallel(shard=2)
    ),
    ids=str,
)
def test_a_resharded_run_equals_that_of_one_process(layout: Parallel, tmp_path: Path) -> None:
    alone = trained(tmp_path / "alone", 0, 6, Parallel(), SINGLE_PROCESS)
    folder = tmp_path / "resharded"
    run_on(2, on_processes, folder, 0, 2, layout, timeout=100)
    trained(folder, 2, 2, Parallel(), SINGLE_PROCESS)
    results = run_on(2, on_processes, folder, 4, 2, layout, timeout=100)
    assert {name for result in results for name in result} == set(alone)
    assert sum(name.endswith("/columns") for name in alone) == 8
    for result in results:
        for name, values in result.items():
            np.testing.assert_allclose(values, alone[name], rtol=1e-6, atol=1e-9, err_msg=name)


POISONED = 1  # the step in which the gradient of one rank is infinite
Case = tuple[str, str]  # skips the poisoned update, the rule
CASES: list[Case] = [("host", "muon"), ("host", "adamw"), ("skip flag", "adamw"), ("host", "lion")]


def recipe_of(case: Case) -> Recipe:
    recipe = resolve(parse(RECIPE, "test"), VOCABULARY)
    optimizer = recipe.train.optimizer.changed(
        kind=case[1], learning_rate=1e-2, betas=(0.9, 0.95), weight_decay=0.3
    )  # fmt: skip
    train = {"steps": 3, "global_batch_tokens": SEQUENCES * LENGTH, "micro_batch": 2, "precision": "fp64", "ema": 0.9}
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={**train, "optimizer": optimizer})})


def trained_with_a_fault(case: Case, layout: Parallel, mesh: ProcessMesh) -> dict[str, Any]:
    """Take three steps; in the second, the last rank's gradient becomes infinite before the norm is computed."""
    recipe = recipe_of(case).model_copy(update={"parallel": layout})
    trainer = trainer_on(mesh, recipe, model_config(recipe, VOCABULARY))
    accumulate, draw = trainer.engine.accumulate, np.random.default_rng(0)

    def poisoned(*arguments: Any) -> Any:
        losses = accumulate(*arguments)
        if mesh.rank == mesh.world - 1:
            gradients = [local(p.grad) for p in trainer.model.parameters() if p.grad is not None]
            next(gradient for gradient in gradients if gradient.numel()).fill_(math.inf)
        return losses

    for number in range(3):
        data = Batch.next_token(
            number * SEQUENCES,
            draw.integers(0, VOCABULARY, (SEQUENCES, LENGTH + 1)),
            np.zeros(SEQUENCES, dtype=np.int64),
        )
        trainer.engine.accumulate = poisoned if number == POISONED else accumulate  # type: ignore[method-assign]
        stats = trainer.forward_backward(data.part(mesh.data_rank, layout.data))
        skip = stats.skip_flag(None)
        assert bool(skip) == (number == POISONED), "the verdict is that of all ranks"
        if case[0] == "skip flag":
            trainer.update(number, stats.grad_norm, 1.0, skip)
        elif not skip:
            trainer.update(number, stats.grad_norm)
    weights = {name: whole(weight).detach().numpy() for name, weight in owned_parameters(trainer.model)}
    assert trainer.average is not None
    parameters, averages = dict(owned_parameters(trainer.model)), trainer.average.tensors
    averaged = {
        name: whole(as_shard_of(parameters[name], value)).detach().numpy()
        for name, value in averages.items()
        if name in parameters
    }
    counts = {float(state["step"]) for state in trainer.optimizer.state.values() if "step" in state}
    return {"weights": weights, "average": averaged, "counts": counts}


def on_uneven_processes(layout: Parallel, cases: list[Case]) -> list[dict[str, Any]]:
    mesh = join(layout, torch.device("cpu"))
    return [trained_with_a_fault(case, layout, mesh) for case in cases]


LAYOUTS = {
    "zero3": Parallel(shard=3), "zero2": Parallel(shard=3, zero=2), "zero1": Parallel(shard=3, zero=1),
    "shard2": Parallel(shard=2), "tp2": Parallel(tensor=2), "cp2": Parallel(context=2), "pp2": Parallel(pipeline=2),
    "ddp3": Parallel(replicate=3), "fsdp2 tp2": Parallel(shard=2, tensor=2), "pp2 fsdp2": Parallel(pipeline=2, shard=2),
    "hsdp": Parallel(replicate=2, shard=3),
}  # fmt: skip


@pytest.mark.parametrize("case_name", long_but(list(LAYOUTS), "zero3"))
@pytest.mark.fault(14)
def test_uneven_shards_train_like_one_process(case_name: str) -> None:
    layout = LAYOUTS[case_name]
    alone = [trained_with_a_fault(case, Parallel(), SINGLE_PROCESS) for case in CASES]
    for results in run_on(layout.world, on_uneven_processes, layout, CASES, timeout=300):
        for case, expected, result in zip(CASES, alone, results, strict=True):
            assert result["counts"] == expected["counts"], case
            for kind in ("weights", "average"):
                for name, values in result[kind].items():
                    np.testing.assert_allclose(
                        values, expected[kind][name], rtol=0, atol=2e-6, err_msg=f"{case} {kind} {name}"
                    )
