"""The tensors_digest of the weights: one number however they are divided, in little memory."""

import torch

from bessemer.distributed import sharded_tensors
from bessemer.distributed.mesh import SINGLE_PROCESS


def test_the_tensors_digest_of_weights_that_were_saved_before_stays() -> None:
    ramp = torch.arange(3_000_000, dtype=torch.float32).view(1500, 2000)
    assert (
        sharded_tensors.tensors_digest([("a", ramp), ("b", torch.tensor(3.0))], SINGLE_PROCESS)
        == "e708e148c32d64470181532e1afb28cb"
    )
