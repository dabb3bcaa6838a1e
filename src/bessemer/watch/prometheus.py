"""Where runs stand, in the text format that Prometheus scrapes (its "Exposition formats", version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from bessemer.guard.goodput import TIME_KINDS
from bessemer.report.data import as_number, as_text, last_finite
from bessemer.watch.live import Watched
from bessemer.watch.status import STATES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Values = Callable[[Watched], dict[str, float | None]]


def _alone(value: Callable[[Watched], float | None]) -> Values:
    return lambda one: {"": value(one)}


def _last(kind: str, column: str) -> Values:
    return _alone(lambda one: getattr(one.data, kind).last(column))


def _task_scores(one: Watched) -> dict[str, float | None]:
    groups = one.data.tasks.groups
    return {f"{task}/{score}": last_finite(values) for score, by_task in groups.items() if score != "content"
            for task, values in by_task.items()}  # fmt: skip


# Of each family: its name, its label besides `run`, what it is, and a run's numbers by that label.
FAMILIES: tuple[tuple[str, str, str, Values], ...] = (
    ("state", "state", "1 for the state that the run is in",
     lambda one: {state: float(one.status.state == state) for state in STATES}),
    ("step", "", "the last logged step", _alone(lambda one: one.status.step)),
    ("steps", "", "planned steps", _alone(lambda one: one.status.steps)),
    ("seconds_left", "", "by the pace of the last steps", _alone(lambda one: one.status.seconds_left)),
    ("last_sign_timestamp_seconds", "", "of the last line about the run", _alone(lambda one: one.status.last)),
    ("loss", "", "training loss of the last logged step", _last("train", "loss")),
    ("grad_norm", "", "global norm of the gradients", _last("train", "grad_norm")),
    ("learning_rate", "", "learning rate", _last("train", "learning_rate")),
    ("tokens", "", "tokens trained on", _last("train", "tokens")),
    ("tokens_per_second", "", "of the last logged step", _last("train", "tokens_per_second")),
    ("mfu_ratio", "", "model FLOPs utilisation", _last("train", "mfu")),
    ("held_out_loss", "", "loss of the last validation", _last("validation", "loss")),
    ("held_out_bits_per_byte", "", "bits per byte of the last validation", _last("validation", "bits_per_byte")),
    ("task_score", "score", "last scores of the tasks while it trains, as TASK/SCORE", _task_scores),
    ("memory_bytes", "", "peak memory of the fullest process", _alone(lambda one: one.data.peak_memory)),
    ("incidents_total", "what", "incidents by kind",
     lambda one: dict(Counter(as_text(row, "what") for row in one.data.incidents))),
    ("wall_seconds_total", "kind", "wall time by what it went to",
     lambda one: {kind: as_number(one.data.times, kind) for kind in TIME_KINDS}),
)  # fmt: skip


def exposition(runs: Sequence[Watched]) -> str:
    """The metrics of runs, each with the label `run`; what a run lacks is left out."""
    text = ""
    for name, label, help, values in FAMILIES:
        lines = []
        for one in runs:
            for value, number in values(one).items():
                labels = {"run": one.name} | ({label: value} if label else {})
                shown = ",".join(f'{key}="{_escaped(of)}"' for key, of in labels.items())
                lines += [] if number is None else [f"bessemer_{name}{{{shown}}} {number:.10g}\n"]
        kind = "counter" if name.endswith("_total") else "gauge"
        text += "".join([f"# HELP bessemer_{name} {help}\n# TYPE bessemer_{name} {kind}\n", *lines]) if lines else ""
    return text


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
