"""The metrics of metrics.jsonl that are shown: their keys, titles, units and styles.

To show a new number of the training lines, add an entry to METRICS. A new layer statistic is shown without an entry;
LAYER_METRICS only lists those with a better title than their key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bessemer.report.data import Column, RunData, as_number, as_object, number_or_0

FROM_ZERO = {"rangemode": "tozero"}
PERCENT = {**FROM_ZERO, "ticksuffix": "%"}


@dataclass(frozen=True)
class Metric:
    """A number that metrics.jsonl logs, and how the report draws it.

    Attributes:
        id: Id of its figure.
        title: Title of the figure.
        unit: Title of the vertical axis.
        key: Key of the number in a line of metrics.jsonl.
        hover: Format of a value in d3's syntax. `shown` needs a format that Python's `format` reads too.
        name: Name of its curve.
        axis: Plotly settings of the vertical axis.
        lines: Field of RunData that holds the lines, such as `train`.
        group: Key of the object in the line that holds `key`; empty if the line itself does.
        divisor: Key of a number in the line to divide by; empty for none.
        factor: Factor that converts the number to the unit.
        level: Name of a horizontal reference line.
        level_at: Where RunData holds the reference line's value: the field, then nested keys. Empty for no line.
        best: `min` or `max`, which selects the best of several values.
    """

    id: str
    title: str
    unit: str
    key: str
    hover: str = ".4f"
    name: str = "measured"
    axis: dict[str, Any] = field(default_factory=dict)
    lines: str = "train"
    group: str = ""
    divisor: str = ""
    factor: float = 1.0
    level: str = ""
    level_at: tuple[str, ...] = ()
    best: Callable[..., Any] = min

    def values(self, data: RunData) -> Column | None:
        """Return the values by step in the metric's unit; None if no line has one."""
        lines = getattr(data, self.lines)
        values = lines.column(self.key, self.group)
        divisor = lines.column(self.divisor) if self.divisor else np.ones(len(lines))
        if values is None or divisor is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            converted: Column = self.factor * (values / divisor)
        return converted

    def shown(self, value: float) -> str:
        """Format a value for a sentence or a table."""
        return f"{value:{self.hover}}"


LOSS = Metric("loss", "Training loss", "nats", "loss")
SCORES = (
    Metric("bits", "Held-out bits per byte", "bits per byte", "bits_per_byte", lines="validation"),
    Metric("accuracy", "Held-out accuracy", "guessed right", "accuracy", ".2%", axis={"tickformat": ".0%"}, lines="validation",
           best=max),
    Metric("held-out", "Held-out loss", "nats", "loss", lines="validation"),
)  # fmt: skip
METRICS = (
    Metric("objective", "Loss of the objective", "its own, of a target", "objective_loss", ".3f"),
    Metric("rate", "Learning rate", "learning rate", "learning_rate", ".3e", "learning rate", FROM_ZERO),
    Metric("grad", "Gradient norm", "global L2 norm", "grad_norm", ".3f", "gradient norm", FROM_ZERO,
           level="clipped above", level_at=("recipe", "train", "optimizer", "clip_norm")),
    Metric("rates", "Tokens per second", "tokens per second", "tokens_per_second", ".4s", axis={**FROM_ZERO, "tickformat": "~s"},
           level="planned", level_at=("plan", "tokens_per_second")),
    Metric("wait", "Waiting for data", "share of the step time", "data_wait", ".2f", "waiting for data", PERCENT,
           divisor="step_seconds", factor=100.0),
    Metric("memory", "Memory in GB", "GB", "memory_bytes", ".3f", axis=FROM_ZERO, factor=1e-9, level="planned",
           level_at=("plan", "memory_bytes", "total")),
    Metric("mfu", "Model FLOPs utilisation", "share of the peak rate", "mfu", ".1f", "MFU", PERCENT, factor=100.0),
)  # fmt: skip
LOG = {"type": "log"}
LAYER_METRICS = {
    "activation_rms": Metric("activations", "Activations after each block", "RMS", "activation_rms", ".3g", axis=LOG),
    "attention_logit_max": Metric("logits", "Largest attention logit", "q·k / √width of a head", "attention_logit_max", ".3g"),
    "update_ratio": Metric("updates", "Size of an update against its weights", "ratio of the norms", "update_ratio", ".2e",
                           axis=LOG, level="usual with Adam"),
}  # fmt: skip
USUAL_UPDATE = 1e-3  # usual ratio with Adam


def baselines(data: RunData) -> dict[str, float]:
    """Return the bits per byte of the held-out text under a byte n-gram and a compressor, by name."""
    levels = {}
    for key, name in (("ngram", "a byte {:.0f}-gram"), ("ppmd", "PPMd order {:.0f}")):
        if (bits := as_number(data.evaluation, key, "bits_per_byte")) is not None:
            levels[name.format(number_or_0(data.evaluation, key, "order"))] = bits
    return levels


def auxiliary_loss(runs: Iterable[RunData]) -> Metric:
    """Return the metric of the auxiliary loss of a mixture of experts, named for the losses that it holds in these runs."""
    models = [as_object(data.plan, "model_config") for data in runs]
    is_on = {"balance loss": any(model.get("balance") in ("loss", "both") for model in models)}
    is_on["z-loss"] = any(number_or_0(model, "router_z_loss") > 0 for model in models)
    name = " and ".join(filter(is_on.get, is_on)) or "auxiliary loss"
    return Metric("balance", f"Router {name}", "nats per token", "auxiliary_loss", name=name, axis=FROM_ZERO)
