"""AdamW and Lion against their papers' formulas in float64, over several steps."""

import numpy as np
import pytest
import torch

from bessemer.common.errors import InputError
from bessemer.train.optimizer.rules import kind_of, parameter_groups

STEPS = 6


def decayed(name: str) -> bool:
    return name.endswith((".qkv", "out.weight", "gate_up", "down.weight"))


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


def told(made) -> dict[str, tuple[str, str, float, float]]:
    """Kind, rule, decay a step and learning rate of each parameter, at a learning rate of 1."""
    names = {id(weight): name for name, weight in made.model.named_parameters()}
    return {
        names[id(weight)]: (group["kind"], group["rule"], group["weight_decay"] * group["rate"], group["rate"])
        for group in made.optimizer.param_groups
        for weight in group["params"]
    }


def test_decay_groups(driven) -> None:
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


def test_both_copies_of_a_tied_matrix_learn_alike_in_a_pipeline(driven) -> None:
    """Its stages hold them as two parameters, with gradients summed over both (`parallel.pipeline.keep_stages`)."""
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
        ({"kind": "muon", "muon_scale": "spectral"}, 1.0, 0.25),
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
    with pytest.raises(InputError, match="a head of its own"):
        driven(tied=True, base_width=16)
