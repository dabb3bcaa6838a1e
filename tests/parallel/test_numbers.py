"""The tensors_digest of the weights: one number however they are divided, in little memory."""

from __future__ import annotations

import sys

import pytest
import torch

from bessemer.parallel import dtensors
from bessemer.parallel.mesh import SINGLE_PROCESS
from bessemer.train import device


def test_the_tensors_digest_of_weights_that_were_saved_before_stays() -> None:
    ramp = torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000)
    assert (
        dtensors.tensors_digest([("a", ramp), ("b", torch.tensor(3.0))], SINGLE_PROCESS)
        == "e708e148c32d64470181532e1afb28cb"
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
def test_the_tensors_digest_takes_little_memory() -> None:
    weights = torch.zeros(16_000_000)
    dtensors.tensors_digest([("small", weights[:10])], SINGLE_PROCESS)
    device.reset_peak_resident()
    before = device.resident_bytes()
    dtensors.tensors_digest([("a", weights)], SINGLE_PROCESS)
    assert device.peak_resident_bytes() - before < 64e6, "less than the weights themselves"
