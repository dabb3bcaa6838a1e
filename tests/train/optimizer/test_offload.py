"""Moments kept elsewhere change no bit."""

import numpy as np
import pytest
import torch

from bessemer.recipe import Optimizer as Settings
from bessemer.train import optimizer as optimizers
from bessemer.train.optimizer import moments


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion"])
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_moments_that_travel_give_the_same_bits(driven, kind: str, state: str, monkeypatch) -> None:
    """The way CUDA takes, copies and bunches, on a CPU and without pinned memory."""
    monkeypatch.setattr(moments, "OFFLOAD_BATCH_BYTES", 100_000)  # several bunches
    stays, travels = driven(kind=kind, state=state), driven(kind=kind, state=state)
    travels.optimizer.offload = moments.CpuOffload(pinned=False)
    left, right = stays.take(4), travels.take(4)
    assert all(np.array_equal(left[name], right[name]) for name in left)
    saved = optimizers.state_tensors(stays.model, stays.optimizer)
    for name, tensor in optimizers.state_tensors(travels.model, travels.optimizer).items():
        assert torch.equal(saved[name], tensor), name


def test_on_a_cpu_it_changes_nothing(driven) -> None:
    made = driven(offload=True)
    assert made.optimizer.offload is None
    left, right = made.take(3), driven().take(3)
    assert all(np.array_equal(left[name], right[name]) for name in left)


def test_bunches_hold_every_parameter_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments, "OFFLOAD_BATCH_BYTES", 10)
    weights = [torch.empty(count) for count in (4, 4, 4, 30, 1)]
    states = [{"m": torch.empty(len(weight), dtype=torch.uint8)} for weight in weights]
    parts = list(moments.offload_batches(weights, states))
    assert [(part.start, part.stop) for part in parts] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert list(moments.offload_batches([], [])) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["adamw", "muon", "lion"])
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_on_cuda_offloaded_moments_give_the_same_bits(kind: str, state: str) -> None:
    from bessemer.model.config import ModelConfig
    from bessemer.model.transformer import build_model

    config = ModelConfig(
        vocabulary=256, layers=2, width=128, heads=4, kv_heads=2, head_dim=32, mlp_width=256, sequence_length=16
    )
    found = []
    for offloaded in (False, True):
        model = build_model(config, 0).to("cuda")
        settings = Settings(learning_rate=0.01, betas=(0.9, 0.95), kind=kind, state=state, offload=offloaded)  # type: ignore[arg-type]
        optimizer = optimizers.build(model, settings)
        assert (optimizer.offload is not None) == offloaded
        generator = torch.Generator("cuda").manual_seed(0)
        for _ in range(5):
            for weight in model.parameters():
                weight.grad = torch.randn(weight.shape, device="cuda", generator=generator)
            optimizer.step()
        state_of = optimizers.state_tensors(model, optimizer)
        if offloaded:
            assert all(
                tensor.device.type == "cpu" and tensor.is_pinned() for tensor in state_of.values() if tensor.dim()
            )
        found.append(
            ({n: w.detach().cpu() for n, w in model.named_parameters()}, {n: t.cpu() for n, t in state_of.items()})
        )
    for left, right in zip(*found, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
