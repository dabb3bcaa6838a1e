"""An update that the device skips changes no bit of weights, states and averages, whatever the gradients are; one that is not as if
the skipped one had never been."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bessemer.train.optimizer import WeightAverage
from tests.train.optimizer.conftest import Driven


def bits(driven: Driven, average: WeightAverage) -> dict[str, Any]:
    found = {name: weight.detach().clone() for name, weight in driven.model.named_parameters()}
    for name, weight in driven.model.named_parameters():
        found |= {f"{name}/{key}": value.clone() for key, value in driven.optimizer.state[weight].items()}
    return found | {f"{name}/ema": value.clone() for name, value in average.tensors.items()}


def step(driven: Driven, average: WeightAverage, number: int, skip: float, factor: float = 1.0) -> dict[str, Any]:
    for name, weight in driven.model.named_parameters():
        weight.grad = torch.from_numpy(driven.gradient(name, number)) * factor
    scalar = torch.tensor(skip)
    driven.optimizer.step(scalar)
    average.update(number, scalar)
    return bits(driven, average)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion"])
@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_skipped_update_changes_no_bit(driven: Callable[..., Driven], kind: str, cautious: bool, state: str) -> None:
    settings = {"kind": kind, "cautious_decay": cautious, "state": state}
    one, other = driven(**settings), driven(**settings)
    averages = [WeightAverage(each.model, 0.9) for each in (one, other)]
    for number in range(2):
        plain, before = step(one, averages[0], number, 0.0), step(other, averages[1], number, 0.0)
        assert plain.keys() == before.keys() and all(torch.equal(plain[name], before[name]) for name in plain)
    for factor in (math.nan, math.inf, 1e30):
        after = step(other, averages[1], 7, 1.0, factor)
        assert all(torch.equal(raw(before[name]), raw(after[name])) for name in before)
    plain, after = step(one, averages[0], 2, 0.0), step(other, averages[1], 2, 0.0)
    assert all(torch.equal(plain[name], after[name]) for name in plain)
