"""The numbers of metrics.jsonl that are shown: where each is, what it is called and how it is drawn.

A new number of the training lines is one more entry of METRICS. A new statistic of the layers needs none: LAYER_METRICS only
names those with a better title than their key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bessemer.report.data import Column, RunData

FROM_ZERO = {"rangemode": "tozero"}
PERCENT = {**FROM_ZERO, "ticksuffix": "%"}


@dataclass(frozen=True)
class Metric:
    """A number of one kind of lines of metrics.jsonl.

    Attributes:
        id: Name of its figure.
        title: Title of the figure.
        unit: Title of the vertical axis.
        key: Key of the number in a line.
        lines: Field of RunData that holds the lines.
        group: Key of the object that holds `key`, empty for a number of the line itself.
        divisor: Key of the number that it is divided by.
        factor: Conversion into the unit.
        hover: Format of a value.
        name: Name of its curve.
        axis: Settings of the vertical axis, in plotly's terms.
        level: Name of a horizontal line to compare with.
        level_at: Field of RunData, then keys, of that line's value.
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

    def values(self, data: RunData) -> Column | None:
        """Return the values over the steps in the metric's unit, None where no line has one."""
        lines = getattr(data, self.lines)
        values = lines.column(self.key, self.group)
        divisor = lines.column(self.divisor) if self.divisor else np.ones(len(lines))
        if values is None or divisor is None:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            converted: Column = self.factor * (values / divisor)
        return converted


@dataclass(frozen=True)
class HeldOutScore:
    """A score of the held-out text.

    Attributes:
        metric: Where the validations log it.
        unit: Its unit in a sentence.
        form: Format in a sentence.
        digits: Format in a table.
        best: Returns the best of several values.
    """

    metric: Metric
    unit: str
    form: str
    digits: str
    best: Callable[[Iterable[float]], float]


LOSS = Metric("loss", "Training loss", "nats", "loss")
_BITS = Metric("bits", "Held-out bits per byte", "bits per byte", "bits_per_byte", lines="validation")
_ACCURACY = Metric("accuracy", "Held-out accuracy", "share", "accuracy", lines="validation")
_HELD_OUT_LOSS = Metric("held-out", "Held-out loss", "nats", "loss", lines="validation")
SCORES = (
    HeldOutScore(_BITS, "bits per byte", "{:.3f}", "{:.4f}", min),
    HeldOutScore(_ACCURACY, "right", "{:.1%}", "{:.2%}", max),
    HeldOutScore(_HELD_OUT_LOSS, "nats", "{:.3f}", "{:.4f}", min),
)
METRICS = (
    Metric("rate", "Learning rate", "learning rate", "learning_rate", ".3e", "learning rate", FROM_ZERO),
    Metric("grad", "Gradient norm", "global L2 norm", "grad_norm", ".3f", "gradient norm", FROM_ZERO,
           level="clipped above", level_at=("recipe", "train", "optimizer", "clip_norm")),
    Metric("rates", "Throughput", "tokens per second", "tokens_per_second", ".4s", axis={**FROM_ZERO, "tickformat": "~s"},
           level="planned", level_at=("plan", "tokens_per_second")),
    Metric("wait", "Waiting for data", "share of the step time", "data_wait", ".2f", "waiting for data", PERCENT,
           divisor="step_seconds", factor=100.0),
    Metric("memory", "Memory", "GB", "memory_bytes", ".3f", axis=FROM_ZERO, factor=1e-9, level="planned",
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
USUAL_UPDATE = 1e-3  # with Adam
