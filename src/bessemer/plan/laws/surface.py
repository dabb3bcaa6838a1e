"""The loss over sizes and tokens as plain series, for a picture: the surface, lines of equal compute, the optimal line, plans."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bessemer.errors import InputError
from bessemer.plan.laws.chinchilla import FLOPS_PER_PARAMETER_TOKEN, FRONTIERS, REPLICATION, LossLaw


@dataclass(frozen=True)
class Line:
    """Points of one size: parameters[i] with tokens[i]."""

    name: str
    parameters: tuple[float, ...]
    tokens: tuple[float, ...]


@dataclass(frozen=True)
class Surface:
    """loss[i][j] at tokens[i] and parameters[j], nats a token; budgets: lines of equal compute by FLOPs; optima: the optimal
    line of each law; here: the plan that the picture is around."""

    parameters: tuple[float, ...]
    tokens: tuple[float, ...]
    loss: tuple[tuple[float, ...], ...]
    budgets: dict[float, Line]
    optima: dict[str, Line]
    here: tuple[float, float]
    law: str


def surface(
    parameters: float, tokens: float, law: LossLaw = REPLICATION, points: int = 41, decades: float = 2.0
) -> Surface:
    """The surrounding of a plan, `decades` powers of ten to each side on both axes, with one line of equal compute through the
    plan and others by powers of ten from it."""
    if points < 2 or not decades > 0:
        raise InputError(
            f"a surface of {points} points over {decades:g} decades: give two points and some width at least"
        )
    across = _around(parameters, points, decades)
    up = _around(tokens, points, decades)
    flops = FLOPS_PER_PARAMETER_TOKEN * parameters * tokens
    budgets = {flops * 10.0**power: _budget(flops * 10.0**power, across, up) for power in range(-3, 4)}
    return Surface(
        parameters=across,
        tokens=up,
        loss=tuple(tuple(law.loss(size, count) for size in across) for count in up),
        budgets={budget: line for budget, line in budgets.items() if line.parameters},
        optima={
            key: Line(frontier.name, across, tuple(frontier.optimal_tokens(size) for size in across))
            for key, frontier in FRONTIERS.items()
        },
        here=(parameters, tokens),
        law=law.name,
    )


def _around(centre: float, points: int, decades: float) -> tuple[float, ...]:
    if not centre > 0:
        raise InputError(f"{centre:g} is not above zero")
    low = math.log10(centre) - decades
    return tuple(10.0 ** (low + 2 * decades * i / (points - 1)) for i in range(points))


def _budget(flops: float, across: tuple[float, ...], up: tuple[float, ...]) -> Line:
    """Where 6 N D is `flops`, within the picture."""
    inside = [(size, flops / (FLOPS_PER_PARAMETER_TOKEN * size)) for size in across]
    kept = [(size, count) for size, count in inside if up[0] * 0.999 <= count <= up[-1] * 1.001]
    return Line(f"{flops:.3g} FLOPs", tuple(size for size, _ in kept), tuple(count for _, count in kept))
