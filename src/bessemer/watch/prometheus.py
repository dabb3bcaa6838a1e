"""Where runs stand, in the text format that Prometheus scrapes (its "Exposition formats", version 0.0.4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from bessemer.guard.goodput import TIME_KINDS
from bessemer.report.data import as_number, as_text
from bessemer.watch.live import Watched
from bessemer.watch.status import STATES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[dict[str, str], float | None]


def exposition(runs: Sequence[Watched]) -> str:
    """The metrics of runs, each with the label `run`; what a run lacks is left out."""
    families: list[tuple[str, str, str, list[Sample]]] = [
        ("state", "gauge", "1 for the state that the run is in", [
            ({"run": one.name, "state": state}, float(one.status.state == state)) for one in runs for state in STATES
        ]),
        ("step", "gauge", "the last logged step", [({"run": one.name}, one.status.step) for one in runs]),
        ("steps", "gauge", "planned steps", [({"run": one.name}, one.status.steps) for one in runs]),
        ("seconds_left", "gauge", "by the pace of the last steps", [
            ({"run": one.name}, one.status.seconds_left) for one in runs
        ]),
        ("last_sign_timestamp_seconds", "gauge", "of the last line about the run", [
            ({"run": one.name}, one.status.last) for one in runs
        ]),
        *(
            (name, "gauge", help, [({"run": one.name}, getattr(one.data, kind).last(column)) for one in runs])
            for name, kind, column, help in (
                ("loss", "train", "loss", "training loss of the last logged step"),
                ("grad_norm", "train", "grad_norm", "global norm of the gradients"),
                ("learning_rate", "train", "learning_rate", "learning rate"),
                ("tokens", "train", "tokens", "tokens trained on"),
                ("tokens_per_second", "train", "tokens_per_second", "of the last logged step"),
                ("mfu_ratio", "train", "mfu", "model FLOPs utilisation"),
                ("held_out_loss", "validation", "loss", "loss of the last validation"),
                ("held_out_bits_per_byte", "validation", "bits_per_byte", "bits per byte of the last validation"),
            )
        ),
        ("memory_bytes", "gauge", "peak memory of the fullest process", [
            ({"run": one.name}, one.data.peak_memory) for one in runs
        ]),
        ("incidents_total", "counter", "incidents by kind", [
            ({"run": one.name, "what": what}, float(count))
            for one in runs
            for what, count in Counter(as_text(row, "what") for row in one.data.incidents).items()
        ]),
        ("wall_seconds_total", "counter", "wall time by what it went to", [
            ({"run": one.name, "kind": kind}, as_number(one.data.times, kind)) for one in runs for kind in TIME_KINDS
        ]),
    ]  # fmt: skip
    return "".join(_family(*family) for family in families)


def _family(name: str, kind: str, help: str, samples: Iterable[Sample]) -> str:
    lines = []
    for labels, number in samples:
        if number is not None:
            shown = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
            lines.append(f"bessemer_{name}{{{shown}}} {number:.10g}\n")
    return "".join([f"# HELP bessemer_{name} {help}\n# TYPE bessemer_{name} {kind}\n", *lines]) if lines else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
