"""Bytes per element of each kind of tensor in a training step."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.model.sublayers import FP32


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element of each kind of tensor.

    Attributes:
        activation: Hidden states, keys and values.
        cast: The weights' copy in the compute dtype, which FSDP2 all-gathers, or which autocast makes and the backward pass
            keeps; 0 if matmuls read the weights directly.
        gradient: Sums of the weights' gradients.
        master: Weights that the optimizer updates.
    """

    activation: int
    cast: int = 0
    gradient: int = FP32
    master: int = FP32

    @property
    def gathered(self) -> int:
        """The bytes per element of the weights that FSDP2 all-gathers."""
        return self.cast or self.master
