"""Results of a fitted ladder: the law with its uncertainty, the predicted loss, the left-out rung and the best size.

Every interval has 80% of the draws. These include the parameters of a residual bootstrap (`fit.bootstrap`), the spread
of runs about the law, and the error of the law's form beyond the largest run.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import log
from typing import Any

import numpy as np

from bessemer.common.errors import InputError
from bessemer.ladder.design import NUM_PARAMETERS, Design
from bessemer.ladder.fit import Array, BestFit, bootstrap, fit, predicted

WITHIN = 0.80  # share of the draws inside an interval
# Standard deviation of the log loss that the law's form misses at e times the compute of the largest run. It increases with the
# logarithm of the distance to the power 1.5. Chosen on ten texts (docs/background/ladder.md).
DRIFT = 0.02
SAME_COMPUTE = 0.9  # rungs with at least this share of the largest one's compute belong to its amount
REPEATS = 20  # draws of each refit, with different residual and drift
# Increase of the log loss for e times the batch at the same tokens, and thus fewer steps. It is the coefficient of the rounding
# of small batches to whole sequences on ten ladders of 139 to 370 steps (0.05, standard deviation between texts 0.03).
BATCH_EFFECT = 0.05
MOST_EXCESS = (
    0.2  # largest effect of rounding from 2 sequences; also the correction for a batch that a bound moves further
)


def batch_effect(design: Design, excess: float) -> float:
    """Return the increase of the log loss if a batch exceeds that of the scaling law by `excess` (`design.batch_excess`).

    It is negative for a smaller batch, and 0 for an isoflop ladder, because it was measured only on ratio ladders.
    """
    return 0.0 if design == "isoflop" else BATCH_EFFECT * min(max(excess, -MOST_EXCESS), MOST_EXCESS)


@dataclass(frozen=True)
class Point:
    """A finished run.

    Attributes:
        name: Name of the rung.
        group: Index of its amount of compute (`Rung.group`).
        parameters: N.
        tokens: D.
        flops: C.
        loss: Held-out loss in nats per token.
        batch_excess: Logarithm of the ratio of its batch to the law's (`design.batch_excess`).
    """

    name: str
    group: int
    parameters: float
    tokens: float
    flops: float
    loss: float
    batch_excess: float = 0.0


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its 80% interval, the central share of random draws (bootstrap, and noise for a loss)."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, samples: Array) -> Interval:
        """Return a value with the 10th and the 90th percentile of the draws `samples`."""
        edge = 100 * (1 - WITHIN) / 2
        low, high = np.percentile(samples, [edge, 100 - edge])
        return cls(float(value), float(low), float(high))

    def covers(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class FittedLaw:
    """A law fitted to runs.

    Attributes:
        design: Design of the ladder.
        points: The runs.
        best: The best fit.
        bootstrap: (draws, P) parameters from the bootstrap.
        residuals: (n,) residuals of the runs' log losses, scaled as the bootstrap resamples them.
        spread: Standard deviation of the log losses about the best fit.
        freedom: Number of runs minus parameters of the law.
        seed: Seed of the random numbers.
    """

    design: Design
    points: tuple[Point, ...]
    best: BestFit
    bootstrap: Array
    residuals: Array
    spread: float
    freedom: int
    seed: int

    def loss(
        self, parameters: float, tokens: float, flops: float, of_a_run: bool = True, batch_excess: float = 0.0
    ) -> Interval:
        """Predict the loss at a size, as the median with its interval.

        Args:
            parameters: N.
            tokens: D.
            flops: C.
            of_a_run: True for the loss of a single run, whose interval includes the spread of sizes and seeds.
            batch_excess: Logarithm of the ratio of the run's batch to that of the scaling law (`design.batch_excess`).
        """
        chance = np.random.default_rng([self.seed, 1])
        x_T = np.log(arguments(self.design, [(parameters, tokens, flops)])) - self.best.centre
        logs = np.repeat(predicted(self.bootstrap, x_T)[0][:, 0], REPEATS) + batch_effect(self.design, batch_excess)
        beyond = max(log(flops / max(point.flops for point in self.points)), 0.0)
        logs += DRIFT * beyond**1.5 * chance.standard_normal(len(logs))
        if of_a_run:
            logs += chance.choice(self.residuals, len(logs))
        return Interval.of(float(np.exp(np.median(logs))), np.exp(logs))


def arguments(design: Design, runs: list[tuple[float, float, float]]) -> Array:
    """Return the (n, T) arguments of the design's law, (N, D) or C, from (N, D, C) of each run."""
    table = np.array([tuple(run) for run in runs], dtype=np.float64)
    return table[:, :2] if design == "isoflop" else table[:, 2:]


