"""State of another shape than its parameter: saved and loaded by any layout, and rejected where it is not as declared.

The rule scales the gradient by the root of a mean of squares of each row, and multiplies it with a factor of columns x columns
(as in Shampoo and SOAP).
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bessemer.checkpoint import latest, save
from bessemer.common.errors import BessemerError
from bessemer.distributed.mesh import SINGLE_PROCESS, ProcessMesh, join
from bessemer.distributed.sharded_tensors import as_shard_of, is_dtensor, local, put
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.model.huggingface.config import model_config
from bessemer.model.recipe_defaults import resolve
from bessemer.model.transformer import build_model, meta_model
from bessemer.recipe import Parallel
from bessemer.recipe.load import parse
from bessemer.recipe.train import OPTIMIZERS, OptimizerFacts
from bessemer.tokens.loader import Batch
from bessemer.train import optimizer as optimizers
from bessemer.train.device import choose
from bessemer.train.optimizer.moments import State, UpdateRule
from bessemer.train.parallelize import initial_weights
from bessemer.train.trainer import Trainer
from tests.choose import long_but
from tests.distributed.processes import run_on

SEQUENCES, LENGTH, VOCABULARY = 12, 16, 64
# Matrices (2, 4, 10, 40), (40, 4, 10), (2, 44, 40) and (40, 44).
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
[train]
steps = 6
global_batch_tokens = 192
micro_batch = 2
precision = "fp64"
[train.optimizer]
learning_rate = 1e-2
betas = [0.9, 0.95]
"""


def whole_gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    if not is_dtensor(weight):
        return gradient
    placed = DTensor.from_local(
        gradient, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    return placed.full_tensor()


def update_by_rows_and_columns(
    names: list[str], weights: list[Tensor], gradients: list[Tensor], states: list[State], group: dict[str, Any]
) -> None:
    for weight, shard, state in zip(weights, gradients, states, strict=True):
        gradient = whole_gradient(weight, shard)
        flat = gradient.reshape(-1, gradient.shape[-1])
        state["rows"].lerp_(gradient.square().mean(-1), 0.1)
        state["columns"].lerp_(flat.T @ flat / flat.square().sum().clamp(min=1e-30), 0.1)
        update = (gradient / (state["rows"].sqrt().unsqueeze(-1) + 1e-8)).reshape(flat.shape) @ (
            torch.eye(flat.shape[-1], dtype=flat.dtype) - 0.5 * state["columns"]
        )
        change = torch.empty_like(local(weight))
        put(as_shard_of(weight, change), update.reshape(gradient.shape))
        local(weight).sub_(change, alpha=group["lr"])
        state["count"] += 1


def whole_state(state: Tensor) -> Tensor:
    return state.full_tensor() if isinstance(state, DTensor) else state


OPTIMIZERS["by_rows"] = OptimizerFacts(moments=0, is_for_matrices=True)
optimizers.RULES["by_rows"] = UpdateRule(
    update_by_rows_and_columns,
    moments={},
    others={"rows": lambda shape: shape[:-1], "columns": lambda shape: (shape[-1], shape[-1]), "count": lambda _: ()},
)


def trainer_on(mesh: ProcessMesh, layout: Parallel) -> Trainer:
    recipe = resolve(parse(RECIPE, "test"), VOCABULARY).changed(
        parallel=layout, train={"optimizer": {"kind": "by_rows"}}
    )
    config = model_config(recipe, VOCABULARY)
    model = build_model(config, 3) if mesh.is_single else meta_model(config)
    return Trainer(recipe, model, choose(recipe.train), 0, 2, mesh, initial_weights(config, 3))


def trained(folder: Path, first: int, steps: int, layout: Parallel, mesh: ProcessMesh) -> dict[str, np.ndarray]:
    """Train `steps` steps from the newest checkpoint, save, and return all weights and states whole."""
    trainer = trainer_on(mesh, layout)
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
    return {
        f"{part} {name}": whole_state(tensor).numpy() for part, named in parts.items() for name, tensor in named.items()
    }


def on_processes(folder: Path, first: int, steps: int, layout: Parallel) -> dict[str, np.ndarray]:
    return trained(folder, first, steps, layout, join(layout, torch.device("cpu")))


@pytest.mark.parametrize(
    "layout",
    long_but(
        [Parallel(shard=2), Parallel(shard=2, zero=1), Parallel(tensor=2), Parallel(pipeline=2)], Parallel(shard=2)
    ),
    ids=str,
)
def test_a_resharded_run_equals_the_run_of_one_process(layout: Parallel, tmp_path: Path) -> None:
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


def test_state_of_another_shape_than_declared_is_rejected(tmp_path: Path) -> None:
    trained(tmp_path, 0, 1, Parallel(), SINGLE_PROCESS)
    trainer = trainer_on(SINGLE_PROCESS, Parallel())
    weight = dict(trainer.model.named_parameters())["blocks.0.mlp.gate_up"]
    for name, shape in (("rows", (3,)), ("columns", (40, 3)), ("count", (1,))):
        trainer.optimizer.state[weight] = trainer.optimizer.initial_state(weight) | {name: torch.zeros(shape)}
        with pytest.raises(BessemerError, match="optimizer"):
            optimizers.state_tensors(trainer.model, trainer.optimizer)
