"""Bytes of an element of each kind of tensor in a training step."""

from __future__ import annotations

from dataclasses import dataclass

FP32 = 4  # bytes of an element


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of an element of each kind of tensor.

    Attributes:
        activation: Of hidden states, keys and values.
        cast: Of the weights' copy in the compute dtype, which FSDP2 all-gathers, or which autocast makes and the backward pass
            keeps; 0 where matmuls read the weights themselves.
        gradient: Of weights' gradients as they are added up.
        master: Of the weights that the optimizer updates.
        sums: Of the loss's sums.
    """

    activation: int
    cast: int = 0
    gradient: int = FP32
    master: int = FP32
    sums: int = FP32

    @property
    def gathered(self) -> int:
        """Return the bytes of an element of the weights as FSDP2 all-gathers them."""
        return self.cast or self.master
