"""The optimizer's state: saved, put back, refused."""

from pathlib import Path

import numpy as np
import pytest
import torch

from bessemer.checkpoint import save
from bessemer.common.errors import BessemerError
from bessemer.train import optimizer as optimizers


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion"])
@pytest.mark.parametrize("state", ["fp32", "8bit"])
def test_a_saved_state_goes_on_bit_for_bit(driven, kind: str, state: str, tmp_path) -> None:
    straight = driven(kind=kind, state=state)
    straight.take(6)
    first, second = driven(kind=kind, state=state), driven(kind=kind, state=state)
    first.take(3)
    tensors = optimizers.state_tensors(first.model, first.optimizer)
    saved_there = save(tmp_path, 3, {"optimizer": tensors}, {}, keep=1)
    with torch.no_grad():
        for (_, there), (_, here) in zip(second.model.named_parameters(), first.model.named_parameters(), strict=True):
            there.copy_(here)
    optimizers.load_state(second.model, second.optimizer, saved_there)
    second.taken = 3
    second.take(3)
    for name, weight in straight.weights().items():
        assert np.array_equal(second.weights()[name], weight), name
    saved = optimizers.state_tensors(second.model, second.optimizer)
    for name, tensor in optimizers.state_tensors(straight.model, straight.optimizer).items():
        assert torch.equal(saved[name], tensor), name


def test_fp32_adamw_is_torchs_bit_for_bit(driven) -> None:
    made = driven()
    wanted = driven()
    theirs = torch.optim.AdamW(
        [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in wanted.optimizer.param_groups],
        lr=0.01, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    for group in theirs.param_groups:
        group["rate"] = 1.0
    wanted.optimizer = theirs
    left, right = made.take(4), wanted.take(4)
    assert all(np.array_equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [({"state": "8bit"}, {}), ({}, {"state": "8bit"}), ({"kind": "lion"}, {}), ({}, {"kind": "muon"})],
)
def test_a_state_of_another_kind_is_refused(driven, saved, loaded, tmp_path: Path) -> None:
    first, second = driven(**saved), driven(**loaded)
    first.take(1)
    there = save(tmp_path, 1, {"optimizer": optimizers.state_tensors(first.model, first.optimizer)}, {}, keep=1)
    with pytest.raises(BessemerError, match="the optimizer state of .* is .*, but this recipe's"):
        optimizers.load_state(second.model, second.optimizer, there)


@pytest.mark.parametrize(("state", "bytes_each"), [("fp32", 8), ("8bit", 2 + 8 / 256)])
def test_the_state_weighs_what_it_should(driven, state: str, bytes_each: float) -> None:
    made = driven(state=state)
    made.take(1)
    for weight in made.model.parameters():
        held = sum(value.nbytes for key, value in made.optimizer.state[weight].items() if key != "step")
        assert held == weight.numel() * (bytes_each if weight.numel() >= 4096 else 8)
