"""The processes of a run: who sits where on the mesh, and what they tell each other."""

from typing import Any

import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.distributed import sharded_tensors
from bessemer.distributed.mesh import MESH_AXES, SINGLE_PROCESS, ProcessMesh, gather_scatter, join, require_world
from bessemer.recipe import Parallel
from tests.distributed.processes import run_on


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


def test_places_on_the_mesh() -> None:
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
        (Parallel(shard=2, tensor=2), 8, "x context 1 = 4 processes, but there are 8; parallel.shard = 4"),
        (Parallel(tensor=3), 8, r"= 3 does not divide 8; possible: \[1, 2, 4, 8\]"),
    ],
)  # fmt: skip
def test_another_number_of_processes_says_what_would_fit(layout: Parallel, world: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        require_world(layout, world)


def test_the_tensors_digest_of_weights_that_were_saved_before_stays() -> None:
    ramp = torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000)
    assert (
        sharded_tensors.tensors_digest([("a", ramp), ("b", torch.tensor(3.0))], SINGLE_PROCESS)
        == "e708e148c32d64470181532e1afb28cb"
    )
