"""Muon against its formulas in float64, real matrix by real matrix."""

import numpy as np
import pytest
import torch

from bessemer.train.optimizer.muon import orthogonalise

STEPS = 4


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Five steps of the quintic on the singular values, which is what the iteration does, by a decomposition."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    s = s / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


def by_hand(weight: np.ndarray, gradients: list[np.ndarray], size: float, decay: float, momentum: float) -> np.ndarray:
    moment = np.zeros_like(weight)
    for step, gradient in enumerate(gradients):
        rate = 0.01 / (step + 1)
        moment = momentum * moment + (1 - momentum) * gradient
        ahead = momentum * moment + (1 - momentum) * gradient
        weight = weight * (1 - rate * decay) - rate * size * newton_schulz(ahead)
    return weight


def real_matrices(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Queries, keys, values, gate and up as transformers would have them, from our fused parameters."""
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


@pytest.mark.parametrize("scale", ["match_rms", "spectral"])
def test_muon_by_hand(driven, scale: str) -> None:
    made = driven(kind="muon", muon_scale=scale, muon_rate=1.5, muon_momentum=0.9)
    before = made.weights()
    found = made.take(STEPS)
    for name in before:
        if not name.endswith((".qkv", "out.weight", "gate_up", "down.weight")):
            continue
        gradients = [real_matrices(name, made.gradient(name, step).astype(np.float64)) for step in range(STEPS)]
        for part, weight in real_matrices(name, before[name]).items():
            rows, columns = weight.shape
            size = 0.2 * max(rows, columns) ** 0.5 if scale == "match_rms" else max(1.0, rows / columns) ** 0.5
            wanted = by_hand(weight, [g[part] for g in gradients], 1.5 * size, 1.5 * 0.3, 0.9)
            np.testing.assert_allclose(
                real_matrices(name, found[name])[part], wanted, rtol=0, atol=5e-6, err_msg=f"{name} {part}"
            )


def test_the_rest_is_adamw(driven) -> None:
    muon, adamw = driven(kind="muon").take(STEPS), driven().take(STEPS)
    rest = [name for name in muon if not name.endswith((".qkv", "out.weight", "gate_up", "down.weight"))]
    assert {"embedding.weight", "head.weight", "norm.weight"} <= set(rest)
    assert all(np.array_equal(muon[name], adamw[name]) for name in rest)


def test_a_zero_matrix_stays_zero() -> None:
    assert float(orthogonalise(torch.zeros(2, 8, 4)).abs().max()) == 0.0


def test_stacks_of_any_size_give_the_same(driven, monkeypatch: pytest.MonkeyPatch) -> None:
    from bessemer.train.optimizer import muon

    whole = driven(kind="muon").take(2)
    monkeypatch.setattr(muon, "STACK_ELEMENTS", 1)
    alone = driven(kind="muon").take(2)
    for name in whole:
        np.testing.assert_allclose(alone[name], whole[name], rtol=0, atol=2e-6)
