"""Laws of loss with published or chosen constants, to draw runs from and to compare fits with."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from bessemer.ladder.fit import Array, BestFit


@dataclass(frozen=True)
class Law:
    """A law of loss as a constant plus a sum of powers.

    Attributes:
        constant: E, the irreducible loss.
        coefficients: (T,) factors of the powers.
        exponents: (T,) exponents of the powers.
    """

    constant: float
    coefficients: tuple[float, ...]
    exponents: tuple[float, ...]

    def loss(self, *sizes: npt.ArrayLike) -> Array:
        """Return nats per token at these sizes: parameters and tokens for a surface, FLOPs for a line."""
        total = np.asarray(self.constant, dtype=np.float64)
        for size, coefficient, exponent in zip(sizes, self.coefficients, self.exponents, strict=True):
            total = total + coefficient * np.asarray(size, dtype=np.float64) ** -exponent
        return np.asarray(total)

    @classmethod
    def of(cls, found: BestFit) -> Self:
        """Return a fit as a law of the sizes themselves."""
        powers, row = len(found.centre), found.parameters
        exponents = row[1 + powers :]
        coefficients = np.exp(row[1 : 1 + powers] + exponents * found.centre)
        return cls(float(np.exp(row[0])), tuple(coefficients.tolist()), tuple(exponents.tolist()))
