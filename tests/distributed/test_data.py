"""Data-parallel layouts train like one process."""

from typing import Any

import numpy as np
import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.distributed import sharded_tensors
from bessemer.distributed.mesh import MESH_AXES, SINGLE_PROCESS, ProcessMesh, gather_scatter, join, require_world
from bessemer.distributed.sharded_tensors import tensors_digest
from bessemer.distributed.tied_embedding import owned_parameters
from bessemer.recipe import Parallel, Recipe
from bessemer.train.precision import LossScale
from tests.choose import long_but
from tests.distributed.processes import run_on
from tests.distributed.small_model import batches, config_of, part, recipe_of, trainer_on, whole


def trained(recipe: Recipe, tied: bool, mesh: ProcessMesh) -> dict[str, Any]:
    trainer = trainer_on(mesh, recipe, config_of(tied))
    start = tensors_digest(owned_parameters(trainer.model), mesh)
    told = []
    for number, batch in enumerate(batches(4)):
        found = trainer.forward_backward(part(batch, mesh))
        trainer.update(number, found.grad_norm)
        [stats] = trainer.read([found])
        told.append((stats.loss, stats.grad_norm, stats.nats, stats.targets))
    weights = {name: whole(p).detach().double().numpy() for name, p in owned_parameters(trainer.model)}
    return {"told": told, "weights": weights, "start": start}


def on_a_team(layout: Parallel, cases: list[tuple[Recipe, bool]]) -> list[dict[str, Any]]:
    mesh = join(layout, torch.device("cpu"))
    return [trained(recipe.model_copy(update={"parallel": layout}), tied, mesh) for recipe, tied in cases]


def difference(one: dict[str, Any], other: dict[str, Any]) -> tuple[float, float]:
    """Return the largest differences of losses and norms, and of weights."""
    pairs = zip(one["told"], other["told"], strict=True)
    losses = max(max(abs(a[0] - b[0]), abs(a[1] - b[1]) / a[1]) for a, b in pairs)
    weights = max(np.abs(one["weights"][name] - other["weights"][name]).max() for name in other["weights"])
    return losses, weights


CASES = [
    (recipe_of("fp64"), False),
    (recipe_of("fp64", micro_batch=2), True),
    (recipe_of("fp64", optimizer={"kind": "muon"}), False),
    (recipe_of("fp64", recompute="full"), False),
    (recipe_of("fp32", ema=0.9), False),
    (recipe_of("fp32", optimizer={"kind": "lion", "learning_rate": 1e-4}), True),
    (recipe_of("fp8", micro_batch=2), False),
]
# Each layout alone runs all cases; combinations run two of them.
WHOLE = [Parallel(shard=2), Parallel(tensor=2), Parallel(pipeline=2), Parallel(context=2)]


@pytest.mark.parametrize(
    "layout",
    long_but(
        [
            Parallel(replicate=2),
            Parallel(shard=2, zero=2),
            Parallel(shard=2, zero=3),
            Parallel(shard=2, offload=True),
            Parallel(replicate=2, shard=2),
            Parallel(tensor=2),
            Parallel(context=2),
            Parallel(pipeline=2),
            Parallel(shard=2, pipeline=2, zero=2),
            Parallel(replicate=2, shard=2, pipeline=2, zero=3),
        ],
        Parallel(replicate=2),
        Parallel(shard=2),
    ),
    ids=[
        "ddp2", "zero2", "zero3", "offload", "hsdp", "tp2", "cp2", "pp2", "pp2 zero2", "pp2 hsdp",
    ],
)  # fmt: skip
def test_data_parallel_layouts_train_like_one_process(layout: Parallel) -> None:
    cases = CASES if layout in WHOLE else CASES[3:5] if layout.data == 4 else CASES[1::3]
    alone = [trained(recipe, tied, SINGLE_PROCESS) for recipe, tied in cases]
    for found in run_on(layout.world, on_a_team, layout, cases):
        for (recipe, _), expected, given in zip(cases, alone, found, strict=True):
            losses, weights = difference(expected, given)
            limits = {"fp64": (1e-11, 1e-9), "fp32": (1e-5, 1e-4), "fp8": (1e-2, 8e-2)}[recipe.train.precision]
            assert losses <= limits[0]
            if recipe.train.optimizer.kind == "adamw":  # the other optimizers turn rounding near zero into whole steps
                assert weights <= limits[1]
            assert given["start"] == expected["start"]
            assert [row[3] for row in given["told"]] == [row[3] for row in expected["told"]]


