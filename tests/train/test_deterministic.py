"""The kernels that train.deterministic chooses."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from bessemer.recipe.train import Train
from bessemer.train.device import choose
from tests.train.faulty_runs import copied, train

CHOICES = [("auto", True, False), ("on", True, True), ("off", False, False)]


@pytest.mark.parametrize(("value", "on_cpu", "on_cuda"), CHOICES)
def test_auto_is_deterministic_on_a_cpu_and_fast_on_cuda(
    value: Literal["auto", "on", "off"], on_cpu: bool, on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose(Train(device="cpu", deterministic=value)).deterministic == on_cpu
    for name, answer in (
        ("is_available", True),
        ("device_count", 1),
        ("set_device", None),
        ("get_device_name", "GPU"),
        ("get_device_capability", (9, 0)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, answer=answer: answer)
    assert choose(Train(device="cuda", precision="fp32", deterministic=value)).deterministic == on_cuda


def test_a_training_sets_the_kernels(runs: Path, recipe_file: Path) -> None:
    for value, mode in (("off", 0), ("on", 1)):
        train(recipe_file, copied(runs, value), "train.steps=1", "checkpoint.every=1", f"train.deterministic={value}")
        assert torch.get_deterministic_debug_mode() == mode
