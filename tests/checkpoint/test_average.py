"""The mean of checkpoints."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from bessemer.checkpoint import save
from bessemer.checkpoint.format import SavedCheckpoint, weight_reader
from bessemer.checkpoint.protocol import find_newest
from bessemer.common.errors import InputError


def saved(folder: Path, step: int, **weights: torch.Tensor) -> dict[str, torch.Tensor]:
    save(folder, step, {"model": weights}, {}, keep=10)
    return weights


def mean_weights(checkpoints: list[SavedCheckpoint]) -> dict[str, torch.Tensor]:
    with ExitStack() as stack:
        read = weight_reader(checkpoints, stack)
        return {name: read(name) for name in checkpoints[0].contents["model"]}


def test_the_mean_is_that_of_the_newest(tmp_path: Path) -> None:
    made = [saved(tmp_path, step, w=torch.randn(5, 7), b=torch.randn(3)) for step in (10, 20, 30, 40)]
    found = find_newest(tmp_path, 3, print)
    assert [checkpoint.step for checkpoint in found] == [40, 30, 20]
    mean = mean_weights(found)
    for name in ("w", "b"):
        wanted = torch.stack([weights[name].double() for weights in made[1:]]).mean(0)
        assert mean[name].dtype == torch.float32
        torch.testing.assert_close(mean[name].double(), wanted, rtol=1e-7, atol=1e-9)


def test_a_damaged_one_is_passed_over_and_too_few_are_refused(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step, w=torch.full((2,), float(step)))
    with open(tmp_path / "step-00000002" / "model.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    said: list[str] = []
    assert mean_weights(find_newest(tmp_path, 2, said.append))["w"].tolist() == [2.0, 2.0]
    assert len(said) == 1 and "step-00000002" in said[0]
    with pytest.raises(InputError, match="3 checkpoints are wanted, .* has 2 whole ones"):
        find_newest(tmp_path, 3, print)
