"""Plans from Python: what a training takes on devices of the catalogue."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bessemer.api import html
from bessemer.api.keys import write_overrides
from bessemer.plan import plan_result
from bessemer.plan.plan_result import PlanResult
from bessemer.plan.tables import model_line, plan_rows, plan_table
from bessemer.workflow import choose_layout


class TrainingPlan:
    """A layout with its memory, step time, days and cost. Made by `bessemer.plan_training`.

    Attributes:
        result: The plan as the planner computes it.
    """

    def __init__(self, result: PlanResult) -> None:
        self.result = result

    @property
    def fits(self) -> bool:
        """Return True if the job fits in the memory of the devices."""
        return self.result.fits

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `bessemer plan --json` prints them: bytes, seconds, FLOPs, dollars, shares from 0 to 1."""
        return plan_result.to_dict(self.result)

    def __str__(self) -> str:
        return plan_table(self.result)

    def __repr__(self) -> str:
        cluster = self.result.job.cluster
        return f"<plan of {model_line(self.result.job.model)} on {cluster.devices:,} x {cluster.device.name}>"

    def _repr_html_(self) -> str:
        cluster = self.result.job.cluster
        return html.table(f"Plan for {cluster.devices:,} {cluster.device.name}", plan_rows(self.result).items())


def plan_training(
    recipe: str | Path | None = None, *, devices: str | int | None = None, params: str | float | None = None,
    model: str | None = None, tokens: str | float | None = None, keys: Mapping[str, Any] | None = None, **names: Any,
) -> TrainingPlan:  # fmt: skip
    """Plan a training: layout, memory, step time, days and cost.

    Args:
        recipe: A recipe to plan for; None: a model of its own, by `params` or `model`.
        devices: Number and kind, as `"512xH100"`; the catalogue is `bessemer plan --devices`.
        params: Number of parameters, as `"8B"`.
        model: A published model, as `"llama-3-8b"`.
        tokens: Tokens to train on, as `"2T"`.
        keys: Keys of the recipe with their values, as `{"train.precision": "fp8"}`.
        names: Other short names of the command, as `seq=8192`, `batch="4M"`, `tp=8` or `price=2.5`.

    Raises:
        InputError: Something is missing or cannot be planned, or no layout fits.
    """
    given = {"gpus": devices, "params": params, "model": model, "tokens": tokens, **names}
    asked = {name: _text(value) for name, value in given.items() if value is not None}
    request = choose_layout.plan_request_of(recipe, asked, tuple(write_overrides(keys or {})))
    return TrainingPlan(choose_layout.planned(request))


def _text(value: object) -> str:
    """Write a number or a name as the command line has it."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
