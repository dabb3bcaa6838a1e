"""Muon compared with its formulas in float64, for each real matrix."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bessemer.common.errors import InputError
from bessemer.train.optimizer import muon
from bessemer.train.optimizer.muon import orthogonalise
from bessemer.train.optimizer.rules import kind_of, parameter_groups
from tests.distributed.processes import run_on

STEPS = 4


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Return the three steps of the quintic iteration, computed on the singular values."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / (1.01 * (s**4).sum() ** 0.25 + 1e-7)
    for a, b, c in ((7.7110, -22.1138, 16.2487), (3.2153, -2.4112, 0.5013), (2.2183, -1.5940, 0.4107)):
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vt


def reference_update(
    weight: np.ndarray, gradients: list[np.ndarray], size: float, decay: float, momentum: float
) -> np.ndarray:
    moment = np.zeros_like(weight)
    for step, gradient in enumerate(gradients):
        rate = 0.01 / (step + 1)
        moment = momentum * moment + (1 - momentum) * gradient
        ahead = momentum * moment + (1 - momentum) * gradient
        weight = weight * (1 - rate * decay) - rate * size * newton_schulz(ahead)
    return weight


def real_matrices(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Return queries, keys, values, gate and up of our fused parameters as in transformers."""
    if name.endswith("qkv"):
        groups, slots, head, width = value.shape
        return {
            "q": value[:, : slots - 2].reshape(groups * (slots - 2) * head, width),
            "k": value[:, slots - 2].reshape(groups * head, width),
            "v": value[:, slots - 1].reshape(groups * head, width),
        }
    if name.endswith("gate_up"):
        return {"gate": value[0], "up": value[1]}
    return {"": value}


def test_muon_equals_its_formula(driven) -> None:
    made = driven(kind="muon", muon_rate=1.5, muon_momentum=0.9)
    before = made.weights()
    found = made.take(STEPS)
    for name in before:
        if not name.endswith((".qkv", "out.weight", "gate_up", "down.weight")):
            continue
        gradients = [real_matrices(name, made.gradient(name, step).astype(np.float64)) for step in range(STEPS)]
        for part, weight in real_matrices(name, before[name]).items():
            rows, columns = weight.shape
            size = 0.2 * max(rows, columns) ** 0.5
            wanted = reference_update(weight, [g[part] for g in gradients], 1.5 * size, 1.5 * 0.3, 0.9)
            np.testing.assert_allclose(
                real_matrices(name, found[name])[part], wanted, rtol=0, atol=5e-6, err_msg=f"{name} {part}"
            )


