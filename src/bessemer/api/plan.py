"""Training plans for Python: layout, memory, step time, duration and cost on devices of the catalogue."""

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
    """A planned training: a layout with its memory, step time, duration and cost.

    Create one with `bessemer.plan_training`.

    Attributes:
        result: The planner's result.
    """

    def __init__(self, result: PlanResult) -> None:
        self.result = result

    @property
    def fits(self) -> bool:
        """True if the job fits in the memory of the devices."""
        return self.result.fits

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values in bytes, seconds, FLOPs, dollars and shares from 0 to 1.

        `bessemer plan --json` prints the same values.
        """
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
    """Plan the layout, memory, step time, duration and cost of a training.

    Args:
        recipe: Recipe to plan for. None: plan for the model that `params` or `model` describes.
        devices: Number and type of devices, such as `"512xH100"`. `bessemer plan --devices` lists the catalogue.
        params: Number of parameters, such as `"8B"`.
        model: A published model, such as `"llama-3-8b"`.
        tokens: Number of training tokens, such as `"2T"`.
        keys: Keys of the recipe with their values, such as `{"train.precision": "fp8"}`.
        names: Other short names of `bessemer plan`, such as `seq=8192`, `batch="4M"`, `tp=8` or `price=2.5`.

    Raises:
        InputError: An argument is missing or invalid, or no layout fits.
    """
    values = {"gpus": devices, "params": params, "model": model, "tokens": tokens, **names}
    texts = {name: _text(value) for name, value in values.items() if value is not None}
    request = choose_layout.plan_request_of(recipe, texts, tuple(write_overrides(keys or {})))
    return TrainingPlan(choose_layout.planned(request))


def _text(value: object) -> str:
    """Format a number or a name as on the command line."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
