"""The newest checkpoint of a run folder."""

from __future__ import annotations

from pathlib import Path

from bessemer.checkpoint import latest
from bessemer.distributed.mesh import SINGLE_PROCESS
from bessemer.distributed.sharded_tensors import tensors_digest


def weights_hash(run: Path) -> str:
    """A hash of its weights: equal for two runs that agree bit for bit, whatever their layouts."""
    checkpoint = latest(run / "checkpoints")
    assert checkpoint is not None
    return tensors_digest(checkpoint.tensors("model").items(), SINGLE_PROCESS)