def test_other_parameters_use_adamw(driven) -> None:
    muon, adamw = driven(kind="muon").take(STEPS), driven().take(STEPS)
    rest = [name for name in muon if not name.endswith((".qkv", "out.weight", "gate_up", "down.weight"))]
    assert {"embedding.weight", "head.weight", "norm.weight"} <= set(rest)
    assert all(np.array_equal(muon[name], adamw[name]) for name in rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_matrix_stays_zero(dtype: torch.dtype) -> None:
    assert float(orthogonalise(torch.zeros(2, 8, 4), dtype).abs().max()) == 0.0


def test_singular_values_from_a_fiftieth_to_1_are_within_a_tenth_of_1() -> None:
    found = np.linspace(0.02, 1.0, 10_000)
    for a, b, c in muon.NEWTON_SCHULZ:
        found = a * found + b * found**3 + c * found**5
    assert 0.9 < found.min() < found.max() < 1.1


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("shape", [(5, 48, 96), (1, 64, 64)])
def test_the_direction_in_a_narrower_dtype_is_near_that_in_fp64(
    shape: tuple[int, ...], dtype: torch.dtype, limit: float
) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exact = orthogonalise(stack.double(), torch.float64)
    error = (orthogonalise(stack, dtype).double() - exact).norm() / exact.norm()
    assert 0.0 < float(error) < limit


def test_stacks_of_any_size_give_equal_updates(driven, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.train.optimizer import muon

    whole = driven(kind="muon").take(2)
    monkeypatch.setattr(muon, "STACK_ELEMENTS", 1)
    alone = driven(kind="muon").take(2)
    for name in whole:
        np.testing.assert_allclose(alone[name], whole[name], rtol=0, atol=2e-6)


SHAPES = {"a.mlp.gate_up": (2, 12, 8), "a.mlp.down.weight": (8, 12), "b.attention.qkv": (2, 4, 6, 8), "b.out.weight": (8, 12),
          "c.out.weight": (6, 10)}  # fmt: skip
GROUP = {"skip": torch.tensor(0.0), "lr": 0.1, "weight_decay": 0.5, "dtype": torch.float32}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sharded(shape: tuple[int, ...], names: tuple[str, ...]) -> dict[str, Any]:
    """Return the weights after an update, and the matrices that this process orthogonalised."""
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
    muon.muon_sharded(list(weights), list(weights.values()), lambda n: list(directions.values())[n].to_local(), GROUP)
    muon.muon = whole
    return {"done": done, "weights": {name: weight.full_tensor() for name, weight in weights.items()}}


@pytest.mark.parametrize(
    ("shape", "names"),
    [((2,), ("shard",)), pytest.param((2, 2), ("replicate", "shard"), marks=pytest.mark.long),
     pytest.param((2, 2), ("shard", "tensor"), marks=pytest.mark.long)]
)  # fmt: skip
def test_each_matrix_is_orthogonalised_once(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    weights, directions = values(0), values(1)
    muon.muon([(name, weights[name], directions[name].clone()) for name in SHAPES], GROUP)
    found = run_on(2 ** len(shape), sharded, shape, names)
    assert sorted(name for one in found for name in one["done"]) == sorted(SHAPES), "each by one process"
    assert all(one["done"] for one in found), "none is idle"
    for one in found:
        for name, weight in weights.items():
            torch.testing.assert_close(one["weights"][name], weight, rtol=1e-6, atol=1e-6)


LION_STEPS = 6


def decayed(name: str) -> bool:
    return name.endswith((".qkv", "out.weight", "gate_up", "down.weight"))


def test_lion_equals_its_formula(driven) -> None:
    made = driven(kind="lion", betas=(0.9, 0.99))
    wanted = made.weights()
    found = made.take(LION_STEPS)
    ties = 0
    for name, weight in wanted.items():
        m = np.zeros_like(weight)
        near = np.zeros(weight.shape, dtype=bool)
        for step in range(LION_STEPS):
            g = made.gradient(name, step).astype(np.float64)
            rate = 0.01 / (step + 1)
            direction = 0.9 * m + 0.1 * g
            near |= (np.abs(direction) < 1e-7 * np.abs(g)) & (direction != 0)  # fp32 may have the other sign
            weight = weight - rate * (np.sign(direction) + (0.3 if decayed(name) else 0.0) * weight)
            m = 0.99 * m + 0.01 * g
        ties += int(near.sum())
        np.testing.assert_allclose(found[name][~near], weight[~near], rtol=0, atol=1e-6, err_msg=name)
    assert ties <= 3


def told(made) -> dict[str, tuple[str, str, float, float]]:
    """Return kind, rule, decay per step and learning rate of each parameter, at a learning rate of 1."""
    names = {id(weight): name for name, weight in made.model.named_parameters()}
    return {
        names[id(weight)]: (group["kind"], group["rule"].name, group["weight_decay"] * group["rate"], group["rate"])
        for group in made.optimizer.param_groups
        for weight in group["params"]
    }


def test_decay_and_rates_by_parameter_group(driven) -> None:
    found = told(driven(embedding_rate=3.0))
    assert found["embedding.weight"] == ("embedding", "adamw", 0.0, 3.0)
    assert found["head.weight"] == ("head", "adamw", 0.0, 1.0)
    assert found["blocks.0.attention.qkv"] == ("matrix", "adamw", 0.3, 1.0)
    assert found["blocks.1.mlp.down.weight"] == ("matrix", "adamw", 0.3, 1.0)
    assert found["norm.weight"] == found["blocks.0.attention.q_norm.weight"] == ("vector", "adamw", 0.0, 1.0)
    decayed = told(driven(decay_embeddings=True))
    assert decayed["embedding.weight"][2] == decayed["head.weight"][2] == 0.3
    assert decayed["norm.weight"][2] == 0.0
    assert told(driven(tied=True, embedding_rate=3.0))["embedding.weight"][3] == 1.0


def test_both_copies_of_a_tied_matrix_get_equal_updates_in_a_pipeline(driven) -> None:
    """Its stages have two parameters, with gradients summed over both (`parallel.pipeline.keep_stages`)."""
    made = driven(tied=True, embedding_rate=3.0)
    made.model.head.weight = torch.nn.Parameter(made.model.head.weight.detach().clone())
    rates = {name: group["rate"] for group in parameter_groups(made.model, made.settings) for name in group["names"]}
    assert rates["embedding.weight"] == rates["head.weight"] == 1.0


def test_biases_are_vectors_whatever_their_dimensions() -> None:
    assert kind_of("blocks.0.attention.qkv_bias", torch.empty(2, 4, 16)) == "vector"
    assert kind_of("blocks.0.mlp.gate_up_bias", torch.empty(2, 96)) == "vector"
    assert kind_of("position_embedding.weight", torch.empty(16, 64)) == "embedding"
    assert kind_of("classifier.weight", torch.empty(3, 64)) == "head"


# Yang et al. 2022, table 3, column Adam: embedding (input) 1, hidden 1/fan-in, head (output) 1/fan-in, vectors 1.
@pytest.mark.parametrize(
    ("settings", "matrix", "head"),
    [
        ({}, 0.25, 0.25),
        ({"kind": "lion"}, 0.25, 0.25),
        ({"kind": "muon"}, 0.5, 0.25),
    ],
)
def test_the_learning_rate_follows_the_width_and_the_decay_does_not(driven, settings, matrix, head) -> None:
    found = told(driven(base_width=16, decay_embeddings=True, **settings))
    assert found["blocks.0.attention.qkv"][2:] == pytest.approx((0.3, matrix))
    assert found["blocks.0.mlp.down.weight"][2:] == pytest.approx((0.3, matrix))
    assert found["head.weight"][2:] == pytest.approx((0.3, head))
    assert found["embedding.weight"][2:] == (0.3, 1.0)
    assert found["norm.weight"][2:] == (0.0, 1.0)


def test_a_tied_matrix_cannot_follow_the_width(driven) -> None:
    with pytest.raises(InputError, match=r"train\.optimizer\.base_width"):
        driven(tied=True, base_width=16)