def num_sizes(points: tuple[Point, ...]) -> int:
    """Return the number of rungs of different size or length; runs that differ only in their seed count once."""
    return len({(point.parameters, point.tokens) for point in points})


def fit_law(design: Design, points: tuple[Point, ...], seed: int = 0) -> FittedLaw:
    """Fit the design's law to finished runs. Raises InputError for no more sizes than parameters of the law."""
    if num_sizes(points) <= NUM_PARAMETERS[design]:
        raise InputError(
            f"ladder: {num_sizes(points)} finished rungs are too few for the law of --design {design}, which has "
            f"{NUM_PARAMETERS[design]} parameters; give more with --rungs"
        )
    sizes = arguments(design, [(point.parameters, point.tokens, point.flops) for point in points])
    logs = np.array([log(point.loss) - batch_effect(design, point.batch_excess) for point in points])
    best, freedom = fit(sizes, np.exp(logs)), len(points) - NUM_PARAMETERS[design]
    spread = float(np.sqrt(((logs - best.log_loss(np.log(sizes))) ** 2).sum() / freedom))
    return FittedLaw(
        design, points, best, *bootstrap(best, np.log(sizes) - best.centre, logs, seed), spread, freedom, seed
    )


def left_out(design: Design, points: tuple[Point, ...], seed: int = 0) -> dict[str, Any] | None:
    """Test the law: predict the loss of the largest rung from the smaller ones; None if too few are left.

    Rungs with the same amount of compute are left out too if enough others remain, so that the prediction extrapolates.
    Returns the rung's `name`, the number of sizes fitted (`from_rungs`), the ratio of compute to the largest of them
    (`beyond`), the `predicted` interval, the `measured` loss, the relative `error`, and True if the interval has it (`covered`).
    """
    largest = max(points, key=lambda point: (round(np.log(point.flops), 1), point.parameters))
    others = tuple(point for point in points if point is not largest)
    below = tuple(point for point in others if point.flops < SAME_COMPUTE * largest.flops)
    rest = below if num_sizes(below) >= NUM_PARAMETERS[design] + 2 else others
    if num_sizes(rest) <= NUM_PARAMETERS[design]:
        return None
    law = fit_law(design, rest, seed)
    guess = law.loss(largest.parameters, largest.tokens, largest.flops, batch_excess=largest.batch_excess)
    return {
        "name": largest.name, "from_rungs": num_sizes(rest), "beyond": largest.flops / max(point.flops for point in rest),
        "predicted": asdict(guess), "measured": largest.loss, "error": guess.value / largest.loss - 1,
        "covered": guess.covers(largest.loss),
    }  # fmt: skip


def optimum(fitted: FittedLaw, flops: float, flops_per_parameter: float) -> dict[str, Any]:
    """Return the best size and number of tokens for an amount of compute, from a fitted surface.

    This is the minimum of the law under C = k N D (Hoffmann et al. 2022, equation 4). `flops_per_parameter` is k. The result
    has an interval for each of `parameters` (N), `tokens` (D), `tokens_per_parameter`, `exponent` (of C in N) and `loss`.
    """
    log_a, log_b, alpha, beta = np.concatenate([fitted.best.parameters[None, 1:], fitted.bootstrap[:, 1:]]).T
    log_a, log_b = log_a + alpha * fitted.best.centre[0], log_b + beta * fitted.best.centre[1]
    share = beta / (alpha + beta)
    log_n = (np.log(alpha / beta) + log_a - log_b) / (alpha + beta) + share * np.log(flops / flops_per_parameter)
    size = np.exp(np.clip(log_n, -50, 200))
    tokens = flops / flops_per_parameter / size
    values = {"parameters": size, "tokens": tokens, "tokens_per_parameter": tokens / size, "exponent": share}
    best = {name: asdict(Interval.of(value[0], value[1:])) for name, value in values.items()}
    return {**best, "loss": asdict(fitted.loss(size[0], tokens[0], flops, of_a_run=False))}