def scaled(layout: Parallel) -> list[tuple[float, bool, float]]:
    """Take ten steps in fp16 from a loss scale that is far too large; return loss, overflow and the next scale of each."""
    mesh = SINGLE_PROCESS if layout.world == 1 else join(layout, torch.device("cpu"))
    recipe = recipe_of("fp16").model_copy(update={"parallel": layout})
    trainer = trainer_on(mesh, recipe, config_of())
    scale, told = LossScale(value=2.0**26).to_tensor(torch.device("cpu")), []
    for number, batch in enumerate(batches(10)):
        found = trainer.forward_backward(part(batch, mesh), scale)
        scale = found.scale
        trainer.update(number, found.grad_norm, 1.0, found.skip_flag())
        [stats] = trainer.read([found])
        told.append((stats.loss, stats.overflow, stats.scale.value))
    return told


@pytest.mark.parametrize(
    "layout",
    long_but([Parallel(shard=2), Parallel(pipeline=2), Parallel(tensor=2)], Parallel(pipeline=2)),
    ids=["zero3", "pp2", "tp2"],
)
def test_in_fp16_all_processes_lower_the_same_scale(layout: Parallel) -> None:
    expected = scaled(Parallel())
    overflows = [overflow for _, overflow, _ in expected]
    assert overflows[0] and not all(overflows)
    every = run_on(layout.world, scaled, layout)
    assert all(found == every[0] for found in every)
    # FSDP2 gathers all weights in fp16, so gradients are fp16 until they are reduced, and overflow sooner.
    assert expected[-1][2] / every[0][-1][2] in ((1.0, 2.0, 4.0, 8.0) if layout.shard > 1 else (1.0,))
    alike = [one[0] - other[0] for one, other in zip(expected, every[0], strict=True) if one[1] and other[1]]
    assert len(alike) >= 3 and max(map(abs, alike)) < 5e-3


@pytest.mark.long
def test_compiled_and_recomputed_blocks_with_shared_matrices_train_like_one_process() -> None:
    compiled = recipe_of("fp32", recompute="full", compile="on")
    alone = trained(recipe_of("fp32"), False, SINGLE_PROCESS)
    for (found,) in run_on(2, on_a_team, Parallel(tensor=2), [(compiled, False)]):
        losses, weights = difference(alone, found)
        assert losses <= 1e-5 and weights <= 1e-4


def refusal(mesh: ProcessMesh) -> str:
    try:
        gather_scatter(mesh, lambda: 0, lambda values: values[1:])
    except RuntimeError as error:
        return str(error)
    return ""


def of_each(layout: Parallel) -> dict[str, Any]:
    mesh = join(layout, torch.device("cpu"))
    return {
        "rank": mesh.rank,
        "places": {axis: mesh.coordinate(axis) for axis in MESH_AXES},
        "data_rank": mesh.data_rank,
        "tells": mesh.is_loss_rank,
        "sum": mesh.sum(torch.tensor([1.0, float(mesh.rank)], dtype=torch.float64)).tolist(),
        "any": mesh.any(mesh.rank == 2),
        "none": mesh.any(False),
        "gathered": mesh.gather(mesh.rank * 10),
        "first": mesh.broadcast(f"of {mesh.rank}"),
        "too few": refusal(mesh),
        "neighbours": torch.distributed.get_process_group_ranks(mesh.group("tensor")),
    }


def test_ranks_on_the_mesh() -> None:
    found = run_on(4, of_each, Parallel(tensor=2, pipeline=2))
    for rank, of in enumerate(found):
        places = {"pipeline": rank // 2, "replicate": 0, "shard": 0, "context": 0, "tensor": rank % 2}
        assert of["rank"] == rank
        assert of["places"] == places
        assert of["data_rank"] == places["shard"]
        assert of["tells"] == (places["pipeline"] == 1 and places["tensor"] == 0)
        assert of["sum"] == [4.0, 6.0]
        assert (of["any"], of["none"], of["first"]) == (True, False, "of 0")
        assert of["gathered"] == [0, 10, 20, 30]
        assert of["too few"].startswith("rank 0: ValueError: zip"), "on every rank, where the others would wait"
        assert of["neighbours"] == [rank - rank % 2, rank - rank % 2 + 1]


@pytest.mark.parametrize(
    ("layout", "world", "says"),
    [
        (Parallel(shard=2, tensor=2), 8, "x context 1 = 4 .* 8 .* parallel.shard = 4"),
        (Parallel(tensor=3), 8, r"tensor x pipeline x context, now 3, .*\[1, 2, 4, 8\]"),
    ],
)  # fmt: skip
def test_a_wrong_number_of_processes_is_an_error_with_advice(layout: Parallel, world: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        require_world(layout, world)


def test_the_digest_of_saved_tensors_does_not_change() -> None:
    ramp = torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000)
    assert (
        sharded_tensors.tensors_digest([("a", ramp), ("b", torch.tensor(3.0))], SINGLE_PROCESS)
        == "e708e148c32d64470181532e1afb28cb"
    )
