"""The moving average of the weights, by hand in float64."""

import numpy as np
import pytest
import torch
from torch import nn

from bessemer.train.optimizer import WeightAverage


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 4)


@pytest.mark.parametrize("decay", [0.3, 0.999])
def test_by_hand(decay: float) -> None:
    made = model()
    average = WeightAverage(made, decay)
    wanted = {name: weight.detach().double().numpy() for name, weight in made.named_parameters()}
    for step in range(30):
        with torch.no_grad():
            for weight in made.parameters():
                weight.add_(torch.randn(weight.shape))
        average.update(step, torch.tensor(0.0))
        d = min(decay, (1 + step) / (10 + step))
        for name, weight in made.named_parameters():
            wanted[name] = d * wanted[name] + (1 - d) * weight.detach().double().numpy()
    for name, found in average.tensors.items():
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found.double().numpy(), wanted[name], rtol=0, atol=2e-6)


def test_in_place_and_back_is_exact() -> None:
    made = model()
    average = WeightAverage(made, 0.9)
    with torch.no_grad():
        made.weight.mul_(1.2345)
    average.update(50, torch.tensor(0.0))
    trained, averaged = made.weight.detach().clone(), average.tensors["weight"].clone()
    assert not torch.equal(trained, averaged)
    with average.swapped_in():
        assert torch.equal(made.weight, averaged)
    assert torch.equal(made.weight, trained)
    assert torch.equal(average.tensors["weight"], averaged)
