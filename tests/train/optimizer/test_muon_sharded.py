"""Muon over processes: each matrix orthogonalised by one of them, with the bits of one process that has them all."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bessemer.train.optimizer import muon
from tests.distributed.processes import run_on

SHAPES = {"a.mlp.gate_up": (2, 12, 8), "a.mlp.down.weight": (8, 12), "b.attention.qkv": (2, 4, 6, 8), "b.out.weight": (8, 12),
          "c.out.weight": (6, 10)}  # fmt: skip
GROUP = {"skip": torch.tensor(0.0), "lr": 0.1, "weight_decay": 0.5, "muon_scale": "match_rms", "cautious_decay": False}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(shape: tuple[int, ...], names: tuple[str, ...], group: dict[str, Any]) -> dict[str, Any]:
    """The weights after an update, and the matrices that this process orthogonalised."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    places = [Replicate() if name == "replicate" else Shard(number) for number, name in enumerate(names)]
    weights, directions = (
        {name: distribute_tensor(value, mesh, places) for name, value in values(seed).items()} for seed in (0, 1)
    )
    done, whole = [], muon.muon

    def watched(directed: Any, group: dict[str, Any]) -> None:
        given = list(directed)
        done.extend(name for name, _, _ in given)
        whole(given, group)

    muon.muon = watched
    muon.muon_sharded(list(weights), list(weights.values()), lambda n: list(directions.values())[n].to_local(), group)
    muon.muon = whole
    return {"done": done, "weights": {name: weight.full_tensor() for name, weight in weights.items()}}


@pytest.mark.parametrize(
    ("shape", "names", "cautious"),
    [((2,), ("shard",), True), pytest.param((2, 2), ("replicate", "shard"), False, marks=pytest.mark.long),
     pytest.param((2, 2), ("shard", "tensor"), False, marks=pytest.mark.long)]
)  # fmt: skip
def test_each_matrix_is_orthogonalised_once(shape: tuple[int, ...], names: tuple[str, ...], cautious: bool) -> None:
    group = GROUP | {"cautious_decay": cautious}
    weights, directions = values(0), values(1)
    muon.muon([(name, weights[name], directions[name].clone()) for name in SHAPES], group)
    found = run_on(2 ** len(shape), sharded, shape, names, group)
    assert sorted(name for one in found for name in one["done"]) == sorted(SHAPES), "each by one process"
    assert all(one["done"] for one in found), "none is idle"
    for one in found:
        for name, weight in weights.items():
            torch.testing.assert_close(one["weights"][name], weight, rtol=1e-6, atol=1e-6)
