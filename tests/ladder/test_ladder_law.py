"""The best fit of the laws: published ones come back, no other optimiser gets lower."""

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import huber

from bessemer.ladder.fit import HUBER_DELTA, Array, fit, predicted
from tests.ladder.laws import Law

# Hoffmann et al. 2022, equation 10; Besiroglu et al. 2024, table 1.
HOFFMANN = Law(1.69, (406.4, 410.7), (0.34, 0.28))
BESIROGLU = Law(1.8172, (482.01, 2085.43), (0.3478, 0.3658))
PUBLISHED = pytest.mark.parametrize("law", [HOFFMANN, BESIROGLU], ids=["hoffmann", "besiroglu"])


def runs(law: Law, noise: float = 0.0, seed: int = 0) -> tuple[Array, Array]:
    """72 runs of nine amounts of compute, as Hoffmann et al. chose them: (n, 2) sizes, (n,) losses."""
    compute = np.repeat([6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21], 8)
    parameters = np.sqrt(compute / 120) * np.tile(np.geomspace(0.2, 5.0, 8), 9)
    tokens = compute / 6 / parameters
    drawn = np.exp(noise * np.random.default_rng(seed).standard_normal(len(compute)))
    return np.stack([parameters, tokens], axis=1), law.loss(parameters, tokens) * drawn


@PUBLISHED
def test_a_law_without_noise_comes_back(law: Law) -> None:
    found = Law.of(fit(*runs(law)))
    assert found.constant == pytest.approx(law.constant, rel=1e-9)
    assert found.coefficients == pytest.approx(law.coefficients, rel=1e-7)
    assert found.exponents == pytest.approx(law.exponents, rel=1e-9)


def test_no_other_optimiser_gets_lower() -> None:
    sizes, losses = runs(BESIROGLU, noise=0.01, seed=1)
    found = fit(sizes, losses)
    x, y = np.log(sizes) - found.centre, np.log(losses)

    def objective(place: Array) -> float:
        return 1e5 * float(huber(HUBER_DELTA, predicted(place[None], x)[0][0] - y).sum())

    chance = np.random.default_rng(0)
    starts = [found.parameters * (1 + 0.3 * chance.standard_normal(5)) for _ in range(4)]
    others = [minimize(objective, start, method="BFGS", options={"gtol": 1e-9, "maxiter": 4000}) for start in starts]
    near = minimize(objective, found.parameters, method="Nelder-Mead", options={"maxfev": 4000, "fatol": 1e-12})
    lowest = min([near.fun, *(other.fun for other in others)])
    assert 1e5 * found.objective <= lowest * (1 + 1e-6)
    assert 1e5 * found.objective == pytest.approx(lowest, rel=1e-4), "and another comes as low: it is the minimum"


def test_derivatives_are_those_of_differences() -> None:
    chance = np.random.default_rng(2)
    place, x = chance.standard_normal((1, 5)) * 0.3, chance.standard_normal((7, 2))
    _, slopes = predicted(place, x)
    for number in range(5):
        step = np.zeros(5)
        step[number] = 1e-6
        difference = (predicted(place + step, x)[0] - predicted(place - step, x)[0]) / 2e-6
        assert slopes[0, :, number] == pytest.approx(difference[0], abs=1e-8)


def test_one_wild_run_moves_the_law_little() -> None:
    sizes, losses = runs(BESIROGLU, noise=0.002, seed=5)
    before = Law.of(fit(sizes, losses))
    losses[10] *= 1.3
    after = Law.of(fit(sizes, losses))
    at = (7e10, 1.4e12)
    assert float(after.loss(*at)) == pytest.approx(float(before.loss(*at)), rel=2e-3)


def test_a_line_comes_back() -> None:
    compute = np.geomspace(1e15, 1e19, 9)
    law = Law(1.9, (2500.0,), (0.19,))
    found = Law.of(fit(compute[:, None], law.loss(compute)))
    assert (found.constant, *found.coefficients, *found.exponents) == pytest.approx((1.9, 2500.0, 0.19), rel=1e-6)
