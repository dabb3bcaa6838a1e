"""The loss surface of the textbook: losses around trained weights, along two random directions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from bessemer.recipe import Recipe
from bessemer.report.static import heat_map
from bessemer.studies import text
from bessemer.studies.base import MAX_BYTES, Row, Rows, Variation, build, fit, python_text, scored
from bessemer.train.trainer import Trainer

SEQUENCES = 16  # held-out ones, for each point


@torch.no_grad()
def grid(trainer: Trainer, edge: int) -> list[list[float]]:
    """Held-out losses (nats) on an `edge` x `edge` grid from -1 to 1 along two random directions, each filter of which has
    the norm of the weights' own (Li et al. 2018, section 4); vectors, such as gains of norms, stay. edge: odd."""
    draw, weights = torch.Generator().manual_seed(0), [p for p in trainer.model.parameters() if p.ndim > 1]
    start = [p.clone() for p in weights]
    directions = []
    for _ in range(2):
        noise = [torch.randn(p.shape, generator=draw) for p in weights]
        directions.append(
            [n * p.norm(dim=-1, keepdim=True) / n.norm(dim=-1, keepdim=True) for n, p in zip(noise, start, strict=True)]
        )
    part = text.held_out(SEQUENCES, trainer.model.config.sequence_length, MAX_BYTES)
    steps = np.linspace(-1, 1, edge).tolist()
    rows = list[list[float]]()
    for a in steps:
        rows.append([])
        for b in steps:
            for p, origin, first, second in zip(weights, start, *directions, strict=True):
                p.copy_(origin + a * first + b * second)
            rows[-1].append(scored(trainer, part).loss)
    for p, origin in zip(weights, start, strict=True):
        p.copy_(origin)
    return rows


def _surface(recipe: Recipe, steps: int | None = None, edge: int = 21) -> Row:
    trainer = build(recipe)
    row = fit(trainer, python_text(recipe), 0, steps)
    around = grid(trainer, edge)
    middle = edge // 2
    center, rim = around[middle][middle], [around[0][middle], around[-1][middle], around[middle][0], around[middle][-1]]
    return {**row, "grid": around, "center": center, "rim": sum(rim) / len(rim), "lowest": min(map(min, around)),
            "near": float((np.array(around) < center + 0.5).mean())}  # fmt: skip


class LossSurface(Variation):
    """A variation whose figure is the grid around its last variant."""

    def plot(self, results: dict[str, Any]) -> str:
        name, row = list(results["rows"].items())[-1]
        title = f"Held-out loss around the weights, {name}; dark: low"
        return heat_map(title, row["grid"], "first direction, -1 to 1", "second direction")


def _shows(rows: Rows) -> list[str]:
    first, last = rows["at initialisation"], rows["trained"]
    lowest = (
        "the lowest point" if last["lowest"] >= last["center"] else f"above the lowest point ({last['lowest']:.2f})"
    )
    return [
        f"The trained weights ({last['center']:.2f} nats) are {lowest} of their grid; at a distance of 1 the loss is "
        f"{last['rim']:.2f}.",
        f"Around the initial weights it goes from {first['center']:.2f} to {first['rim']:.2f} over the same distance: "
        f"training has made the "
        f"surface {'steeper' if last['rim'] - last['center'] > first['rim'] - first['center'] else 'no steeper'}.",
        f"{last['near']:.0%} of the trained grid lies within half a nat of the middle, {first['near']:.0%} of the initial one.",
    ]


loss_surface = LossSurface(
    expected="A basin with the trained weights at its bottom, round and without other minima nearby for networks that train "
    "well (Li et al. "
    "2018).",
    variants={"at initialisation": {"steps": 0}, "trained": {}},
    conclude=_shows, tokens=600_000, train=_surface, measures=("center", "rim", "lowest", "near"),
)  # fmt: skip
