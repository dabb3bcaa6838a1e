"""AdamW and Lion against their papers' formulas in float64, over several steps."""

import numpy as np
import pytest

STEPS = 6


def decayed(name: str) -> bool:
    return name.endswith((".qkv", "out.weight", "gate_up", "down.weight"))


def test_adamw_by_hand(driven) -> None:
    made = driven(eps=1e-6, embedding_rate=2.0)
    wanted = made.weights()
    found = made.take(STEPS)
    for name, weight in wanted.items():
        m = v = np.zeros_like(weight)
        for step in range(STEPS):
            g = made.gradient(name, step).astype(np.float64)
            rate = 0.01 / (step + 1) * (2.0 if name == "embedding.weight" else 1.0)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            corrected = (m / (1 - 0.9 ** (step + 1))) / (np.sqrt(v / (1 - 0.95 ** (step + 1))) + 1e-6)
            weight = weight - rate * (0.3 if decayed(name) else 0.0) * weight - rate * corrected
        np.testing.assert_allclose(found[name], weight, rtol=0, atol=1e-6, err_msg=name)


def test_lion_by_hand(driven) -> None:
    made = driven(kind="lion", betas=(0.9, 0.99))
    wanted = made.weights()
    found = made.take(STEPS)
    ties = 0
    for name, weight in wanted.items():
        m = np.zeros_like(weight)
        near = np.zeros(weight.shape, dtype=bool)
        for step in range(STEPS):
            g = made.gradient(name, step).astype(np.float64)
            rate = 0.01 / (step + 1)
            direction = 0.9 * m + 0.1 * g
            near |= (np.abs(direction) < 1e-7 * np.abs(g)) & (direction != 0)  # fp32 may see the other sign
            weight = weight - rate * (np.sign(direction) + (0.3 if decayed(name) else 0.0) * weight)
            m = 0.99 * m + 0.01 * g
        ties += int(near.sum())
        np.testing.assert_allclose(found[name][~near], weight[~near], rtol=0, atol=1e-6, err_msg=name)
    assert ties <= 3


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon"])
def test_cautious_decay_by_hand(driven, kind: str) -> None:
    """From the same step without decay, which the other tests hold: what aligned elements lose more."""
    plain, cautious = driven(kind=kind, weight_decay=0.0), driven(kind=kind, cautious_decay=True)
    before, moved, found = plain.weights(), plain.take(1), cautious.take(1)
    shares = []
    for name, weight in before.items():
        step = weight - moved[name]
        aligned = (step * weight >= 0) & decayed(name)
        shares.append(aligned.mean() if decayed(name) else 0.5)
        np.testing.assert_allclose(
            found[name], moved[name] - 0.01 * 0.3 * weight * aligned, rtol=0, atol=1e-7, err_msg=name
        )
    assert all(0.3 < share < 0.8 or share == 1.0 for share in shares), "matrices that start at zero have no sign"
