"""IsoFLOP profiles: the second opinion on the best size, without a law of the loss (Hoffmann et al. 2022, section 3.2).

Of each amount of compute a parabola of the loss over log N; its lowest point is the best size; a straight line through
log N_opt over log C says what the best size of another amount is. A parabola is only near the curve: with sizes far to both
sides, or with the best one off their middle, its lowest point is biased, so the law's own optimum goes first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bessemer.ladder.fit import Fitted, Interval, Point
from bessemer.ladder.law import Array


def profiles(points: tuple[Point, ...]) -> list[dict[str, Any]]:
    """Of each amount with three sizes or more: FLOPs, the parabola's coefficients (highest power first), and its lowest
    point where it opens upwards. `inside`: whether that lies between the sizes that were trained."""
    found = []
    for group in sorted({point.group for point in points}):
        mine = [point for point in points if point.group == group]
        if len(mine) < 3:
            continue
        logs = np.log([point.parameters for point in mine])
        curve = np.polyfit(logs, [point.loss for point in mine], 2)
        lowest = float(-curve[1] / (2 * curve[0])) if curve[0] > 0 else None
        found.append(
            {
                "group": group,
                "flops": float(np.exp(np.mean(np.log([point.flops for point in mine])))),
                "curve": curve.tolist(),
                "parameters": None if lowest is None else float(np.exp(np.clip(lowest, -50, 100))),
                "inside": lowest is not None and bool(logs.min() <= lowest <= logs.max()),
            }
        )
    return found


def best_size(found: Fitted, flops: float) -> dict[str, Any] | None:
    """The best N for so much compute, by profiles whose lowest point was trained across; None with fewer than two such.

    The interval: the same for losses drawn anew about the law with its spread, of the draws that give one.
    """
    value = _through(found.points, flops)
    if value is None:
        return None
    chance, drawn = np.random.default_rng([found.seed, 2]), []
    for noise in found.noise[:200]:
        shaken = tuple(
            Point(p.name, p.group, p.parameters, p.tokens, p.flops, float(p.loss * np.exp(noise * z)))
            for p, z in zip(found.points, chance.standard_normal(len(found.points)), strict=True)
        )
        again = _through(shaken, flops)
        if again is not None:
            drawn.append(again)
    every: Array = np.array(drawn or [value])
    return {
        "parameters": Interval.of(value[0], every[:, 0]).to_dict() if drawn else None,
        "exponent": Interval.of(value[1], every[:, 1]).to_dict() if drawn else None,
        "draws": len(drawn),
    }


def _through(points: tuple[Point, ...], flops: float) -> tuple[float, float] | None:
    """N_opt at `flops` and the exponent of the line."""
    lowest = [row for row in profiles(points) if row["inside"]]
    if len(lowest) < 2:
        return None
    slope, level = np.polyfit(
        np.log([row["flops"] for row in lowest]), np.log([row["parameters"] for row in lowest]), 1
    )
    return float(np.exp(np.clip(level + slope * np.log(flops), -50, 200))), float(slope)
